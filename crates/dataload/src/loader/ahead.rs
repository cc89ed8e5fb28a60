//! The lanes of a stream with the items read ahead from each, so that several are read and decompressed at once.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::loader::guard::survived;
use crate::loader::lane::{Item, Lane, LanePlan, LanePosition};
use crate::loader::position::{Mark, StreamMark};
use crate::loader::stream_feed::Origin;
use crate::{Cancellation, Deferred, IterableDataset};

/// What the items read ahead from all lanes together may take: 64 MiB.
const AHEAD_BYTES: usize = 64 << 20;

/// The lanes of one rank. They take turns, and any thread may read ahead from a lane that no other reads.
pub(crate) struct Lanes<D: IterableDataset> {
    dataset: Arc<D>,
    plan: LanePlan,
    /// By their numbers among all ranks'.
    lanes: Vec<(usize, Mutex<ReadAhead<D>>)>,
    /// The most items, and bytes, that are read ahead from each.
    most: [usize; 2],
    /// How often a thread has looked for a lane to read ahead from.
    looks: AtomicUsize,
}

/// The place in the lanes up to which samples were drawn.
pub(crate) struct Cursor {
    turn: usize,
    /// The lane that was read last.
    reading: usize,
    positions: Vec<LanePosition>,
}

/// A lane, and what it gives next.
struct ReadAhead<D: IterableDataset> {
    lane: Lane<Arc<D>>,
    ahead: VecDeque<(Next<D::Sample>, LanePosition)>,
    bytes: usize,
    ended: bool,
}

/// What a lane gives.
pub(crate) enum Next<S> {
    Item(Item<S>),
    /// The stream panicked while it read this item ahead.
    Panicked(String),
}

impl<D: IterableDataset> Lanes<D> {
    /// The lanes with these numbers at these positions, for batches of `batch_size`.
    pub(crate) fn new(
        dataset: Arc<D>,
        plan: LanePlan,
        turn: usize,
        positions: Vec<(usize, LanePosition)>,
        batch_size: usize,
    ) -> (Self, Cursor) {
        let count = positions.len().max(1);
        // Enough for the next batch, while this one is drawn.
        let most = [batch_size.saturating_mul(2).div_ceil(count), AHEAD_BYTES / count];
        let at = |&(number, from): &(usize, LanePosition)| {
            (number, Mutex::new(ReadAhead::new(Lane::at(dataset.clone(), plan, number, from))))
        };
        let lanes = positions.iter().map(at).collect();
        let positions = positions.into_iter().map(|(_, from)| from).collect();
        let cursor = Cursor { turn: turn % count, reading: turn % count, positions };
        (Self { dataset, plan, lanes, most, looks: AtomicUsize::new(0) }, cursor)
    }

    fn lane(&self, index: usize) -> MutexGuard<'_, ReadAhead<D>> {
        self.lanes[index].1.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next item of the lane whose turn it is, or of the first after it that has one; `None` at the end, or when
    /// cancelled.
    pub(crate) fn draw(&self, cursor: &mut Cursor, cancelled: &Cancellation) -> Option<Next<D::Sample>> {
        for _ in 0..self.lanes.len() {
            cursor.reading = cursor.turn;
            cursor.turn = (cursor.turn + 1) % self.lanes.len();
            let (next, after) = self.lane(cursor.reading).next(cancelled);
            cursor.positions[cursor.reading] = after;
            if next.is_some() {
                return next;
            }
        }
        None
    }

    /// Moves every lane to the start of a pass.
    pub(crate) fn begin_anew(&self, cursor: &mut Cursor, pass: u64) {
        let start = LanePosition::start_of(pass);
        for (index, (number, _)) in self.lanes.iter().enumerate() {
            *self.lane(index) = ReadAhead::new(Lane::at(self.dataset.clone(), self.plan, *number, start));
        }
        cursor.positions.fill(start);
        (cursor.turn, cursor.reading) = (0, 0);
    }

    /// Reads an item ahead; false where every lane is full, at its end, or being read.
    pub(crate) fn read_ahead(&self, cancelled: &Cancellation) -> bool {
        let first = self.looks.fetch_add(1, Relaxed);
        for offset in 0..self.lanes.len() {
            let mut lane = match self.lanes[(first + offset) % self.lanes.len()].1.try_lock() {
                Ok(lane) => lane,
                Err(TryLockError::Poisoned(lane)) => lane.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            let [items, bytes] = self.most;
            if !lane.ended && lane.ahead.len() < items && lane.bytes < bytes {
                lane.read(cancelled);
                return true;
            }
        }
        false
    }

    /// The item that was being read when the stream panicked.
    pub(crate) fn origin(&self, cursor: &Cursor) -> Option<Origin> {
        let lane = &self.lane(cursor.reading).lane;
        let pass = lane.position().pass;
        lane.place().map(|(shard, position)| Origin { shard, position, pass, key: None })
    }

    pub(crate) fn mark(&self, cursor: &Cursor) -> Mark {
        let numbers = self.lanes.iter().map(|(number, _)| *number);
        Some(Box::new(StreamMark { turn: cursor.turn, lanes: numbers.zip(cursor.positions.iter().copied()).collect() }))
    }
}

impl<D: IterableDataset> ReadAhead<D> {
    fn new(lane: Lane<Arc<D>>) -> Self {
        Self { lane, ahead: VecDeque::new(), bytes: 0, ended: false }
    }

    /// What the lane gives next, and its position after that.
    fn next(&mut self, cancelled: &Cancellation) -> (Option<Next<D::Sample>>, LanePosition) {
        match self.ahead.pop_front() {
            Some((next, after)) => {
                self.bytes -= next.bytes();
                (Some(next), after)
            }
            None if self.ended => (None, self.lane.position()),
            None => {
                // It stays so after a panic.
                self.ended = true;
                let next = self.lane.next(cancelled).map(Next::Item);
                self.ended = next.is_none();
                (next, self.lane.position())
            }
        }
    }

    /// Reads an item ahead. A panic waits for its turn, as the item would.
    fn read(&mut self, cancelled: &Cancellation) {
        let next = survived(|| self.lane.next(cancelled));
        // A cancelled lane is not used again.
        self.ended = !matches!(next, Ok(Some(_)));
        let next = match next {
            Ok(Some(item)) => Next::Item(item),
            Ok(None) => return,
            Err(message) => Next::Panicked(message),
        };
        self.bytes += next.bytes();
        self.ahead.push_back((next, self.lane.position()));
    }
}

impl<S> Next<S> {
    fn bytes(&self) -> usize {
        match self {
            Self::Item(item) => item.sample.as_ref().map_or(0, Deferred::bytes),
            Self::Panicked(..) => 0,
        }
    }
}
