//! WebDataset: samples are groups of neighbouring files in tar shards.

mod index;
mod sample;
mod samples;
mod tar;
mod writer;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use sample::WebSample;
pub use samples::WebSamples;
pub use writer::{WebDatasetWriter, WebDatasetWriterBuilder};

use crate::loader::fingerprint;
use crate::read::{Version, read_ahead};
use crate::shards::index::{self as shard_index, ShardIndex};
use crate::shards::{IndexedShards, listed, matching};
use crate::{Cancellation, DataError, Deferred, IterableDataset, Samples};

/// The default of [`WebDataset::max_sample_bytes`]: 1 GiB.
const MAX_SAMPLE_BYTES: u64 = 1 << 30;

/// Tar shards, plain or compressed with gzip or zstd (recognised by their content), as a stream of [`WebSample`]s.
///
/// Neighbouring files whose names agree up to the first dot after the last slash make one sample. Folders, links, files
/// without a dot, hidden files, and files whose first folder is named like `__meta__` are ignored. A shard without
/// tar's end mark, or with data after it, is an error: a truncated or concatenated shard would silently lose samples.
///
/// A bad sample is an `Err` in its place, and the stream continues after it. After a damaged header it continues behind
/// the next one that can be found; the samples on both sides of the gap are left out, because the damaged file may be
/// theirs, and the `Err` says so. Where no header is found, or the shard is cut, it says that the rest is lost.
///
/// With an index beside it (`train-0.tar.idx` or `train-0.idx`, see [`write_index`](Self::write_index)), a shard is
/// opened at any sample in constant time, and after a damaged header the samples on both sides of it are read. The
/// index is checked against the shard; one that does not fit is ignored, with a warning that says why.
///
/// ```no_run
/// use overdrive_dataload::{IterableDataset, WebDataset};
///
/// let dataset = WebDataset::open("data-{000..127}.tar")?.select(["jpg", "cls"]);
/// for sample in dataset.stream(0..dataset.shards()) {
///     let sample = sample?;
///     println!("{}: {} bytes", sample.key(), sample.get("jpg").map_or(0, |jpg| jpg.len()));
/// }
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// Python's `webdataset.WebDataset` without its decoding; the format is that of `webdataset.tariterators`.
#[derive(Clone, Debug)]
pub struct WebDataset {
    files: Arc<[Arc<Path>]>,
    options: Options,
}

/// Options of reading a shard.
#[derive(Clone, Debug)]
struct Options {
    /// `None` for all.
    extensions: Option<Arc<[Box<str>]>>,
    max_sample_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { extensions: None, max_sample_bytes: MAX_SAMPLE_BYTES }
    }
}

impl Options {
    /// Whether files with this extension, in lower case, are read.
    fn wants(&self, extension: &str) -> bool {
        self.extensions.as_ref().is_none_or(|wanted| wanted.iter().any(|it| **it == *extension))
    }
}

impl WebDataset {
    /// Opens the shards that match a pattern of braces and globs; see [`expand_shards`](crate::expand_shards).
    ///
    /// # Errors
    /// As [`expand_shards`](crate::expand_shards).
    pub fn open(pattern: &str) -> Result<Self, DataError> {
        Self::from_files(matching(pattern)?)
    }

    /// Opens a list of files as shards.
    ///
    /// # Errors
    /// [`DataError::Io`] with the path, for a missing file; [`DataError::InvalidOption`] for an empty list.
    pub fn from_files(files: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Self, DataError> {
        Ok(Self { files: listed(files)?.into_iter().map(Arc::from).collect(), options: Options::default() })
    }

    /// Reads only files with these extensions (`jpg`, `seg.png`) and skips the others; all files unless set.
    ///
    /// A sample that has none of them is left out, and is no bad sample: where no sample has any, an epoch is
    /// empty, of which a loader warns.
    pub fn select<E: AsRef<str>>(mut self, extensions: impl IntoIterator<Item = E>) -> Self {
        let lower = extensions.into_iter().map(|extension| extension.as_ref().to_lowercase().into_boxed_str());
        self.options.extensions = Some(lower.collect());
        self
    }

    /// The most bytes that one sample may take, for all its files together; 1 GiB unless set.
    pub fn max_sample_bytes(mut self, bytes: u64) -> Self {
        self.options.max_sample_bytes = bytes;
        self
    }

    /// The shards' files, in order.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| &**file)
    }

