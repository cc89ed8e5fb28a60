//! The windows of an epoch: each is decoded once, in parts that all workers share.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::batches::{ParquetBatches, Plan, WINDOW_BYTES};
use super::window::{Decoding, Part, Window};
use crate::columns::{Array, Table};
use crate::loader::{Lookup, lock};
use crate::{Cancellation, DataError};

/// What the windows may take that are decoded ahead only because those before them have fewer parts than there are
/// workers: 512 MiB.
const BYTES_AHEAD: usize = 2 * WINDOW_BYTES;

/// The batches of an epoch, by number. A window is in memory from when its first batch is made, or a little earlier,
/// until its last batch is.
pub(super) struct Windows {
    batches: ParquetBatches,
    plan: Plan,
    pinned: bool,
    /// The epoch's first batch, for which the training loop waits.
    first: usize,
    /// How many threads share the windows.
    workers: AtomicUsize,
    bytes_ahead: usize,
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
        let (first, workers, changed) = (numbers.start, AtomicUsize::new(1), Condvar::new());
        Ok(Self { batches, plan, pinned, first, workers, bytes_ahead: BYTES_AHEAD, open, changed })
    }

    fn begin(&self, number: usize) -> Decoding {
        let dataset = &self.batches.dataset;
        let (groups, columns) = (self.plan.groups_of(number), dataset.selected().len());
        dataset.decoded.fetch_add(groups.len() as u64, Relaxed);
        let of_column = |column| (0..groups.len()).map(move |group| Part { column, group });
        let mut waiting: Vec<Part> = (0..columns).flat_map(of_column).collect();
        // The largest first, so that no thread is still busy with one when the others are done.
        waiting.sort_by_key(|part| dataset.packed_bytes(groups[part.group].0, part.column));
        let (mut place, shuffled) = (self.plan.windows[number].1.start, self.plan.windows[number].1.len());
        let used: Vec<Range<usize>> = match self.batches.shuffle {
            true => std::iter::once(0..shuffled).collect(),
            false => groups.iter().map(|(_, rows)| rows.clone()).collect(),
        };
        let array = |rows: Range<usize>| {
            let begun = place;
            place += rows.len();
            (rows, begun)
        };
        let arrays = used.into_iter().map(array).collect();
        Decoding::new(groups.len(), columns, waiting, arrays)
    }

    /// The windows of batch `number`, decoded together with the other threads that need them.
    fn needed(
        &self,
        number: usize,
        windows: &Range<usize>,
        cancelled: &Cancellation,
    ) -> Result<Vec<Arc<Window>>, DataError> {
        let mut found = Vec::with_capacity(windows.len());
        let mut open = lock(&self.open);
        while found.len() < windows.len() {
            cancelled.check()?;
            let next = windows.start + found.len();
            open.unneeded = open.unneeded.max(next + 1);
            let window = open.windows.entry(next).or_insert_with(|| self.begin(next));
            if let Some(window) = &window.done {
                found.push(window.clone());
            } else if let Some((of, part)) = self.next_part(&mut open, windows, number == self.first) {
                drop(open);
                match windows.contains(&of) {
                    true => self.decode(of, part, cancelled)?,
                    false => self.decode_ahead(of, part, cancelled),
                }
                open = lock(&self.open);
            } else {
                open = self.changed.wait(open).unwrap_or_else(PoisonError::into_inner);
            }
        }
        Ok(found)
    }

    /// The part that a thread decodes next: one of the first window that has any, since that window's batches are due
    /// first. The thread needs the windows `own`, if any. `None` where others have the last parts of these and there is
    /// no room for another window, or for the first batch no time.
    fn next_part(&self, open: &mut Open, own: &Range<usize>, is_first_batch: bool) -> Option<(usize, Part)> {
        // A part of a later window may take longer than what is left of these.
        let end = if is_first_batch { own.end } else { usize::MAX };
        // A window that has failed is tried again by a thread that needs it, which reports why.
        let mut good = open.windows.range_mut(..end).filter(|(number, window)| own.contains(number) || !window.failed);
        let begun = good.find_map(|(number, window)| Some((*number, window.waiting.pop()?)));
        begun.or_else(|| {
            let number = self.ahead(open).next().filter(|&number| number < end)?;
            let window = open.windows.entry(number).or_insert_with(|| self.begin(number));
            window.waiting.pop().map(|part| (number, part))
        })
    }

    /// The windows that may be decoded before a batch needs them, and are not begun. These are all those of the next
    /// batch, and at least one where one worker decodes, or two where several do, so that these have something to decode
    /// while the training loop takes the last batches of a window; further ones where these have fewer parts than there
    /// are workers.
    fn ahead<'a>(&self, open: &'a Open) -> impl Iterator<Item = usize> + use<'a> {
        let (first, workers, windows) = (open.unneeded, self.workers.load(Relaxed), &self.plan.windows);
        let next_batch = windows.get(first).map_or(first, |(_, rows)| {
            let number = self.batches.batches_of(rows).start;
            self.plan.windows_of(&self.batches.places(number)).end
        });
        let mut end = next_batch.max(first + workers.clamp(1, 2)).min(windows.len());
        let mut parts: usize = (first..end).map(|number| self.parts_of(number)).sum();
        let mut bytes = 0usize;
        while parts < workers && end < windows.len() {
            let groups = self.plan.groups_of(end).iter().map(|(group, _)| self.batches.dataset.decoded_bytes(*group));
            bytes = groups.fold(bytes, usize::saturating_add);
            if bytes > self.bytes_ahead {
                break;
            }
            parts += self.parts_of(end).max(1);
            end += 1;
        }
        (first..end).filter(|number| open.left[*number] > 0 && !open.windows.contains_key(number))
    }

    fn parts_of(&self, window: usize) -> usize {
        self.plan.groups_of(window).len() * self.batches.dataset.selected().len()
    }

    fn decode(&self, number: usize, part: Part, cancelled: &Cancellation) -> Result<(), DataError> {
        let mut begun = Begun { windows: self, number, lost: vec![part] };
        let ParquetBatches { dataset, spare, .. } = &self.batches;
        let (groups, column) = (self.plan.groups_of(number), part.column);
        let array = dataset.decode_chunk(groups[part.group].0, column, spare, cancelled)?;
        let mut open = lock(&self.open);
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
                let shuffled = Array::gather(&arrays.iter().collect::<Vec<_>>(), order, |bytes| spare.take(bytes))?;
                self.reuse(arrays);
                open = lock(&self.open);
                if let Some(window) = open.windows.get_mut(&number) {
                    window.columns[column].push(Some(shuffled));
                }
            }
        }
        if let Some(window) = open.windows.get_mut(&number) {
            window.part_done();
        }
        begun.lost.clear();
        Ok(())
    }

    /// Keeps the memory of arrays, at most that of two windows.
    fn reuse(&self, arrays: Vec<Array>) {
        let most = 2
            * self.batches.dataset.selected().len()
            * self.plan.windows.iter().map(|it| it.0.len()).max().unwrap_or(0);
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
        let mut open = lock(&self.open);
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
        let needed = self.needed(number, &windows, cancelled);
        let table = needed.and_then(|windows| self.batches.rows_of(&windows, &places, self.pinned));
        self.made(windows);
        table
    }

    fn read_ahead(&self, cancelled: &Cancellation) -> bool {
        let part = self.next_part(&mut lock(&self.open), &(0..0), false);
        if let Some((number, part)) = part {
            self.decode_ahead(number, part, cancelled);
        }
        part.is_some()
    }

    fn parts_ahead(&self) -> usize {
        let open = lock(&self.open);
        let begun = open.windows.values().filter(|window| !window.failed).map(|window| window.waiting.len());
        begun.chain(self.ahead(&open).map(|number| self.parts_of(number))).sum()
    }

    fn shared_by(&self, workers: usize) {
        self.workers.store(workers, Relaxed);
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
        let mut open = lock(&self.windows.open);
        let window = open.windows.get_mut(&self.number).filter(|_| !self.lost.is_empty());
        if let Some(window) = window {
            window.lost(std::mem::take(&mut self.lost), self.windows.plan.groups_of(self.number).len());
        }
        self.windows.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::ParquetDataset;
    use crate::columns::{COPIED, Column};

    /// Twelve windows of one row group of 8, 8 or 4 rows each, with two parts.
    fn windows(batch_size: usize, workers: usize) -> Result<Windows, DataError> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet/part-0.parquet");
        let rows = ParquetDataset::from_files(vec![file; 4])?.select(["int64", "text"])?;
        let batches = rows.batches(batch_size)?.window(1);
        let windows = Windows::new(batches, 0, 0..usize::MAX, &BTreeSet::new(), false)?;
        windows.shared_by(workers);
        Ok(windows)
    }

    #[test]
    fn parts_of_the_window_that_is_due_come_first() -> Result<(), DataError> {
        let windows = windows(8, 2)?;
        let begin = |number: usize, is_first| {
            let part = windows.next_part(&mut lock(&windows.open), &(number..number + 1), is_first);
            part.map(|(number, _)| number)
        };
        let begin_window = |number| lock(&windows.open).windows.insert(number, windows.begin(number)).is_none();
        assert!(begin_window(0) && begin_window(1));
        // The second batch's thread helps with the first window.
        assert_eq!([begin(1, false), begin(0, true)], [Some(0), Some(0)]);
        // The first batch's waits for it, and begins no part of the second.
        assert_eq!([begin(0, true), begin(1, false), begin(0, true)], [None, Some(1), None]);
        // Later batches' begin what there is.
        assert_eq!([begin(1, false), begin(1, false)], [Some(1), None]);
        lock(&windows.open).unneeded = 2;
        assert_eq!([begin(0, true), begin(1, false)], [None, Some(2)]);
        Ok(())
    }

    #[test]
    fn windows_ahead_are_few_or_small() -> Result<(), DataError> {
        let ahead = |workers, bytes_ahead| {
            let windows = Windows { bytes_ahead, ..windows(8, workers)? };
            let numbers: Vec<usize> = windows.ahead(&lock(&windows.open)).collect();
            assert_eq!(windows.parts_ahead(), 2 * numbers.len());
            Ok::<_, DataError>(numbers.len())
        };
        assert_eq!([ahead(1, usize::MAX)?, ahead(2, usize::MAX)?, ahead(4, usize::MAX)?], [1, 2, 2]);
        // Eight have parts for 16 workers.
        assert_eq!([ahead(16, usize::MAX)?, ahead(1000, usize::MAX)?], [8, 12]);
        let third = windows(8, 1)?.batches.dataset.decoded_bytes(2);
        assert_eq!([ahead(16, 0)?, ahead(16, third - 1)?, ahead(16, third)?], [2, 2, 3]);
        Ok(())
    }

    /// A batch owns its memory, and a window's is shared by its batches, so the floor is one copy. To shuffle, the rows of
    /// a window are put in order once: each batch would look them up in all row groups otherwise. Lists and strings are
    /// not copied more often than numbers, and what is read whole is not copied where it is of one row group.
    #[test]
    fn values_are_copied_once_for_a_batch_and_once_more_to_shuffle() -> Result<(), DataError> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet/nested.parquet");
        let bytes_of = |table: &Table| match table.columns().next() {
            Some((_, Column::Tensor(tensor))) => tensor.numel() * tensor.kind().elt_size_in_bytes(),
            Some((_, Column::Ragged(lists))) => lists.parts().2.numel() * lists.parts().2.kind().elt_size_in_bytes(),
            Some((_, Column::Bytes(texts))) => texts.iter().map(<[u8]>::len).sum(),
            None => 0,
        };
        for column in ["date", "ints", "deep", "words", "category"] {
            let rows = ParquetDataset::from_files([&file])?.select([column])?;
            for (shuffle, copies) in [(false, 1), (true, 2)] {
                let batches = rows.batches(4)?.window(2).shuffle(shuffle);
                let windows = Windows::new(batches, 0, 0..usize::MAX, &BTreeSet::new(), false)?;
                COPIED.set(0);
                let batch = |number| windows.get(number, false, &Cancellation::default());
                let batches = (0..windows.len()).map(batch).collect::<Result<Vec<_>, _>>()?;
                let bytes: usize = batches.iter().map(bytes_of).sum();
                assert!(bytes > 0);
                assert_eq!(COPIED.get(), copies * bytes, "{column}, shuffled: {shuffle}");
            }
            COPIED.set(0);
            assert!(bytes_of(&rows.read_row_groups(&[1])?) > 0);
            assert_eq!(COPIED.get(), 0, "{column}");
        }
        Ok(())
    }

    #[test]
    fn all_windows_of_the_next_batch_are_decoded_together() -> Result<(), DataError> {
        assert_eq!(windows(12, 1)?.parts_ahead(), 2 * 2);
        assert_eq!(windows(100, 1)?.parts_ahead(), 12 * 2);
        Ok(())
    }
}
