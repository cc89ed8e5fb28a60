//! The objects that a configuration is made into.

use overdrive_amp::Autocast;
use overdrive_core::{IntoParameters, Optimizer, OptimizerError, Parameter, TorchError};
use overdrive_ddp::ProcessGroup;
use overdrive_memory::{ActivationCheckpoint, CpuOffloadOptimizer, MemoryError};
use tch::{Device, Kind, Tensor};

use super::error::DeepSpeedError;
use super::loss_scaler::LossScaler;
use super::zero::{Offload, ZeroStage};
use super::{DeepSpeedConfig, size};
use crate::{
    FullyShardedBuilder, FullyShardedDataParallel, FullyShardedOptimizer, OffloadPolicy, ShardedDataParallel,
    ZeroRedundancyOptimizer,
};

const FULLY_SHARDED: &str = "a `FullyShardedDataParallel`";

impl DeepSpeedConfig {
    /// The optimizer of the file over these parameters, on the host where the file offloads it: for stage 0, or for the
    /// closure of a [`ZeroRedundancyOptimizer`].
    ///
    /// # Errors
    /// When the file has no section `optimizer`, and those of [`optimizer_from`](Self::optimizer_from).
    pub fn optimizer(&self, params: impl IntoParameters) -> Result<Box<dyn Optimizer>, OptimizerError> {
        let Some(chosen) = &self.optimizer else {
            let reason = "the file has no `optimizer`: choose one by `optimizer_from`";
            return Err(OptimizerError::NotNow { part: "DeepSpeedConfig", reason });
        };
        self.optimizer_from(params, |params| chosen.build(params))
    }

