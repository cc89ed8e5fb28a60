//! The windows of an epoch: each is decoded once, in parts that all workers share.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

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

/// Decoded row groups.
pub(super) struct Window {
    /// The arrays of each column: one of the shuffled rows, or one for each row group.
    pub(super) columns: Vec<Vec<Array>>,
    /// For each array, the range of its rows that are used, and where they are in the epoch.
    arrays: Vec<(Range<usize>, usize)>,
}

impl Window {
    /// The arrays with rows in this range of the epoch, and which rows of them these are.
    pub(super) fn pieces(&self, places: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.arrays.iter().enumerate().filter_map(move |(array, (rows, place))| {
            let start = rows.start + places.start.saturating_sub(*place);
            let end = rows.end.min(rows.start + places.end.saturating_sub(*place));
            (start < end).then_some((array, start..end))
        })
    }
}

struct Decoding {
    /// The parts that no thread has begun, the largest at the end.
    waiting: Vec<Part>,
    columns: Vec<Vec<Option<Array>>>,
    /// The order of the rows, if they are shuffled, once it is needed.
    order: Arc<OnceLock<Vec<Place>>>,
    /// How many parts are not done.
    missing: usize,
    /// Whether a part could not be decoded: a batch that needs the window tries again, to get the error.
    failed: bool,
    done: Option<Arc<Window>>,
}

/// What one thread does at a time: a column of one of the window's row groups, counted from 0. The thread that has a
/// column's last one puts its rows into the epoch's order.
#[derive(Clone, Copy)]
struct Part {
    column: usize,
    group: usize,
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
        let of_column = |column| (0..groups.len()).map(move |group| Part { column, group });
        let mut waiting: Vec<Part> = columns.clone().flat_map(of_column).collect();
        // The largest first, so that no thread is still busy with one when the others are done.
        waiting.sort_by_key(|part| dataset.packed_bytes(groups[part.group].0, part.column));
        let columns = columns.map(|_| groups.iter().map(|_| None).collect()).collect();
        let missing = waiting.len();
        let mut window = Decoding { missing, waiting, columns, order: Arc::default(), failed: false, done: None };
        if missing == 0 {
            // No column is selected.
            self.finish(number, &mut window);
        }
        window
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
        let mut begun = Begun { windows: self, number, lost: vec![part] };
        let ParquetBatches { dataset, spare, .. } = &self.batches;
        let (groups, column) = (self.plan.groups_of(number), part.column);
        let array = dataset.decode_chunk(groups[part.group].0, column, spare, cancelled)?;
        let mut open = self.open();
        // Where all of its batches have failed, the window is not there any more.
        if let Some(window) = open.windows.get_mut(&number) {
            let arrays = &mut window.columns[column];
            arrays[part.group] = Some(array);
            if self.batches.shuffle && arrays.iter().all(Option::is_some) {
                let arrays: Vec<Array> = std::mem::take(arrays).into_iter().flatten().collect();
                let order = window.order.clone();
                drop(open);
                begun.lost = (0..groups.len()).map(|group| Part { column, group }).collect();
                let order = order.get_or_init(|| self.batches.order_of(&self.plan, number));
                let shuffled = Array::gather(&arrays, order, |bytes| spare.take(bytes))?;
                self.reuse(arrays);
                open = self.open();
                if let Some(window) = open.windows.get_mut(&number) {
                    window.columns[column].push(Some(shuffled));
                }
            }
        }
        if let Some(window) = open.windows.get_mut(&number) {
            self.part_done(number, window);
        }
        begun.lost.clear();
        Ok(())
    }

    fn part_done(&self, number: usize, window: &mut Decoding) {
        window.missing -= 1;
        if window.missing == 0 {
            self.finish(number, window);
        }
    }

    fn finish(&self, number: usize, window: &mut Decoding) {
        let (mut place, shuffled) = (self.plan.windows[number].1.start, self.plan.windows[number].1.len());
        let used: Vec<Range<usize>> = match self.batches.shuffle {
            true => std::iter::once(0..shuffled).collect(),
            false => self.plan.groups_of(number).iter().map(|(_, rows)| rows.clone()).collect(),
        };
        let mut arrays = Vec::with_capacity(used.len());
        for rows in used {
            let end = place + rows.len();
            arrays.push((rows, place));
            place = end;
        }
        let columns = std::mem::take(&mut window.columns).into_iter();
        let columns = columns.map(|arrays| arrays.into_iter().flatten().collect()).collect();
        window.done = Some(Arc::new(Window { columns, arrays }));
    }

    /// Keeps the memory of arrays, at most that of two windows.
    fn reuse(&self, arrays: Vec<Array>) {
        let most =
            2 * self.batches.dataset.columns.len() * self.plan.windows.iter().map(|it| it.0.len()).max().unwrap_or(0);
        arrays.into_iter().for_each(|array| self.batches.spare.give(array.values, most));
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
        let unused = unused.into_iter().filter_map(Arc::into_inner);
        unused.for_each(|window| self.reuse(window.columns.into_iter().flatten().collect()));
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
        let table = needed.and_then(|windows| self.batches.rows_of(&windows, &places, self.pinned));
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

    /// One window ahead of one worker, and two of several, so that these have something to decode while the training loop
    /// takes the last batches of a window; more where a window has fewer parts than there are workers.
    fn shared_by(&self, workers: usize) {
        let parts = self.plan.parts.len() * self.batches.dataset.columns.len() / self.plan.windows.len().max(1);
        self.ahead.store(workers.div_ceil(parts.max(1)).max(workers.clamp(1, 2)), Relaxed);
    }
}

/// A part that a thread has begun.
struct Begun<'a> {
    windows: &'a Windows,
    number: usize,
    /// What is lost if it fails: the part, or all of its column.
    lost: Vec<Part>,
}

impl Drop for Begun<'_> {
    /// Gives lost parts back: to a thread that will report why.
    fn drop(&mut self) {
        let mut open = self.windows.open();
        let window = open.windows.get_mut(&self.number).filter(|_| !self.lost.is_empty());
        if let Some(window) = window {
            let groups = self.windows.plan.groups_of(self.number).len();
            self.lost.iter().for_each(|part| window.columns[part.column].resize_with(groups, || None));
            window.missing += self.lost.len() - 1;
            window.waiting.append(&mut self.lost);
            window.failed = true;
        }
        self.windows.changed.notify_all();
    }
}
