//! Decodes column chunks.

use std::cmp::Reverse;
use std::panic::resume_unwind;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::chunk::Chunk;
use super::codec::Codec;
use super::dataset::ParquetDataset;
use super::footer::chunk_range;
use super::pages::{ChunkPlace, Pages};
use crate::columns::{Array, Element, FieldKind, OnNull, Part, Selected, Spare, Words};
use crate::{Cancellation, DataError};

/// A column chunk to decode, and where its values go.
struct Task<'a> {
    column: usize,
    element: Element,
    group: usize,
    target: Target<'a>,
}

enum Target<'a> {
    /// Parts of the column's values, and of its mask.
    Flat(&'a mut [u8], Option<&'a mut [u8]>),
    /// An array of the row group's own, whose memory is there before it is read.
    Lists(&'a mut Array),
}

impl ParquetDataset {
    /// Decodes the selected columns of some row groups, in order. Threads share the column chunks: a whole table is no
    /// epoch, whose workers could.
    pub(super) fn decode(&self, groups: &[usize], cancelled: &Cancellation) -> Result<Vec<Array>, DataError> {
        groups.iter().try_for_each(|&group| self.groups.get(group).map(|_| ()))?;
        cancelled.check()?;
        self.decoded.fetch_add(groups.len() as u64, Relaxed);
        // Numbers of all row groups are decoded to where they stay, lists and strings of each to an array of its own.
        let pieces = |column: usize| {
            let is_flat = self.is_flat(&self.selected()[column]);
            groups.chunks(if is_flat { groups.len().max(1) } else { 1 })
        };
        let begin = |column: usize| match groups.is_empty() {
            true => Ok(vec![self.begin(column, groups, &Spare::default())?]),
            false => pieces(column).map(|piece| self.begin(column, piece, &Spare::default())).collect(),
        };
        let columns = (0..self.selected().len()).map(begin);
        let mut columns = columns.collect::<Result<Vec<Vec<Array>>, DataError>>()?;
        let mut tasks = Vec::with_capacity(groups.len() * columns.len());
        for (column, arrays) in columns.iter_mut().enumerate() {
            arrays
                .iter_mut()
                .zip(pieces(column))
                .for_each(|(array, piece)| self.add_tasks(column, piece, array, &mut tasks));
        }
        // The largest first, so that no thread is still busy with one when the others are done.
        tasks.sort_by_key(|task| Reverse(self.packed_bytes(task.group, task.column)));
        self.run(tasks, cancelled)?;
        let finish = |(column, arrays): (usize, Vec<Array>)| {
            let sized = arrays.into_iter().enumerate();
            let sized = sized.map(|(piece, array)| self.with_list_size(column, groups.get(piece).copied(), array));
            Array::concat(sized.collect::<Result<_, _>>()?)
        };
        columns.into_iter().enumerate().map(finish).collect()
    }

    /// Decodes a row group on the calling thread.
    pub(super) fn decode_group(&self, group: usize, cancelled: &Cancellation) -> Result<Vec<Array>, DataError> {
        self.groups.get(group)?;
        self.decoded.fetch_add(1, Relaxed);
        let chunk = |column| self.decode_chunk(group, column, &Spare::default(), cancelled);
        (0..self.selected().len()).map(chunk).collect()
    }

    /// Decodes one column of a row group, in memory of `spare` where it is large enough.
    pub(super) fn decode_chunk(
        &self,
        group: usize,
        column: usize,
        spare: &Spare,
        cancelled: &Cancellation,
    ) -> Result<Array, DataError> {
        let (mut array, mut tasks) = (self.begin(column, &[group], spare)?, Vec::with_capacity(1));
        self.add_tasks(column, &[group], &mut array, &mut tasks);
        tasks.into_iter().try_for_each(|task| self.run_task(task, cancelled))?;
        self.with_list_size(column, Some(group), array)
    }

