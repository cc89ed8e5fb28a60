//! Builders: parameters and options before an optimizer is built.

use std::fmt;
use std::sync::Arc;

use overdrive_core::{IntoParameters, OptimizerError, Parameter};
use tch::Tensor;

use crate::algorithm::{Algorithm, Fusable};
use crate::bucket::{self, Packing};
use crate::check_params;
use crate::in_backward::InBackward;
use crate::low_precision::LowPrecision;
use crate::optimizer::{GroupOptimizer, Values, check};
use crate::split;

/// The options set so far, for a [`GroupBuilder`] (all groups), a [`ParamGroup`] (one group) or a
/// [`GroupMut`](crate::GroupMut) (a group that trains already). Each algorithm adds its own setters.
#[must_use = "options do nothing until they are built or applied"]
pub struct Options<A, Scope> {
    edits: Vec<Edit<A>>,
    pub(crate) scope: Scope,
}

/// Reference-counted, because the parts that a group is split into share them.
type Edit<A> = Arc<dyn Fn(&mut Values<A>) + Send + Sync>;

/// Options for all groups of an optimizer; the defaults are PyTorch's. Options set on a group override these, in
/// whichever order they are set:
///
/// ```
/// # use overdrive_optim::AdamW;
/// # use tch::{Device, Kind, Tensor};
/// # let ones = || vec![Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true)];
/// # let (matrices, biases) = (ones(), ones());
/// let opt = AdamW::builder(matrices)
///     .add_param_group(AdamW::group(biases).weight_decay(0.0))
///     .lr(1e-3) // both groups
///     .weight_decay(0.1) // the matrices
///     .build()?;
/// # Ok::<(), overdrive_core::OptimizerError>(())
/// ```
pub type GroupBuilder<A> = Options<A, Whole<A>>;

/// A parameter group, with the options that differ from the rest of the optimizer.
///
/// # Source
/// A dictionary in the list that `torch.optim.Optimizer` takes.
pub type ParamGroup<A> = Options<A, OneGroup>;

/// What a [`GroupBuilder`] holds besides options.
pub struct Whole<A> {
    groups: Vec<ParamGroup<A>>,
    /// None: fused where libtorch has the kernel.
    fused: Option<bool>,
    precision: LowPrecision,
    /// The first error of a builder method, which `build` returns.
    problem: Option<OptimizerError>,
}

/// What a [`ParamGroup`] holds besides options.
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

    /// The learning rate; the default is PyTorch's, or the paper's.
    pub fn lr(self, lr: f64) -> Self {
        self.edit(move |values| values.lr = lr)
    }

    /// `values` with these options applied, and checked. `keeps_momentum`: the group has a momentum buffer, so that a
    /// momentum of 0 means that a schedule has brought it down.
    pub(crate) fn over(&self, values: &Values<A>, keeps_momentum: bool) -> Result<Values<A>, OptimizerError> {
        let mut values = values.clone();
        self.edits.iter().for_each(|set| set(&mut values));
        OptimizerError::check_lr(values.lr)?;
        check(&values.options, keeps_momentum)?;
        Ok(values)
    }
}

impl<A: Algorithm> ParamGroup<A> {
    pub(crate) fn new(params: impl IntoParameters) -> Self {
        Self::of(OneGroup { params: params.into_parameters() })
    }

    /// A group with the same options and some of the parameters.
    pub(crate) fn part(&self, params: Vec<Parameter>) -> Self {
        Self { edits: self.edits.clone(), scope: OneGroup { params } }
    }
}

impl<A: Algorithm> GroupBuilder<A> {
    pub(crate) fn new(params: impl IntoParameters) -> Self {
        let groups = vec![ParamGroup::new(params)];
        Self::of(Whole { groups, fused: None, precision: LowPrecision::default(), problem: None })
    }

    /// How bfloat16 and float16 parameters are updated, in all groups; default [`LowPrecision::Nearest`].
    pub fn low_precision(mut self, precision: LowPrecision) -> Self {
        self.scope.precision = precision;
        self
    }

