//! Clipping by the norm over all ranks' gradients.

use overdrive_core::OptimizerError;
use tch::{Device, Kind, Tensor};

use super::FullyShardedDataParallel;
use super::engine::{LOCAL, PART};
use super::meeting::Event;
use crate::error::ShardError;
use crate::gradients::{GradNorm, check_max_norm, clip};

impl FullyShardedDataParallel {
    /// Scales the averaged gradients of all ranks down so that their 2-norm, over all of them as one vector, is at most
    /// `max_norm`. Returns the norm before clipping, a scalar, the same on all ranks. Every rank calls it, with a
    /// `GradScaler` after `unscale_`, with the same `max_norm`.
    ///
    /// # Errors
    /// When `max_norm` is negative or NaN, when passes have left gradients local, or libtorch fails;
    /// [`ShardError::RanksDisagree`] when ranks give another `max_norm`; [`ShardError::Ddp`] when a rank has exited or does
    /// not call it within the group's timeout.
    ///
    /// # Syncs
    /// Waits for what all ranks say; over Gloo for the norm too, and for the device where rows of a GPU are offloaded.
    ///
    /// # Source
    /// `torch.nn.utils.clip_grad_norm_` over DTensors
    pub fn clip_grad_norm_(&self, max_norm: f64) -> Result<GradNorm, ShardError> {
        let mut engine = self.shared.lock();
        let own = check_max_norm(max_norm).and_then(|()| {
            if engine.link.is_local() {
                Err(OptimizerError::NotNow { part: PART, reason: LOCAL }.into())
            } else {
                Ok(())
            }
        });
        engine.agree_on(Event::Clip, own, format!("`max_norm` = {max_norm:?}"))?;
        let shards: Vec<Tensor> = engine.params().map(|param| param.shard.tensor().shallow_clone()).collect();
        let is_double = shards.iter().any(|shard| shard.kind() == Kind::Double);
        let device = match self.ranks.all.device() {
            Device::Cpu => shards.first().map_or(Device::Cpu, Tensor::device),
            gpu => gpu,
        };
        let grads = shards.iter().map(Tensor::f_grad).collect::<Result<Vec<_>, _>>()?;
        let grads = grads.into_iter().filter(|grad| grad.defined() && grad.numel() > 0).collect();
        let of = (if is_double { Kind::Double } else { Kind::Float }, device);
        clip(&self.ranks.parts, &engine.link, grads, of, max_norm)
    }
}
