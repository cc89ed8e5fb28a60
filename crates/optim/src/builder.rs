//! Parameters in groups with options, on their way to an optimizer.

use overdrive_core::OptimizerError;
use tch::Tensor;

use crate::algorithm::{Algorithm, Fusable};
use crate::bucket::{self, Packing};
use crate::in_backward::InBackward;
use crate::low_precision::LowPrecision;
use crate::optimizer::GroupOptimizer;

/// Options of an optimizer and its parameter groups. Each algorithm adds its own; what is not said is as in PyTorch.
///
/// Options hold for the group at hand and those behind it, until they are said anew:
///
/// ```
/// # use overdrive_optim::AdamW;
/// # use tch::{Device, Kind, Tensor};
/// # let ones = || vec![Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true)];
/// # let (matrices, biases) = (ones(), ones());
/// let opt = AdamW::builder(matrices).lr(1e-3).weight_decay(0.1).then_group(biases).weight_decay(0.0).build()?;
/// # Ok::<(), overdrive_core::OptimizerError>(())
/// ```
#[derive(Debug)]
#[must_use = "options do nothing until `build`"]
pub struct GroupBuilder<A: Algorithm> {
    params: Vec<Tensor>,
    lr: f64,
    pub(crate) options: A,
    groups: Vec<(Vec<Tensor>, f64, A)>,
    /// None: where libtorch has the kernel.
    fused: Option<bool>,
    precision: LowPrecision,
}

/// The caller's parameters, sharing their data with the model.
pub(crate) fn shared(params: impl AsRef<[Tensor]>) -> Vec<Tensor> {
    params.as_ref().iter().map(Tensor::shallow_clone).collect()
}

impl<A: Algorithm> GroupBuilder<A> {
    pub(crate) fn new(params: impl AsRef<[Tensor]>) -> Self {
        let precision = LowPrecision::default();
        Self { params: shared(params), lr: A::LR, options: A::default(), groups: Vec::new(), fused: None, precision }
    }

    pub(crate) fn with(mut self, set: impl FnOnce(&mut A)) -> Self {
        set(&mut self.options);
        self
    }

    /// The learning rate; PyTorch's default, or the paper's, when not said.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// What becomes of bfloat16 and float16 parameters, in all groups; [`LowPrecision::Nearest`] when not said.
    pub fn low_precision(mut self, precision: LowPrecision) -> Self {
        self.precision = precision;
        self
    }

    /// Ends a parameter group with the options so far; what is said behind this is for `params`, the next group.
    ///
    /// # Source
    /// `Optimizer.add_param_group`
    #[doc(alias = "add_param_group")]
    pub fn then_group(mut self, params: impl AsRef<[Tensor]>) -> Self {
        let ended = std::mem::replace(&mut self.params, shared(params));
        self.groups.push((ended, self.lr, self.options.clone()));
        self
    }

    /// The optimizer.
    ///
    /// # Errors
    /// When there is no parameter, an option is out of range, a parameter is no dense floating-point leaf or is given twice, or the algorithm
    /// does not take it.
    pub fn build(self) -> Result<GroupOptimizer<A>, OptimizerError> {
        self.pack(false)
    }

    /// The optimizer, stepping each parameter during the backward pass as soon as its gradient is there.
    ///
    /// # Errors
    /// As [`build`](Self::build), and when a parameter does not require a gradient.
    pub fn build_in_backward(self) -> Result<InBackward<A>, OptimizerError> {
        InBackward::new(self.pack(true)?)
    }

    fn pack(mut self, apart: bool) -> Result<GroupOptimizer<A>, OptimizerError> {
        self.groups.push((self.params, self.lr, self.options));
        for (_, lr, options) in &self.groups {
            OptimizerError::check_lr(*lr)?;
            options.check()?;
        }
        if self.groups.iter().all(|(params, ..)| params.is_empty()) {
            return Err(OptimizerError::NoParameters);
        }
        bucket::check(&self.groups)?;
        let unfusable =
            self.groups.iter().flat_map(|(params, ..)| params).position(|p| !A::has_fused_kernel(p.device()));
        let fused = match (self.fused, unfusable) {
            (Some(true), Some(index)) => {
                let reason = "libtorch has no fused kernel for its device: leave `fused` off".to_owned();
                return Err(OptimizerError::InvalidParameter { index, reason });
            }
            (fused, _) => fused.unwrap_or(unfusable.is_none()),
        };
        GroupOptimizer::new(self.groups, Packing { fused, precision: self.precision, apart })
    }
}

impl<A: Fusable> GroupBuilder<A> {
    /// Whether to update all parameters of a group, device and dtype in one kernel of libtorch's; on when not said,
    /// wherever libtorch has the kernel.
    ///
    /// PyTorch's default is `foreach` on CUDA and a loop over the parameters on a CPU, out of caution when fused kernels
    /// were new. They are the fastest and take the fewest bytes, and their results differ from the others' by rounding
    /// alone.
    pub fn fused(mut self, fused: bool) -> Self {
        self.fused = Some(fused);
        self
    }

    /// Whether to update lists of parameters by one operator after another: the opposite of [`fused`](Self::fused).
    pub fn foreach(self, foreach: bool) -> Self {
        self.fused(!foreach)
    }
}
