//! TFRecord: length-prefixed records with checksums, and the `tf.train.Example` messages in them.

mod crc;
mod example;
mod index;
mod records;
mod wire;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use example::{Example, Feature};
pub use records::{TfRecord, TfRecords};
pub use writer::TfRecordWriter;

use crate::read::{Version, read_ahead};
use crate::shards::index::{self as shard_index, ShardIndex};
use crate::shards::{IndexedShards, listed, matching};
use crate::{Cancellation, DataError, Deferred, IterableDataset, Samples};

/// The default of [`TfRecordDataset::max_record_bytes`]: 1 GiB.
const MAX_RECORD_BYTES: u64 = 1 << 30;

/// TFRecord files, plain or compressed with gzip or zstd (recognised by their content), as a stream of [`TfRecord`]s.
///
/// A record whose content does not match its checksum is an `Err` in its place, and the stream continues after it.
/// After a length that does not match its checksum it continues with the next record whose length does, and the `Err`
/// says how many bytes were lost, or that no record was found. A file that ends within a record ends with an `Err`.
///
/// With an index beside it (`part-0.tfrecord.idx` or `part-0.idx`, see [`write_index`](Self::write_index)), a file is
/// opened at any record in constant time, and after a damaged length the very next record is read. The index is checked
/// against the file; one that does not fit is ignored, with a warning that says why.
///
/// ```no_run
/// use overdrive_dataload::{Feature, IterableDataset, TfRecordDataset};
///
/// let dataset = TfRecordDataset::open("train-{00000..00127}-of-00128.tfrecord")?;
/// for record in dataset.stream(0..dataset.shards()) {
///     let record = record?;
///     let example = record.example()?;
///     if let Some(Feature::Int64(labels)) = example.get("image/class/label") {
///         println!("{labels:?}");
///     }
/// }
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `tf.data.TFRecordDataset`.
#[derive(Clone, Debug)]
pub struct TfRecordDataset {
    files: Arc<[Arc<Path>]>,
    options: Options,
}

#[derive(Clone, Copy, Debug)]
struct Options {
    verify_crc: bool,
    max_record_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { verify_crc: true, max_record_bytes: MAX_RECORD_BYTES }
    }
}

impl TfRecordDataset {
    /// Opens the files that match a pattern of braces and globs; see [`expand_shards`](crate::expand_shards).
    ///
    /// # Errors
    /// As [`expand_shards`](crate::expand_shards).
    pub fn open(pattern: &str) -> Result<Self, DataError> {
        Self::from_files(matching(pattern)?)
    }

    /// Opens a list of files.
    ///
    /// # Errors
    /// [`DataError::Io`] with the path, for a missing file; [`DataError::InvalidOption`] for an empty list.
    pub fn from_files(files: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Self, DataError> {
        Ok(Self { files: listed(files)?.into_iter().map(Arc::from).collect(), options: Options::default() })
    }

    /// Whether checksums are verified; on unless set. Otherwise a flipped bit goes unnoticed.
    pub fn verify_crc(mut self, verify: bool) -> Self {
        self.options.verify_crc = verify;
        self
    }

    /// The most bytes that one record may take; 1 GiB unless set.
    pub fn max_record_bytes(mut self, bytes: u64) -> Self {
        self.options.max_record_bytes = bytes;
        self
    }

    /// The files, in order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| &**file)
    }

    /// Writes the index of a file beside it, as `part-0.tfrecord.idx`, and returns how many records it has. With it,
    /// resume and random access ([`ShardListDataset`](crate::ShardListDataset)) take constant time.
    ///
    /// The lengths of all records are read, of a compressed file everything. A file whose items are counted by an index
    /// may count others than without it where it is damaged: write the index before training.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a file that is compressed as a whole, by gzip or by zstd in one frame (`overdrive-data
    /// convert` writes many); the error of a damaged file; [`DataError::Io`].
    ///
    /// # Source
    /// `tfrecord2idx` of NVIDIA DALI and of Python's `tfrecord`, which read and write the same files.
    #[doc(alias = "tfrecord2idx")]
    pub fn write_index(&self, shard: usize) -> Result<u64, DataError> {
        let (text, records) = self.open_file(shard, None, &Cancellation::default())?.list()?;
        shard_index::write(&self.files[shard], &text)?;
        Ok(records)
    }

    fn open_file(
        &self,
        shard: usize,
        version: Option<&Version>,
        cancelled: &Cancellation,
    ) -> Result<TfRecords, DataError> {
        let len = self.files.len();
        let path = self.files.get(shard).ok_or(DataError::IndexOutOfRange { index: shard, len })?;
        TfRecords::open(path.clone(), version, self.options, cancelled)
    }

    fn records(&self, shard: usize, position: u64, cancelled: &Cancellation) -> Result<TfRecords, DataError> {
        let mut records = self.open_file(shard, None, cancelled)?;
        match records.load_index() {
            Ok(Some(index)) => {
                let item = usize::try_from(position).unwrap_or(usize::MAX);
                return Ok(records.by_index(Arc::new(index), item));
            }
            Ok(None) => {}
            Err(error) if error.ends_epoch() => return Err(error),
            Err(error) => shard_index::ignored(&error),
        }
        records.skip_items(position);
        Ok(records)
    }
}

impl IndexedShards for TfRecordDataset {
    fn shard_index(&self, shard: usize) -> Result<ShardIndex, DataError> {
        let index = self.open_file(shard, None, &Cancellation::default())?.load_index()?;
        index.ok_or_else(|| shard_index::missing(&self.files[shard]))
    }

    fn read_item(&self, shard: usize, index: &Arc<ShardIndex>, item: usize) -> Result<TfRecord, DataError> {
        let mut records =
            self.open_file(shard, index.version(), &Cancellation::default())?.by_index(index.clone(), item);
        records.next().unwrap_or(Err(DataError::IndexOutOfRange { index: item, len: index.len() }))
    }
}

impl IterableDataset for TfRecordDataset {
    type Sample = TfRecord;

    fn shards(&self) -> usize {
        self.files.len()
    }

    /// Skips the first records, without reading them where the file is not compressed, and in constant time where it
    /// has an index.
    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<TfRecord>, DataError> {
        Ok(Box::new(self.records(shard, position, &Cancellation::default())?))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<TfRecord>>, DataError> {
        let placed = |record: TfRecord| {
            let (offset, bytes) = (record.offset(), record.bytes().len());
            Deferred::ready(record).at("byte", offset).of_bytes(bytes)
        };
        Ok(Box::new(self.records(shard, position, cancelled)?.map(move |record| record.map(placed))))
    }

    fn read_ahead(&self, shard: usize) {
        if let Some(path) = self.files.get(shard) {
            read_ahead(path);
        }
    }

    fn shard_name(&self, shard: usize) -> Option<String> {
        self.files.get(shard).map(|path| path.display().to_string())
    }
}
