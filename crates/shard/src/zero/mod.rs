//! ZeRO-1: optimizer state partitioned over ranks.

mod gather;
mod optimizer;
mod state;

use overdrive_core::{
    Growth, IGNORED, IntoParameters, Optimizer, OptimizerError, OptimizerId, Parameter, SHARDED_GRADIENTS, StateDict,
    check_averaged, check_not_stepped_in_backward,
};
use overdrive_ddp::ProcessGroup;
use overdrive_ffi::TensorList;

use crate::agree;
use crate::error::ShardError;
use crate::exchange::{self, Bucket};
use crate::link::Link;
use crate::ownership::{self, Own, Ownership, PART};

const BUILDING: &str = "building a ZeroRedundancyOptimizer";

/// How much a broadcast or reduction sends at most: 25 MiB, as DDP's buckets.
pub(crate) const BUCKET_BYTES: usize = 25 << 20;

/// Any optimizer with its state partitioned over ranks: each rank keeps the state of a part of the parameters, steps
/// these, and sends their new values to all.
///
/// Give the gradients averaged over the ranks, by a `DistributedDataParallel`: then each step is that of the optimizer
/// inside over all parameters, to the bit where they are of one dtype and rounding is not stochastic. With N ranks, a
/// rank keeps about 1/N of the state (AdamW: two numbers a parameter); parameters stay whole on each rank. A parameter is
/// not split: the largest goes to the rank that has the least so far, and so on.
///
/// The closure is called twice, to learn the groups and to build this rank's part, so it should put parameters into
/// groups by their name, shape or dtype, and be able to build from any part. It may return a `Box<dyn Optimizer>`.
/// Optimizers whose step of a parameter depends on all others (Prodigy, `max_grad_norm`, L-BFGS), which move or average
/// parameters besides their steps (SAM, schedule-free ones) or step in the backward pass are refused.
///
/// All ranks make the same calls: [`step`](Optimizer::step) waits for all, and fails on all before anything changes
/// when it cannot be made on one. [`params`](Optimizer::params) are those of all ranks, so clipping, a `GradScaler` and
/// an accumulator see all gradients; ranks skip a step together. A scaled run waits for the device once a step.
///
/// ```no_run
/// use overdrive_core::Optimizer;
/// use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, init_process_group};
/// use overdrive_optim::AdamW;
/// use overdrive_shard::ZeroRedundancyOptimizer;
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 1, Default::default());
/// let ddp = DistributedDataParallel::new(&vs, &group)?;
/// let mut opt = ZeroRedundancyOptimizer::new(&vs, &group, |params| AdamW::builder(params).lr(1e-3).build())?;
/// for batch in 0..10 {
///     let inputs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu)); // this rank's part
///     let loss = ddp.forward(|| model.forward(&inputs))?.square().mean(Kind::Float);
///     ddp.backward(&loss)?;
///     opt.step()?;
///     opt.zero_grad()?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.distributed.optim.ZeroRedundancyOptimizer`; Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, stage 1
#[doc(alias = "ZeRO")]
#[derive(Debug)]
pub struct ZeroRedundancyOptimizer<O> {
    id: OptimizerId,
    group: ProcessGroup,
    ownership: Ownership,
    /// `None` if this rank has no parameters.
    own: Option<Own<O>>,
    buckets: Vec<Bucket>,
    params: TensorList,
    /// Tells of parameters that the model gets after it was sharded.
    growth: Option<Growth>,
    link: Link,
}

