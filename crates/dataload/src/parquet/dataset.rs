//! Parquet files of one schema, with the selected columns and options.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ::parquet::file::metadata::ParquetMetaData;

use super::batches::ParquetBatches;
use super::buffers::Buffers;
use super::field::{Leaf, leaves};
use super::file::{ClosedFile, OpenFile};
use super::footer::read_footer;
use crate::columns::{Array, Element, Field, Parts, Recent, Selected, Selection, Table, same_columns};
use crate::shards::{listed, matching};
use crate::{Cancellation, DataError};

/// How many row groups stay decoded for access to single rows.
const KEPT_GROUPS: usize = 4;
/// How many files stay open. A process may often have 1024 files open, and a dataset more files than that.
const KEPT_OPEN: usize = 64;
/// The default of [`ParquetDataset::max_column_bytes`]: 4 GiB.
const MAX_COLUMN_BYTES: u64 = 1 << 32;

/// Parquet files of one schema: whole columns as tensors, rows in any order, or shuffled batches.
///
/// ```no_run
/// use overdrive_dataload::ParquetDataset;
///
/// let dataset = ParquetDataset::open("train-{000..127}.parquet")?.select(["label", "tokens"])?;
/// // All rows at once: as fast as the columns can be decompressed.
/// let table = dataset.read()?;
/// let labels = table.tensor("label")?;
/// let (tokens, lengths) = table.ragged("tokens")?.to_padded(0.0, Some(512))?;
/// // Or shuffled batches, with the rows of eight row groups mixed.
/// for batch in dataset.batches(1024)?.shuffle(true).seed(1).window(8).epoch(0) {
///     let labels = batch?.tensor("label")?;
/// }
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// The columns of a structure are separate columns, `structure.column`. `uint16` becomes [`Kind::Int`](tch::Kind) and
/// `uint32` [`Kind::Int64`](tch::Kind), which hold every value; dates, times and timestamps are read as their stored
/// numbers. A null is an error unless [`fill_null`](Self::fill_null) or [`mask_null`](Self::mask_null) says what it
/// becomes.
///
/// It is also a [`Dataset`](crate::Dataset) of rows, which keeps the latest row groups in memory, and an
/// [`IterableDataset`](crate::IterableDataset) whose shards are the row groups; so is the result of [`map`](Self::map).
///
/// # Source
/// `pyarrow.parquet.ParquetDataset`, `ParquetFile` and `read_table`.
#[derive(Clone)]
pub struct ParquetDataset {
    pub(super) files: Arc<[ParquetFile]>,
    pub(super) opened: Arc<Recent<usize, OpenFile>>,
    pub(super) groups: Parts,
    pub(super) columns: Selection<Leaf>,
    pub(super) options: Options,
    pub(super) buffers: Buffers,
    pub(super) recent: Arc<Recent<usize, Vec<Array>>>,
    /// How many row groups all clones together have decoded.
    pub(super) decoded: Arc<AtomicU64>,
}

/// One file, whose footer has been read.
pub(super) struct ParquetFile {
    pub(super) source: ClosedFile,
    pub(super) metadata: ParquetMetaData,
    pub(super) leaves: Vec<Leaf>,
}

#[derive(Clone, Copy)]
pub(super) struct Options {
    pub(super) verify_crc: bool,
    pub(super) max_column_bytes: u64,
    pub(super) threads: usize,
}

impl ParquetDataset {
    /// Opens the files that match a pattern of braces and globs; see [`expand_shards`](crate::expand_shards).
    ///
    /// # Errors
    /// As [`expand_shards`](crate::expand_shards), and as [`from_files`](Self::from_files).
    pub fn open(pattern: &str) -> Result<Self, DataError> {
        Self::from_files(matching(pattern)?)
    }

