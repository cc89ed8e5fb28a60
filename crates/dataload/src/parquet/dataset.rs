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
use crate::columns::{Array, Element, Field, Recent, Spare, Table, encode};
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
/// numbers. A null is an error unless [`fill_null`](Self::fill_null) sets a value for it.
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
    pub(super) groups: Arc<[Group]>,
    /// The selected columns, in order.
    pub(super) columns: Arc<[Selected]>,
    pub(super) options: Options,
    pub(super) buffers: Buffers,
    pub(super) recent: Arc<Recent<usize, Vec<Vec<Array>>>>,
    /// How many row groups all clones together have decoded.
    pub(super) decoded: Arc<AtomicU64>,
}

/// One file, whose footer has been read.
pub(super) struct ParquetFile {
    pub(super) source: ClosedFile,
    pub(super) metadata: ParquetMetaData,
    pub(super) leaves: Vec<Leaf>,
}

/// A row group, and the position of its rows in the dataset.
#[derive(Clone, Copy)]
pub(super) struct Group {
    pub(super) file: usize,
    /// The row group's number in its file.
    pub(super) index: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// A selected column.
#[derive(Clone)]
pub(super) struct Selected {
    pub(super) name: Arc<str>,
    pub(super) leaf: usize,
    pub(super) fill: Option<Arc<[u8]>>,
    /// The length that every list must have.
    pub(super) list_size: Option<usize>,
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
        let mut groups = Vec::new();
        let mut first_row = 0usize;
        for source in sources {
            let source = source?;
            let metadata = read_footer(&source)?;
            let leaves = leaves(metadata.file_metadata().schema_descr());
            if let Some(first) = files.first() {
                same_columns(&first.leaves, &leaves, source.path())?;
            }
            for (index, group) in metadata.row_groups().iter().enumerate() {
                let rows = usize::try_from(group.num_rows()).ok();
                let end = rows.and_then(|rows| first_row.checked_add(rows));
                let (Some(rows), Some(end)) = (rows, end) else {
                    return Err(DataError::layout(
                        source.path(),
                        "rows that can be counted",
                        group.num_rows().to_string(),
                    ));
                };
                groups.push(Group { file: files.len(), index, first_row, rows });
                first_row = end;
            }
            files.push(ParquetFile { source: source.close(), metadata, leaves });
        }
        let columns = files[0].leaves.iter().map(Selected::new).collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            files: files.into(),
            opened: Arc::new(Recent::new(KEPT_OPEN)),
            groups: groups.into(),
            columns,
            options: Options { verify_crc: true, max_column_bytes: MAX_COLUMN_BYTES, threads },
            buffers: Buffers::default(),
            recent: empty_cache(),
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
    pub fn select<N: AsRef<str>>(mut self, columns: impl IntoIterator<Item = N>) -> Result<Self, DataError> {
        let mut selected: Vec<Selected> = Vec::new();
        for name in columns {
            let name = name.as_ref();
            let inside = |leaf: &Leaf| leaf.field.name().strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
            let is_named = |leaf: &Leaf| leaf.field.name() == name || leaf.path == name || inside(leaf);
            let before = selected.len();
            selected.extend(self.files[0].leaves.iter().filter(|leaf| is_named(leaf)).map(Selected::new));
            if selected.len() == before {
                return Err(self.no_column(name));
            }
        }
        self.columns = selected.into();
        self.recent = empty_cache();
        Ok(self)
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
        let element = self.leaf(self.selected(column)?).element;
        let fill = element.and_then(|element| encode(element, value));
        let fill = fill.ok_or_else(|| DataError::option("fill_null", format!("a value of {element:?}"), value))?;
        let fill: Arc<[u8]> = fill.into();
        self.with_column(column, |selected| selected.fill = Some(fill.clone()))
    }

