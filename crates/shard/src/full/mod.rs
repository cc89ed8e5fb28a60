//! ZeRO-3: parameters, gradients and optimizer state partitioned over ranks.

mod agreement;
mod builder;
mod clip;
mod engine;
mod forward;
mod gather;
mod home;
mod layout;
mod meeting;
mod optimizer;
mod optimizer_state;
mod order;
mod param;
mod pass;
mod ranks;
mod reduction;
mod state;
mod sync;
mod unit;
mod weights;
mod whole;

use std::collections::HashSet;
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_core::{Activity, Marked, Optimizer, OptimizerError, Parameter, TorchError, activity};
use overdrive_ddp::{Outputs, ProcessGroup};
use overdrive_ffi::{GradHook, TensorId};
use tch::Tensor;

use crate::error::ShardError;
use crate::mesh::DeviceMesh;
use engine::Engine;
use ranks::Ranks;

pub use builder::FullyShardedBuilder;
pub use engine::Exchange;
pub use forward::ShardedUnit;
pub use home::OffloadPolicy;
pub use optimizer::FullyShardedOptimizer;
pub use sync::HeldBack;

/// A model whose parameters are partitioned over ranks, with their gradients and the optimizer's state: each rank keeps
/// some rows of each, and has whole parameters only of the parts that compute.
///
/// Parts of the model are units ([`FullyShardedBuilder::unit`]), and what is left is the last one. A unit's
/// [`forward`](ShardedUnit::forward) gathers its parameters from all ranks, and frees them afterwards; the backward pass
/// gathers them again, averages their gradients, of which each rank gets those of its rows, and frees both. The unit that
/// comes next is gathered meanwhile. With N ranks, a rank keeps about 1/N of parameters, gradients and state, and two
/// whole units.
///
/// The optimizer is made by [`optimizer`](Self::optimizer), and steps this rank's rows ([`parameters`](Self::parameters)).
/// Call [`backward`](Self::backward), or give this to an `Accumulator`, instead of `loss.backward()`, and clip by
/// [`clip_grad_norm_`](Self::clip_grad_norm_). With a `GradScaler` ranks skip a step together. Buffers stay each rank's
/// own, and are part of its state. Compiled steps and differentiating gradients again are not possible.
///
/// Before each exchange, ranks tell one another what comes next. What fails on one, in a forward for instance, is an error
/// on all that names the rank, and they may go on; so is another order of units.
///
/// ```no_run
/// use overdrive_core::Optimizer;
/// use overdrive_ddp::{Backend, InitMethod, init_process_group};
/// use overdrive_optim::AdamW;
/// use overdrive_shard::{FullyShardedDataParallel, ShardError};
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let mut sharding = FullyShardedDataParallel::builder(&group)?;
/// let mut blocks = Vec::new();
/// for number in 0..8 {
///     let name = format!("blocks.{number}");
///     let block = nn::linear(vs.root() / "blocks" / number, 64, 64, Default::default());
///     let unit = sharding.unit(&name, [("weight", &block.ws), ("bias", block.bs.as_ref().unwrap())])?;
///     blocks.push((block, unit)); // the whole block's memory is freed: there is room for the next
/// }
/// let head = nn::linear(vs.root() / "head", 64, 1, Default::default());
/// let model = sharding.build(&vs)?;
/// let mut opt = model.optimizer(|params| AdamW::builder(params).lr(1e-3).build())?;
///
/// for batch in 0..10 {
///     let inputs = Tensor::randn([8, 64], (Kind::Float, Device::Cpu)); // this rank's part
///     let outputs = model.try_forward(inputs, |mut x| {
///         for (block, unit) in &blocks {
///             x = unit.forward(x, |x| block.forward(&x).relu())?;
///         }
///         Ok::<_, ShardError>(head.forward(&x))
///     })?;
///     model.backward(&outputs.square().mean(Kind::Float))?;
///     model.clip_grad_norm_(1.0)?;
///     opt.step()?;
///     opt.zero_grad()?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.distributed.fsdp.fully_shard`; Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, stage 3
#[doc(alias = "fully_shard")]
#[doc(alias = "FSDP")]
#[doc(alias = "FSDP2")]
#[doc(alias = "FullyShard")]
#[doc(alias = "ZeRO-3")]
#[derive(Debug)]
pub struct FullyShardedDataParallel {
    shared: Shared,
    root: ShardedUnit,
    ranks: Ranks,
    hooks: Vec<GradHook>,
    averaged: HashSet<TensorId>,
    /// The model's buffers, which are whole on each rank and its own.
    buffers: Vec<(String, Tensor)>,
    /// Other parts look these marks up.
    _marked: Vec<Marked>,
}

