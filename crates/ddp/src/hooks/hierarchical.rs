//! Gradients averaged inside each host first, so that they cross the network once a host.

use std::collections::HashMap;

use overdrive_ffi::c10d::{GradBucket, ReduceOp};
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use super::CommHook;
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

static DIV: LazyOp = LazyOp::new("aten::div_", "Scalar");

/// Averages gradients in three steps. The ranks of a host add theirs, and each keeps a part of the sum; the ranks with
/// the same place on their hosts add these parts; the ranks of a host gather all parts.
///
/// So a host sends its gradients over the network once: of H hosts, 2 (H - 1) / H times their bytes, whatever its number
/// of ranks. A flat all-reduce in a ring of N ranks sends 2 (N - 1) / N times their bytes from each host. The mean is that
/// of a flat all-reduce but for the order of the sums.
///
/// It pays where the network between hosts is slower than the exchange inside a host. A bucket's exchange between hosts
/// begins when the next bucket is ready, so most of it overlaps with backward.
///
/// # Source
/// Horovod's `HOROVOD_HIERARCHICAL_ALLREDUCE`; PyTorch averages only parameters in such steps
/// (`HierarchicalModelAverager`)
#[derive(Debug)]
pub struct HierarchicalAllReduce {
    /// The ranks of this host.
    inside: ProcessGroup,
    /// The ranks with this rank's place on their hosts.
    between: ProcessGroup,
    ranks: usize,
    /// By bucket.
    under_way: HashMap<usize, Parts>,
    last: Option<usize>,
}

/// A bucket's sums under way.
#[derive(Debug)]
struct Parts {
    /// The gradients, with zeros at the end so that all parts have the same length.
    whole: Tensor,
    part: Tensor,
    inside: Option<Work>,
    between: Option<Work>,
}

impl HierarchicalAllReduce {
    /// For hosts that have `ranks_per_host` consecutive ranks each, as launchers number them. Every rank calls it.
    ///
    /// # Errors
    /// When the number of ranks is not a multiple of `ranks_per_host`, or a rank does not call it within the timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn new(group: &ProcessGroup, ranks_per_host: usize) -> Result<Self, DdpError> {
        let ranks = group.size();
        if ranks_per_host == 0 || !ranks.is_multiple_of(ranks_per_host) {
            let expected = "a divisor of the number of ranks";
            return Err(DdpError::InvalidOption {
                option: "ranks_per_host",
                found: format!("{ranks_per_host} for {ranks} ranks"),
                expected,
            });
        }
        let hosts: Vec<Vec<usize>> =
            (0..ranks).collect::<Vec<_>>().chunks(ranks_per_host).map(<[usize]>::to_vec).collect();
        let places = (0..ranks_per_host).map(|place| hosts.iter().map(|host| host[place]).collect::<Vec<_>>());
        let own = |members: &mut dyn Iterator<Item = Vec<usize>>| {
            let mut own = None;
            for members in members {
                own = group.new_group(&members)?.or(own);
            }
            // Each rank is on one host, and at one place.
            own.ok_or(DdpError::NoParameters)
        };
        let inside = own(&mut hosts.iter().cloned())?;
        let between = own(&mut places.into_iter())?;
        Ok(Self { inside, between, ranks, under_way: HashMap::new(), last: None })
    }

    /// Begins the step between hosts of a bucket, if it has not begun.
    fn go_on(&mut self, bucket: usize) -> Result<(), DdpError> {
        if let Some(parts) = self.under_way.get_mut(&bucket)
            && let Some(inside) = parts.inside.take()
        {
            inside.wait()?;
            parts.between = Some(self.between.all_reduce_async(&mut parts.part, ReduceOp::Sum)?);
        }
        Ok(())
    }
}

impl CommHook for HierarchicalAllReduce {
    type InFlight = ();

    fn start(&mut self, bucket: &GradBucket) -> Result<(), DdpError> {
        // The same order on all ranks: that of the buckets.
        if let Some(last) = self.last.replace(bucket.index) {
            self.go_on(last)?;
        }
        let (count, parts) = (bucket.buffer.numel() as i64, self.inside.size() as i64);
        let length = (count + parts - 1) / parts;
        let flat = bucket.buffer.f_detach()?.f_view([-1])?;
        let whole = if length * parts == count { flat } else { flat.f_constant_pad_nd([0, length * parts - count])? };
        let mut part = whole.f_new_empty([length], (whole.kind(), whole.device()))?;
        let inside = Some(self.inside.reduce_scatter_into_async(&mut part, &whole, ReduceOp::Sum)?);
        self.under_way.insert(bucket.index, Parts { whole, part, inside, between: None });
        Ok(())
    }

    fn finish(&mut self, bucket: &GradBucket, (): ()) -> Result<Tensor, DdpError> {
        self.last = None;
        self.go_on(bucket.index)?;
        let parts = self.under_way.remove(&bucket.index).ok_or(DdpError::NoParameters)?;
        let Parts { mut whole, part, between, .. } = parts;
        between.map_or(Ok(()), Work::wait)?;
        DIV.call(&[Arg::Tensor(&part), Arg::Double(self.ranks as f64)])?;
        self.inside.all_gather_into(&mut whole, &part)?;
        let mut mean = bucket.buffer.shallow_clone();
        if whole.numel() != mean.numel() {
            mean.f_copy_(&whole.f_narrow(0, 0, mean.numel() as i64)?)?;
        }
        Ok(mean)
    }
}
