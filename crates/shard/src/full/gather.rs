//! Gathers a unit's whole parameters.

use overdrive_ddp::{DdpError, ProcessGroup, Work};
use overdrive_ffi::Transfer;
use overdrive_ffi::saved_tensors::version;
use tch::Tensor;

use super::home::Home;
use super::param::ShardedParam;
use crate::error::ShardError;

/// This rank's rows of a unit, whatever their dtypes, as bytes of one tensor: a copy of them.
pub(super) struct Packed {
    own: Tensor,
    /// On its way to the device.
    upload: Option<Transfer>,
    /// Of the shards, when they were copied.
    versions: Vec<i64>,
}

impl Packed {
    pub(super) fn new(params: &[ShardedParam], home: &Home) -> Result<Self, ShardError> {
        let _no_grad = tch::no_grad_guard();
        let bytes: i64 = params.iter().map(|it| it.layout.part_bytes(it.kind)).sum();
        let mut own = home.staging(bytes, params[0].whole().device())?;
        // What is not this rank's rows is sent too: not what the memory had before.
        let is_padded = |it: &ShardedParam| {
            it.layout.part_bytes(it.kind) != it.layout.own_numel() * it.kind.elt_size_in_bytes() as i64
        };
        if params.iter().any(is_padded) {
            let _zeros = own.f_zero_()?;
        }
        let mut first = 0;
        for param in params {
            let length = param.layout.part_bytes(param.kind);
            let to = own.f_narrow(0, first, length)?.f_view_dtype(param.kind)?;
            let from = param.shard.tensor().f_detach()?.f_reshape([-1])?;
            to.f_narrow(0, 0, param.layout.own_numel())?.f_copy_(&from)?;
            first += length;
        }
        let upload = home.upload(&own)?;
        Ok(Self { own, upload, versions: versions_of(params) })
    }

    pub(super) fn is_of(&self, params: &[ShardedParam]) -> bool {
        self.versions == versions_of(params)
    }
}

/// All parameters of a unit, as such bytes of all ranks.
pub(super) struct Gather {
    own: Tensor,
    /// `[ranks * bytes of a part]`.
    all: Tensor,
    work: Option<Work>,
    /// Of the shards, when they were copied.
    versions: Vec<i64>,
}

impl Gather {
    /// Takes memory.
    pub(super) fn prepare(packed: Packed, ranks: usize) -> Result<Self, ShardError> {
        let Packed { own, upload, versions } = packed;
        let own = upload.map_or(Ok(own), |mut it| it.tensor())?;
        let all = match ranks {
            1 => own.shallow_clone(),
            _ => Tensor::f_empty([own.size1()? * ranks as i64], (own.kind(), own.device()))?,
        };
        Ok(Self { own, all, work: None, versions })
    }

    pub(super) fn start(&mut self, group: &ProcessGroup) -> Result<(), DdpError> {
        if group.size() > 1 {
            self.work = Some(group.all_gather_into_async(&mut self.all, &self.own)?);
        }
        Ok(())
    }

    pub(super) fn versions(&self) -> &[i64] {
        &self.versions
    }

    /// Waits, and fills the whole parameters. Returns the versions of the shards that they are made of.
    pub(super) fn finish(mut self, params: &mut [ShardedParam], ranks: usize) -> Result<Vec<i64>, ShardError> {
        if let Some(work) = self.work.take() {
            work.wait()?;
        }
        let _no_grad = tch::no_grad_guard();
        let all = self.all.f_view([ranks as i64, -1])?;
        let mut first = 0;
        for param in params {
            let length = param.layout.part_bytes(param.kind);
            let parts = all.f_narrow(1, first, length)?.f_view_dtype(param.kind)?;
            param.fill(&parts.f_narrow(1, 0, param.layout.part_numel())?)?;
            first += length;
        }
        Ok(self.versions)
    }

    /// Waits, where this rank has the parameters already.
    pub(super) fn discard(mut self) -> Result<(), ShardError> {
        Ok(self.work.take().map_or(Ok(()), Work::wait)?)
    }
}

/// How often each shard was changed in place.
pub(super) fn versions_of(params: &[ShardedParam]) -> Vec<i64> {
    params.iter().map(|param| version(param.shard.tensor())).collect()
}
