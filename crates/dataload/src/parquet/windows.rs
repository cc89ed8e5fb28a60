//! The windows of an epoch: each is decoded once, in parts that all workers share.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::batches::{ParquetBatches, Plan};
use crate::columns::{Array, Place, Table};
use crate::loader::Lookup;
use crate::{Cancellation, DataError};

/// The batches of an epoch, by number. A window is in memory from when its first batch is made, or a little earlier,
/// until its last batch is.
pub(super) struct Windows {
    batches: ParquetBatches,
    plan: Plan,
    pinned: bool,
    /// How many windows are decoded before a batch needs them.
    ahead: AtomicUsize,
    open: Mutex<Open>,
    /// Notified when a part is done, or given back.
    changed: Condvar,
}

struct Open {
    /// For each window, how many batches are still to be made of it.
    left: Vec<usize>,
    /// The windows that are decoded, or being decoded.
    windows: BTreeMap<usize, Decoding>,
    /// No batch has needed this window yet, nor a later one.
    unneeded: usize,
}

/// Decoded row groups, and the order of their rows.
pub(super) struct Window {
    /// The arrays of each column, one for each row group.
    pub(super) columns: Vec<Vec<Array>>,
    /// The rows in the epoch's order.
    pub(super) order: Vec<Place>,
    /// The range of its rows in the epoch.
    pub(super) places: Range<usize>,
}

struct Decoding {
    /// The parts that no thread has begun, the largest at the end.
    waiting: Vec<Part>,
    columns: Vec<Vec<Option<Array>>>,
    order: Vec<Place>,
    /// How many parts are not done.
    missing: usize,
    /// Whether a part could not be decoded: a batch that needs the window tries again, to get the error.
    failed: bool,
    done: Option<Arc<Window>>,
}

/// What one thread does at a time.
#[derive(Clone, Copy)]
enum Part {
    /// The order of the rows.
    Order,
    /// A column of one of the window's row groups.
    Column { column: usize, group: usize },
}

enum Piece {
    Order(Vec<Place>),
    Array(Array),
}

impl Windows {
    /// The batches `numbers` of an epoch, without those that were `delivered` before.
    pub(super) fn new(
        batches: ParquetBatches,
        epoch: u64,
        numbers: Range<usize>,
        delivered: &BTreeSet<usize>,
        pinned: bool,
    ) -> Result<Self, DataError> {
        let plan = batches.plan(epoch)?;
        let of_window = |(_, places): &(Range<usize>, Range<usize>)| {
            let all = batches.batches_of(places);
            let some = all.start.max(numbers.start)..all.end.min(numbers.end);
            some.len() - if some.is_empty() { 0 } else { delivered.range(some).count() }
        };
        let left = plan.windows.iter().map(of_window).collect();
        let unneeded = plan.windows_of(&batches.places(numbers.start)).start;
        let open = Mutex::new(Open { left, windows: BTreeMap::new(), unneeded });
        Ok(Self { batches, plan, pinned, ahead: AtomicUsize::new(1), open, changed: Condvar::new() })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, number: usize) -> Decoding {
        let dataset = &self.batches.dataset;
        let groups = self.plan.groups_of(number);
        dataset.decoded.fetch_add(groups.len() as u64, Relaxed);
        let columns = 0..dataset.columns.len();
        let of_column = |column| (0..groups.len()).map(move |group| Part::Column { column, group });
        let mut waiting: Vec<Part> = columns.clone().flat_map(of_column).collect();
        // The largest first, so that no thread is still busy with one when the others are done.
        waiting.sort_by_key(|part| match part {
            Part::Column { column, group } => dataset.packed_bytes(groups[*group].0, *column),
            Part::Order => 0,
        });
        waiting.push(Part::Order);
        Decoding {
            missing: waiting.len(),
            waiting,
            columns: columns.map(|_| groups.iter().map(|_| None).collect()).collect(),
            order: Vec::new(),
            failed: false,
            done: None,
        }
    }

    /// The windows of a batch, decoded together with the other threads that need them.
    fn needed(&self, windows: Range<usize>, cancelled: &Cancellation) -> Result<Vec<Arc<Window>>, DataError> {
        windows.map(|number| self.window(number, cancelled)).collect()
    }