#[derive(Clone)]
pub(crate) struct Shared(Arc<Mutex<Engine>>);

impl Shared {
    fn new(ranks: &Ranks) -> Result<Self, ShardError> {
        Ok(Self(Arc::new(Mutex::new(Engine::new(ranks)?))))
    }

    fn lock(&self) -> MutexGuard<'_, Engine> {
        // A panic in a hook is resumed at the end of the pass.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

/// What a program runs: a backward pass, or an optimizer's step. Dropped by a panic, it tells the other ranks.
struct Running<'a> {
    shared: Option<&'a Shared>,
    reason: &'static str,
}

impl<'a> Running<'a> {
    fn new(shared: &'a Shared, reason: &'static str) -> Self {
        Self { shared: Some(shared), reason }
    }

    fn ends(mut self) {
        self.shared = None;
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared {
            shared.lock().give_up(self.reason);
        }
    }
}

impl FullyShardedDataParallel {
    /// Begins to shard a model over the ranks of `group`. Every rank calls it.
    ///
    /// # Errors
    /// [`ShardError::Ddp`] when a rank has exited or does not call it within the group's timeout.
    ///
    /// # Syncs
    /// Over NCCL, waits for all ranks the first time.
    pub fn builder(group: &ProcessGroup) -> Result<FullyShardedBuilder, ShardError> {
        FullyShardedBuilder::new(Ranks::new(group))
    }

    /// The same with hybrid sharding, over a mesh of two dimensions: parameters are partitioned over the ranks along `shard`,
    /// such as those of a host, and each of their parts is on all ranks along `replicate`. Gathers stay along `shard`;
    /// gradients are averaged over all ranks. Every rank calls it.
    ///
    /// # Errors
    /// [`ShardError::NoSuchDimension`]; [`ShardError::MeshNames`] when the mesh has other dimensions besides these two.
    /// [`ShardError::Ddp`] as [`builder`](Self::builder).
    ///
    /// # Syncs
    /// As [`builder`](Self::builder).
    ///
    /// # Source
    /// `fully_shard(mesh=init_device_mesh(.., mesh_dim_names=("replicate", "shard")))`
    #[doc(alias = "HSDP")]
    pub fn hybrid(mesh: &DeviceMesh, replicate: &str, shard: &str) -> Result<FullyShardedBuilder, ShardError> {
        FullyShardedBuilder::new(Ranks::of_mesh(mesh, replicate, shard)?)
    }

    fn new(
        shared: Shared,
        ranks: Ranks,
        root: ShardedUnit,
        hooks: Vec<GradHook>,
        buffers: Vec<(String, Tensor)>,
        marked: Vec<Marked>,
    ) -> Self {
        let params = shards(&shared);
        let trained = params.iter().filter(|param| param.tensor().requires_grad());
        let averaged = trained.map(|param| TensorId::of(param.tensor())).collect();
        Self { shared, root, ranks, hooks, averaged, buffers, _marked: marked }
    }

