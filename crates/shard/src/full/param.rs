//! One parameter: the whole, whose memory comes and goes, and this rank's rows of it.

use overdrive_core::{OptimizerError, Parameter, TorchError};
use overdrive_ffi::saved_tensors::{version, without_history};
use overdrive_ffi::{OnDemand, set_grad, take_grad};
use tch::{Kind, Tensor};

use super::home::Home;
use super::layout::Layout;
use crate::error::ShardError;

pub(super) struct ShardedParam {
    /// This rank's rows, under the parameter's name in the model.
    pub(super) shard: Parameter,
    whole: OnDemand,
    pub(super) layout: Layout,
    /// The dtype of the whole, which a mixed precision makes another than the shard's.
    pub(super) kind: Kind,
    pub(super) is_trained: bool,
    /// Of the whole, when it was filled.
    version: i64,
}

impl ShardedParam {
    /// Takes this rank's rows of a parameter home, and frees the whole.
    pub(super) fn new(
        param: &Parameter,
        layout: Layout,
        kind: Kind,
        unit: &str,
        home: &Home,
    ) -> Result<Self, TorchError> {
        let tensor = param.tensor();
        let is_trained = tensor.requires_grad();
        let (first, rows) = layout.own_rows();
        let shard = home.keep(&tensor.f_detach()?.f_narrow(0, first, rows)?)?.f_set_requires_grad(is_trained)?;
        let message = format!(
            "parameter {} is sharded, and its values are here only while its unit computes: use it within `forward` of \
             the unit `{unit}`, and run backward by `backward` of the `FullyShardedDataParallel`",
            param.label(0)
        );
        let bytes = layout.padded_numel() as usize * kind.elt_size_in_bytes();
        let whole = OnDemand::new(tensor, kind, bytes, &message)?;
        Ok(Self { shard: named(param.name(), shard), whole, layout, kind, is_trained, version: 0 })
    }

    /// The model's tensor.
    pub(super) fn whole(&self) -> &Tensor {
        self.whole.tensor()
    }

    /// This rank's rows. An error if the program has put others in their place that do not fit.
    pub(super) fn rows(&self) -> Result<Tensor, ShardError> {
        let rows = self.shard.tensor().f_detach()?;
        let expected = self.layout.own_shape();
        if rows.size() != expected {
            let found = rows.size();
            let reason = format!(
                "this rank's rows were replaced after it was sharded, by `set_data` for instance: they are of shape \
                 {found:?}, but should be of {expected:?}"
            );
            return Err(OptimizerError::parameter(&self.shard, 0, reason).into());
        }
        Ok(rows)
    }

    pub(super) fn rename(&mut self, name: Option<&str>) {
        let shard = self.shard.tensor().shallow_clone();
        self.shard = named(name, shard);
    }

    /// Fills the whole with all ranks' parts: `[ranks, elements of a part]`.
    pub(super) fn fill(&mut self, parts: &Tensor) -> Result<(), ShardError> {
        let whole = Tensor::f_empty(self.layout.padded_shape(), (self.kind, parts.device()))?;
        whole.f_view([self.layout.ranks, self.layout.part_numel()])?.f_copy_(parts)?;
        self.take_memory(whole)
    }

    /// Makes the bytes of all ranks' parts, without a copy, the whole's memory.
    pub(super) fn move_in(&mut self, bytes: &Tensor) -> Result<(), ShardError> {
        self.take_memory(bytes.f_view_dtype(self.kind)?.f_view(&self.layout.padded_shape()[..])?)
    }

    fn take_memory(&mut self, padded: Tensor) -> Result<(), ShardError> {
        self.whole.fill(padded).map_err(|error| {
            let reason = format!(
                "it was replaced after it was sharded, by `set_data` for instance ({error}): change the shards, which \
                 `parameters` of the `FullyShardedDataParallel` returns"
            );
            OptimizerError::parameter(&self.shard, 0, reason)
        })?;
        self.version = version(self.whole());
        Ok(())
    }