    fn window(&self, number: usize, cancelled: &Cancellation) -> Result<Arc<Window>, DataError> {
        let mut open = self.open();
        open.unneeded = open.unneeded.max(number + 1);
        loop {
            cancelled.check()?;
            let window = open.windows.entry(number).or_insert_with(|| self.begin(number));
            if let Some(window) = &window.done {
                return Ok(window.clone());
            }
            if let Some(part) = window.waiting.pop() {
                drop(open);
                self.decode(number, part, cancelled)?;
            } else if let Some((number, part)) = self.part_ahead(&mut open) {
                // Others have the last parts.
                drop(open);
                self.decode_ahead(number, part, cancelled);
            } else {
                open = self.changed.wait(open).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            open = self.open();
        }
    }

    /// A part of a window that is being decoded, or of the next one where there is room for it.
    fn part_ahead(&self, open: &mut Open) -> Option<(usize, Part)> {
        let good = open.windows.iter_mut().filter(|(_, window)| !window.failed);
        let begun = good.map(|(number, window)| (*number, window)).find(|(_, window)| !window.waiting.is_empty());
        let (number, window) = match begun {
            Some(begun) => begun,
            None => {
                let number = self.next_window(open)?;
                (number, open.windows.entry(number).or_insert_with(|| self.begin(number)))
            }
        };
        window.waiting.pop().map(|part| (number, part))
    }

    /// The next window to be decoded ahead, if there is room for one.
    fn next_window(&self, open: &Open) -> Option<usize> {
        let mut ahead = (open.unneeded..self.plan.windows.len()).take(self.ahead.load(Relaxed));
        ahead.find(|number| open.left[*number] > 0 && !open.windows.contains_key(number))
    }

    fn decode(&self, number: usize, part: Part, cancelled: &Cancellation) -> Result<(), DataError> {
        let mut begun = Begun { windows: self, number, part, piece: None };
        let ParquetBatches { dataset, spare, .. } = &self.batches;
        begun.piece = Some(match part {
            Part::Order => Piece::Order(self.batches.order_of(&self.plan, number)),
            Part::Column { column, group } => {
                let group = self.plan.groups_of(number)[group].0;
                Piece::Array(dataset.decode_chunk(group, column, spare, cancelled)?)
            }
        });
        Ok(())
    }

    /// An error shows again where a batch needs the window.
    fn decode_ahead(&self, number: usize, part: Part, cancelled: &Cancellation) {
        if let Err(error) = self.decode(number, part, cancelled) {
            tracing::debug!(%error, window = number, "a window could not be decoded ahead");
        }
    }

    /// Records that a batch was made of these windows, and keeps the memory of those that no batch needs any more.
    fn made(&self, windows: Range<usize>) {
        let mut open = self.open();
        let mut unused = Vec::new();
        for number in windows {
            open.left[number] = open.left[number].saturating_sub(1);
            if open.left[number] == 0 {
                unused.extend(open.windows.remove(&number).and_then(|window| window.done));
            }
        }
        drop(open);
        for window in unused.into_iter().filter_map(Arc::into_inner) {
            // That of two windows, while a third is decoded.
            let most = 2 * window.columns.iter().map(Vec::len).sum::<usize>();
            window.columns.into_iter().flatten().for_each(|array| self.batches.spare.give(array.values, most));
        }
    }
}

impl Lookup for Windows {
    type Sample = Table;

    fn len(&self) -> usize {
        self.batches.len()
    }

    fn key(&self, _number: usize) -> Option<String> {
        None
    }

    fn get(&self, number: usize, is_substitute: bool, cancelled: &Cancellation) -> Result<Table, DataError> {
        if is_substitute {
            return self.batches.read_batch(self.plan.epoch, number, self.pinned, cancelled);
        }
        let places = self.batches.places(number);
        let windows = self.plan.windows_of(&places);
        let needed = self.needed(windows.clone(), cancelled);
        let table = needed.and_then(|windows| self.batches.gather(&windows, &places, self.pinned));
        self.made(windows);
        table
    }

    fn read_ahead(&self, cancelled: &Cancellation) -> bool {
        let part = self.part_ahead(&mut self.open());
        if let Some((number, part)) = part {
            self.decode_ahead(number, part, cancelled);
        }
        part.is_some()
    }

    fn can_read_ahead(&self) -> bool {
        let open = self.open();
        let waits = |window: &Decoding| !window.failed && !window.waiting.is_empty();
        open.windows.values().any(waits) || self.next_window(&open).is_some()
    }

    /// One window ahead, or as many as have a part for each of `workers`.
    fn shared_by(&self, workers: usize) {
        let parts = self.plan.parts.len() * self.batches.dataset.columns.len() / self.plan.windows.len().max(1);
        self.ahead.store(workers.div_ceil(parts.max(1)).max(1), Relaxed);
    }
}

/// A part that a thread has begun. Unless it gets done, it is given back: to a thread that will report why not.
struct Begun<'a> {
    windows: &'a Windows,
    number: usize,
    part: Part,
    piece: Option<Piece>,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        let mut open = self.windows.open();
        // Where all of its batches have failed, the window is not there any more.
        if let Some(window) = open.windows.get_mut(&self.number) {
            match (self.part, self.piece.take()) {
                (_, Some(Piece::Order(order))) => window.order = order,
                (Part::Column { column, group }, Some(Piece::Array(array))) => {
                    window.columns[column][group] = Some(array);
                }
                (part, _) => {
                    window.waiting.push(part);
                    window.failed = true;
                    window.missing += 1;
                }
            }
            window.missing -= 1;
            if window.missing == 0 {
                let columns = std::mem::take(&mut window.columns).into_iter();
                window.done = Some(Arc::new(Window {
                    columns: columns.map(|arrays| arrays.into_iter().flatten().collect()).collect(),
                    order: std::mem::take(&mut window.order),
                    places: self.windows.plan.windows[self.number].1.clone(),
                }));
            }
        }
        self.windows.changed.notify_all();
    }
}
