//! Rows of Arrow files, by index and as tensors.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_schema::Schema;

use super::columns::ArrowColumns;
use super::file::{ArrowFile, Backing};
use super::layout::Leaf;
use super::message::Arrays;
use super::unpack::Unpacked;
use crate::DataError;
use crate::columns::{Array, Field, Recent, Table};
use crate::shards::matching;

/// How many record batches stay decompressed, or with their headers parsed.
const KEPT_BATCHES: usize = 8;
/// The default of [`ArrowDataset::max_column_bytes`]: 4 GiB.
const MAX_COLUMN_BYTES: u64 = 1 << 32;

/// Arrow IPC files or streams of one schema: rows by index, or record batches as tensors.
///
/// The files are memory-mapped: opening reads the headers of the record batches, and a row costs as much as its values,
/// wherever it is. They must not get shorter while they are open, see [`MappedFile`](overdrive_ffi::MappedFile). Where
/// buffers are compressed, by LZ4 or zstd, the latest record batches are kept decompressed.
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_array::{ArrayRef, FixedSizeListArray, Int64Array, RecordBatch, types::Float32Type};
/// # let vectors = [0.5, 1.5].map(|x| Some([Some(x), Some(2.0)]));
/// # let vectors = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(vectors, 2);
/// # let columns: [(&str, ArrayRef); 2] =
/// #     [("label", Arc::new(Int64Array::from(vec![3, 7]))), ("vector", Arc::new(vectors))];
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("train.arrow");
/// # let batch = RecordBatch::try_from_iter(columns)?;
/// # let mut writer = overdrive_dataload::ArrowWriter::create(&path, batch.schema())?;
/// # writer.write(&batch)?;
/// # writer.finish()?;
/// use overdrive_dataload::{ArrowDataset, DataError, DataLoader, Dataset};
///
/// let dataset = ArrowDataset::from_files([&path])?.select(["vector", "label"])?;
/// assert_eq!((dataset.len(), dataset.get(1)?.int("label")), (2, Some(7)));
/// // Batches of rows, in any order.
/// let samples = dataset.clone().map(|row| {
///     let missing = |name| DataError::other(format!("no {name}"));
///     let vector = row.tensor("vector").ok_or_else(|| missing("vector"))?.shallow_clone();
///     Ok((vector, row.int("label").ok_or_else(|| missing("label"))?))
/// });
/// let (vectors, labels) = DataLoader::builder(samples).batch_size(2).build()?.iter().next().unwrap()?;
/// assert_eq!((vectors.size(), labels.size()), (vec![2, 2], vec![2]));
/// // Or whole columns.
/// assert_eq!(dataset.read()?.tensor("vector")?.size(), [2, 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Columns become tensors as [`ArrowColumns`] says. It is a [`Dataset`](crate::Dataset) of rows, and an
/// [`IterableDataset`](crate::IterableDataset) whose shards are the record batches; so is the result of
/// [`map`](Self::map). Files elsewhere (URLs) are fetched whole into the cache when they are opened, and mapped there.
///
/// # Source
/// `datasets.Dataset.from_file`, `datasets.load_from_disk`; `pyarrow.ipc.open_file` and `open_stream` over a
/// `pyarrow.memory_map`.
#[derive(Clone)]
#[doc(alias = "Feather")]
pub struct ArrowDataset {
    pub(super) files: Arc<[ArrowFile]>,
    pub(super) batches: Arc<[Place]>,
    pub(super) columns: ArrowColumns,
    recent: Arc<Recent<usize, Loaded>>,
    max_column_bytes: u64,
}

/// A record batch, and the position of its rows in the dataset.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) file: usize,
    /// The index of the batch in its file.
    pub(super) index: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// A record batch whose header is parsed, and whose selected columns are decompressed.
struct Loaded {
    arrays: Arrays,
    unpacked: Unpacked,
}

impl ArrowDataset {
    /// Opens the files that match a pattern of braces and globs; see [`expand_shards`](crate::expand_shards).
    ///
    /// # Errors
    /// As [`expand_shards`](crate::expand_shards), and as [`from_files`](Self::from_files).
    pub fn open(pattern: &str) -> Result<Self, DataError> {
        Self::from_files(matching(pattern)?)
    }

