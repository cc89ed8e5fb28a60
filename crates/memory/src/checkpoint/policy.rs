//! Selective checkpointing: which results are kept.

use std::any::TypeId;
use std::sync::Arc;

use overdrive_ffi::Error as TorchError;
use overdrive_ffi::keep::Keeper;
use tch::Tensor;

use super::budget::{Budget, ByPlan, Key, Measure, Measuring};

/// Whether the result of an operator is kept, by its name and its overload.
pub type Keeps = dyn Fn(&str, &str) -> bool + Send + Sync;

/// Which operators' results are kept in the first run of a function.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Policy {
    /// None.
    #[default]
    Nothing,
    /// Those of products of matrices, convolutions and attention, which take most of the time. A result that comes
    /// after the last saved tensor is not kept: the second run ends before it.
    Products,
    /// Those of the operators that this says yes to, called with a name and an overload: `aten::add`, `Tensor`. Operators
    /// that write to their arguments, or return views or lists, are never kept.
    Operators(Arc<Keeps>),
    /// As many as a budget of memory allows, by what they cost.
    Budget(Budget),
}

/// What takes most of a model's time.
const PRODUCTS: [&str; 17] = [
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::mv",
    "aten::addmv",
    "aten::dot",
    "aten::convolution",
    "aten::_convolution",
    "aten::mkldnn_convolution",
    "aten::linear",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_mm",
];

impl Policy {
    /// What keeps the results of a call, and what measures it, if that is needed.
    pub(super) fn keeper(
        &self,
        function: TypeId,
        inputs: &[Tensor],
    ) -> Result<(Option<Keeper>, Option<Arc<Measure>>), TorchError> {
        let keeper = match self {
            Self::Nothing => return Ok((None, None)),
            Self::Products => Keeper::new(|name: &str, _: &str| PRODUCTS.contains(&name))?,
            Self::Operators(keeps) => {
                let keeps = Arc::clone(keeps);
                Keeper::new(move |name: &str, overload: &str| keeps(name, overload))?
            }
            Self::Budget(budget) => {
                let key = Key::of(function, inputs);
                if let Some(plan) = budget.plan(&key) {
                    Keeper::new(ByPlan(plan))?
                } else {
                    let measure = budget.measure(key, inputs);
                    return Ok((Some(Keeper::new(Measuring(Arc::clone(&measure)))?), Some(measure)));
                }
            }
        };
        Ok((Some(keeper), None))
    }
}

impl std::fmt::Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nothing => "Nothing",
            Self::Products => "Products",
            Self::Operators(_) => "Operators(..)",
            Self::Budget(budget) => return budget.fmt(f),
        })
    }
}