    /// Frees the whole. An error if it was written to: nobody would see the change.
    pub(super) fn free(&mut self) -> Result<(), ShardError> {
        if !self.whole.is_filled() {
            return Ok(());
        }
        let written = self.check_written();
        self.whole.free().map_err(ShardError::Torch)?;
        written
    }

    pub(super) fn check_written(&self) -> Result<(), ShardError> {
        if self.whole.is_filled() && version(self.whole()) != self.version {
            let reason = "it was written to while its whole values were here, which are freed: change the shards, which \
                          `parameters` of the `FullyShardedDataParallel` returns";
            return Err(OptimizerError::parameter(&self.shard, 0, reason).into());
        }
        Ok(())
    }

    /// Frees the whole, whatever was done to it.
    pub(super) fn drop_whole(&mut self) {
        // It fails for a tensor that is no longer strided alone, which a parameter cannot become.
        let _ = self.whole.free();
    }

    /// The gradient of the whole as `[ranks, elements of a part]`, without a copy; `None` where it needs one: it is sparse, of
    /// another dtype or padded.
    pub(super) fn take_whole_grad(&self, kind: Kind) -> Result<Option<Tensor>, ShardError> {
        let grad = self.whole().f_grad()?;
        let is_dense = grad.defined() && !grad.is_sparse() && !grad.is_mkldnn();
        let shape = [self.layout.ranks, self.layout.part_numel()];
        if !is_dense || grad.kind() != kind || grad.numel() as i64 != self.layout.padded_numel() {
            return Ok(None);
        }
        drop(grad);
        Ok(take_grad(self.whole())?.map(|grad| grad.f_detach()?.f_reshape(shape)).transpose()?)
    }

    /// Moves the gradient of the whole into `parts`, `[ranks, elements of a part]`, or adds it to what is there.
    pub(super) fn take_grad(&self, parts: &Tensor, adds: bool) -> Result<bool, ShardError> {
        let grad = self.whole().f_grad()?;
        if !grad.defined() {
            return Ok(false);
        }
        if grad.is_sparse() || grad.is_mkldnn() {
            let reason = "its gradient is sparse, but should be dense: make an embedding with `sparse: false`";
            return Err(OptimizerError::parameter(&self.shard, 0, reason).into());
        }
        let put = |mut to: Tensor, from: &Tensor| match adds {
            true => to.f_add_(from).map(drop),
            false => to.f_copy_(from),
        };
        let (full, rest) = self.layout.full_parts();
        let flat = grad.f_detach()?.f_reshape([-1])?;
        let numel = full * self.layout.part_numel();
        if full > 0 {
            let from = flat.f_narrow(0, 0, numel)?.f_view([full, self.layout.part_numel()])?;
            put(parts.f_narrow(0, 0, full)?, &from)?;
        }
        if rest > 0 {
            put(parts.f_select(0, full)?.f_narrow(0, 0, rest)?, &flat.f_narrow(0, numel, rest)?)?;
        }
        set_grad(self.whole(), None)?;
        Ok(true)
    }

    /// Adds a mean of gradients, this rank's part, to the shard's gradient.
    pub(super) fn add_mean(&self, part: &Tensor) -> Result<(), ShardError> {
        let shard = self.shard.tensor();
        let mean = part.f_narrow(0, 0, self.layout.own_numel())?.f_view(&self.layout.own_shape()[..])?;
        // Not a view for autograd: programs may detach it in place.
        let mean = without_history(&mean.f_to_kind(shard.kind())?)?;
        let mut before = shard.f_grad()?;
        match before.defined() {
            true => drop(before.f_add_(&mean)?),
            false => set_grad(shard, Some(&mean))?,
        }
        Ok(())
    }

    pub(super) fn clear_grads(&self) -> Result<(), TorchError> {
        set_grad(self.whole(), None)?;
        set_grad(self.shard.tensor(), None)
    }
}

fn named(name: Option<&str>, tensor: Tensor) -> Parameter {
    match name {
        Some(name) => Parameter::named(name, tensor),
        None => Parameter::unnamed(tensor),
    }
}