    /// Opens a list of files, each in IPC's file format or its stream format, and reads the headers of their record
    /// batches.
    ///
    /// # Errors
    /// [`DataError::Io`] with the path; [`DataError::InvalidOption`] for an empty list; [`DataError::Corrupt`] for a
    /// file that is truncated or contradicts its format; [`DataError::Layout`] for one with other columns than the
    /// first, with values in another byte order or with a dictionary that changes, and for what is no regular file;
    /// [`DataError::TooLarge`] for a header above 64 MiB, or a dictionary above 4 GiB.
    pub fn from_files(files: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Self, DataError> {
        Self::new(files.into_iter().map(|path| ArrowFile::open(path.into().into(), MAX_COLUMN_BYTES)))
    }

    /// A file or stream that is already in memory; `path` only names it in errors.
    ///
    /// # Errors
    /// As [`from_files`](Self::from_files).
    pub fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self, DataError> {
        Self::new([ArrowFile::new(path.into(), Backing::Memory(bytes), MAX_COLUMN_BYTES)].into_iter())
    }

    fn new(opened: impl Iterator<Item = Result<ArrowFile, DataError>>) -> Result<Self, DataError> {
        let (mut files, mut batches, mut first_row) = (Vec::<ArrowFile>::new(), Vec::new(), 0usize);
        for file in opened {
            let file = file?;
            if let Some(first) = files.first() {
                same_columns(first, &file)?;
            }
            for (index, &(_, rows)) in file.batches.iter().enumerate() {
                batches.push(Place { file: files.len(), index, first_row, rows });
                first_row = first_row.checked_add(rows).ok_or_else(|| {
                    DataError::layout(&file.path, "rows that can be counted", format!("{rows} rows in batch {index}"))
                })?;
            }
            files.push(file);
        }
        let Some(first) = files.first() else { return Err(DataError::option("files", "at least one file", 0)) };
        let columns = ArrowColumns::new(&first.schema);
        let (recent, max_column_bytes) = (Arc::new(Recent::new(KEPT_BATCHES)), MAX_COLUMN_BYTES);
        Ok(Self { files: files.into(), batches: batches.into(), columns, recent, max_column_bytes })
    }

    /// Reads only these columns, in this order; see [`ArrowColumns::select`].
    ///
    /// # Errors
    /// As [`ArrowColumns::select`].
    ///
    /// # Source
    /// `datasets.Dataset.select_columns`.
    #[doc(alias = "select_columns")]
    pub fn select<N: AsRef<str>>(self, columns: impl IntoIterator<Item = N>) -> Result<Self, DataError> {
        self.with_columns(|all| all.select(columns))
    }

    /// Reads nulls of a column of numbers as `value`; see [`ArrowColumns::fill_null`].
    ///
    /// # Errors
    /// As [`ArrowColumns::fill_null`].
    pub fn fill_null(self, column: &str, value: f64) -> Result<Self, DataError> {
        self.with_columns(|columns| columns.fill_null(column, value))
    }

    /// Reads nulls of a column of strings or binary values as `value`; see [`ArrowColumns::fill_null_bytes`].
    ///
    /// # Errors
    /// As [`ArrowColumns::fill_null_bytes`].
    pub fn fill_null_bytes(self, column: &str, value: &[u8]) -> Result<Self, DataError> {
        self.with_columns(|columns| columns.fill_null_bytes(column, value))
    }

    /// Reads nulls of a column as zeros, or as empty, and adds a column that says where they are; see
    /// [`ArrowColumns::mask_null`].
    ///
    /// # Errors
    /// As [`ArrowColumns::mask_null`].
    pub fn mask_null(self, column: &str) -> Result<Self, DataError> {
        self.with_columns(|columns| columns.mask_null(column))
    }

    /// The most bytes that one column of what is read at once may take in memory; 4 GiB unless set.
    pub fn max_column_bytes(mut self, bytes: u64) -> Self {
        self.max_column_bytes = bytes;
        self
    }

    fn with_columns(
        mut self,
        change: impl FnOnce(ArrowColumns) -> Result<ArrowColumns, DataError>,
    ) -> Result<Self, DataError> {
        self.columns = change(self.columns)?;
        // Only selected columns are decompressed.
        self.recent = Arc::new(Recent::new(KEPT_BATCHES));
        Ok(self)
    }

    /// The selected columns, in order; all columns of the files unless [`select`](Self::select) was called.
    pub fn fields(&self) -> impl ExactSizeIterator<Item = &Field> {
        self.columns.fields()
    }

    /// The first file's schema, with its metadata: that of Hugging Face's `datasets` has the key `huggingface`.
    pub fn schema(&self) -> &Schema {
        &self.files[0].schema
    }

    /// The files, in order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| &*file.path)
    }

    /// How many rows the files have.
    pub fn rows(&self) -> usize {
        self.batches.last().map_or(0, |batch| batch.first_row + batch.rows)
    }

    /// The number of rows of each record batch, file after file.
    pub fn record_batches(&self) -> impl ExactSizeIterator<Item = usize> {
        self.batches.iter().map(|batch| batch.rows)
    }

