//! Random access to the samples of shards.

use std::fmt;
use std::sync::Arc;

use super::index::ShardIndex;
use crate::compose::concat::locate;
use crate::{DataError, Dataset, IterableDataset};

/// Shards whose samples can be read in any order: those of a [`WebDataset`](crate::WebDataset) or a
/// [`TfRecordDataset`](crate::TfRecordDataset) with an index beside each, and those of an
/// [`MdsDataset`](crate::MdsDataset) that are not compressed.
pub trait IndexedShards: IterableDataset {
    /// The index of a shard.
    #[doc(hidden)]
    fn shard_index(&self, shard: usize) -> Result<ShardIndex, DataError>;

    /// The sample with this number in the shard's index.
    #[doc(hidden)]
    fn read_item(&self, shard: usize, index: &Arc<ShardIndex>, item: usize) -> Result<Self::Sample, DataError>;
}

/// The samples of all shards by number, in any order: the shards of a [`WebDataset`](crate::WebDataset) or a
/// [`TfRecordDataset`](crate::TfRecordDataset) with an index beside each, see
/// [`write_index`](crate::WebDataset::write_index), or of an [`MdsDataset`](crate::MdsDataset) without compression.
///
/// Opening reads the indexes, and keeps 8 bytes for each sample; of tar files 12, and 16 where extensions are selected.
/// A sample is read from its shard's file when it is asked for, of a zstd shard with the frames that it is in.
///
/// ```
/// use overdrive_dataload::{DataLoader, Dataset, ShardListDataset, WebDataset, WebDatasetWriter};
///
/// # let folder = tempfile::tempdir()?;
/// let pattern = format!("{}/train-%06d.tar.zst", folder.path().display());
/// let mut writer = WebDatasetWriter::builder(pattern).index(true).max_count(4).build()?;
/// for i in 0..10 {
///     writer.write(&format!("{i:04}"), &[("cls", i.to_string())])?;
/// }
/// let shards = writer.finish()?;
///
/// let samples = ShardListDataset::new(WebDataset::from_files(shards)?)?;
/// assert_eq!((samples.len(), samples.get(7)?.key()), (10, "0007"));
/// // Shuffled as a whole, not in windows.
/// let keys = samples.map(|sample| Ok(sample.key().to_owned()));
/// let loader = DataLoader::builder(keys).batch_size(5).shuffle(true).build()?;
/// # assert_eq!(loader.iter().count(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `ShardListDataset` of `wids` in Python's webdataset, which reads the whole shard to find its samples.
#[doc(alias = "wids")]
pub struct ShardListDataset<D> {
    dataset: D,
    indexes: Vec<Arc<ShardIndex>>,
    /// The number of samples up to the end of each shard.
    ends: Vec<usize>,
}

impl<D: IndexedShards> ShardListDataset<D> {
    /// Reads the index of every shard.
    ///
    /// # Errors
    /// [`DataError::Layout`] with the file's name, for a shard without an index, one that is compressed as a whole, and
    /// an index that is not that of its shard; [`DataError::Line`] for a damaged index; [`DataError::Io`].
    pub fn new(dataset: D) -> Result<Self, DataError> {
        let (mut indexes, mut ends, mut end) = (Vec::with_capacity(dataset.shards()), Vec::new(), 0);
        for shard in 0..dataset.shards() {
            let index = dataset.shard_index(shard)?;
            end += index.len();
            indexes.push(Arc::new(index));
            ends.push(end);
        }
        Ok(Self { dataset, indexes, ends })
    }
}

impl<D: IndexedShards> Dataset for ShardListDataset<D> {
    type Sample = D::Sample;

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Reads one sample.
    ///
    /// # Errors
    /// As the stream's for the sample; [`DataError::Corrupt`] where it is not where the index has it.
    fn get(&self, index: usize) -> Result<D::Sample, DataError> {
        let (shard, item) = locate(&self.ends, index)?;
        self.dataset.read_item(shard, &self.indexes[shard], item)
    }

    /// The shard's name, and the sample's number in it.
    fn key(&self, index: usize) -> Option<String> {
        let (shard, item) = locate(&self.ends, index).ok()?;
        Some(format!("{}, sample {item}", self.dataset.shard_name(shard)?))
    }
}

impl<D: Clone> Clone for ShardListDataset<D> {
    fn clone(&self) -> Self {
        Self { dataset: self.dataset.clone(), indexes: self.indexes.clone(), ends: self.ends.clone() }
    }
}

impl<D> fmt::Debug for ShardListDataset<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let samples = self.ends.last().copied().unwrap_or(0);
        write!(f, "ShardListDataset {{ shards: {}, samples: {samples} }}", self.ends.len())
    }
}
