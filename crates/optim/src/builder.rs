//! Parameters and options on their way to an optimizer.

use std::fmt;
use std::sync::Arc;

use overdrive_core::{IntoParameters, OptimizerError, Parameter};
use tch::Tensor;

use crate::algorithm::{Algorithm, Fusable};
use crate::bucket::{self, Packing};
use crate::in_backward::InBackward;
use crate::low_precision::LowPrecision;
use crate::optimizer::{GroupOptimizer, Values, with_momentum};
use crate::split;

/// Options that were said, for [`GroupBuilder`] (of all groups), [`ParamGroup`] (of one) or
/// [`GroupMut`](crate::GroupMut) (of one that trains already). Each algorithm adds its own.
#[must_use = "options do nothing until they are built or applied"]
pub struct Options<A, Scope> {
    edits: Vec<Edit<A>>,
    pub(crate) scope: Scope,
}

/// Shared by the groups that one group is split into.
type Edit<A> = Arc<dyn Fn(&mut Values<A>) + Send + Sync>;

/// Options of an optimizer, for all its groups; what is not said is as in PyTorch. A group's own come before these,
/// whichever was said first:
///
/// ```
/// # use overdrive_optim::AdamW;
/// # use tch::{Device, Kind, Tensor};
/// # let ones = || vec![Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true)];
/// # let (matrices, biases) = (ones(), ones());
/// let opt = AdamW::builder(matrices)
///     .add_param_group(AdamW::group(biases).weight_decay(0.0))
///     .lr(1e-3) // of both
///     .weight_decay(0.1) // of the matrices
///     .build()?;
/// # Ok::<(), overdrive_core::OptimizerError>(())
/// ```
pub type GroupBuilder<A> = Options<A, Whole<A>>;

/// A parameter group, with what it has other than the rest of the optimizer.
///
/// # Source
/// A dictionary in the list that `torch.optim.Optimizer` takes.
pub type ParamGroup<A> = Options<A, OneGroup>;

/// What a [`GroupBuilder`] holds beside options.
pub struct Whole<A> {
    groups: Vec<ParamGroup<A>>,
    /// None: where libtorch has the kernel.
    fused: Option<bool>,
    precision: LowPrecision,
    /// What was wrong with a call that could not say so.
    problem: Option<OptimizerError>,
}

/// What a [`ParamGroup`] holds beside options.
#[derive(Debug)]
pub struct OneGroup {
    pub(crate) params: Vec<Parameter>,
}

impl<A: Algorithm, Scope> Options<A, Scope> {
    pub(crate) fn of(scope: Scope) -> Self {
        Self { edits: Vec::new(), scope }
    }

    pub(crate) fn edit(mut self, set: impl Fn(&mut Values<A>) + Send + Sync + 'static) -> Self {
        self.edits.push(Arc::new(set));
        self
    }

    pub(crate) fn with(self, set: impl Fn(&mut A) + Send + Sync + 'static) -> Self {
        self.edit(move |values| set(&mut values.options))
    }

    /// The learning rate; PyTorch's default, or the paper's, when not said.
    pub fn lr(self, lr: f64) -> Self {
        self.edit(move |values| values.lr = lr)
    }

    /// `values` with what was said. `keeps_momentum`: a momentum of 0 is one that was cycled down.
    pub(crate) fn over(&self, values: &Values<A>, keeps_momentum: bool) -> Result<Values<A>, OptimizerError> {
        let mut values = values.clone();
        self.edits.iter().for_each(|set| set(&mut values));
        OptimizerError::check_lr(values.lr)?;
        with_momentum(&values.options, keeps_momentum).check()?;
        Ok(values)
    }
}

impl<A: Algorithm> ParamGroup<A> {
    pub(crate) fn new(params: impl IntoParameters) -> Self {
        Self::of(OneGroup { params: params.into_parameters() })
    }

    /// The same options for some of its parameters.
    pub(crate) fn part(&self, params: Vec<Parameter>) -> Self {
        Self { edits: self.edits.clone(), scope: OneGroup { params } }
    }
}

impl<A: Algorithm> GroupBuilder<A> {
    pub(crate) fn new(params: impl IntoParameters) -> Self {
        let groups = vec![ParamGroup::new(params)];
        Self::of(Whole { groups, fused: None, precision: LowPrecision::default(), problem: None })
    }

    /// What becomes of bfloat16 and float16 parameters, in all groups; [`LowPrecision::Nearest`] when not said.
    pub fn low_precision(mut self, precision: LowPrecision) -> Self {
        self.scope.precision = precision;
        self
    }

    /// One more parameter group, behind those so far.
    ///
    /// # Source
    /// `Optimizer.add_param_group`
    pub fn add_param_group(mut self, group: ParamGroup<A>) -> Self {
        self.scope.groups.push(group);
        self
    }

