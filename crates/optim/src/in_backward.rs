//! Steps during the backward pass, so that only a few gradients are in memory at any time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_core::{
    AVERAGED, Activity, Behavior, Marked, Optimizer, OptimizerError, OptimizerId, Parameter, STEPPED_IN_BACKWARD,
    StateDict, StateError, Stateful, activity, check_averaged,
};
use overdrive_ffi::GradHook;
use tch::Tensor;

use crate::algorithm::Algorithm;
use crate::bucket::Bucket;
use crate::builder::{ParamGroup, needs_all_gradients, tensors};
use crate::optimizer::{Group, GroupOptimizer};

/// An optimizer that steps each parameter during the backward pass, as soon as its gradient is ready, and frees the
/// gradient at once: the gradients of the whole model are never in memory together.
///
/// Call [`step`](Optimizer::step) after the backward pass as usual. It has nothing left to update, but returns errors
/// of the backward pass. Techniques that need all gradients at once cannot be used with it: clipping by the global
/// norm, accumulation over several backward passes in one process, and a `GradScaler`, which could not skip a step that
/// is half done (bfloat16 needs no scaler).
///
/// Under a `DistributedDataParallel`, averaged gradients are complete only when the backward pass ends: all parameters
/// are stepped then, from the averages, whether the optimizer or the `DistributedDataParallel` was made first. Backward
/// passes without synchronisation step nothing, so that an accumulator `with_sync(&ddp)` works.
///
/// A parameter that is used several times in a model gets one gradient, the sum, and is stepped once. No second
/// optimizer of this kind can have the same parameter while this one lives: libtorch keeps one such hook per tensor.
///
/// # Source
/// `torch.Tensor.register_post_accumulate_grad_hook`, PyTorch's tutorial "How to save memory by fusing the optimizer
/// step into the backward pass", and `DistributedDataParallel._setup_in_backward_optimizers`.
#[derive(Debug)]
pub struct InBackward<A: Algorithm> {
    shared: Arc<Mutex<Shared<A>>>,
    hooks: Vec<GradHook>,
    /// Marks the parameters, so that clipping refuses them.
    marked: Vec<Marked>,
    id: OptimizerId,
}