    /// Reads nulls of a column of strings or binary values as `value`, and null lists as empty ones. Call it after
    /// [`select`](Self::select).
    ///
    /// # Errors
    /// [`DataError::Layout`] for a column that is not selected; [`DataError::InvalidOption`] for a column of numbers,
    /// and for a value of another length where the length is fixed.
    pub fn fill_null_bytes(self, column: &str, value: &[u8]) -> Result<Self, DataError> {
        let element = self.leaf(self.selected(column)?).element;
        match element {
            Some(Element::Bytes) => {}
            Some(Element::Fixed(bytes)) if bytes == value.len() => {}
            _ => {
                let found = format!("{} bytes", value.len());
                return Err(DataError::option("fill_null_bytes", format!("a value of {element:?}"), found));
            }
        }
        self.with_column(column, |selected| selected.fill = Some(value.into()))
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
        let leaf = self.leaf(self.selected(column)?);
        let numbers = !matches!(leaf.element, None | Some(Element::Bytes | Element::Fixed(_)));
        if leaf.field.lists() != 1 || !numbers {
            let found = format!("{} lists of {:?}", leaf.field.lists(), leaf.field.kind());
            return Err(DataError::option("list_size", "a column with one list of numbers per row", found));
        }
        self.with_column(column, |selected| selected.list_size = Some(length))
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
        self.columns.iter().map(|selected| &self.leaf(selected).field)
    }

    /// The files, in order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| file.source.path())
    }

    /// How many rows the files have.
    pub fn rows(&self) -> usize {
        self.groups.last().map_or(0, |group| group.first_row + group.rows)
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
    /// [`fill_null`](Self::fill_null), a codec that this build does not support, or values that have no
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
        let columns = self.decode(groups, self.options.threads, &Spare::default(), &Cancellation::default())?;
        let arrays = columns.into_iter().map(Array::concat).collect::<Result<_, _>>()?;
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
        Table::new(self.columns.iter().map(|selected| selected.name.clone()), arrays, rows, pinned)
    }

    /// The leaf of a column in the first file; those of the other files are equal.
    pub(super) fn leaf(&self, selected: &Selected) -> &Leaf {
        &self.files[0].leaves[selected.leaf]
    }

    fn selected(&self, column: &str) -> Result<&Selected, DataError> {
        self.columns.iter().find(|selected| &*selected.name == column).ok_or_else(|| self.no_column(column))
    }

    fn with_column(mut self, column: &str, change: impl Fn(&mut Selected)) -> Result<Self, DataError> {
        let mut columns = self.columns.to_vec();
        columns.iter_mut().filter(|selected| &*selected.name == column).for_each(change);
        self.columns = columns.into();
        self.recent = empty_cache();
        Ok(self)
    }

    fn no_column(&self, name: &str) -> DataError {
        let names: Vec<&str> = self.files[0].leaves.iter().map(|leaf| leaf.field.name()).collect();
        DataError::layout(self.files[0].source.path(), format!("a column {name:?}"), format!("the columns {names:?}"))
    }
}

impl Selected {
    fn new(leaf: &Leaf) -> Self {
        Self { name: leaf.field.name().into(), leaf: leaf.index, fill: None, list_size: None }
    }
}

fn empty_cache() -> Arc<Recent<usize, Vec<Vec<Array>>>> {
    Arc::new(Recent::new(KEPT_GROUPS))
}

fn same_columns(first: &[Leaf], leaves: &[Leaf], path: &Path) -> Result<(), DataError> {
    let describe = |leaf: &Leaf| format!("{} of {:?} in {} lists", leaf.path, leaf.field.kind(), leaf.field.lists());
    let differs = |(first, leaf): &(&Leaf, &Leaf)| describe(first) != describe(leaf);
    if let Some((first, leaf)) = first.iter().zip(leaves).find(differs) {
        return Err(DataError::layout(path, format!("the first file's column {}", describe(first)), describe(leaf)));
    }
    match first.len() == leaves.len() {
        true => Ok(()),
        false => {
            let expected = format!("the first file's {} columns", first.len());
            Err(DataError::layout(path, expected, leaves.len().to_string()))
        }
    }
}
