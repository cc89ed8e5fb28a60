//! How items are divided between the ranks of a distributed run.

use crate::DataError;

/// One rank of several, and whether an incomplete last round is filled with items from the start of the order, or
/// dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rank {
    pub(crate) world_size: usize,
    pub(crate) rank: usize,
    pub(crate) drop_last: bool,
}

impl Rank {
    pub(crate) fn new(world_size: usize, rank: usize) -> Result<Self, DataError> {
        DataError::at_least_1("world_size", world_size)?;
        if rank >= world_size {
            return Err(DataError::option("rank", format!("a number below world_size, {world_size}"), rank));
        }
        Ok(Self { world_size, rank, drop_last: false })
    }

    /// The rank as a `u64`.
    #[cfg(feature = "parquet")]
    pub(crate) fn number(self) -> u64 {
        self.rank as u64
    }

    /// The rank's first item, where each rank takes a contiguous range.
    #[cfg(feature = "parquet")]
    pub(crate) fn first(self, len: usize) -> usize {
        self.share(len).saturating_mul(self.rank)
    }

    /// The same rank, without `drop_last` if dropping would leave the ranks none of `len` items.
    pub(crate) fn or_fill(self, len: usize) -> Self {
        Self { drop_last: self.drop_last && len >= self.world_size, ..self }
    }

    /// How many of `len` items each rank takes.
    ///
    /// With `drop_last`, PyTorch writes `ceil((len - world_size) / world_size)`, which is the same number.
    pub(crate) fn share(&self, len: usize) -> usize {
        if self.drop_last { len / self.world_size } else { len.div_ceil(self.world_size) }
    }

    /// The rank's items, as (position, round): every `world_size`-th position from `rank` on; past the end it starts
    /// over, in the next round.
    pub(crate) fn positions(self, len: usize) -> impl Iterator<Item = (usize, u64)> {
        (0..self.share(len)).map(move |turn| (self.place(turn) % len, (self.place(turn) / len) as u64))
    }

    /// The position of this rank's item number `turn` among the items of all ranks.
    pub(crate) fn place(&self, turn: usize) -> usize {
        self.rank.saturating_add(turn.saturating_mul(self.world_size))
    }
}