    /// Splits each group so far in two: parameters of two dimensions and more decay; biases, gains and other vectors do
    /// not, nor does what is named `..bias`. Plain tensors are told by their dimensions alone.
    ///
    /// # Source
    /// timm's `param_groups_weight_decay`
    #[doc(alias = "param_groups_weight_decay")]
    pub fn decay_groups(self) -> Self {
        self.decay_groups_except(|_| false)
    }

    /// [`decay_groups`](Self::decay_groups), and no decay for the names that `is_kept` tells: position embeddings, say.
    pub fn decay_groups_except(mut self, is_kept: impl Fn(&str) -> bool) -> Self {
        self.scope.groups = split::by_decay(&self.scope.groups, is_kept);
        self
    }

    /// Splits each group so far by layers, and gives each layer its learning rate: that of the last one times `decay` for
    /// each layer that lies behind it. `layer_of` tells the layer of a name, from 0.
    ///
    /// # Source
    /// timm's `param_groups_layer_decay`; Clark et al., "ELECTRA", 2020.
    #[doc(alias = "param_groups_layer_decay")]
    pub fn layer_decay(mut self, decay: f64, layer_of: impl Fn(&str) -> usize) -> Self {
        match split::by_layer(&self.scope.groups, decay, layer_of) {
            Ok(groups) => self.scope.groups = groups,
            Err(problem) => self.scope.problem = self.scope.problem.or(Some(problem)),
        }
        self
    }

    /// The optimizer.
    ///
    /// # Errors
    /// When there is no parameter, an option is out of range, a parameter is no dense floating-point leaf or is given
    /// twice, a name is, some have names and others have none, or the algorithm does not take a parameter.
    pub fn build(self) -> Result<GroupOptimizer<A>, OptimizerError> {
        self.pack(false)
    }

    /// The optimizer, stepping each parameter during the backward pass as soon as its gradient is there.
    ///
    /// # Errors
    /// As [`build`](Self::build), and when a parameter does not require a gradient.
    pub fn build_in_backward(self) -> Result<InBackward<A>, OptimizerError> {
        let optimizer = self.pack(true)?;
        if optimizer.groups.iter().any(|group| group.values.options.max_grad_norm().is_some()) {
            return Err(needs_all_gradients());
        }
        InBackward::new(optimizer)
    }

    fn pack(mut self, apart: bool) -> Result<GroupOptimizer<A>, OptimizerError> {
        if let Some(problem) = self.scope.problem.take() {
            return Err(problem);
        }
        let defaults = self.over(&Values::default(), false)?;
        let mut groups = Vec::new();
        for group in self.scope.groups {
            groups.push((group.over(&defaults, false)?, group.scope.params));
        }
        if groups.iter().all(|(_, params)| params.is_empty()) {
            return Err(OptimizerError::NoParameters);
        }
        let all = || groups.iter().flat_map(|(_, params)| params);
        bucket::check(groups.iter().map(|(values, params)| (&values.options, params.as_slice())))?;
        let unfusable = all().enumerate().find(|(_, param)| !A::has_fused_kernel(param.tensor().device()));
        let fused = match (self.scope.fused, unfusable) {
            (Some(true), Some((index, param))) => {
                let reason = "libtorch has no fused kernel for its device: leave `fused` off";
                return Err(OptimizerError::parameter(param, index, reason));
            }
            (fused, _) => fused.unwrap_or(unfusable.is_none()),
        };
        GroupOptimizer::new(defaults, groups, Packing { fused, precision: self.scope.precision, apart })
    }
}

/// Of an optimizer that steps in backward, and one of its groups.
pub(crate) fn needs_all_gradients() -> OptimizerError {
    let reason = "it needs all gradients before the first step, which is taken as soon as one gradient is there";
    OptimizerError::DoesNotFit { part: "max_grad_norm", reason }
}

impl<A: Fusable> GroupBuilder<A> {
    /// Whether to update all parameters of a group, device and dtype in one kernel of libtorch's; on when not said,
    /// wherever libtorch has the kernel.
    ///
    /// PyTorch's default is `foreach` on CUDA and a loop over the parameters on a CPU, out of caution when fused kernels
    /// were new. They are the fastest and take the fewest bytes, and their results differ from the others' by rounding
    /// alone.
    pub fn fused(mut self, fused: bool) -> Self {
        self.scope.fused = Some(fused);
        self
    }

    /// Whether to update lists of parameters by one operator after another: the opposite of [`fused`](Self::fused).
    pub fn foreach(self, foreach: bool) -> Self {
        self.fused(!foreach)
    }
}

impl<A, Scope: fmt::Debug> fmt::Debug for Options<A, Scope> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").field("said", &self.edits.len()).field("of", &self.scope).finish()
    }
}

impl<A> fmt::Debug for Whole<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Whole").field("groups", &self.groups).field("fused", &self.fused).finish_non_exhaustive()
    }
}

/// Tensors to be trained, of parameters.
pub(crate) fn tensors(params: &[Parameter]) -> Vec<Tensor> {
    params.iter().map(|param| param.tensor().shallow_clone()).collect()
}
