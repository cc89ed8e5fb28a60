//! The parts that all algorithms share: groups, learning rates, and the step over all buckets.

use overdrive_core::{
    Activity, GradScale, IntoParameters, Optimizer, OptimizerError, OptimizerId, Parameter, Stateful, TorchError,
    activity, check_averaged, check_not_stepped_in_backward,
};
use overdrive_ffi::TensorList;
use tch::Tensor;

use crate::algorithm::Algorithm;
use crate::bucket::{Bucket, Packing, buckets};
use crate::builder::{GroupBuilder, ParamGroup, tensors};
use crate::check_params;
use crate::clip;
use crate::foreach;
use crate::group_mut::GroupMut;
use crate::low_precision::LowPrecision;
use crate::together;

/// The learning rate and options of a parameter group.
#[derive(Clone, Debug)]
pub struct Values<A> {
    pub(crate) lr: f64,
    pub(crate) options: A,
}

impl<A: Algorithm> Default for Values<A> {
    fn default() -> Self {
        Self { lr: A::LR, options: A::default() }
    }
}

#[derive(Debug)]
pub(crate) struct Group<A> {
    pub(crate) values: Values<A>,
    pub(crate) buckets: Vec<Bucket>,
    /// How many parameters it holds.
    pub(crate) len: usize,
    /// Whether the group keeps momentum state, even if a schedule has brought the momentum down to 0.
    pub(crate) has_momentum: bool,
}

/// An optimizer over parameter groups; [`AdamW`](crate::AdamW) and the others are aliases of it with an algorithm.
///
/// Parameters without a gradient stay unchanged. The state is allocated at the first step. A step that fails in
/// libtorch is not counted.
#[derive(Debug)]
pub struct GroupOptimizer<A: Algorithm> {
    id: OptimizerId,
    /// The values of groups that set none of their own.
    defaults: Values<A>,
    pub(crate) groups: Vec<Group<A>>,
    /// All parameters in the order they were given.
    pub(crate) params: TensorList,
    /// The parameters' names, if they have any.
    pub(crate) names: Option<Vec<String>>,
    pub(crate) packing: Packing,
    /// How often `zero_grad` has freed the gradients.
    freed: u64,
    /// See [`Optimizer::revision`].
    pub(crate) revision: u64,
}

impl<A: Algorithm> Group<A> {
    fn new(params: &[Tensor], first: usize, values: Values<A>, packing: Packing) -> Result<Self, TorchError> {
        let buckets = buckets(params, first, &values.options, packing)?;
        let has_momentum = has_momentum(&values.options);
        Ok(Self { values, buckets, len: params.len(), has_momentum })
    }

    /// Replaces the values and the buckets.
    pub(crate) fn take_over(&mut self, values: Values<A>, buckets: Vec<Bucket>, keeps_momentum: bool) {
        self.has_momentum = keeps_momentum || has_momentum(&values.options);
        (self.values, self.buckets) = (values, buckets);
    }
}

fn has_momentum<A: Algorithm>(options: &A) -> bool {
    options.clone().momentum().is_some_and(|momentum| *momentum > 0.0)
}

/// The options with a momentum above 0 if the group keeps momentum state: `slots` then includes that state.
pub(crate) fn with_momentum<A: Algorithm>(options: &A, keeps_momentum: bool) -> A {
    let mut kept = options.clone();
    if let (true, Some(momentum)) = (keeps_momentum, kept.momentum()) {
        *momentum = momentum.max(f64::MIN_POSITIVE);
    }
    kept
}

/// An error when an option is out of its range, or options do not fit together.
pub(crate) fn check<A: Algorithm>(options: &A, keeps_momentum: bool) -> Result<(), OptimizerError> {
    let options = with_momentum(options, keeps_momentum);
    options.check_ranges()?;
    options.check()
}

impl<A: Algorithm> GroupOptimizer<A> {
    /// Options for an optimizer over `params`: a `VarStore`, names with tensors, or tensors.
    pub fn builder(params: impl IntoParameters) -> GroupBuilder<A> {
        GroupBuilder::new(params)
    }

    /// A parameter group, for [`add_param_group`](GroupBuilder::add_param_group) of the builder or the optimizer.
    pub fn group(params: impl IntoParameters) -> ParamGroup<A> {
        ParamGroup::new(params)
    }

    /// An optimizer over groups that have been checked.
    pub(crate) fn new(
        defaults: Values<A>,
        given: Vec<(Values<A>, Vec<Parameter>)>,
        packing: Packing,
    ) -> Result<Self, OptimizerError> {
        let params = TensorList::new::<Tensor>(&[])?;
        let mut optimizer = Self {
            id: OptimizerId::new(),
            defaults,
            groups: Vec::new(),
            params,
            names: None,
            packing,
            freed: 0,
            revision: 0,
        };
        for (values, params) in given {
            optimizer.push(values, &params)?;
        }
        Ok(optimizer)
    }