    /// Reads all rows of the selected columns.
    ///
    /// # Errors
    /// [`DataError::Corrupt`] with file, byte, column and row; [`DataError::Layout`] for a null without a
    /// [`fill_null`](Self::fill_null) or [`mask_null`](Self::mask_null), and for values that have no
    /// [`Kind`](tch::Kind); [`DataError::TooLarge`]; [`DataError::Io`].
    ///
    /// # Source
    /// `pyarrow.ipc.RecordBatchFileReader.read_all`.
    pub fn read(&self) -> Result<Table, DataError> {
        self.read_record_batches(&(0..self.batches.len()).collect::<Vec<_>>())
    }

    /// Reads the rows of some record batches, in the order of `batches`.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for a record batch that does not exist; as [`read`](Self::read).
    ///
    /// # Source
    /// `pyarrow.ipc.RecordBatchFileReader.get_batch`.
    pub fn read_record_batches(&self, batches: &[usize]) -> Result<Table, DataError> {
        let (mut rows, mut read) = (0usize, Vec::new());
        for &batch in batches {
            let len = self.batches.len();
            let place = self.batches.get(batch).ok_or(DataError::IndexOutOfRange { index: batch, len })?;
            rows = rows.saturating_add(place.rows);
            read.push(self.arrays(batch, 0..place.rows)?);
        }
        let columns = join(read, self.columns.empty()?)?;
        let (names, arrays): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
        Ok(Table::new(names.into_iter(), arrays, rows, false)?.with_masks(self.columns.masks()))
    }

    /// Rows of the selected columns of a record batch.
    pub(super) fn arrays(&self, batch: usize, rows: Range<usize>) -> Result<Vec<(Arc<str>, Array)>, DataError> {
        let Place { file: number, index, .. } = self.batches[batch];
        let file = &self.files[number];
        let leaves = || self.columns.selected().iter().map(|selected| self.columns.leaf(selected));
        let loaded = self.recent.get(batch, || {
            let arrays = file.arrays(index)?;
            let unpacked = file.unpack(&arrays, leaves(), self.max_column_bytes)?;
            Ok(Loaded { arrays, unpacked })
        })?;
        let mut columns = Vec::with_capacity(self.columns.selected().len());
        for selected in self.columns.selected() {
            let leaf = self.columns.leaf(selected);
            let nodes = match leaf.stored() {
                Some(_) => file.nodes(&loaded.arrays, &loaded.unpacked, leaf)?,
                None => Vec::new(),
            };
            let read = selected.read(leaf, &nodes, rows.clone(), file.dictionary(leaf), self.max_column_bytes);
            columns.extend(read.or_else(|bad| {
                let described = selected.describe(bad)?;
                let found = format!("{} of record batch {index}", described.found);
                Err(match described.is_damage {
                    true => DataError::corrupt(
                        &file.path,
                        file.batches[index].0.body.start as u64,
                        described.expected,
                        found,
                    ),
                    false => DataError::layout(&file.path, described.expected, found),
                })
            })?);
        }
        Ok(columns)
    }
}

/// Joins the tables of several record batches, column by column; `empty` if there are none.
fn join(read: Vec<Vec<(Arc<str>, Array)>>, empty: Vec<(Arc<str>, Array)>) -> Result<Vec<(Arc<str>, Array)>, DataError> {
    let mut columns: Vec<(Arc<str>, Vec<Array>)> = empty.iter().map(|(name, _)| (name.clone(), Vec::new())).collect();
    for batch in read {
        columns.iter_mut().zip(batch).for_each(|((_, pieces), (_, array))| pieces.push(array));
    }
    let joined = columns.into_iter().zip(empty).map(|((name, pieces), (_, empty))| match pieces.len() {
        0 => Ok((name, empty)),
        _ => Ok((name, Array::concat(pieces)?)),
    });
    joined.collect()
}

fn same_columns(first: &ArrowFile, file: &ArrowFile) -> Result<(), DataError> {
    let is_unlike = |first: &Leaf, leaf: &Leaf| first.field.name() != leaf.field.name() || first.levels != leaf.levels;
    let differs = first.leaves.iter().zip(&file.leaves).find(|(first, leaf)| is_unlike(first, leaf));
    let describe = |leaf: &Leaf| format!("{:?} of {:?}", leaf.field.name(), leaf.field.kind());
    match differs {
        Some((first, leaf)) => {
            let expected = format!("the first file's column {}", describe(first));
            Err(DataError::layout(&file.path, expected, describe(leaf)))
        }
        None if first.leaves.len() != file.leaves.len() => {
            let expected = format!("the first file's {} columns", first.leaves.len());
            Err(DataError::layout(&file.path, expected, file.leaves.len().to_string()))
        }
        None => Ok(()),
    }
}
