//! Gathers a unit's whole parameters.

use overdrive_ddp::{DdpError, ProcessGroup, Work};
use overdrive_ffi::Transfer;
use overdrive_ffi::saved_tensors::version;
use tch::Tensor;

use super::home::Home;
use super::param::ShardedParam;
use crate::error::ShardError;

/// This rank's rows of a unit: a copy of them, to be sent.
pub(super) struct Packed {
    pieces: Vec<Piece>,
    /// Of the shards, when they were copied.
    versions: Vec<i64>,
}

/// Rows of parameters that are gathered together, whatever their dtypes, as bytes of one tensor.
struct Piece {
    members: Members,
    own: Tensor,
    /// On its way to the device.
    upload: Option<Transfer>,
}

/// Parameters of a unit that are gathered together, by index.
enum Members {
    /// What is gathered is the whole parameter.
    Large(usize),
    Small(Vec<usize>),
}

impl Packed {
    pub(super) fn new(params: &[ShardedParam], home: &Home) -> Result<Self, ShardError> {
        let _no_grad = tch::no_grad_guard();
        let pieces = members_of(params).into_iter().map(|members| Piece::new(members, params, home));
        Ok(Self { pieces: pieces.collect::<Result<_, _>>()?, versions: versions_of(params) })
    }

    pub(super) fn is_of(&self, params: &[ShardedParam]) -> bool {
        self.versions == versions_of(params)
    }
}

fn members_of(params: &[ShardedParam]) -> Vec<Members> {
    let is_large = |&index: &usize| params[index].layout.is_large(params[index].kind);
    let (large, small): (Vec<usize>, Vec<usize>) = (0..params.len()).partition(is_large);
    let small = (!small.is_empty()).then_some(Members::Small(small));
    small.into_iter().chain(large.into_iter().map(Members::Large)).collect()
}

impl Members {
    fn indices(&self) -> &[usize] {
        match self {
            Self::Large(index) => std::slice::from_ref(index),
            Self::Small(indices) => indices,
        }
    }

    /// Bytes of a member's part in what is sent.
    fn bytes(&self, param: &ShardedParam) -> i64 {
        match self {
            Self::Large(_) => param.layout.part_numel() * param.kind.elt_size_in_bytes() as i64,
            Self::Small(_) => param.layout.part_bytes(param.kind),
        }
    }

    /// Each parameter's index, and where its part begins and how long it is, in bytes.
    fn places(&self, params: &[ShardedParam]) -> Vec<(usize, i64, i64)> {
        let place = |first: &mut i64, &index: &usize| {
            let length = self.bytes(&params[index]);
            *first += length;
            Some((index, *first - length, length))
        };
        self.indices().iter().scan(0, place).collect()
    }
}

impl Piece {
    fn new(members: Members, params: &[ShardedParam], home: &Home) -> Result<Self, ShardError> {
        let places = members.places(params);
        let bytes = places.iter().map(|(_, _, length)| length).sum();
        let mut own = home.staging(bytes, params[0].whole().device())?;
        // What is not this rank's rows is sent too: not what the memory had before.
        let is_padded = |&(index, _, length): &(usize, i64, i64)| {
            let param = &params[index];
            length != param.layout.own_numel() * param.kind.elt_size_in_bytes() as i64
        };
        if places.iter().any(is_padded) {
            let _zeros = own.f_zero_()?;
        }
        for (index, first, length) in places {
            let param = &params[index];
            let to = own.f_narrow(0, first, length)?.f_view_dtype(param.kind)?;
            let from = param.rows()?.f_reshape([-1])?;
            to.f_narrow(0, 0, param.layout.own_numel())?.f_copy_(&from)?;
        }
        let upload = home.upload(&own)?;
        Ok(Self { members, own, upload })
    }
}

/// All parameters of a unit, as such bytes of all ranks.
pub(super) struct Gather {
    pieces: Vec<Coming>,
    /// Of the shards, when they were copied.
    versions: Vec<i64>,
}

struct Coming {
    members: Members,
    own: Tensor,
    /// `[ranks * bytes of a part]`.
    all: Tensor,
    work: Option<Work>,
}

impl Gather {
    /// Takes memory.
    pub(super) fn prepare(packed: Packed, ranks: usize) -> Result<Self, ShardError> {
        let coming = |Piece { members, own, upload }| {
            let own = upload.map_or(Ok(own), |mut it: Transfer| it.tensor())?;
            let all = match ranks {
                1 => own.shallow_clone(),
                _ => Tensor::f_empty([own.size1()? * ranks as i64], (own.kind(), own.device()))?,
            };
            Ok(Coming { members, own, all, work: None })
        };
        let pieces = packed.pieces.into_iter().map(coming).collect::<Result<_, ShardError>>()?;
        Ok(Self { pieces, versions: packed.versions })
    }

    pub(super) fn start(&mut self, group: &ProcessGroup) -> Result<(), DdpError> {
        if group.size() > 1 {
            for piece in &mut self.pieces {
                piece.work = Some(group.all_gather_into_async(&mut piece.all, &piece.own)?);
            }
        }
        Ok(())
    }

    pub(super) fn versions(&self) -> &[i64] {
        &self.versions
    }

    /// Waits, and fills the whole parameters. Returns the versions of the shards that they are made of.
    pub(super) fn finish(mut self, params: &mut [ShardedParam], ranks: usize) -> Result<Vec<i64>, ShardError> {
        self.wait()?;
        let _no_grad = tch::no_grad_guard();
        for Coming { members, own, all, .. } in self.pieces {
            drop(own);
            if let Members::Large(index) = members {
                params[index].move_in(&all)?;
                continue;
            }
            let all = all.f_view([ranks as i64, -1])?;
            for (index, first, length) in members.places(params) {
                let param = &mut params[index];
                let parts = all.f_narrow(1, first, length)?.f_view_dtype(param.kind)?;
                param.fill(&parts.f_narrow(1, 0, param.layout.part_numel())?)?;
            }
        }
        Ok(self.versions)
    }

    /// Waits, where this rank has the parameters already.
    pub(super) fn discard(mut self) -> Result<(), ShardError> {
        Ok(self.wait()?)
    }

    fn wait(&mut self) -> Result<(), DdpError> {
        self.pieces.iter_mut().filter_map(|piece| piece.work.take()).try_for_each(Work::wait)
    }
}

/// How often each shard was changed in place.
pub(super) fn versions_of(params: &[ShardedParam]) -> Vec<i64> {
    params.iter().map(|param| version(param.shard.tensor())).collect()
}
