//! ZeRO-2: each gradient on the rank that steps with it.

mod clip;
mod reduction;
mod sync;

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_core::{AVERAGED, Activity, Marked, Optimizer, OptimizerError, SHARDED_GRADIENTS, activity};
use overdrive_ddp::{DdpError, ProcessGroup};
use overdrive_ffi::{GradHook, TensorId};
use tch::{Kind, Tensor};

use crate::agree;
use crate::error::ShardError;
use crate::exchange;
use crate::link::Link;
use crate::zero::{BUCKET_BYTES, ZeroRedundancyOptimizer};
use reduction::{Passed, Reduction};

pub use clip::GradNorm;
pub(crate) use clip::{check_max_norm, clip};
pub use sync::NoSync;

const BUILDING: &str = "building a ShardedDataParallel";
const BACKWARD: &str = "the backward pass";
const PART: &str = "ShardedDataParallel";

/// Averages gradients over ranks in the backward pass, each on the one rank that keeps the state of its parameter; on
/// the others it is freed while the pass goes on. Used instead of a `DistributedDataParallel`.
///
/// With N ranks, a rank holds about 1/N of the gradients after a pass, and during it those of the buckets that are not
/// complete or under way (two at a time, or four that are smaller than a bucket together). It sends as much as it would to average them on all ranks, or less. Steps of
/// the [`ZeroRedundancyOptimizer`] are those that the gradients' means on all ranks would give.
///
/// Call [`backward`](Self::backward), or give this to an `Accumulator`, instead of `loss.backward()`, and clip by
/// [`clip_grad_norm_`](Self::clip_grad_norm_). With a `GradScaler` ranks skip a step together. The model is called
/// directly. Its buffers, such as running statistics, and parameters that the optimizer does not have stay each rank's
/// own: they are not sent by rank 0 either. Gradients are dense. While this lives, it
/// hooks into the parameters' gradients.
///
/// ```no_run
/// use overdrive_core::Optimizer;
/// use overdrive_ddp::{Backend, InitMethod, init_process_group};
/// use overdrive_optim::AdamW;
/// use overdrive_shard::{ShardedDataParallel, ZeroRedundancyOptimizer};
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut opt = ZeroRedundancyOptimizer::new(&vs, &group, |params| AdamW::builder(params).lr(1e-3).build())?;
/// let sharded = ShardedDataParallel::new(&mut opt)?;
/// for batch in 0..10 {
///     let inputs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu)); // this rank's part
///     sharded.backward(&model.forward(&inputs).square().mean(Kind::Float))?;
///     sharded.clip_grad_norm_(1.0)?;
///     opt.step()?;
///     opt.zero_grad()?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// FairScale's `ShardedDataParallel`; Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, stage 2
#[doc(alias = "ZeRO-2")]
#[derive(Debug)]
pub struct ShardedDataParallel {
    hooks: Vec<GradHook>,
    shared: Shared,
    averaged: HashSet<TensorId>,
    /// Other parts look these marks up: `clip_grad_norm_` of `overdrive-optim` refuses the parameters.
    _marked: [Marked; 2],
    group: ProcessGroup,
    link: Link,
    /// Of the norm of gradients.
    norm: (Kind, tch::Device),
    held: Cell<bool>,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Reduction>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Reduction> {
        // A panic in a hook is resumed at the end of the pass.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

impl ShardedDataParallel {
    /// Averages the gradients of the optimizer's parameters that require one, over its group, in buckets of 25 MiB, and
    /// those of 1 MiB and more by themselves.
    /// Overwrites all of its parameters by rank 0's. Gradients that are there already count as this rank's own.
    ///
    /// # Errors
    /// On every rank, [`ShardError::OtherRank`] on those that would go on: when no parameter requires a gradient, one
    /// is not a leaf or has a hook, such as that of an optimizer that steps in the backward pass, or a
    /// `DistributedDataParallel` averages it. [`ShardError::Ddp`] when a rank has exited or does not call it within the
    /// group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn new<O: Optimizer>(opt: &mut ZeroRedundancyOptimizer<O>) -> Result<Self, ShardError> {
        Self::with_bucket_bytes(opt, BUCKET_BYTES)
    }

    /// The same with buckets of at most `bytes`, unless a single gradient is larger.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`ShardError::RanksDisagree`] when ranks are given different numbers.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn with_bucket_bytes<O: Optimizer>(
        opt: &mut ZeroRedundancyOptimizer<O>,
        bytes: usize,
    ) -> Result<Self, ShardError> {
        let group = opt.process_group().clone();
        let shared = Shared(Arc::new(Mutex::new(Reduction::new(&group, opt.ownership(), opt.link(), bytes))));
        let hooks = opt.link().check(PART).and_then(|()| hooks(&shared));
        let layout = shared.lock().describe();
        let (hooks, all) = agree::built(&group, BUILDING, hooks, |_| (bytes.to_string(), layout))?;
        let (all_bytes, layouts): (Vec<String>, Vec<_>) = all.into_iter().unzip();
        agree::on_text("the size of buckets in bytes", &all_bytes)?;
        agree::on_lines("the buckets of gradients", &layouts)?;
        let link = opt.link().clone();
        let sent = exchange::send(&group, &exchange::from_first(opt.ownership(), bytes), true);
        let has_changed = link.watch(sent.map_err(ShardError::from))?;
        // Not otherwise: slow weights would begin anew, also those that were loaded.
        if link.watch(agree::on_any(&group, has_changed))? {
            let renewed = opt.params_changed();
            link.watch(agree::all_have(&group, BUILDING, renewed))?;
        }
        let params: Vec<Tensor> =
            shared.lock().places().iter().map(|(param, ..)| param.tensor().shallow_clone()).collect();
        let averaged = params.iter().map(TensorId::of).collect();
        let is_double = params.iter().any(|param| param.kind() == Kind::Double);
        let device = match group.device() {
            tch::Device::Cpu => params.first().map_or(tch::Device::Cpu, Tensor::device),
            gpu => gpu,
        };
        let norm = (if is_double { Kind::Double } else { Kind::Float }, device);
        let shallow = params.iter().map(Tensor::shallow_clone).collect();
        let marked = [AVERAGED.mark(params), SHARDED_GRADIENTS.mark(shallow)];
        Ok(Self { hooks, shared, averaged, _marked: marked, group, link, norm, held: Cell::new(false) })
    }

