//! SGD on libtorch's fused kernel.

use overdrive_core::{GradScale, OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::Tensor;

use crate::bucket::{shared, zeros_like};
use crate::fused::{Fused, Options, Rule, Stepped, delegate_optimizer};

static FUSED_SGD: LazyOp = LazyOp::new("aten::_fused_sgd_", "");

/// Stochastic gradient descent with momentum, all parameters of a group in one fused kernel, on a CPU and on CUDA.
///
/// # Source
/// `torch.optim.SGD(fused=True)`
#[doc(alias = "SGD")]
#[derive(Debug)]
pub struct Sgd(Fused<SgdRule>);

delegate_optimizer!(Sgd);

impl Sgd {
    /// An SGD over `params`, with PyTorch's defaults.
    pub fn builder(params: impl AsRef<[Tensor]>) -> SgdBuilder {
        SgdBuilder { params: shared(params), groups: Vec::new(), options: SgdOptions::default() }
    }
}

/// The options of an [`Sgd`].
#[derive(Debug)]
#[must_use = "options do nothing until `build`"]
pub struct SgdBuilder {
    params: Vec<Tensor>,
    groups: Vec<(Vec<Tensor>, SgdOptions)>,
    options: SgdOptions,
}

#[derive(Clone, Debug)]
pub(crate) struct SgdOptions {
    lr: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
    maximize: bool,
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false }
    }
}

impl SgdBuilder {
    /// The learning rate; 1e-3 when not said.
    pub fn lr(mut self, lr: f64) -> Self {
        self.options.lr = lr;
        self
    }

    /// How much of the last step goes into the next; 0 when not said.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.options.momentum = momentum;
        self
    }

    /// How much of the gradient is kept out of the momentum; 0 when not said.
    pub fn dampening(mut self, dampening: f64) -> Self {
        self.options.dampening = dampening;
        self
    }

    /// The L2 penalty, added to the gradient; 0 when not said.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.options.weight_decay = weight_decay;
        self
    }

    /// Nesterov momentum, which needs a momentum and no dampening; off when not said.
    pub fn nesterov(mut self, nesterov: bool) -> Self {
        self.options.nesterov = nesterov;
        self
    }

    /// Climbs where it would descend; off when not said.
    pub fn maximize(mut self, maximize: bool) -> Self {
        self.options.maximize = maximize;
        self
    }

    /// Ends a parameter group with the options so far; what is said behind this is for `params`, the next group.
    ///
    /// # Source
    /// `Optimizer.add_param_group`
    #[doc(alias = "add_param_group")]
    pub fn then_group(mut self, params: impl AsRef<[Tensor]>) -> Self {
        let ended = std::mem::replace(&mut self.params, shared(params));
        self.groups.push((ended, self.options.clone()));
        self
    }

    /// The optimizer.
    ///
    /// # Errors
    /// When an option is out of range, or a parameter is no floating-point leaf or is given twice.
    pub fn build(mut self) -> Result<Sgd, OptimizerError> {
        self.groups.push((self.params, self.options));
        Ok(Sgd(Fused::new(self.groups)?))
    }
}

impl Options for SgdOptions {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn check(&self) -> Result<(), OptimizerError> {
        let at_least_0 = 0.0..f64::INFINITY;
        OptimizerError::check_lr(self.lr)?;
        OptimizerError::check_range("momentum", self.momentum, at_least_0.clone(), "a finite number of at least 0")?;
        OptimizerError::check_range("weight_decay", self.weight_decay, at_least_0, "a finite number of at least 0")?;
        let any = f64::NEG_INFINITY..f64::INFINITY;
        OptimizerError::check_range("dampening", self.dampening, any, "a finite number")?;
        if self.nesterov && self.momentum <= 0.0 {
            let (option, found) = ("momentum", self.momentum);
            return Err(OptimizerError::InvalidOption { option, found, expected: "above 0 with nesterov" });
        }
        if self.nesterov && self.dampening != 0.0 {
            let (option, found) = ("dampening", self.dampening);
            return Err(OptimizerError::InvalidOption { option, found, expected: "0 with nesterov" });
        }
        Ok(())
    }
}

/// The momentum of one bucket's parameters.
#[derive(Debug)]
pub(crate) struct SgdRule {
    /// Empty without momentum.
    momentum_buffers: TensorList,
    /// Which parameters have been stepped before: the kernel fills a fresh buffer with the gradient itself.
    started: Vec<bool>,
}

impl Rule for SgdRule {
    type Options = SgdOptions;

    fn new(params: &TensorList, options: &SgdOptions) -> Result<Self, TorchError> {
        // Zeros, not uninitialised memory: when the very first step is skipped for an infinity, the kernel leaves the
        // buffers as they are, and nobody knows without waiting for the device.
        let momentum_buffers =
            if options.momentum > 0.0 { zeros_like(params)? } else { TensorList::new::<Tensor>(&[])? };
        Ok(Self { momentum_buffers, started: vec![false; params.len()] })
    }

    fn step(
        &mut self,
        stepped: &Stepped<'_>,
        options: &SgdOptions,
        scale: Option<GradScale<'_>>,
    ) -> Result<(), TorchError> {
        if self.momentum_buffers.is_empty() {
            return call(stepped.params, stepped.grads, &self.momentum_buffers, options, false, scale);
        }
        let buffers = stepped.of(&self.momentum_buffers)?;
        let indices: Vec<usize> = match stepped.only {
            Some(only) => (0..only.len()).filter(|&index| only[index]).collect(),
            None => (0..self.started.len()).collect(),
        };
        let fresh: Vec<bool> =
            indices.iter().map(|&index| !std::mem::replace(&mut self.started[index], true)).collect();
        if fresh.iter().all(|&is_fresh| is_fresh == fresh[0]) {
            return call(stepped.params, stepped.grads, &buffers, options, fresh[0], scale);
        }
        // Some parameters have their first gradient only now: the kernel wants them apart.
        for is_first in [true, false] {
            let keep: Vec<bool> = fresh.iter().map(|&is_fresh| is_fresh == is_first).collect();
            let of = |list: &TensorList| list.select(&keep);
            call(&of(stepped.params)?, &of(stepped.grads)?, &of(&buffers)?, options, is_first, scale)?;
        }
        Ok(())
    }
}

fn call(
    params: &TensorList,
    grads: &TensorList,
    momentum_buffers: &TensorList,
    options: &SgdOptions,
    is_first_step: bool,
    scale: Option<GradScale<'_>>,
) -> Result<(), TorchError> {
    FUSED_SGD.call(&[
        Arg::TensorList(params),
        Arg::TensorList(grads),
        Arg::TensorList(momentum_buffers),
        Arg::Double(options.weight_decay),
        Arg::Double(options.momentum),
        Arg::Double(options.lr),
        Arg::Double(options.dampening),
        Arg::Bool(options.nesterov),
        Arg::Bool(options.maximize),
        Arg::Bool(is_first_step),
        scale.and_then(|scale| scale.scale).into(),
        scale.map(|scale| scale.found_inf).into(),
    ])?;
    Ok(())
}