    /// An array with memory for a column's numbers in some row groups, or for its lists or strings in one.
    fn begin(&self, column: usize, groups: &[usize], spare: &Spare) -> Result<Array, DataError> {
        let selected = &self.selected()[column];
        let element = self.element(selected)?;
        let array = if self.is_flat(selected) {
            groups.iter().try_for_each(|&group| self.check_bytes(group, element))?;
            let rows = groups.iter().try_fold(0usize, |rows, &group| rows.checked_add(self.groups[group].rows));
            let rows = rows.ok_or_else(|| DataError::option("row groups", "rows that can be counted", "more"))?;
            Array::of_values(element, rows, spare.take(rows.saturating_mul(element.bytes()))?)
        } else {
            let bytes = groups.iter().map(|&group| self.uncompressed_bytes(group, selected.leaf)).sum();
            let levels = self.leaf(selected).field.lists() + usize::from(element == Element::Bytes);
            Array::of_lists(element, vec![vec![0]; levels], spare.take_empty(bytes))
        };
        let mask = matches!(selected.nulls, OnNull::Mask).then(|| Words::new(array.rows)).transpose()?;
        let mask = mask.map(|mask| Box::new(Array::of_values(Element::Bool, array.rows, mask)));
        Ok(Array { mask, ..array })
    }

