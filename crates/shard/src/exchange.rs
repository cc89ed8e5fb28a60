//! Sends each rank's new parameters to all ranks.

use std::collections::VecDeque;

use overdrive_core::Parameter;
use overdrive_ddp::{DdpError, ProcessGroup, Work};
use overdrive_ffi::bump_version;
use tch::Tensor;

use crate::ownership::Ownership;
use crate::packing::{bytes_of, packed};

/// How many broadcasts are under way at a time: enough to fill the network, few enough that their buffers stay small.
const AT_ONCE: usize = 4;

/// Parameters of one rank, dtype and device, sent as one tensor.
#[derive(Debug)]
pub(crate) struct Bucket {
    root: usize,
    params: Vec<Tensor>,
}

/// All parameters by owner, in buckets of at most `bytes`, and large ones alone. The owners take turns, so that they send
/// at the same time. The same on all ranks.
pub(crate) fn buckets(ownership: &Ownership, ranks: usize, bytes: usize) -> Vec<Bucket> {
    let of_rank = |rank: usize| {
        let own = ownership.params.iter().zip(&ownership.owner).filter(move |(_, owner)| **owner == rank);
        of_root(own.map(|(param, _)| param), rank, bytes)
    };
    let mut by_root: Vec<VecDeque<Bucket>> = (0..ranks).map(of_rank).collect();
    let mut all = Vec::new();
    while by_root.iter().any(|buckets| !buckets.is_empty()) {
        all.extend(by_root.iter_mut().filter_map(VecDeque::pop_front));
    }
    all
}

/// All parameters in buckets that rank 0 sends.
pub(crate) fn from_first(ownership: &Ownership, bytes: usize) -> Vec<Bucket> {
    of_root(ownership.params.iter(), 0, bytes).into()
}

fn of_root<'a>(params: impl Iterator<Item = &'a Parameter>, root: usize, bytes: usize) -> VecDeque<Bucket> {
    let params = params.map(Parameter::tensor).filter(|tensor| tensor.numel() > 0);
    let keyed = params.map(|it| ((it.kind(), it.device()), bytes_of(it), it.shallow_clone()));
    packed(keyed, bytes).into_iter().map(|(_, params)| Bucket { root, params }).collect()
}

/// Broadcasts each bucket from its owner. All ranks hold the owners' parameters afterwards; after an error a rank may hold
/// parts of both, and over Gloo nothing is under way any more. Where this `looks`, returns whether any value of this rank's has changed.
pub(crate) fn send(group: &ProcessGroup, buckets: &[Bucket], looks: bool) -> Result<bool, DdpError> {
    let mut sending = Sending { group, looks, has_changed: false, under_way: VecDeque::with_capacity(AT_ONCE) };
    if group.size() == 1 {
        return Ok(false);
    }
    let _no_grad = tch::no_grad_guard();
    let sent = buckets.iter().try_for_each(|bucket| sending.start(bucket));
    // Also after a failure: what is under way is written into parameters.
    let mut ended = sent;
    while let Some(finished) = sending.finish_first() {
        ended = ended.and(finished);
    }
    ended.map(|()| sending.has_changed)
}

/// Broadcasts under way.
struct Sending<'a> {
    group: &'a ProcessGroup,
    looks: bool,
    has_changed: bool,
    under_way: VecDeque<(&'a Bucket, Tensor, Work)>,
}

impl<'a> Sending<'a> {
    fn start(&mut self, bucket: &'a Bucket) -> Result<(), DdpError> {
        if self.under_way.len() == AT_ONCE {
            self.finish_first().transpose()?;
        }
        let mut flat = match bucket.root == self.group.rank() {
            true => bucket.values()?,
            false => bucket.memory(self.looks)?,
        };
        let work = self.group.broadcast_async(&mut flat, bucket.root)?;
        self.under_way.push_back((bucket, flat, work));
        Ok(())
    }

    /// Waits for the broadcast that was started first, if there is one.
    fn finish_first(&mut self) -> Option<Result<(), DdpError>> {
        let (bucket, flat, work) = self.under_way.pop_front()?;
        let waited = work.wait();
        if bucket.root == self.group.rank() {
            return Some(waited);
        }
        if let Some(param) = bucket.in_place(self.looks) {
            // Also if a part of it alone was written.
            bump_version(param);
            return Some(waited);
        }
        let taken = waited.and_then(|()| bucket.take(&flat, self.looks));
        Some(taken.map(|has_changed| self.has_changed |= has_changed))
    }
}

impl Bucket {
    /// Its parameters as one tensor of one dimension.
    fn values(&self) -> Result<Tensor, DdpError> {
        let parts = self.params.iter().map(|param| param.f_detach()?.f_reshape([-1])?.f_contiguous());
        let parts = parts.collect::<Result<Vec<_>, tch::TchError>>()?;
        match &parts[..] {
            [one] => Ok(one.shallow_clone()),
            several => Ok(Tensor::f_cat(several, 0)?),
        }
    }

    /// The parameter that is received where it is: the only one, whose memory is as it is sent, unless it is compared with
    /// what comes.
    fn in_place(&self, looks: bool) -> Option<&Tensor> {
        match &self.params[..] {
            [one] if !looks && one.is_contiguous() => Some(one),
            _ => None,
        }
    }

    /// Memory for them.
    fn memory(&self, looks: bool) -> Result<Tensor, DdpError> {
        if let Some(param) = self.in_place(looks) {
            return Ok(param.f_detach()?.f_view([-1])?);
        }
        let first = &self.params[0];
        let numel: usize = self.params.iter().map(Tensor::numel).sum();
        Ok(first.f_new_empty([numel as i64], (first.kind(), first.device()))?)
    }

    fn take(&self, flat: &Tensor, looks: bool) -> Result<bool, DdpError> {
        let mut has_changed = false;
        let sizes: Vec<i64> = self.params.iter().map(|param| param.numel() as i64).collect();
        for (param, part) in self.params.iter().zip(flat.f_split_with_sizes(&sizes, 0)?) {
            let part = part.f_view(&param.size()[..])?;
            has_changed |= looks && !param.f_equal(&part)?;
            param.shallow_clone().f_copy_(&part)?;
        }
        Ok(has_changed)
    }
}