impl<O: Optimizer> ZeroRedundancyOptimizer<O> {
    /// Partitions the parameters over the ranks of `group`, and builds the optimizer of this rank's.
    ///
    /// # Errors
    /// On every rank, and nothing is made: those of `build`, [`ShardError::Optimizer`] with the parameter or the reason
    /// why the optimizer does not fit, on the rank that has it, and [`ShardError::OtherRank`] on the others;
    /// [`ShardError::RanksDisagree`] with the first parameter or group that is not the same on all ranks.
    /// [`ShardError::Ddp`] when a rank has exited or does not call it within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn new(
        params: impl IntoParameters,
        group: &ProcessGroup,
        build: impl Fn(Vec<Parameter>) -> Result<O, OptimizerError>,
    ) -> Result<Self, ShardError> {
        let growth = params.growth();
        let given = params.into_parameters();
        let built = Ownership::new(&given, group.size(), &build).and_then(|ownership| {
            ownership.check_devices(group)?;
            let own = ownership.build_own(group.rank(), &build)?;
            let list = ownership.params.iter().map(Parameter::tensor).collect::<Vec<_>>();
            let list = TensorList::new(&list)?;
            Ok((ownership, own, list))
        });
        let ((ownership, own, params), all) =
            agree::built(group, BUILDING, built, |(ownership, ..)| ownership.describe())?;
        agree::on_lines("the parameters and groups", &all)?;
        let buckets = exchange::buckets(&ownership, group.size(), BUCKET_BYTES);
        let (id, group) = (OptimizerId::new(), group.clone());
        Ok(Self { id, group, ownership, own, buckets, params, growth, link: Link::default() })
    }

    /// Sets how many bytes of parameters are sent in one broadcast at most; 25 MiB by default. A parameter of
    /// 1 MiB and more is sent alone, and received where it is if it is contiguous. Four broadcasts are under way at a time; those of small
    /// parameters need memory. Every rank calls it.
    ///
    /// # Errors
    /// [`ShardError::RanksDisagree`] on every rank, when they are given different numbers. [`ShardError::Ddp`] when a
    /// rank has exited or does not call it within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn bucket_bytes(mut self, bytes: usize) -> Result<Self, ShardError> {
        agree::on_bytes(&self.group, bytes)?;
        self.buckets = exchange::buckets(&self.ownership, self.group.size(), bytes);
        Ok(self)
    }

    /// The optimizer of this rank's parameters; `None` if there are fewer parameters than ranks and this rank has none.
    pub fn inner(&self) -> Option<&O> {
        self.own.as_ref().map(|own| &own.inner)
    }

    /// The optimizer inside, to change its options. Call `step`, set rates and load states on the
    /// `ZeroRedundancyOptimizer`, not on it; add no parameters.
    pub fn inner_mut(&mut self) -> Option<&mut O> {
        self.own.as_mut().map(|own| &mut own.inner)
    }

    /// The rank that keeps the state of each of [`params`](Optimizer::params), in their order.
    pub fn owners(&self) -> &[usize] {
        &self.ownership.owner
    }

    /// The group over which the state is partitioned.
    pub fn process_group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The whole optimizer's state on rank `to`, and `None` on the others: what the optimizer inside would have if it
    /// had all parameters, with copies of the tensors on the CPU. That optimizer can load it, and so can a
    /// `ZeroRedundancyOptimizer` over any number of ranks. Every rank calls it.
    ///
    /// # Errors
    /// On every rank: [`ShardError::State`] or [`ShardError::OtherRank`] when the optimizer cannot save its state or
    /// has entries besides those of parameters and groups (`Lookahead`). [`ShardError::Ddp`] when there is no rank
    /// `to`, or a rank has exited or does not call it within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks, and for the device.
    ///
    /// # Source
    /// `ZeroRedundancyOptimizer.consolidate_state_dict(to)`, then `state_dict()`
    pub fn consolidate_state_dict(&self, to: usize) -> Result<Option<StateDict>, ShardError> {
        gather::whole(&self.group, &self.ownership, self.own.as_ref(), to)
    }

    pub(crate) fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// Agrees with all ranks that the step can be made, before anything changes.
    fn begin_step(&mut self) -> Result<(), OptimizerError> {
        self.link.check(PART)?;
        let own = self.check_own().and_then(|()| match &mut self.own {
            Some(own) => own.inner.make_state(),
            None => Ok(()),
        });
        self.agree(own)
    }

    /// What is known to be wrong before a step on this rank.
    fn check_own(&self) -> Result<(), OptimizerError> {
        check_averaged(self)?;
        check_not_stepped_in_backward(self)?;
        let is_local = |(index, param): (usize, &Parameter)| {
            let tensor = param.tensor();
            self.ownership.owner[index] != self.group.rank()
                && SHARDED_GRADIENTS.contains(tensor)
                && tensor.grad().defined()
        };
        if let Some(index) = self.ownership.params.iter().enumerate().position(is_local) {
            let reason = "its gradient is this rank's alone, not the mean over ranks: call `backward` of the \
                          `ShardedDataParallel`, and end `no_sync` before a window's last pass";
            return Err(OptimizerError::parameter(&self.ownership.params[index], index, reason));
        }
        if let Some(index) = IGNORED.position(self.ownership.params.iter().map(Parameter::tensor)) {
            let reason = "a `DistributedDataParallel` was told to ignore it, so that each rank trains its own, but here one \
                          rank steps it for all: give it to an optimizer of its own";
            return Err(OptimizerError::parameter(&self.ownership.params[index], index, reason));
        }
        if self.group.size() > 1 && self.link.is_local() {
            let reason = "backward passes have left gradients local since the last exchange: end `no_sync` before a \
                          window's last pass, or zero the gradients";
            return Err(OptimizerError::NotNow { part: "ShardedDataParallel", reason });
        }
        ownership::check_growth(&self.growth)?;
        let Some(own) = &self.own else { return Ok(()) };
        // Options may have been changed, or loaded.
        ownership::check_behavior(PART, &own.inner)?;
        if own.inner.params().len() != own.params.len() || own.inner.num_groups() != own.groups.len() {
            let reason = "parameters were added to the optimizer inside after they were partitioned, which the other ranks \
                          would not get: build it anew over all parameters";
            return Err(OptimizerError::NotNow { part: PART, reason });
        }
        let is_other = |(number, &group): (usize, &usize)| own.inner.lr(number) != self.ownership.groups[group].lr;
        if own.groups.iter().enumerate().any(is_other) {
            let reason = "a learning rate was set on the optimizer inside, on this rank alone perhaps: call `set_lr` of the \
                          sharded optimizer, on all ranks";
            return Err(OptimizerError::NotNow { part: PART, reason });
        }
        own.inner.check_step()
    }

    /// Sends the new parameters, and agrees on whether all ranks have stepped.
    fn end_step(&mut self, stepped: Result<(), OptimizerError>) -> Result<(), OptimizerError> {
        // Also after a failure: the other ranks wait, and all should have the same parameters.
        self.link.watch(exchange::send(&self.group, &self.buckets, false).map_err(ShardError::from))?;
        self.agree(stepped)
    }

    /// What has failed on any rank fails on all.
    fn agree(&self, own: Result<(), OptimizerError>) -> Result<(), OptimizerError> {
        if self.group.size() == 1 || !self.link.watch(agree::on_any(&self.group, own.is_err()))? {
            return own;
        }
        Ok(self.link.watch(agree::all_have(&self.group, "the optimizer's step", own)).map(drop)?)
    }
}