    /// What there is to decode for an array that was begun.
    fn add_tasks<'a>(&self, column: usize, groups: &[usize], array: &'a mut Array, tasks: &mut Vec<Task<'a>>) {
        let element = array.element;
        if !self.is_flat(&self.selected()[column]) {
            let group = groups.first();
            return tasks.extend(group.map(|&group| Task { column, element, group, target: Target::Lists(array) }));
        }
        let mut values = array.values.bytes_mut();
        let mut mask = array.mask.as_mut().map(|mask| mask.values.bytes_mut());
        for &group in groups {
            let rows = self.groups[group].rows;
            let here = values.split_off_mut(..rows * element.bytes()).unwrap_or_default();
            let mask = mask.as_mut().and_then(|mask| mask.split_off_mut(..rows));
            tasks.push(Task { column, element, group, target: Target::Flat(here, mask) });
        }
    }

    /// The bytes of a column of a row group in its file.
    pub(super) fn packed_bytes(&self, group: usize, column: usize) -> i64 {
        let Part { file, index, .. } = self.groups[group];
        self.files[file].metadata.row_group(index).column(self.selected()[column].leaf).compressed_size()
    }

    fn element(&self, selected: &Selected) -> Result<Element, DataError> {
        let leaf = self.leaf(selected);
        leaf.element.ok_or_else(|| {
            let found = match leaf.field.kind() {
                FieldKind::Unsupported(found) => found.clone(),
                kind => format!("{kind:?}"),
            };
            let expected = format!("a supported type in column {:?}, or a `select` without that column", selected.name);
            DataError::layout(self.files[0].source.path(), expected, found)
        })
    }

    /// Whether each row is one value of a fixed number of bytes.
    fn is_flat(&self, selected: &Selected) -> bool {
        let leaf = self.leaf(selected);
        leaf.field.lists() == 0 && leaf.element != Some(Element::Bytes)
    }

    /// About how many bytes a row group's selected columns take when they are decoded.
    pub(super) fn decoded_bytes(&self, group: usize) -> usize {
        let rows = self.groups[group].rows;
        let bytes = |selected: &Selected| {
            let values = match self.leaf(selected).element {
                Some(element) if self.is_flat(selected) => rows.saturating_mul(element.bytes()),
                _ => self.uncompressed_bytes(group, selected.leaf),
            };
            values.saturating_add(if matches!(selected.nulls, OnNull::Mask) { rows } else { 0 })
        };
        self.selected().iter().map(bytes).fold(0, usize::saturating_add)
    }

    fn uncompressed_bytes(&self, group: usize, leaf: usize) -> usize {
        let Part { file, index, .. } = self.groups[group];
        let chunk = self.files[file].metadata.row_group(index).column(leaf);
        usize::try_from(chunk.uncompressed_size()).unwrap_or(0)
    }

    fn check_bytes(&self, group: usize, element: Element) -> Result<(), DataError> {
        let group = self.groups[group];
        let (bytes, path) = (group.rows.saturating_mul(element.bytes()) as u64, self.files[group.file].source.path());
        DataError::check_bytes(self.options.max_column_bytes, bytes, "a column of a row group", path)
    }

    fn run(&self, tasks: Vec<Task<'_>>, cancelled: &Cancellation) -> Result<(), DataError> {
        let threads = self.options.threads.min(tasks.len());
        let tasks = Mutex::new(tasks.into_iter());
        let left = || tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            loop {
                let Some(task) = left().next() else { return Ok(()) };
                // The others end with what they are decoding.
                self.run_task(task, cancelled).inspect_err(|_| left().by_ref().for_each(drop))?;
            }
        };
        thread::scope(|scope| {
            let start = |worker| thread::Builder::new().name(format!("parquet-{worker}")).spawn_scoped(scope, work);
            // Where no thread can be started, the calling thread does the work.
            let others: Vec<_> = (1..threads).filter_map(|worker| start(worker).ok()).collect();
            let own = work();
            let ended = others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            ended.fold(own, Result::and)
        })
    }

    fn run_task(&self, task: Task<'_>, cancelled: &Cancellation) -> Result<(), DataError> {
        let group = self.groups[task.group];
        if group.rows == 0 {
            return Ok(());
        }
        let file = &self.files[group.file];
        let selected = &self.selected()[task.column];
        let leaf = &file.leaves[selected.leaf];
        let metadata = file.metadata.row_group(group.index).column(selected.leaf);
        let codec = Codec::new(metadata.compression_codec()).map_err(|found| {
            let expected = format!("a codec that this build supports for column {:?}", selected.name);
            DataError::layout(file.source.path(), expected, found)
        })?;
        let opened = self.opened.get(group.file, || file.source.open())?;
        let place = ChunkPlace::new(opened, selected.name.clone(), group.index);
        let levels = u64::try_from(metadata.num_values()).unwrap_or(0);
        // `check` in `footer.rs` has already made sure that there is a range.
        let range = chunk_range(metadata).unwrap_or_default();
        let pages = Pages::new(
            place.clone(),
            leaf.descriptor.clone(),
            codec,
            range,
            levels,
            self.options.verify_crc,
            self.buffers.clone(),
        );
        let chunk = Chunk {
            leaf,
            element: task.element,
            nulls: &selected.nulls,
            place,
            rows: group.rows,
            levels,
            max_bytes: self.options.max_column_bytes,
            cancelled,
        };
        match task.target {
            Target::Flat(out, mask) => chunk.read_into(pages, out, mask),
            Target::Lists(array) => {
                *array = chunk.read(pages, std::mem::take(&mut array.values))?;
                Ok(())
            }
        }
    }

    /// Drops the offsets of lists that all must have the length set by `list_size`.
    fn with_list_size(&self, column: usize, group: Option<usize>, array: Array) -> Result<Array, DataError> {
        let selected = &self.selected()[column];
        let Some(size) = selected.list_size else { return Ok(array) };
        if let Some(group) = group.filter(|_| array.rows > 0) {
            let right = |length| if length == size as i64 { Ok(()) } else { Err((0, length)) };
            array.uniform().and_then(right).map_err(|(row, length)| {
                let Part { file, index, .. } = self.groups[group];
                let expected = format!("lists of {size} values in column {:?}", selected.name);
                let found = format!("one of {length} in row {row} of row group {index}");
                DataError::layout(self.files[file].source.path(), expected, found)
            })?;
        }
        Ok(Array { per_row: Some(size), offsets: Vec::new(), ..array })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_stops_when_cancelled() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet");
        let dataset = ParquetDataset::from_files([folder.join("nested.parquet")]).unwrap();
        let dataset = dataset.select(["ints", "deep", "words", "category", "date"]).unwrap();
        let (spare, cancelled) = (Spare::default(), Cancellation::new());
        assert!(dataset.decode(&[0, 1], &cancelled).is_ok());
        cancelled.cancel();
        assert!(matches!(dataset.decode(&[0, 1], &cancelled), Err(DataError::Cancelled)));
        // Every kind of column checks it again and again while it is decoded.
        for column in 0..5 {
            assert!(matches!(dataset.decode_chunk(0, column, &spare, &cancelled), Err(DataError::Cancelled)));
        }
    }

    /// Nothing is joined before rows are gathered for a batch.
    #[test]
    fn lists_and_strings_are_decoded_where_they_stay() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet");
        let dataset = ParquetDataset::from_files([folder.join("nested.parquet")]).unwrap();
        let dataset = dataset.select(["ints", "deep", "words"]).unwrap();
        let spare = Spare::default();
        let memory = (0..6).map(|_| {
            let words = Words::new(1 << 16).unwrap();
            let address = words.bytes().as_ptr();
            spare.give(words, 6);
            address
        });
        let memory: Vec<*const u8> = memory.collect();
        for (group, column) in [0, 1].into_iter().flat_map(|group| (0..3).map(move |column| (group, column))) {
            let array = dataset.decode_chunk(group, column, &spare, &Cancellation::default()).unwrap();
            assert!(memory.contains(&array.values.bytes().as_ptr()));
        }
    }
}
