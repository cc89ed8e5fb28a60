//! What all algorithms share: groups, learning rates, and the step over all buckets.

use overdrive_core::{Activity, GradScale, Optimizer, OptimizerError, OptimizerId, TorchError, activity};
use overdrive_ffi::TensorList;
use tch::Tensor;

use crate::algorithm::Algorithm;
use crate::bucket::{Bucket, Packing, buckets};
use crate::builder::GroupBuilder;

#[derive(Debug)]
pub(crate) struct Group<A> {
    pub(crate) lr: f64,
    pub(crate) options: A,
    pub(crate) buckets: Vec<Bucket>,
    /// How many parameters it holds.
    pub(crate) len: usize,
    /// Whether its momentum was above 0 at first: only then has it the state for one.
    has_momentum: bool,
}

/// An optimizer over parameter groups; [`AdamW`](crate::AdamW) and its neighbours are names for it with an algorithm.
///
/// Gradients that are missing leave their parameters as they are. The state is made at the first step. A step that failed
/// in libtorch is not counted.
#[derive(Debug)]
pub struct GroupOptimizer<A: Algorithm> {
    id: OptimizerId,
    pub(crate) groups: Vec<Group<A>>,
    /// All parameters in the order they were given.
    pub(crate) params: TensorList,
    pub(crate) packing: Packing,
}

impl<A: Algorithm> Group<A> {
    fn new(params: &[Tensor], first: usize, lr: f64, mut options: A, packing: Packing) -> Result<Self, TorchError> {
        let buckets = buckets(params, first, &options, packing)?;
        let has_momentum = options.momentum().is_some_and(|momentum| *momentum > 0.0);
        Ok(Self { lr, options, buckets, len: params.len(), has_momentum })
    }

    /// Goes on as saved.
    pub(crate) fn take_over(&mut self, lr: f64, mut options: A, buckets: Vec<Bucket>) {
        self.has_momentum = options.momentum().is_some_and(|momentum| *momentum > 0.0);
        (self.lr, self.options, self.buckets) = (lr, options, buckets);
    }
}

impl<A: Algorithm> GroupOptimizer<A> {
    /// Options for an optimizer over `params`.
    pub fn builder(params: impl AsRef<[Tensor]>) -> GroupBuilder<A> {
        GroupBuilder::new(params)
    }

    /// An optimizer over groups that have been checked.
    pub(crate) fn new(given: Vec<(Vec<Tensor>, f64, A)>, packing: Packing) -> Result<Self, OptimizerError> {
        let mut all = Vec::new();
        let mut groups = Vec::with_capacity(given.len());
        for (params, lr, options) in given {
            groups.push(Group::new(&params, all.len(), lr, options, packing)?);
            all.extend(params);
        }
        Ok(Self { id: OptimizerId::new(), groups, params: TensorList::new(&all)?, packing })
    }

    fn step_all(&mut self, scale: Option<GradScale<'_>>) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        // Before anything changes: a bucket that refuses must not find others stepped.
        self.groups.iter().flat_map(|group| &group.buckets).try_for_each(Bucket::check_grads)?;
        for group in &mut self.groups {
            for bucket in &mut group.buckets {
                bucket.step((&group.options, group.lr, self.packing.fused), scale)?;
            }
        }
        Ok(())
    }

    /// Group, bucket, place among all parameters, and the parameter, where each is in a bucket of its own.
    pub(crate) fn places(&self) -> Result<Vec<(usize, usize, usize, Tensor)>, TorchError> {
        let mut places = Vec::new();
        for (group, it) in self.groups.iter().enumerate() {
            for (bucket, it) in it.buckets.iter().enumerate() {
                places.push((group, bucket, it.indices[0], it.params.get(0)?));
            }
        }
        Ok(places)
    }

    /// Updates the parameters of one bucket and frees their gradients.
    pub(crate) fn step_bucket(&mut self, group: usize, bucket: usize) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        let group = &mut self.groups[group];
        let bucket = &mut group.buckets[bucket];
        bucket.check_grads()?;
        bucket.step((&group.options, group.lr, self.packing.fused), None)?;
        Ok(bucket.params.clear_grads()?)
    }

    fn group(&mut self, group: usize) -> Result<&mut Group<A>, OptimizerError> {
        let groups = self.groups.len();
        self.groups.get_mut(group).ok_or(OptimizerError::NoSuchGroup { group, groups })
    }
}

impl<A: Algorithm> Optimizer for GroupOptimizer<A> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        // The list is as long as it says, so no index can be out of it.
        self.params.to_vec().unwrap_or_default()
    }

    fn num_groups(&self) -> usize {
        self.groups.len()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        Some(self.groups.get(group)?.lr)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        let group = self.group(group)?;
        OptimizerError::check_lr(lr)?;
        group.lr = lr;
        Ok(())
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        let group = self.groups.get(group).filter(|group| group.has_momentum)?;
        group.options.clone().momentum().copied()
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        let group = self.group(group)?;
        let Some(place) = group.options.momentum().filter(|_| group.has_momentum) else {
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

    fn takes_grad_scale(&self) -> bool {
        self.packing.fused
    }

    fn step_scaled(&mut self, scale: GradScale<'_>) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        match self.packing.fused {
            true => self.step_all(Some(scale)),
            false => Err(OptimizerError::TakesNoGradScale),
        }
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        Ok(self.params.clear_grads()?)
    }

    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        Ok(self.groups.iter().flat_map(|group| &group.buckets).try_for_each(Bucket::renew_masters)?)
    }
}
