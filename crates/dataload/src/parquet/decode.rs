//! Decodes column chunks in parallel.

use std::cmp::Reverse;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::chunk::Chunk;
use super::codec::Codec;
use super::dataset::{Group, ParquetDataset, Selected};
use super::footer::chunk_range;
use super::pages::{ChunkPlace, Pages};
use crate::columns::{Array, Element, FieldKind, Spare, Words};
use crate::{Cancellation, DataError};

/// A column chunk to decode, and where its values go.
struct Task<'a> {
    selected: &'a Selected,
    element: Element,
    group: usize,
    packed_bytes: i64,
    target: Target<'a>,
}

enum Target<'a> {
    /// A slice of the column's final memory.
    Flat(&'a mut [u8]),
    /// An array of the row group's own, whose memory is there before it is read.
    Lists(&'a mut Array),
}

/// A column that is being decoded.
enum Begun {
    Flat(Words),
    Lists(Vec<Array>),
}

impl ParquetDataset {
    /// Decodes the selected columns of some row groups, in order, reusing memory of `spare` where it is large enough:
    /// each column as arrays one behind the other, one of numbers, or one for each row group of lists and strings.
    pub(super) fn decode(
        &self,
        groups: &[usize],
        threads: usize,
        spare: &Spare,
        cancelled: &Cancellation,
    ) -> Result<Vec<Vec<Array>>, DataError> {
        let len = self.groups.len();
        if let Some(&index) = groups.iter().find(|&&group| group >= len) {
            return Err(DataError::IndexOutOfRange { index, len });
        }
        cancelled.check()?;
        self.decoded.fetch_add(groups.len() as u64, Relaxed);
        let elements = self.columns.iter().map(|selected| self.element(selected));
        let elements = elements.collect::<Result<Vec<Element>, _>>()?;
        let rows = groups.iter().try_fold(0usize, |rows, &group| rows.checked_add(self.groups[group].rows));
        let rows = rows.ok_or_else(|| DataError::option("row groups", "rows that can be counted", "more"))?;

        let mut columns = Vec::with_capacity(elements.len());
        for (selected, &element) in self.columns.iter().zip(&elements) {
            columns.push(if self.is_flat(selected, element) {
                for &group in groups {
                    self.check_bytes(group, element)?;
                }
                Begun::Flat(spare.take(rows.saturating_mul(element.bytes()))?)
            } else {
                let (levels, leaf) = (self.levels(selected, element), selected.leaf);
                let begin = |&group| {
                    let memory = spare.take_empty(self.uncompressed_bytes(group, leaf));
                    Array::of_lists(element, vec![vec![0]; levels], memory)
                };
                Begun::Lists(groups.iter().map(begin).collect())
            });
        }
        self.run(self.tasks(groups, &elements, &mut columns), threads, cancelled)?;

        let finish = |((column, selected), &element): ((Begun, &Selected), &Element)| match column {
            Begun::Flat(values) => Ok(vec![Array { element, rows, per_row: None, offsets: Vec::new(), values }]),
            Begun::Lists(arrays) if arrays.is_empty() => {
                let empty = Array::empty(element, self.levels(selected, element));
                Ok(vec![self.with_list_size(selected, None, empty)?])
            }
            Begun::Lists(arrays) => {
                let sized = |(array, &group)| self.with_list_size(selected, Some(group), array);
                arrays.into_iter().zip(groups).map(sized).collect()
            }
        };
        columns.into_iter().zip(&*self.columns).zip(&elements).map(finish).collect()
    }

    /// Decodes one column of a row group, as [`decode`](Self::decode) does.
    pub(super) fn decode_chunk(
        &self,
        group: usize,
        column: usize,
        spare: &Spare,
        cancelled: &Cancellation,
    ) -> Result<Array, DataError> {
        let selected = &self.columns[column];
        let (element, rows) = (self.element(selected)?, self.groups[group].rows);
        let task = |target| Task { selected, element, group, packed_bytes: 0, target };
        if self.is_flat(selected, element) {
            self.check_bytes(group, element)?;
            let mut values = spare.take(rows.saturating_mul(element.bytes()))?;
            self.run_task(task(Target::Flat(values.bytes_mut())), cancelled)?;
            return Ok(Array { element, rows, per_row: None, offsets: Vec::new(), values });
        }
        let memory = spare.take_empty(self.uncompressed_bytes(group, selected.leaf));
        let mut array = Array::of_lists(element, vec![vec![0]; self.levels(selected, element)], memory);
        self.run_task(task(Target::Lists(&mut array)), cancelled)?;
        self.with_list_size(selected, Some(group), array)
    }

    /// The bytes of a column of a row group in its file.
    pub(super) fn packed_bytes(&self, group: usize, column: usize) -> i64 {
        let Group { file, index, .. } = self.groups[group];
        self.files[file].metadata.row_group(index).column(self.columns[column].leaf).compressed_size()
    }

    /// The levels of lists of a column that is not flat; strings are lists of bytes.
    fn levels(&self, selected: &Selected, element: Element) -> usize {
        self.leaf(selected).field.lists() + usize::from(element == Element::Bytes)
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
    fn is_flat(&self, selected: &Selected, element: Element) -> bool {
        self.leaf(selected).field.lists() == 0 && element != Element::Bytes
    }

    /// About how many bytes a row group's selected columns take when they are decoded.
    pub(super) fn decoded_bytes(&self, group: usize) -> usize {
        let bytes = |selected: &Selected| match self.leaf(selected).element {
            Some(element) if self.is_flat(selected, element) => self.groups[group].rows.saturating_mul(element.bytes()),
            _ => self.uncompressed_bytes(group, selected.leaf),
        };
        self.columns.iter().map(bytes).fold(0, usize::saturating_add)
    }

    fn uncompressed_bytes(&self, group: usize, leaf: usize) -> usize {
        let Group { file, index, .. } = self.groups[group];
        let chunk = self.files[file].metadata.row_group(index).column(leaf);
        usize::try_from(chunk.uncompressed_size()).unwrap_or(0)
    }

    fn check_bytes(&self, group: usize, element: Element) -> Result<(), DataError> {
        let group = self.groups[group];
        let (bytes, limit) = (group.rows.saturating_mul(element.bytes()) as u64, self.options.max_column_bytes);
        match bytes <= limit {
            true => Ok(()),
            false => {
                let (path, what) = (self.files[group.file].source.path().to_owned(), "a column of a row group");
                Err(DataError::TooLarge { path, what, bytes, limit })
            }
        }
    }

    fn tasks<'a>(&'a self, groups: &[usize], elements: &[Element], columns: &'a mut [Begun]) -> Vec<Task<'a>> {
        let mut tasks = Vec::with_capacity(groups.len() * columns.len());
        for (number, ((selected, &element), column)) in self.columns.iter().zip(elements).zip(columns).enumerate() {
            let (mut flat, mut lists) = match column {
                Begun::Flat(values) => (values.bytes_mut(), [].iter_mut()),
                Begun::Lists(arrays) => (&mut [][..], arrays.iter_mut()),
            };
            for &group in groups {
                let target = match lists.next() {
                    Some(array) => Target::Lists(array),
                    None => {
                        let (here, tail) = flat.split_at_mut(self.groups[group].rows * element.bytes());
                        flat = tail;
                        Target::Flat(here)
                    }
                };
                tasks.push(Task { selected, element, group, packed_bytes: self.packed_bytes(group, number), target });
            }
        }
        // The largest first, so that no thread is still busy with one when the others are done.
        tasks.sort_by_key(|task| Reverse(task.packed_bytes));
        tasks
    }

    fn run(&self, tasks: Vec<Task<'_>>, threads: usize, cancelled: &Cancellation) -> Result<(), DataError> {
        let threads = threads.min(tasks.len());
        if threads <= 1 {
            return tasks.into_iter().try_for_each(|task| self.run_task(task, cancelled));
        }
        let tasks = Mutex::new(tasks.into_iter());
        let failed = Mutex::new(None);
        let work = || {
            loop {
                let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(task) = task else { return };
                if let Err(error) = self.run_task(task, cancelled) {
                    // Drop the remaining tasks.
                    tasks.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            }
        };
        thread::scope(|scope| {
            for worker in 1..threads {
                let thread = thread::Builder::new().name(format!("parquet-{worker}"));
                // If no thread can be started, the calling thread does the work.
                if let Err(error) = thread.spawn_scoped(scope, work) {
                    tracing::warn!(worker, %error, "a decoding thread could not be started");
                }
            }
            work();
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    fn run_task(&self, task: Task<'_>, cancelled: &Cancellation) -> Result<(), DataError> {
        let group = self.groups[task.group];
        if group.rows == 0 {
            return Ok(());
        }
        let file = &self.files[group.file];
        let (leaf, metadata) = (&file.leaves[task.selected.leaf], file.metadata.row_group(group.index));
        let metadata = metadata.column(task.selected.leaf);
        let codec = Codec::new(metadata.compression_codec()).map_err(|found| {
            let expected = format!("a codec that this build supports for column {:?}", task.selected.name);
            DataError::layout(file.source.path(), expected, found)
        })?;
        let opened = self.opened.get(group.file, || file.source.open())?;
        let place = ChunkPlace::new(opened, task.selected.name.clone(), group.index);
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
            fill: task.selected.fill.as_deref(),
            place,
            rows: group.rows,
            levels,
            max_bytes: self.options.max_column_bytes,
            cancelled,
        };
        match task.target {
            Target::Flat(out) => chunk.read_into(pages, out),
            Target::Lists(array) => {
                *array = chunk.read(pages, std::mem::take(&mut array.values))?;
                Ok(())
            }
        }
    }

    /// Drops the offsets of lists that all must have the length set by `list_size`.
    fn with_list_size(&self, selected: &Selected, group: Option<usize>, array: Array) -> Result<Array, DataError> {
        let Some(size) = selected.list_size else { return Ok(array) };
        if let Some(group) = group.filter(|_| array.rows > 0) {
            let right = |length| if length == size as i64 { Ok(()) } else { Err((0, length)) };
            array.uniform().and_then(right).map_err(|(row, length)| {
                let Group { file, index, .. } = self.groups[group];
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
        assert!(dataset.decode(&[0, 1], 2, &spare, &cancelled).is_ok());
        let elements: Vec<Element> = dataset.columns.iter().map(|column| dataset.element(column).unwrap()).collect();
        cancelled.cancel();
        assert!(matches!(dataset.decode(&[0, 1], 2, &spare, &cancelled), Err(DataError::Cancelled)));
        // Every kind of column checks it again and again while it is decoded.
        let mut columns: Vec<Begun> = dataset
            .columns
            .iter()
            .zip(&elements)
            .map(|(column, &element)| match dataset.is_flat(column, element) {
                true => Begun::Flat(Words::new(25 * element.bytes()).unwrap()),
                false => Begun::Lists(vec![Array::empty(element, dataset.levels(column, element))]),
            })
            .collect();
        let tasks = dataset.tasks(&[0], &elements, &mut columns);
        assert_eq!(tasks.len(), 5);
        for task in tasks {
            assert!(matches!(dataset.run_task(task, &cancelled), Err(DataError::Cancelled)));
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
        let columns = dataset.decode(&[0, 1], 1, &spare, &Cancellation::default()).unwrap();
        assert!(columns.iter().all(|arrays| arrays.len() == 2));
        assert!(columns.iter().flatten().all(|array| memory.contains(&array.values.bytes().as_ptr())));
    }
}
