//! Rows of Arrow files, by index and as tensors.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_schema::Schema;

use super::columns::{ArrowColumns, describe, read};
use super::file::{ArrowFile, Backing};
use super::message::Arrays;
use super::unpack::Unpacked;
use crate::DataError;
use crate::columns::{Array, Field, Part, Parts, Recent, Selected, Table, same_columns};
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
    pub(super) batches: Parts,
    pub(super) columns: ArrowColumns,
    recent: Arc<Recent<usize, Loaded>>,
    max_column_bytes: u64,
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
        let (mut files, mut batches) = (Vec::<ArrowFile>::new(), Parts::default());
        for file in opened {
            let file = file?;
            same_columns(&files.first().unwrap_or(&file).leaves, &file.leaves, &file.path)?;
            batches.add(files.len(), &file.path, file.batches.iter().map(|&(_, rows)| Some(rows)))?;
            files.push(file);
        }
        let Some(first) = files.first() else { return Err(DataError::option("files", "at least one file", 0)) };
        let columns = ArrowColumns::new(&first.schema);
        let (recent, max_column_bytes) = (Arc::new(Recent::new(KEPT_BATCHES)), MAX_COLUMN_BYTES);
        Ok(Self { files: files.into(), batches, columns, recent, max_column_bytes })
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
        self.batches.rows()
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
        let (mut rows, mut columns) = (0usize, Vec::new());
        columns.resize_with(self.columns.fields().len(), Vec::new);
        let mut add = |read: Vec<Array>| columns.iter_mut().zip(read).for_each(|(column, array)| column.push(array));
        for &batch in batches {
            let part = self.batches.get(batch)?;
            rows = rows.saturating_add(part.rows);
            add(self.arrays(batch, 0..part.rows)?);
        }
        if batches.is_empty() {
            add(self.columns.empty()?);
        }
        let arrays = columns.into_iter().map(Array::concat).collect::<Result<_, _>>()?;
        Table::new(self.columns.selection.names(), arrays, rows, false)
    }

    /// Rows of the selected columns of a record batch.
    pub(super) fn arrays(&self, batch: usize, rows: Range<usize>) -> Result<Vec<Array>, DataError> {
        let Part { file: number, index, .. } = self.batches[batch];
        let (file, selection) = (&self.files[number], &self.columns.selection);
        let loaded = self.recent.get(batch, || {
            let arrays = file.arrays(index)?;
            let leaves = selection.selected().iter().map(|selected| selection.leaf(selected));
            let unpacked = file.unpack(&arrays, leaves, self.max_column_bytes)?;
            Ok(Loaded { arrays, unpacked })
        })?;
        let of_column = |selected: &Selected| {
            let leaf = selection.leaf(selected);
            let nodes = match leaf.stored() {
                Some(_) => file.nodes(&loaded.arrays, &loaded.unpacked, leaf)?,
                None => Vec::new(),
            };
            read(selected, leaf, &nodes, rows.clone(), file.dictionary(leaf), self.max_column_bytes).or_else(|bad| {
                let described = describe(&selected.name, bad)?;
                let (at, expected) = (file.batches[index].0.body.start as u64, described.expected);
                let found = format!("{} of record batch {index}", described.found);
                Err(match described.is_damage {
                    true => DataError::corrupt(&file.path, at, expected, found),
                    false => DataError::layout(&file.path, expected, found),
                })
            })
        };
        selection.selected().iter().map(of_column).collect()
    }
}
