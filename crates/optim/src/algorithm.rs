//! The interface of an algorithm: its options, its state for each parameter, and its step over a list of parameters.

use overdrive_core::{GradScale, OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Device, Kind, Tensor};

use crate::constants::Constants;
use crate::foreach::{self, Lent};
use crate::optimizer::Values;
use crate::options::{BETA, NOT_NEGATIVE, OptionSet};

static FULL_LIKE: LazyOp = LazyOp::new("aten::full_like", "");

/// An algorithm: the options of one parameter group, except the learning rate, which every algorithm has.
pub trait Algorithm: OptionSet + Clone + Default + std::fmt::Debug + Send + 'static {
    /// The default learning rate.
    const LR: f64;

    /// Whether it counts the steps of each parameter.
    const COUNTS_STEPS: bool;

    /// Whether each element's step depends only on that element's gradient and state.
    const ELEMENTWISE: bool = false;

    /// Whether the step of an element depends on others of its parameter.
    const COUPLES_ELEMENTS: bool = false;

    /// Whether it takes sparse gradients, and only these.
    const SPARSE: bool = false;

    /// Whether it steps lists of parameters that differ by their slots alone together on a GPU.
    const STEPS_TOGETHER: bool = false;

    /// How often a step passes over all parameters.
    const PASSES: usize = 1;

    /// Whether it can step a parameter as soon as that one's gradient is ready.
    const STEPS_ALONE: bool = true;

    /// Whether its first slot is a copy of the parameter, which moves with it.
    const KEEPS_COPY: bool = false;

    /// Called before each pass. May change numbers of the groups that differ from step to step, such as counters; the
    /// changes are kept only if the whole step succeeds. `false` ends the step without them.
    fn begin(_groups: &mut [Values<Self>], _pass: usize) -> Result<bool, OptimizerError> {
        Ok(true)
    }

    /// An error when options that are in their ranges do not fit together.
    fn check(&self) -> Result<(), OptimizerError> {
        Ok(())
    }

    /// Why it cannot optimize this parameter; `None` if it can.
    fn refuses(&self, _param: &Tensor) -> Option<String> {
        None
    }

    /// Whether libtorch has a fused kernel for it that is right for parameters of this dtype on this device.
    fn has_fused_kernel(_device: Device, _kind: Kind) -> bool {
        false
    }

    /// Whether its unfused step reads the step counts on the parameters' device.
    fn counts_on_device(&self) -> bool {
        false
    }

    /// Whether its steps depend on the learning rate.
    fn takes_lr(&self) -> bool {
        true
    }

    /// Whether its fused kernel can take a `GradScaler`'s scale and flag with these options.
    fn takes_grad_scale(&self) -> bool {
        true
    }

    /// The 2-norm that the gradients are scaled down to before the step, measured over all groups.
    fn max_grad_norm(&self) -> Option<f64> {
        None
    }

    /// The option that cyclic schedules vary inversely to the learning rate.
    fn momentum(&mut self) -> Option<&mut f64> {
        None
    }

    /// The tensors it keeps for this parameter.
    fn slots(&self, param: &Tensor) -> Vec<Slot>;

    /// Updates parameters of one device, dtype and set of slots.
    fn step(&self, step: &Step<'_>) -> Result<(), TorchError>;

    /// Updates several such lists, of one device and dtype.
    fn step_together(&self, steps: &[&Step<'_>]) -> Result<(), TorchError> {
        steps.iter().try_for_each(|step| self.step(step))
    }
}

/// An algorithm for which libtorch has a fused kernel.
pub trait Fusable: Algorithm {}

/// A reference to an option, by its type.
pub enum Field<'a> {
    Float(&'a mut f64),
    Bool(&'a mut bool),
    Int(&'a mut i64),
    /// A number that may be unset.
    Optional(&'a mut Option<f64>),
    /// One of these words.
    Word(&'a mut &'static str, &'static [&'static str]),
    /// One of these words, for an option that PyTorch's optimizer of that name lacks: its states have no such entry, so
    /// the first word is taken where a state has none.
    OwnWord(&'a mut &'static str, &'static [&'static str]),
    /// A constant that tells this algorithm from another with the same entries: a state with the other value is
    /// refused.
    Fixed(bool),
}

/// A tensor that is kept for each parameter.
#[derive(Clone, Debug)]
pub struct Slot {
    /// PyTorch's name for it.
    pub name: &'static str,
    /// Makes the tensor from the parameter (as the algorithm steps it) and the fill value.
    pub fresh: fn(&Tensor, f64) -> Result<Tensor, TorchError>,
    /// The fill value.
    pub fill: f64,
    /// Whether the tensor has the parameter's shape, dtype and memory format.
    pub is_like_param: bool,
}

impl Slot {
    /// A copy of the parameter.
    pub fn copy(name: &'static str) -> Self {
        Self { name, fresh: |param, _| Ok(param.f_detach_copy()?), fill: 0.0, is_like_param: true }
    }

    /// Made in another form than the parameter's.
    pub fn made(name: &'static str, fresh: fn(&Tensor, f64) -> Result<Tensor, TorchError>, fill: f64) -> Self {
        Self { name, fresh, fill, is_like_param: false }
    }

    /// The tensor before its first step.
    pub fn fresh(&self, param: &Tensor) -> Result<Tensor, TorchError> {
        (self.fresh)(param, self.fill)
    }

    /// A tensor of the same form, whose values do not count: they are overwritten.
    pub fn blank(&self, param: &Tensor) -> Result<Tensor, TorchError> {
        if self.is_like_param { Ok(param.f_empty_like()?) } else { self.fresh(param) }
    }

    /// Zeros in the shape of the parameter.
    pub fn zeros(name: &'static str) -> Self {
        Self::filled(name, 0.0)
    }

    /// The same number everywhere, in the shape of the parameter.
    pub fn filled(name: &'static str, fill: f64) -> Self {
        let fresh = |param: &Tensor, fill| FULL_LIKE.tensor(&[Arg::Tensor(param), Arg::Double(fill)]);
        Self { name, fresh, fill, is_like_param: true }
    }

    /// One float32 number, on the parameter's device.
    pub fn scalar(name: &'static str, fill: f64) -> Self {
        let fresh = |param: &Tensor, fill| Ok(Tensor::f_full(&[0; 0][..], fill, (Kind::Float, param.device()))?);
        Self::made(name, fresh, fill)
    }

    /// One float32 number, on the host.
    pub fn host_scalar(name: &'static str, fill: f64) -> Self {
        Self::made(name, |_, fill| Ok(Tensor::from(fill as f32)), fill)
    }
}

/// The parameters of one bucket that have a gradient in this step, and their state; all lists are in the same order.
pub struct Step<'a> {
    pub lr: f64,
    /// Whether to call libtorch's fused kernel.
    pub fused: bool,
    pub params: &'a TensorList,
    /// Not to be changed: the caller may read the gradients later.
    pub grads: &'a TensorList,
    /// One list per slot.
    pub slots: &'a [TensorList],
    /// The step count of each parameter, this step included; empty if the algorithm does not count.
    pub counts: &'a TensorList,
    /// Whether all of `counts` is the same scalar.
    pub same_counts: bool,
    /// For each parameter, whether this is its first step.
    pub first: &'a [bool],
    /// Numbers that are the same in each step.
    pub constants: &'a Constants,
    /// On the parameters' device; only for fused kernels.
    pub scale: Option<GradScale<'a>>,
}

impl Step<'_> {
    /// One number per parameter, computed from its step count.
    ///
    /// # Syncs
    /// Reads the counts, which are on the host unless the kernel is fused or `counts_on_device`.
    pub(crate) fn by_count(&self, number: impl Fn(f64) -> f64) -> Result<Vec<f64>, TorchError> {
        let read = |index| Ok::<_, TorchError>(number(self.counts.get(index)?.f_double_value(&[])?));
        match self.same_counts {
            true => Ok(vec![read(0)?; self.counts.len()]),
            false => (0..self.counts.len()).map(read).collect(),
        }
    }

    /// The gradients to descend along, after weight decay: of the parameters themselves if `decoupled`.
    pub(crate) fn decayed_grads(
        &self,
        maximize: bool,
        weight_decay: f64,
        decoupled: bool,
    ) -> Result<Lent<'_>, TorchError> {
        if !decoupled || weight_decay == 0.0 {
            return self.penalised_grads(maximize, weight_decay);
        }
        foreach::mul_scalar_(self.params, 1.0 - self.lr * weight_decay)?;
        self.signed_grads(maximize)
    }

    /// Fills the state of the parameters whose first step this is.
    pub(crate) fn start(&self, slot: &TensorList, value: f64) -> Result<(), TorchError> {
        if !self.first.contains(&true) {
            return Ok(());
        }
        let slot = slot.select(self.first)?;
        fill(&slot, &vec![value; slot.len()])
    }

    /// The gradients to descend along: negated if `maximize`.
    pub(crate) fn signed_grads(&self, maximize: bool) -> Result<Lent<'_>, TorchError> {
        match maximize {
            true => Ok(Lent::Made(foreach::neg(self.grads)?)),
            false => Ok(Lent::Given(self.grads)),
        }
    }

    /// The gradients to descend along, plus those of the L2 penalty.
    pub(crate) fn penalised_grads(&self, maximize: bool, weight_decay: f64) -> Result<Lent<'_>, TorchError> {
        match self.signed_grads(maximize)? {
            grads if weight_decay == 0.0 => Ok(grads),
            Lent::Given(grads) => Ok(Lent::Made(foreach::add(grads, self.params, weight_decay)?)),
            Lent::Made(grads) => {
                foreach::add_(&grads, self.params, weight_decay)?;
                Ok(Lent::Made(grads))
            }
        }
    }
}

/// Fills each tensor with its number, without waiting for the device: two kernels however many tensors there are.
pub(crate) fn fill(list: &TensorList, values: &[f64]) -> Result<(), TorchError> {
    foreach::zero_(list)?;
    foreach::add_each_(list, values)
}

/// Python's `number ** 0.5`, which sometimes differs from `sqrt` in the last bit. The black box keeps the compiler from
/// replacing `powf(0.5)` by `sqrt`.
pub(crate) fn power_of_half(number: f64) -> f64 {
    number.powf(std::hint::black_box(0.5))
}

/// An error unless `found` is a finite number of at least 0.
pub(crate) fn check_not_negative(option: &'static str, found: f64) -> Result<(), OptimizerError> {
    OptimizerError::check_range(option, found, NOT_NEGATIVE.0, NOT_NEGATIVE.1)
}

/// An error unless `found` is a valid decay rate of an average.
pub(crate) fn check_beta(option: &'static str, found: f64) -> Result<(), OptimizerError> {
    OptimizerError::check_range(option, found, BETA.0, BETA.1)
}