    fn push(&mut self, values: Values<A>, params: &[Parameter]) -> Result<(), TorchError> {
        let mut all = self.params.to_vec()?;
        let own = tensors(params);
        let group = Group::new(&own, all.len(), values, self.packing)?;
        all.extend(own);
        self.params = TensorList::new(&all)?;
        // All parameters have names or none has: that has been checked.
        let names = params.iter().filter_map(|param| Some(param.name()?.to_owned()));
        if params.iter().any(|param| param.name().is_some()) {
            self.names.get_or_insert_default().extend(names);
        }
        self.groups.push(group);
        self.revision += 1;
        Ok(())
    }

    /// Appends a parameter group, for layers that are unfrozen or added later. Options that it does not set are the
    /// builder's.
    ///
    /// # Errors
    /// Those of [`build`](GroupBuilder::build); the optimizer is unchanged then.
    ///
    /// # Source
    /// `Optimizer.add_param_group`
    pub fn add_param_group(&mut self, group: ParamGroup<A>) -> Result<(), OptimizerError> {
        if group.scope.params.is_empty() {
            return Err(OptimizerError::NoParameters);
        }
        let values = group.over(&self.defaults, false)?;
        let known = self.parameters();
        let mut first = 0;
        let mut groups = Vec::new();
        for group in &self.groups {
            groups.push((&group.values.options, &known[first..first + group.len]));
            first += group.len;
        }
        groups.push((&values.options, &group.scope.params));
        check_params::check(groups.into_iter())?;
        self.packing.check::<A>(&group.scope.params, first)?;
        Ok(self.push(values, &group.scope.params)?)
    }

    /// Changes the options of a group.
    ///
    /// ```
    /// # use overdrive_optim::AdamW;
    /// # use tch::{Device, Kind, Tensor};
    /// # let weights = [Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true)];
    /// let mut opt = AdamW::builder(&weights).lr(1e-3).build()?;
    /// opt.group_mut(0)?.lr(1e-4).weight_decay(0.0).apply()?;
    /// # Ok::<(), overdrive_core::OptimizerError>(())
    /// ```
    ///
    /// # Errors
    /// When there is no such group.
    ///
    /// # Source
    /// `optimizer.param_groups[group]`
    #[doc(alias = "param_groups")]
    pub fn group_mut(&mut self, group: usize) -> Result<GroupMut<'_, A>, OptimizerError> {
        self.revision += 1;
        let group = self.group_at(group)?;
        Ok(GroupMut::over_group(group))
    }

    fn step_all(&mut self, scale: Option<GradScale<'_>>) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        // All checks come first, so that an error leaves every parameter unchanged.
        self.check_grads()?;
        let mut values = self.values();
        self.make_state()?;
        for pass in 0..A::PASSES {
            if !A::begin(&mut values, pass)? {
                return Ok(());
            }
            if pass == 0 {
                self.scale_grads_down()?;
            }
            for (group, values) in self.groups.iter_mut().zip(&values) {
                let given = (&values.options, values.lr, self.packing.fused);
                for mut buckets in together::parts::<A>(&mut group.buckets) {
                    let shared = |buckets: &[&mut Bucket]| buckets.iter().filter(|it| it.shares_count()).count();
                    let before = shared(&buckets);
                    let stepped = together::step(&mut buckets, given, scale, None);
                    // Splitting a shared step count makes new tensors: see `Optimizer::revision`.
                    self.revision += u64::from(shared(&buckets) != before);
                    stepped?;
                }
            }
        }
        self.groups.iter_mut().zip(values).for_each(|(group, values)| group.values = values);
        Ok(())
    }

    fn check_grads(&self) -> Result<(), OptimizerError> {
        check_averaged(self)?;
        check_not_stepped_in_backward(self)?;
        let mut buckets = self.groups.iter().flat_map(|group| &group.buckets);
        buckets.try_for_each(|bucket| bucket.check_grads::<A>(self.names.as_deref()))
    }

    fn values(&self) -> Vec<Values<A>> {
        self.groups.iter().map(|group| group.values.clone()).collect()
    }

    /// Clips the gradients of the groups that set `max_grad_norm`, by the norm over all groups.
    fn scale_grads_down(&self) -> Result<(), OptimizerError> {
        if self.groups.iter().all(|group| group.values.options.max_grad_norm().is_none()) {
            return Ok(());
        }
        let Some(norm) = clip::norm_of(&self.parameters())? else { return Ok(()) };
        for group in &self.groups {
            let Some(max_norm) = group.values.options.max_grad_norm() else { continue };
            for bucket in &group.buckets {
                clip::divide(&bucket.params.grads()?.list, &norm, max_norm)?;
            }
        }
        Ok(())
    }

    fn group_at(&mut self, group: usize) -> Result<&mut Group<A>, OptimizerError> {
        let groups = self.groups.len();
        self.groups.get_mut(group).ok_or(OptimizerError::NoSuchGroup { group, groups })
    }
}