    /// The program's own optimizer, on the host where the file offloads it: for a file without the section `optimizer`.
    ///
    /// ```no_run
    /// # use overdrive_optim::Lamb;
    /// # use overdrive_shard::{ZeroRedundancyOptimizer, deepspeed::DeepSpeedConfig};
    /// # use overdrive_ddp::ProcessGroup;
    /// # fn sharded(
    /// #     config: &DeepSpeedConfig, vs: &tch::nn::VarStore, group: &ProcessGroup,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// let opt = ZeroRedundancyOptimizer::new(vs, group, |params| {
    ///     config.optimizer_from(params, |params| Lamb::builder(params).lr(2e-3).build())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of `build` and of `CpuOffloadOptimizer`, and when the folder `nvme_path` cannot be opened.
    pub fn optimizer_from<O: Optimizer + 'static>(
        &self,
        params: impl IntoParameters,
        build: impl FnOnce(Vec<Parameter>) -> Result<O, OptimizerError>,
    ) -> Result<Box<dyn Optimizer>, OptimizerError> {
        Ok(match &self.zero.offload {
            Offload::None => Box::new(build(params.into_parameters())?),
            Offload::Cpu => Box::new(CpuOffloadOptimizer::new(params, build)?),
            Offload::Nvme(folder) => {
                Box::new(CpuOffloadOptimizer::new(params, build)?.state_on_disk(folder).map_err(of_folder)?)
            }
        })
    }

    /// The optimizer of the file with its state partitioned over ranks, for stages 1 and 2.
    ///
    /// # Errors
    /// [`DeepSpeedError::Stage`] with stage 0, [`DeepSpeedError::WorldSize`] when the group has another size than the
    /// arguments said, and those of [`optimizer`](Self::optimizer) and [`ZeroRedundancyOptimizer::new`].
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn zero_optimizer(
        &self,
        params: impl IntoParameters,
        group: &ProcessGroup,
    ) -> Result<ZeroRedundancyOptimizer<Box<dyn Optimizer>>, DeepSpeedError> {
        let has_it = matches!(self.zero.stage, ZeroStage::OptimizerStates | ZeroStage::Gradients);
        self.check_stage("a `ZeroRedundancyOptimizer`", "1 or 2", has_it)?;
        self.check_size(group)?;
        Ok(ZeroRedundancyOptimizer::new(params, group, |params| self.optimizer(params))?)
    }

    /// What averages gradients, each on the rank that steps with it, for stage 2, in buckets of `reduce_bucket_size`
    /// elements or of 25 MiB.
    ///
    /// # Errors
    /// [`DeepSpeedError::Stage`] with another stage, and those of [`ShardedDataParallel::new`].
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn sharded_data_parallel<O: Optimizer>(
        &self,
        opt: &mut ZeroRedundancyOptimizer<O>,
    ) -> Result<ShardedDataParallel, DeepSpeedError> {
        self.check_stage("a `ShardedDataParallel`", "2", self.zero.stage == ZeroStage::Gradients)?;
        Ok(match self.zero.bucket {
            None => ShardedDataParallel::new(opt)?,
            Some(elements) => {
                let largest = |param: &Tensor| param.kind().elt_size_in_bytes();
                let bytes = opt.params().iter().map(largest).max().unwrap_or(1);
                ShardedDataParallel::with_bucket_bytes(opt, size(elements).saturating_mul(bytes))?
            }
        })
    }

    /// Begins to shard the model, for stage 3: the program makes the units, and builds it. Rows, gradients and state are where
    /// `offload_param` says. With `fp16` or `bf16`, whole parameters and their gradients are of 16 bits, and averages and rows
    /// of float32; run the forward pass within [`autocast`](Self::autocast), so that inputs may be of float32.
    ///
    /// # Errors
    /// [`DeepSpeedError::Stage`] with another stage, [`DeepSpeedError::WorldSize`] when the group has another size than the
    /// arguments said, and those of [`FullyShardedDataParallel::builder`].
    ///
    /// # Syncs
    /// As [`FullyShardedDataParallel::builder`].
    pub fn fully_sharded(&self, group: &ProcessGroup) -> Result<FullyShardedBuilder, DeepSpeedError> {
        self.check_stage(FULLY_SHARDED, "3", self.zero.stage == ZeroStage::Parameters)?;
        self.check_size(group)?;
        let builder = FullyShardedDataParallel::builder(group)?.prefetch(self.zero.prefetches);
        let builder = match self.precision.kind {
            Some(kind) if self.converts_parameters => builder.mixed_precision(kind, Some(Kind::Float)),
            _ => builder,
        };
        Ok(builder.offload_policy(match &self.zero.params {
            Offload::None => OffloadPolicy::None,
            Offload::Cpu => OffloadPolicy::Cpu,
            Offload::Nvme(folder) => OffloadPolicy::Disk(folder.clone()),
        }))
    }

    /// The optimizer of the file over this rank's rows, for stage 3.
    ///
    /// # Errors
    /// [`DeepSpeedError::Stage`] with another stage, and those of [`optimizer`](Self::optimizer) and
    /// [`FullyShardedDataParallel::optimizer`].
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn fully_sharded_optimizer(
        &self,
        model: &FullyShardedDataParallel,
    ) -> Result<FullyShardedOptimizer<Box<dyn Optimizer>>, DeepSpeedError> {
        self.check_stage(FULLY_SHARDED, "3", self.zero.stage == ZeroStage::Parameters)?;
        Ok(model.optimizer(|params| self.optimizer(params))?)
    }

    /// The region for the forward pass and the loss: in float16 with `fp16`, in bfloat16 with `bf16`, in either with
    /// `torch_autocast`, else one in which autocast is off.
    ///
    /// DeepSpeed converts the model to 16 bits, and keeps master weights in float32. Here parameters are of float32, but the
    /// whole ones of stage 3, and operators are cast.
    pub fn autocast(&self, device: Device) -> Autocast {
        let region = Autocast::new(device);
        match self.precision.kind {
            Some(kind) => region.kind(kind),
            None => region.enabled(false),
        }
    }

    /// What scales losses and skips steps whose gradients overflow, for a loss on this device; it does nothing in float32.
    ///
    /// # Errors
    /// [`DeepSpeedError::Amp`]
    pub fn loss_scaler(&self, device: Device) -> Result<LossScaler, DeepSpeedError> {
        LossScaler::new(device, self.precision.scaling)
    }

    /// What runs a part of the forward pass without keeping what its backward pass needs; `None` without a section
    /// `activation_checkpointing`. As in DeepSpeed, the model says which parts are run by it.
    pub fn activation_checkpoint(&self) -> Option<ActivationCheckpoint> {
        self.has_activation_checkpointing.then(ActivationCheckpoint::default)
    }

    fn check_size(&self, group: &ProcessGroup) -> Result<(), DeepSpeedError> {
        match group.size() == self.world_size {
            true => Ok(()),
            false => Err(DeepSpeedError::WorldSize { expected: self.world_size, found: group.size() }),
        }
    }

    fn check_stage(&self, part: &'static str, stages: &'static str, has_part: bool) -> Result<(), DeepSpeedError> {
        let found = self.zero.stage.number();
        if has_part { Ok(()) } else { Err(DeepSpeedError::Stage { part, stages, found }) }
    }
}

/// An optimizer's error, which the closure of a sharded optimizer returns.
fn of_folder(error: MemoryError) -> OptimizerError {
    match error {
        MemoryError::Optimizer(error) => error,
        MemoryError::Torch(error) => error.into(),
        other => {
            let told = format!("`zero_optimization.offload_optimizer.nvme_path`: {other}");
            OptimizerError::Torch(TorchError::from(tch::TchError::Io(std::io::Error::other(told))))
        }
    }
}
