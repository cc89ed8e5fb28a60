//! An epoch that goes on with another number of ranks, where each of them takes a contiguous part of its rows.

use std::fmt;
use std::ops::Range;

use overdrive_core::{StateDict, StateError};

use crate::loader::position::{Position, mismatch, natural, text};
use crate::rank::Rank;

/// The entries of the number of ranks, and of those that had the epoch before.
pub(super) const RANKS: &str = "ranks";
pub(super) const EARLIER: &str = "earlier_ranks";

/// Limits for states: their sizes, and the work to go on from them, stay small.
const MAX_CHANGES: usize = 8;
const MAX_RANKS: usize = 1 << 16;

/// The batches of an epoch, of which each rank has equally many.
///
/// When another number of ranks goes on, the batches that the ranks before had left, one rank's after the other's, are
/// cut into contiguous parts anew. So batches stay as they are, none is lost, and most windows of row groups are still
/// decoded by one rank alone. With more ranks than batches divide by, some come again at the end, or are dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankBatches {
    pub(crate) rank: Rank,
    pub(crate) rows: usize,
    pub(crate) batch_size: usize,
}

/// So many ranks had so many batches each, before others went on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Earlier {
    pub(crate) ranks: usize,
    pub(crate) batches: usize,
}

impl RankBatches {
    /// How many batches each rank has, after `earlier` ones.
    pub(crate) fn len(&self, earlier: &[Earlier]) -> usize {
        let rows = self.rank.share(self.rows);
        match earlier.split_last() {
            Some((last, before)) => self.rank.share(self.left(last, before).saturating_mul(last.ranks)),
            None if self.rank.drop_last => rows / self.batch_size,
            None => rows.div_ceil(self.batch_size),
        }
    }

    /// How many batches each of the ranks before had left.
    fn left(&self, last: &Earlier, before: &[Earlier]) -> usize {
        let last_ranks = Self { rank: Rank { world_size: last.ranks, ..self.rank }, ..*self };
        last_ranks.len(before).saturating_sub(last.batches)
    }

    /// Where this rank's batches in `numbers` are from: a rank of those that began the epoch, and its batches.
    #[cfg_attr(not(feature = "parquet"), allow(dead_code))]
    pub(crate) fn runs(&self, earlier: &[Earlier], numbers: Range<usize>) -> Vec<(Rank, Range<usize>)> {
        let Some((last, before)) = earlier.split_last() else { return vec![(self.rank, numbers)] };
        let (each, mut runs) = (self.left(last, before), Vec::new());
        let first = self.len(earlier) * self.rank.rank;
        let (mut place, end) = (first + numbers.start, first + numbers.end);
        while place < end && each > 0 {
            // Past the end, it starts over.
            let (rank, start) = (place / each % last.ranks, place % each);
            let len = (end - place).min(each - start);
            let of = Self { rank: Rank { world_size: last.ranks, rank, ..self.rank }, ..*self };
            runs.extend(of.runs(before, last.batches + start..last.batches + start + len));
            place += len;
        }
        runs
    }

    /// Turns the position of another number of ranks into one of these.
    pub(super) fn load(&self, position: &mut Position, state: &StateDict) -> Result<(), StateError> {
        if state.get(EARLIER).is_ok() {
            let found = text(state, EARLIER)?;
            let earlier = parsed(found).filter(|earlier| self.have_had(earlier));
            let expected = "numbers of ranks, and of batches that each of them has had";
            position.earlier = earlier.ok_or_else(|| mismatch(EARLIER, expected, found))?;
        }
        let ranks = natural(state, RANKS)? as usize;
        if ranks == self.rank.world_size || position.taken() == 0 {
            return Ok(());
        }
        if !position.before.is_empty() {
            let expected = format!("none, to go on with {} ranks: batches in order", self.rank.world_size);
            return Err(mismatch("ahead", expected, text(state, "ahead")?));
        }
        position.earlier.push(Earlier { ranks, batches: std::mem::take(&mut position.batch) });
        if !self.have_had(&position.earlier) {
            let most = MAX_RANKS.min(self.rows);
            let expected = format!(
                "1 to {most} ranks, each with no more batches than there are, and at most {MAX_CHANGES} changes of their \
                 number in an epoch"
            );
            return Err(mismatch(RANKS, expected, ranks));
        }
        Ok(())
    }

    fn have_had(&self, earlier: &[Earlier]) -> bool {
        let possible = |number: usize| {
            let Earlier { ranks, batches } = earlier[number];
            let of = Self { rank: Rank { world_size: ranks, ..self.rank }, ..*self };
            (1..=MAX_RANKS.min(self.rows)).contains(&ranks) && batches <= of.len(&earlier[..number])
        };
        earlier.len() <= MAX_CHANGES && (0..earlier.len()).all(possible)
    }
}

impl fmt::Display for Earlier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.ranks, self.batches)
    }
}

fn parsed(text: &str) -> Option<Vec<Earlier>> {
    let one = |part: &str| {
        let (ranks, batches) = part.split_once(':')?;
        Some(Earlier { ranks: ranks.parse().ok()?, batches: batches.parse().ok()? })
    };
    text.split(' ').map(one).collect()
}