    /// Writes the index of a shard beside it, as `train-0.tar.idx`, and returns how many samples it has. With it,
    /// resume and random access ([`ShardListDataset`](crate::ShardListDataset)) take constant time.
    ///
    /// The headers of all files are read, of a compressed shard everything. A shard whose items are counted by an index
    /// may count others than without it where it is damaged: write the index before training.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a shard that is compressed as a whole, by gzip or by zstd in one frame
    /// (`overdrive-data convert` writes many), and for names with spaces; the error of a damaged shard;
    /// [`DataError::Io`].
    ///
    /// # Source
    /// `wds2idx` of NVIDIA DALI, which reads and writes the same files; `widsindex` of Python's webdataset.
    #[doc(alias = "wds2idx")]
    #[doc(alias = "widsindex")]
    pub fn write_index(&self, shard: usize) -> Result<u64, DataError> {
        let (text, samples) = self.open_file(shard, None, &Cancellation::default())?.list()?;
        shard_index::write(&self.files[shard], &text)?;
        Ok(samples)
    }

    fn open_file(
        &self,
        shard: usize,
        version: Option<&Version>,
        cancelled: &Cancellation,
    ) -> Result<WebSamples, DataError> {
        let len = self.files.len();
        let path = self.files.get(shard).ok_or(DataError::IndexOutOfRange { index: shard, len })?;
        WebSamples::open(path.clone(), version, self.options.clone(), cancelled)
    }

    fn samples(&self, shard: usize, position: u64, cancelled: &Cancellation) -> Result<WebSamples, DataError> {
        let mut samples = self.open_file(shard, None, cancelled)?;
        match samples.load_index() {
            Ok(Some(index)) => {
                let item = usize::try_from(position).unwrap_or(usize::MAX);
                return Ok(samples.by_index(Arc::new(index), item));
            }
            Ok(None) => {}
            Err(error) if error.ends_epoch() => return Err(error),
            Err(error) => {
                shard_index::ignored(&error);
                samples = self.open_file(shard, None, cancelled)?;
            }
        }
        samples.skip_items(position);
        Ok(samples)
    }
}

impl IndexedShards for WebDataset {
    fn shard_index(&self, shard: usize) -> Result<ShardIndex, DataError> {
        let index = self.open_file(shard, None, &Cancellation::default())?.load_index()?;
        index.ok_or_else(|| shard_index::missing(&self.files[shard]))
    }

    fn read_item(&self, shard: usize, index: &Arc<ShardIndex>, item: usize) -> Result<WebSample, DataError> {
        let mut samples =
            self.open_file(shard, index.version(), &Cancellation::default())?.by_index(index.clone(), item);
        samples.next().unwrap_or(Err(DataError::IndexOutOfRange { index: item, len: index.len() }))
    }
}

impl IterableDataset for WebDataset {
    type Sample = WebSample;

    fn shards(&self) -> usize {
        self.files.len()
    }

    /// Skips the first `position` samples, without reading them unless the shard is compressed, and in constant time
    /// where it has an index.
    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<WebSample>, DataError> {
        Ok(Box::new(self.samples(shard, position, &Cancellation::default())?))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<WebSample>>, DataError> {
        let named = |sample: WebSample| {
            let key = sample.key.clone();
            let bytes = sample.files().map(|(_, content)| content.len()).sum();
            Deferred::ready(sample).named(key).of_bytes(bytes)
        };
        Ok(Box::new(self.samples(shard, position, cancelled)?.map(move |sample| sample.map(named))))
    }

    fn read_ahead(&self, shard: usize) {
        if let Some(path) = self.files.get(shard) {
            read_ahead(path);
        }
    }

    /// The sizes of samples, and with them the ends of windows, depend on the files that are read.
    fn fingerprint(&self) -> u64 {
        // In whatever order they are given.
        let extensions = self.options.extensions.as_ref();
        extensions.map_or(0, |extensions| fingerprint(&extensions.iter().collect::<BTreeSet<_>>()))
    }

    fn shard_name(&self, shard: usize) -> Option<String> {
        self.files.get(shard).map(|path| path.display().to_string())
    }
}