    /// Opens a list of files, and reads their footers.
    ///
    /// # Errors
    /// [`DataError::Io`] with the path, for a missing file; [`DataError::InvalidOption`] for an empty list;
    /// [`DataError::Corrupt`] and [`DataError::TooLarge`] for a bad footer; [`DataError::Layout`] for an encrypted
    /// footer, and for a file with other columns than the first.
    pub fn from_files(files: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Self, DataError> {
        Self::new(listed(files)?.into_iter().map(|path| OpenFile::new(path.into())))
    }

    /// A file that is already in memory; `path` only names it in errors.
    ///
    /// # Errors
    /// As [`from_files`](Self::from_files).
    pub fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self, DataError> {
        Self::new([Ok(OpenFile::from_bytes(bytes, path))].into_iter())
    }

    fn new(sources: impl ExactSizeIterator<Item = Result<OpenFile, DataError>>) -> Result<Self, DataError> {
        let mut files: Vec<ParquetFile> = Vec::with_capacity(sources.len());
        let mut groups = Parts::default();
        for source in sources {
            let source = source?;
            let metadata = read_footer(&source)?;
            let leaves = leaves(metadata.file_metadata().schema_descr());
            same_columns(files.first().map_or(&leaves, |first| &first.leaves), &leaves, source.path())?;
            let rows = metadata.row_groups().iter().map(|group| usize::try_from(group.num_rows()).ok());
            groups.add(files.len(), source.path(), rows)?;
            files.push(ParquetFile { source: source.close(), metadata, leaves });
        }
        let columns = Selection::new(files[0].leaves.clone(), Some(files[0].source.path().into()));
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            files: files.into(),
            opened: Arc::new(Recent::new(KEPT_OPEN)),
            groups,
            columns,
            options: Options { verify_crc: true, max_column_bytes: MAX_COLUMN_BYTES, threads },
            buffers: Buffers::default(),
            recent: Arc::new(Recent::new(KEPT_GROUPS)),
            decoded: Arc::default(),
        })
    }

    /// Reads only these columns, in this order. The name of a structure selects all its columns.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a column that does not exist.
    ///
    /// # Source
    /// `columns` of `pyarrow.parquet.read_table`.
    #[doc(alias = "columns")]
    pub fn select<N: AsRef<str>>(self, columns: impl IntoIterator<Item = N>) -> Result<Self, DataError> {
        self.with_columns(|all| all.select(columns))
    }

    /// Reads nulls of a column of numbers as `value`, and null lists as empty ones. Call it after
    /// [`select`](Self::select).
    ///
    /// # Errors
    /// [`DataError::Layout`] for a column that is not selected; [`DataError::InvalidOption`] for a column of strings or
    /// binary values (see [`fill_null_bytes`](Self::fill_null_bytes)), and for a value that the column's kind cannot
    /// hold.
    ///
    /// # Source
    /// `pyarrow.compute.fill_null`.
    pub fn fill_null(self, column: &str, value: f64) -> Result<Self, DataError> {
        self.with_columns(|columns| columns.fill_null(column, value))
    }

    /// Reads nulls of a column of strings or binary values as `value`, and null lists as empty ones. Call it after
    /// [`select`](Self::select).
    ///
    /// # Errors
    /// [`DataError::Layout`] for a column that is not selected; [`DataError::InvalidOption`] for a column of numbers,
    /// and for a value of another length where the length is fixed.
    pub fn fill_null_bytes(self, column: &str, value: &[u8]) -> Result<Self, DataError> {
        self.with_columns(|columns| columns.fill_null_bytes(column, value))
    }

    /// Reads nulls of a column as zeros, or as empty, and adds the column `column.is_null`, which says where they are.
    /// Call it after [`select`](Self::select).
    ///
    /// Nulls within lists stay errors, because the mask has one entry per row. A null list is an empty one, so with
    /// [`list_size`](Self::list_size) it is an error too.
    ///
    /// # Shapes
    /// The column of nulls: bool `[N]`; of a single [`Row`](crate::Row), 0 or 1.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a column that is not selected; [`DataError::InvalidOption`] where the files have a column
    /// of that name.
    ///
    /// # Source
    /// `pyarrow.compute.is_null`.
    #[doc(alias = "is_null")]
    pub fn mask_null(self, column: &str) -> Result<Self, DataError> {
        self.with_columns(|columns| columns.mask_null(column))
    }

    /// Reads a column of lists of `length` numbers each as a tensor with one row per list. Call it after
    /// [`select`](Self::select).
    ///
    /// Parquet has no type for lists of fixed length, so the files do not say that the lists have one.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a column that is not selected; [`DataError::InvalidOption`] for a column that does not
    /// hold plain lists of numbers.
    pub fn list_size(self, column: &str, length: usize) -> Result<Self, DataError> {
        let leaf = self.columns.find(column)?;
        let numbers = !matches!(leaf.element, None | Some(Element::Bytes | Element::Fixed(_)));
        if leaf.field.lists() != 1 || !numbers {
            let found = format!("{} lists of {:?}", leaf.field.lists(), leaf.field.kind());
            return Err(DataError::option("list_size", "a column with one list of numbers per row", found));
        }
        self.with_columns(|columns| columns.changed(column, |selected| selected.list_size = Some(length)))
    }

    /// Whether the checksums of pages are verified, where the file has them; on unless set.
    pub fn verify_crc(mut self, verify: bool) -> Self {
        self.options.verify_crc = verify;
        self
    }

    /// The most bytes that one column of one row group may take in memory; 4 GiB unless set.
    pub fn max_column_bytes(mut self, bytes: u64) -> Self {
        self.options.max_column_bytes = bytes;
        self
    }

    /// How many threads decode; as many as there are cores unless set.
    pub fn threads(mut self, threads: usize) -> Self {
        self.options.threads = threads.max(1);
        self
    }

    /// The selected columns, in order; all columns of the files unless [`select`](Self::select) was called.
    pub fn fields(&self) -> impl ExactSizeIterator<Item = &Field> {
        self.columns.fields()
    }

    /// The files, in order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| file.source.path())
    }

    /// How many rows the files have.
    pub fn rows(&self) -> usize {
        self.groups.rows()
    }

    /// How many row groups have been decoded since the files were opened, by this dataset and by its clones, batches
    /// and loaders. If an epoch decodes more row groups than there are, some were decoded twice.
    pub fn decoded_row_groups(&self) -> u64 {
        self.decoded.load(Relaxed)
    }

    /// The number of rows of each row group, file after file.
    pub fn row_groups(&self) -> impl ExactSizeIterator<Item = usize> {
        self.groups.iter().map(|group| group.rows)
    }

    /// The value of `key` in the first file's key-value metadata.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let pairs = self.files[0].metadata.file_metadata().key_value_metadata()?;
        pairs.iter().find(|pair| pair.key == key)?.value.as_deref()
    }

    /// Reads all rows of the selected columns.
    ///
    /// # Errors
    /// [`DataError::Corrupt`] with file, byte, column and row group; [`DataError::Layout`] for a null without a
    /// [`fill_null`](Self::fill_null) or [`mask_null`](Self::mask_null), a codec that this build does not support, or values that have no
    /// [`Kind`](tch::Kind); [`DataError::TooLarge`]; [`DataError::Io`].
    ///
    /// # Syncs
    /// Blocks until [`threads`](Self::threads) threads have decoded everything.
    ///
    /// # Source
    /// `pyarrow.parquet.read_table`.
    pub fn read(&self) -> Result<Table, DataError> {
        self.read_row_groups(&(0..self.groups.len()).collect::<Vec<_>>())
    }

    /// Reads the rows of some row groups, in the order of `groups`.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for a row group that does not exist; as [`read`](Self::read).
    ///
    /// # Syncs
    /// As [`read`](Self::read).
    ///
    /// # Source
    /// `pyarrow.parquet.ParquetFile.read_row_groups`.
    pub fn read_row_groups(&self, groups: &[usize]) -> Result<Table, DataError> {
        let arrays = self.decode(groups, &Cancellation::default())?;
        let rows = groups.iter().map(|&group| self.groups[group].rows).sum();
        self.table(arrays, rows, false)
    }

    /// Batches of `batch_size` rows, in the files' order unless they are shuffled.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when `batch_size` is 0.
    pub fn batches(&self, batch_size: usize) -> Result<ParquetBatches, DataError> {
        ParquetBatches::new(self.clone(), batch_size)
    }

    pub(super) fn table(&self, arrays: Vec<Array>, rows: usize, pinned: bool) -> Result<Table, DataError> {
        Table::new(self.columns.names(), arrays, rows, pinned)
    }

    /// The selected columns.
    pub(super) fn selected(&self) -> &[Selected] {
        self.columns.selected()
    }

    /// The leaf of a column in the first file; those of the other files are equal.
    pub(super) fn leaf(&self, selected: &Selected) -> &Leaf {
        self.columns.leaf(selected)
    }

    fn with_columns(
        mut self,
        change: impl FnOnce(Selection<Leaf>) -> Result<Selection<Leaf>, DataError>,
    ) -> Result<Self, DataError> {
        self.columns = change(self.columns)?;
        self.recent = Arc::new(Recent::new(KEPT_GROUPS));
        Ok(self)
    }
}
