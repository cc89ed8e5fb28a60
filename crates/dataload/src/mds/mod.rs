//! MDS, the format of Mosaic's streaming: an `index.json`, and shards with a table of where their samples begin.

mod encoding;
mod index;
mod sample;
mod shard;
mod writer;

use std::path::Path;
use std::sync::Arc;

pub use encoding::MdsValue;
pub use sample::MdsSample;
pub use writer::MdsWriter;

use self::index::Shard;
use self::sample::Column;
use self::shard::ShardReader;
use crate::read::{Version, read_ahead};
use crate::shards::IndexedShards;
use crate::shards::index::ShardIndex;
use crate::{Cancellation, DataError, Deferred, IterableDataset, Samples};

/// A folder that Mosaic's `MDSWriter` wrote, as a stream of [`MdsSample`]s; shards may be compressed with zstd or gzip.
///
/// Shards that are not compressed are opened at any sample in constant time, and read in any order by
/// [`ShardListDataset`](crate::ShardListDataset). Where a shard is there both ways, that without compression is read,
/// as Mosaic does. A damaged sample is an `Err` in its place, and the stream continues after it. A shard whose table is
/// damaged gives one `Err`, which says how many samples it had.
///
/// ```no_run
/// use overdrive_dataload::{IterableDataset, MdsDataset, MdsValue};
///
/// let dataset = MdsDataset::open("c4/train")?;
/// for sample in dataset.stream(0..dataset.shards()) {
///     if let MdsValue::Str(text) = sample?.get("text")? {
///         println!("{text}");
///     }
/// }
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `streaming.StreamingDataset` of mosaicml-streaming, and its `MDSReader`.
#[derive(Clone, Debug)]
#[doc(alias = "StreamingDataset")]
pub struct MdsDataset {
    shards: Arc<[Shard]>,
}

impl MdsDataset {
    /// Opens a folder with an `index.json`, here or elsewhere (a URL).
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Line`] or [`DataError::Layout`] with the file's name: for a missing or damaged
    /// index, another format or version, a shard that is missing, listed twice or of another length than the index says,
    /// one of more than 2^26 samples, and a compression that this build does not support (Brotli, bzip2, Snappy).
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, DataError> {
        Ok(Self { shards: index::read(folder.as_ref())?.into() })
    }

    /// The names of the columns, in order.
    pub fn columns(&self) -> impl ExactSizeIterator<Item = &str> {
        self.shards.first().map_or(&[][..], |shard| &*shard.columns).iter().map(Column::name)
    }

    /// How many samples the index lists.
    pub fn samples(&self) -> u64 {
        self.shards.iter().map(|shard| shard.samples).sum()
    }

    /// The shards' files, in order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.iter().map(|shard| &*shard.path)
    }

    fn reader(
        &self,
        shard: usize,
        version: Option<&Version>,
        cancelled: &Cancellation,
    ) -> Result<ShardReader, DataError> {
        let len = self.shards.len();
        let shard = self.shards.get(shard).ok_or(DataError::IndexOutOfRange { index: shard, len })?;
        ShardReader::open(shard, version, cancelled)
    }
}

impl IterableDataset for MdsDataset {
    type Sample = MdsSample;

    fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Skips the first `position` samples, without reading them unless the shard is compressed.
    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<MdsSample>, DataError> {
        Ok(Box::new(self.reader(shard, None, &Cancellation::default())?.table()?.after(position)))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<MdsSample>>, DataError> {
        let placed = |sample: MdsSample| {
            let (offset, bytes) = (sample.offset(), sample.bytes());
            Deferred::ready(sample).at("byte", offset).of_bytes(bytes)
        };
        let samples = self.reader(shard, None, cancelled)?.table()?.after(position);
        Ok(Box::new(samples.map(move |sample| sample.map(placed))))
    }

    fn read_ahead(&self, shard: usize) {
        if let Some(shard) = self.shards.get(shard) {
            read_ahead(&shard.path);
        }
    }

    fn shard_name(&self, shard: usize) -> Option<String> {
        self.shards.get(shard).map(|shard| shard.path.display().to_string())
    }
}

impl IndexedShards for MdsDataset {
    fn shard_index(&self, shard: usize) -> Result<ShardIndex, DataError> {
        self.reader(shard, None, &Cancellation::default())?.table()?.index()
    }

    fn read_item(&self, shard: usize, index: &Arc<ShardIndex>, item: usize) -> Result<MdsSample, DataError> {
        let span = index.span(item).ok_or(DataError::IndexOutOfRange { index: item, len: index.len() })?;
        self.reader(shard, index.version(), &Cancellation::default())?.read(span)
    }
}
