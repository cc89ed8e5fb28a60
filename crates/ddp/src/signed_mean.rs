//! A mean over ranks that sends only signs.

use tch::{Device, Kind, Tensor};

use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::hooks::signs;
use crate::work::Work;

/// Averages a flat tensor over ranks, sending only signs and one scale per rank. It keeps two rounding errors for the
/// next call: that of this rank's own tensor, and that of the part that this rank averages.
///
/// # Source
/// Tang et al. 2021, arXiv:2102.02888, algorithm 1's compressed all-reduce
#[derive(Debug)]
pub(crate) struct SignedMean {
    group: ProcessGroup,
    count: i64,
    /// How many numbers a rank averages, rounded up to whole bytes of signs.
    part: i64,
    /// The rounding error of this rank's signs, padded to all ranks' parts.
    pub own: Tensor,
    /// The rounding error of this rank's part of the mean.
    pub mean: Tensor,
}

/// Two collectives under way: every rank's signs for this rank's part, and the ranks' scales.
#[derive(Debug)]
pub(crate) struct InFlight(Work<Tensor>, Work<Vec<Tensor>>);

impl SignedMean {
    pub fn new(group: &ProcessGroup, like: &Tensor) -> Result<Self, DdpError> {
        let (ranks, count) = (group.size() as i64, like.numel() as i64);
        let part = (count + 8 * ranks - 1) / (8 * ranks) * 8;
        let own = like.f_new_zeros([part * ranks], kind(like))?;
        let mean = like.f_new_zeros([part], kind(like))?;
        Ok(Self { group: group.clone(), count, part, own, mean })
    }

    /// Whether it averages tensors of this length.
    pub fn fits(&self, values: &Tensor) -> bool {
        self.count == values.numel() as i64
    }

    pub fn start(&self, values: &Tensor) -> Result<InFlight, DdpError> {
        let (signs, scale) = signs::compress(values, &self.own)?;
        let mut received = signs.f_empty_like()?;
        let work = self.group.all_to_all_single_async(&mut received, &signs, None)?;
        let signs = work.and_then(move |()| Ok(received));
        Ok(InFlight(signs, self.group.all_gather_async(&scale)?))
    }

    /// Averages this rank's part, and gathers all parts as signs again, into `out`.
    pub fn finish(&self, InFlight(signs, scales): InFlight, out: &Tensor) -> Result<(), DdpError> {
        let ranks = self.group.size() as i64;
        // The length of a rank's part without padding.
        let real = |rank: i64| (self.count - self.part * rank).clamp(0, self.part);
        let mean = out.f_new_empty([real(self.group.rank() as i64)], kind(out))?;
        let (signs, scales) = (signs.wait()?, scales.wait()?);
        for (rank, (signs, scale)) in signs.f_chunk(ranks, 0)?.iter().zip(&scales).enumerate() {
            signs::expand(signs, scale, 1.0 / ranks as f64, &mean, rank > 0)?;
        }
        let (signs, scale) = signs::compress(&mean, &self.mean)?;
        let signs = self.group.all_gather_async(&signs)?;
        let scales = self.group.all_gather(&scale)?;
        for (rank, (signs, scale)) in (0..).zip(signs.wait()?.iter().zip(&scales)) {
            let start = (self.part * rank).min(self.count);
            signs::expand(signs, scale, 1.0, &out.f_narrow(0, start, real(rank))?, false)?;
        }
        Ok(())
    }
}

fn kind(like: &Tensor) -> (Kind, Device) {
    (like.kind(), like.device())
}
