//! AdamW on libtorch's fused kernel.

use overdrive_core::{GradScale, OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::Tensor;

use crate::bucket::{shared, zeros_like};
use crate::fused::{Fused, Options, Rule, Stepped, delegate_optimizer};
use crate::step_count::StepCounts;

static FUSED_ADAMW: LazyOp = LazyOp::new("aten::_fused_adamw_", "");

/// Adam with decoupled weight decay, all parameters of a group in one fused kernel, on a CPU and on CUDA.
///
/// # Source
/// `torch.optim.AdamW(fused=True)`; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
#[derive(Debug)]
pub struct AdamW(Fused<AdamWRule>);

delegate_optimizer!(AdamW);

impl AdamW {
    /// An AdamW over `params`, with PyTorch's defaults.
    pub fn builder(params: impl AsRef<[Tensor]>) -> AdamWBuilder {
        AdamWBuilder { params: shared(params), groups: Vec::new(), options: AdamWOptions::default() }
    }
}

/// The options of an [`AdamW`].
#[derive(Debug)]
#[must_use = "options do nothing until `build`"]
pub struct AdamWBuilder {
    params: Vec<Tensor>,
    groups: Vec<(Vec<Tensor>, AdamWOptions)>,
    options: AdamWOptions,
}

#[derive(Clone, Debug)]
pub(crate) struct AdamWOptions {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    amsgrad: bool,
    maximize: bool,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 1e-2, amsgrad: false, maximize: false }
    }
}

impl AdamWBuilder {
    /// The learning rate; 1e-3 when not said.
    pub fn lr(mut self, lr: f64) -> Self {
        self.options.lr = lr;
        self
    }

    /// How slowly the two averages of the gradient move, each in [0, 1); (0.9, 0.999) when not said.
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        self.options.betas = (beta1, beta2);
        self
    }

    /// Added to the denominator; 1e-8 when not said.
    pub fn eps(mut self, eps: f64) -> Self {
        self.options.eps = eps;
        self
    }

    /// The share of each weight, times the learning rate, taken off a step; 0.01 when not said.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.options.weight_decay = weight_decay;
        self
    }

    /// Divides by the largest second moment so far; off when not said.
    pub fn amsgrad(mut self, amsgrad: bool) -> Self {
        self.options.amsgrad = amsgrad;
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
    pub fn build(mut self) -> Result<AdamW, OptimizerError> {
        self.groups.push((self.params, self.options));
        Ok(AdamW(Fused::new(self.groups)?))
    }
}

impl Options for AdamWOptions {
    fn lr(&self) -> f64 {
        self.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn check(&self) -> Result<(), OptimizerError> {
        let at_least_0 = 0.0..f64::INFINITY;
        OptimizerError::check_lr(self.lr)?;
        OptimizerError::check_range("beta1", self.betas.0, 0.0..1.0, "at least 0 and below 1")?;
        OptimizerError::check_range("beta2", self.betas.1, 0.0..1.0, "at least 0 and below 1")?;
        OptimizerError::check_range("eps", self.eps, at_least_0.clone(), "a finite number of at least 0")?;
        OptimizerError::check_range("weight_decay", self.weight_decay, at_least_0, "a finite number of at least 0")
    }
}

/// The moments of one bucket's gradients.
#[derive(Debug)]
pub(crate) struct AdamWRule {
    exp_avgs: TensorList,
    exp_avg_sqs: TensorList,
    /// Empty without amsgrad.
    max_exp_avg_sqs: TensorList,
    steps: StepCounts,
}

impl Rule for AdamWRule {
    type Options = AdamWOptions;

    fn new(params: &TensorList, options: &AdamWOptions) -> Result<Self, TorchError> {
        let device = params.get(0)?.device();
        let none = || TensorList::new::<Tensor>(&[]);
        Ok(Self {
            exp_avgs: zeros_like(params)?,
            exp_avg_sqs: zeros_like(params)?,
            max_exp_avg_sqs: if options.amsgrad { zeros_like(params)? } else { none()? },
            steps: StepCounts::zeros(params.len(), device)?,
        })
    }

    fn step(
        &mut self,
        stepped: &Stepped<'_>,
        options: &AdamWOptions,
        scale: Option<GradScale<'_>>,
    ) -> Result<(), TorchError> {
        if stepped.only.is_some() {
            self.steps.part()?;
        }
        let steps = stepped.of(self.steps.list())?;
        self.steps.add_one(&steps)?;
        FUSED_ADAMW.call(&[
            Arg::TensorList(stepped.params),
            Arg::TensorList(stepped.grads),
            Arg::TensorList(&stepped.of(&self.exp_avgs)?),
            Arg::TensorList(&stepped.of(&self.exp_avg_sqs)?),
            Arg::TensorList(&stepped.of(&self.max_exp_avg_sqs)?),
            Arg::TensorList(&steps),
            Arg::Double(options.lr),
            Arg::Double(options.betas.0),
            Arg::Double(options.betas.1),
            Arg::Double(options.weight_decay),
            Arg::Double(options.eps),
            Arg::Bool(options.amsgrad),
            Arg::Bool(options.maximize),
            scale.and_then(|scale| scale.scale).into(),
            scale.map(|scale| scale.found_inf).into(),
        ])?;
        // A skipped step does not count.
        if let Some(scale) = scale {
            self.steps.subtract(&steps, scale.found_inf)?;
        }
        Ok(())
    }
}