#[derive(Debug)]
struct Shared<A: Algorithm> {
    optimizer: GroupOptimizer<A>,
    /// The first error since the last step; parameters after it are not stepped.
    failed: Option<OptimizerError>,
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in a hook is resumed at the next `step`, so a poisoned lock can be ignored here.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<A: Algorithm> InBackward<A> {
    /// `optimizer` has one bucket per parameter.
    pub(crate) fn new(optimizer: GroupOptimizer<A>) -> Result<Self, OptimizerError> {
        let (id, places, params) = (optimizer.id(), optimizer.places(), optimizer.parameters());
        let shared = Arc::new(Mutex::new(Shared { optimizer, failed: None }));
        let mut hooks = Vec::new();
        for (group, bucket, index) in places {
            hooks.push(hook(&shared, (group, bucket), (&params[index], index))?);
        }
        Ok(Self { shared, hooks, marked: vec![STEPPED_IN_BACKWARD.mark(tensors(&params))], id })
    }

    /// Appends a parameter group; see [`GroupOptimizer::add_param_group`].
    ///
    /// # Errors
    /// Those of that function, and when a parameter does not require a gradient; the optimizer is unchanged then.
    pub fn add_param_group(&mut self, group: ParamGroup<A>) -> Result<(), OptimizerError> {
        let (number, first) = (self.num_groups(), self.hooks.len());
        let mut hooks = Vec::new();
        for (bucket, param) in group.scope.params.iter().enumerate() {
            hooks.push(hook(&self.shared, (number, bucket), (param, first + bucket))?);
        }
        let added = tensors(&group.scope.params);
        lock(&self.shared).optimizer.add_param_group(group)?;
        self.marked.push(STEPPED_IN_BACKWARD.mark(added));
        self.hooks.extend(hooks);
        Ok(())
    }
}

/// Registers a hook that steps a parameter, the only one of its bucket, whenever its gradient is ready.
fn hook<A: Algorithm>(
    shared: &Arc<Mutex<Shared<A>>>,
    (group, bucket): (usize, usize),
    (param, index): (&Parameter, usize),
) -> Result<GradHook, OptimizerError> {
    if AVERAGED.times(param.tensor()) > 1 {
        let reason = "several `DistributedDataParallel`s average its gradient, but a step in backward can wait for \
                      only one: drop the others";
        return Err(OptimizerError::parameter(param, index, reason));
    }
    let seen = shared.clone();
    let hook = GradHook::new(param.tensor(), move || {
        let mut shared = lock(&seen);
        if shared.failed.is_none() {
            shared.failed = shared.optimizer.step_bucket(group, bucket).err();
        }
    });
    hook.map_err(|error| {
        let reason = format!(
            "{}: it must be a leaf that requires a gradient, and belong to only one optimizer that steps in the \
             backward pass",
            error.message()
        );
        OptimizerError::parameter(param, index, reason)
    })
}

impl<A: Algorithm> Optimizer for InBackward<A> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        lock(&self.shared).optimizer.params()
    }

    fn parameters(&self) -> Vec<Parameter> {
        lock(&self.shared).optimizer.parameters()
    }

    fn behavior(&self) -> Behavior {
        let mut behavior = lock(&self.shared).optimizer.behavior();
        behavior.steps_in_backward = true;
        behavior
    }

    fn num_groups(&self) -> usize {
        lock(&self.shared).optimizer.num_groups()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        lock(&self.shared).optimizer.lr(group)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        lock(&self.shared).optimizer.set_lr(group, lr)
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        lock(&self.shared).optimizer.momentum(group)
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        lock(&self.shared).optimizer.set_momentum(group, momentum)
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.hooks.iter().for_each(GradHook::resume_panic);
        lock(&self.shared).failed.take().map_or(Ok(()), Err)
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        lock(&self.shared).optimizer.zero_grad()
    }

    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        lock(&self.shared).optimizer.params_changed()
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        Some(self)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        Some(self)
    }
}

impl<A: Algorithm> Stateful for InBackward<A> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        lock(&self.shared).optimizer.state_dict()
    }

    /// With another state, an error of an earlier backward pass is forgotten.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let mut shared = lock(&self.shared);
        shared.optimizer.load_state_dict(state)?;
        shared.failed = None;
        Ok(())
    }
}

impl<A: Algorithm> GroupOptimizer<A> {
    /// The group, the bucket and the index of each parameter, when each has its own bucket.
    pub(crate) fn places(&self) -> Vec<(usize, usize, usize)> {
        let of_group = |(group, it): (usize, &Group<A>)| {
            let of_bucket = move |(bucket, it): (usize, &Bucket)| (group, bucket, it.indices[0]);
            it.buckets.iter().enumerate().map(of_bucket).collect::<Vec<_>>()
        };
        self.groups.iter().enumerate().flat_map(of_group).collect()
    }

    /// Updates the parameters of one bucket and frees their gradients.
    pub(crate) fn step_bucket(&mut self, group_index: usize, bucket: usize) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        let group = &self.groups[group_index];
        // An added group or a loaded state can have set `max_grad_norm`.
        if group.values.options.max_grad_norm().is_some() {
            return Err(needs_all_gradients());
        }
        let is_averaged = AVERAGED.is_empty() || AVERAGED.contains(&group.buckets[bucket].params.get(0)?);
        if !is_averaged {
            check_averaged(self)?;
        }
        let group = &mut self.groups[group_index];
        let bucket = &mut group.buckets[bucket];
        bucket.check_grads::<A>(self.names.as_deref())?;
        bucket.step((&group.values.options, group.values.lr, self.packing.fused), None)?;
        Ok(bucket.params.clear_grads()?)
    }
}