    /// Appends a parameter group.
    ///
    /// # Source
    /// `Optimizer.add_param_group`
    pub fn add_param_group(mut self, group: ParamGroup<A>) -> Self {
        self.scope.groups.push(group);
        self
    }

    /// Splits each group added so far in two: parameters of two or more dimensions get weight decay; biases, gains and
    /// other vectors do not, nor do parameters named `bias` or `..bias`. Tensors without names are split by their
    /// number of dimensions only.
    ///
    /// # Source
    /// timm's `param_groups_weight_decay`
    #[doc(alias = "param_groups_weight_decay")]
    pub fn decay_groups(self) -> Self {
        self.decay_groups_except(|_| false)
    }

    /// [`decay_groups`](Self::decay_groups), also without weight decay for the names that `is_exempt` accepts: position
    /// embeddings, say.
    pub fn decay_groups_except(mut self, is_exempt: impl Fn(&str) -> bool) -> Self {
        self.scope.groups = split::by_decay(&self.scope.groups, is_exempt);
        self
    }

    /// Splits each group added so far by layers. The last layer keeps the group's learning rate; each earlier layer's
    /// is `decay` times that of the layer after it. `layer_of` maps a parameter's name to its layer, counted from 0.
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
    /// When there is no parameter, an option is out of range, a parameter is not a dense floating-point leaf, a
    /// parameter or a name is given twice, some parameters have names and others have none, or the algorithm refuses a
    /// parameter.
    pub fn build(self) -> Result<GroupOptimizer<A>, OptimizerError> {
        self.pack(false)
    }

    /// The optimizer, which steps each parameter during the backward pass as soon as its gradient is ready.
    ///
    /// # Errors
    /// Those of [`build`](Self::build), when a parameter does not require a gradient, and for schedule-free optimizers,
    /// `Prodigy` and `max_grad_norm`, which need all gradients at once.
    pub fn build_in_backward(self) -> Result<InBackward<A>, OptimizerError> {
        if !A::STEPS_ALONE {
            let reason = "its steps need the gradients of all parameters at once: build it with `build`";
            return Err(OptimizerError::DoesNotFit { part: "`build_in_backward`", reason });
        }
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
        check_params::check(groups.iter().map(|(values, params)| (&values.options, params.as_slice())))?;
        let precision = self.scope.precision;
        let can_fuse = || all().all(|param| bucket::has_fused_kernel::<A>(param, precision));
        let packing = Packing { fused: self.scope.fused.unwrap_or_else(can_fuse), precision, apart };
        let mut first = 0;
        for (_, params) in &groups {
            packing.check::<A>(params, first)?;
            first += params.len();
        }
        GroupOptimizer::new(defaults, groups, packing)
    }
}

/// The error for `max_grad_norm` in an optimizer that steps in backward.
pub(crate) fn needs_all_gradients() -> OptimizerError {
    let reason = "it steps each parameter as soon as its gradient is ready, but the norm needs all gradients: build it \
                  with `build`";
    OptimizerError::DoesNotFit { part: "max_grad_norm", reason }
}

impl<A: Fusable> GroupBuilder<A> {
    /// Whether to update all parameters of the same group, device and dtype in one libtorch kernel; default true
    /// wherever libtorch has the kernel. Its kernel of SGD for bfloat16 and float16 on a CPU is wrong in libtorch 2.11,
    /// and is not used.
    ///
    /// PyTorch's default is `foreach` on CUDA and a loop over the parameters on a CPU, out of caution when fused
    /// kernels were new. They are the fastest and use the least memory, and their results differ only by rounding.
    pub fn fused(mut self, fused: bool) -> Self {
        self.scope.fused = Some(fused);
        self
    }

    /// Whether to update lists of parameters with one `_foreach` operator after another: the opposite of
    /// [`fused`](Self::fused).
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

/// The tensors of parameters.
pub(crate) fn tensors(params: &[Parameter]) -> Vec<Tensor> {
    params.iter().map(|param| param.tensor().shallow_clone()).collect()
}