    /// Runs backward from a loss. Then the owner of each parameter has the mean over ranks in its gradient, added to
    /// what earlier calls have left there, and the others have none. A parameter that no rank has used has no gradient.
    ///
    /// # Shapes
    /// `loss`: one number.
    ///
    /// # Errors
    /// Where gradients are averaged, on every rank, and all gradients are freed: the error of backward itself or
    /// [`ShardError::Optimizer`] with the parameter whose gradient is sparse, on the rank that has it, and
    /// [`ShardError::OtherRank`] on the others. [`ShardError::Ddp`] when a rank has exited or does not take part within
    /// the group's timeout.
    ///
    /// # Syncs
    /// Over Gloo, waits for all ranks; over NCCL, for their hosts.
    pub fn backward(&self, loss: &Tensor) -> Result<(), ShardError> {
        let _backward = activity(|| Activity::Backward);
        self.pass(Some(loss))
    }

    /// The group over which gradients are averaged.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    fn outside_pass(&self, call: &'static str) -> Result<(), DdpError> {
        if self.shared.lock().is_within_pass() { Err(DdpError::WithinBackward { call }) } else { Ok(()) }
    }

    /// A backward pass, or without a loss the averaging of what there is.
    fn pass(&self, loss: Option<&Tensor>) -> Result<(), ShardError> {
        self.outside_pass("backward")?;
        let run = || loss.map_or(Ok(()), |loss| Ok(loss.f_backward()?));
        self.link.check(PART)?;
        if self.held.get() {
            self.shared.lock().begin_local()?;
            let ran = run();
            self.shared.lock().end_local(ran.is_ok());
            return ran;
        }
        self.shared.lock().begin()?;
        // Hooks take the lock.
        let ran: Result<(), ShardError> = run();
        let finished = self.shared.lock().finish();
        self.hooks.iter().for_each(GradHook::resume_panic);
        let ended = self.link.watch(finished.and_then(|own| self.end_pass(ran.and(own))));
        if ended.is_err() {
            self.shared.lock().clear()?;
        }
        ended
    }

    /// Agrees with all ranks that the pass was good.
    fn end_pass(&self, own: Result<Passed, ShardError>) -> Result<(), ShardError> {
        let is_plain = own.as_ref().is_ok_and(|own| own.missing.is_empty() && !own.is_anew);
        if !agree::on_any(&self.group, !is_plain)? {
            return Ok(());
        }
        let all = agree::all_have(&self.group, BACKWARD, own)?;
        if all.iter().any(|of_rank| of_rank.is_anew) {
            // A rank that has begun its window anew alone has other passes in it than the others.
            let freed: Vec<String> = all.iter().map(|of_rank| of_rank.freed.to_string()).collect();
            agree::on_text("how often gradients were zeroed in a window that was begun anew", &freed)?;
        }
        let (first, others) = all.split_at(1);
        let is_unused = |index: &usize| others.iter().all(|other| other.missing.contains(index));
        let unused = first[0].missing.iter().copied().filter(is_unused);
        Ok(self.shared.lock().without(&unused.collect::<Vec<_>>())?)
    }
}

/// Hooks of all gradients.
fn hooks(shared: &Shared) -> Result<Vec<GradHook>, OptimizerError> {
    let places = shared.lock().places();
    if places.is_empty() {
        return Err(OptimizerError::NoParameters);
    }
    let mut hooks = Vec::with_capacity(places.len());
    for (param, index, bucket) in &places {
        if AVERAGED.contains(param.tensor()) {
            let reason =
                "a `DistributedDataParallel` or another `ShardedDataParallel` averages its gradient: use one of them";
            return Err(OptimizerError::parameter(param, *index, reason));
        }
        let (seen, bucket, of_all) = (shared.clone(), *bucket, *index);
        let hook = GradHook::new(param.tensor(), move || seen.lock().ready(bucket, of_all));
        hooks.push(hook.map_err(|error| {
            let reason =
                format!("{}: it must be a leaf that requires a gradient, and have no other hook", error.message());
            OptimizerError::parameter(param, *index, reason)
        })?);
    }
    Ok(hooks)
}