    /// The optimizer of this rank's rows. `build` is called with all parameters' rows under the names of the model, and
    /// may return a `Box<dyn Optimizer>`. A parameter with fewer rows than ranks has none on the last ones.
    ///
    /// Optimizers whose step of an element depends on others are refused with the reason: Muon, Adafactor, LAMB, LARS and
    /// AdamW with 8 bits; Prodigy and L-BFGS; and those that a `ZeroRedundancyOptimizer` refuses.
    ///
    /// # Errors
    /// On every rank: those of `build`, [`ShardError::Optimizer`] with the reason why the optimizer does not fit, on the
    /// rank that has it, and [`ShardError::OtherRank`] on the others; [`ShardError::RanksDisagree`] with the first group
    /// or option that is not the same on all. [`ShardError::Ddp`] when a rank has exited or does not call it within the
    /// group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn optimizer<O: Optimizer>(
        &self,
        build: impl FnOnce(Vec<Parameter>) -> Result<O, OptimizerError>,
    ) -> Result<FullyShardedOptimizer<O>, ShardError> {
        FullyShardedOptimizer::new(&self.shared, &self.ranks, build)
    }

    /// Computes the whole model: [`ShardedUnit::forward`] of the last unit.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    ///
    /// # Syncs
    /// As there.
    pub fn forward<I: Outputs, O: Outputs>(&self, inputs: I, forward: impl FnOnce(I) -> O) -> Result<O, ShardError> {
        self.root.forward(inputs, forward)
    }

    /// The same for a `forward` that calls other units: [`ShardedUnit::try_forward`] of the last unit.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    ///
    /// # Syncs
    /// As there.
    pub fn try_forward<I: Outputs, O: Outputs, E: From<ShardError> + Display>(
        &self,
        inputs: I,
        forward: impl FnOnce(I) -> Result<O, E>,
    ) -> Result<O, E> {
        self.root.try_forward(inputs, forward)
    }

    /// Runs backward from a loss. Then each rank has the mean over ranks in the gradients of its rows, added to what
    /// earlier calls have left there. A parameter that no rank has used has no gradient.
    ///
    /// # Shapes
    /// `loss`: one number.
    ///
    /// # Errors
    /// On every rank, and all gradients are freed: the error of backward itself or [`ShardError::Optimizer`] with the
    /// parameter whose gradient is sparse, on the rank that has it, and [`ShardError::OtherRank`] on the others.
    /// [`ShardError::RanksDisagree`] when ranks come to different units. [`ShardError::Ddp`] when a rank has exited or does
    /// not take part within the group's timeout. Where memory runs out while means are added, the others have an error
    /// before their next exchange.
    ///
    /// # Syncs
    /// Waits for all ranks: for what they say, and over Gloo for parameters and gradients.
    pub fn backward(&self, loss: &Tensor) -> Result<(), ShardError> {
        self.backward_with(|| Ok(loss.f_backward()?))
    }

    /// The same for another way to run backward: with several outputs, or a graph that is kept.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    ///
    /// # Syncs
    /// As [`backward`](Self::backward).
    pub fn backward_with(&self, run: impl FnOnce() -> Result<(), TorchError>) -> Result<(), ShardError> {
        let _backward = activity(|| Activity::Backward);
        self.pass(run)
    }

    fn pass(&self, run: impl FnOnce() -> Result<(), TorchError>) -> Result<(), ShardError> {
        self.shared.lock().begin_pass()?;
        let running = Running::new(&self.shared, "the backward pass has panicked");
        // Hooks take the lock.
        let ran = run().map_err(ShardError::Torch);
        running.ends();
        let ended = self.shared.lock().end_pass(ran);
        self.hooks.iter().for_each(GradHook::resume_panic);
        ended
    }

    /// This rank's rows of each parameter, which the optimizer steps, under the parameters' names in the model.
    pub fn parameters(&self) -> Vec<Parameter> {
        shards(&self.shared)
    }

    /// The group of all ranks that train the model.
    pub fn process_group(&self) -> &ProcessGroup {
        &self.ranks.all
    }

    /// What was gathered, freed and reduced since the last backward pass began, in order.
    pub fn exchanges(&self) -> Vec<Exchange> {
        self.shared.lock().log.clone()
    }
}

fn shards(shared: &Shared) -> Vec<Parameter> {
    shared.lock().params().map(|param| param.shard.share()).collect()
}