impl<A: Algorithm> Optimizer for GroupOptimizer<A> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        // Cannot fail: `to_vec` asks only for indices within the list.
        self.params.to_vec().unwrap_or_default()
    }

    fn parameters(&self) -> Vec<Parameter> {
        match &self.names {
            Some(names) => names.iter().zip(self.params()).map(|(name, param)| Parameter::named(name, param)).collect(),
            None => self.params().into_iter().map(Parameter::unnamed).collect(),
        }
    }

    fn trained(&self) -> Result<Vec<Tensor>, OptimizerError> {
        let mut placed = Vec::new();
        for bucket in self.groups.iter().flat_map(|group| &group.buckets) {
            placed.extend(bucket.indices.iter().copied().zip(bucket.trained()?.to_vec()?));
        }
        placed.sort_by_key(|(index, _)| *index);
        Ok(placed.into_iter().map(|(_, tensor)| tensor).collect())
    }

    fn behavior(&self) -> overdrive_core::Behavior {
        let mut behavior = overdrive_core::Behavior::default();
        behavior.keeps_average = A::KEEPS_COPY;
        behavior.keeps_copies = A::KEEPS_COPY || self.packing.precision == LowPrecision::MasterCopy;
        let clips = self.groups.iter().any(|group| group.values.options.max_grad_norm().is_some());
        behavior.couples_parameters = clips || A::PASSES > 1;
        behavior.couples_elements = A::COUPLES_ELEMENTS;
        behavior
    }

    fn num_groups(&self) -> usize {
        self.groups.len()
    }

    fn group_lens(&self) -> Option<Vec<usize>> {
        Some(self.groups.iter().map(|group| group.len).collect())
    }

    fn revision(&self) -> Option<u64> {
        Some(self.revision)
    }

    fn lr(&self, group: usize) -> Option<f64> {
        let Values { lr, options } = &self.groups.get(group)?.values;
        options.takes_lr().then_some(*lr)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        let group = self.group_at(group)?;
        if !group.values.options.takes_lr() {
            let reason = "T5's relative step computes it from the number of steps: use `AdafactorForm::Pytorch` to set \
                          one";
            return Err(OptimizerError::DoesNotFit { part: "a learning rate", reason });
        }
        OptimizerError::check_lr(lr)?;
        group.values.lr = lr;
        Ok(())
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        let group = self.groups.get(group).filter(|group| group.has_momentum)?;
        group.values.options.clone().momentum().copied()
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        let group = self.group_at(group)?;
        let Some(place) = group.values.options.momentum().filter(|_| group.has_momentum) else {
            return Err(OptimizerError::NoMomentum);
        };
        OptimizerError::check_range("momentum", momentum, 0.0..1.0, "at least 0 and below 1")?;
        *place = momentum;
        Ok(())
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.step_all(None)
    }

    fn make_state(&mut self) -> Result<(), OptimizerError> {
        let mut made = Vec::new();
        for group in &mut self.groups {
            for bucket in group.buckets.iter_mut().filter(|bucket| bucket.state.is_none()) {
                if !bucket.params.grads()?.list.is_empty() {
                    made.push((bucket.fresh_state(&group.values.options, self.packing.fused)?, bucket));
                }
            }
        }
        made.into_iter().for_each(|(state, bucket)| bucket.state = Some(state));
        Ok(())
    }

    fn check_step(&self) -> Result<(), OptimizerError> {
        self.check_grads()?;
        A::begin(&mut self.values(), 0).map(drop)
    }

    fn takes_grad_scale(&self) -> bool {
        self.packing.fused && self.groups.iter().all(|group| group.values.options.takes_grad_scale())
    }

    fn step_scaled(&mut self, scale: GradScale<'_>) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        match self.takes_grad_scale() {
            true => self.step_all(Some(scale)),
            false => Err(OptimizerError::TakesNoGradScale),
        }
    }

    fn gradients_used(&self) -> u64 {
        self.freed
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        self.freed += 1;
        Ok(self.params.clear_grads()?)
    }

    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        for bucket in self.groups.iter_mut().flat_map(|group| &mut group.buckets) {
            bucket.renew_masters()?;
            if A::KEEPS_COPY {
                bucket.with_first_slot(|params, copies| foreach::copy_(copies, params))?;
            }
        }
        Ok(())
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        Some(self)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        Some(self)
    }
}
