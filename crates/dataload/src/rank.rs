//! What each rank of a distributed run takes of a whole.

use crate::DataError;

/// One rank of several, and what becomes of the remainder: it is filled up from the start, or dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rank {
    pub(crate) world_size: usize,
    rank: usize,
    pub(crate) drop_last: bool,
}

impl Rank {
    pub(crate) fn new(world_size: usize, rank: usize) -> Result<Self, DataError> {
        if world_size == 0 {
            return Err(DataError::option("world_size", "at least 1", 0));
        }
        if rank >= world_size {
            return Err(DataError::option("rank", format!("a number below world_size, {world_size}"), rank));
        }
        Ok(Self { world_size, rank, drop_last: false })
    }

    /// Its number as a number of 64 bits.
    #[cfg(feature = "parquet")]
    pub(crate) fn number(self) -> u64 {
        self.rank as u64
    }

    /// The first of the things that it takes where each rank takes neighbours.
    #[cfg(feature = "parquet")]
    pub(crate) fn first(self, len: usize) -> usize {
        self.share(len).saturating_mul(self.rank)
    }

    /// The same rank, which fills up where dropping would leave it nothing of `len` things.
    pub(crate) fn or_fill(self, len: usize) -> Self {
        Self { drop_last: self.drop_last && len >= self.world_size, ..self }
    }

    /// How many of `len` things each rank takes.
    ///
    /// PyTorch writes `ceil((len - world_size) / world_size)` for a remainder that is dropped: the same number.
    pub(crate) fn share(&self, len: usize) -> usize {
        if self.drop_last { len / self.world_size } else { len.div_ceil(self.world_size) }
    }

    /// Their positions: every `world_size`-th one from `rank` on, and those past the end from the start again, in another
    /// round. Both are told.
    pub(crate) fn positions(self, len: usize) -> impl Iterator<Item = (usize, u64)> {
        (0..self.share(len)).map(move |turn| (self.place(turn) % len, (self.place(turn) / len) as u64))
    }

    /// The place of this rank's `turn` among the turns of all.
    pub(crate) fn place(&self, turn: usize) -> usize {
        self.rank.saturating_add(turn.saturating_mul(self.world_size))
    }
}
