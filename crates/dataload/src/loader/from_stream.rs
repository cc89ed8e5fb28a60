//! Loaders over a stream.

use std::sync::Arc;

use crate::loader::builder::{DataLoaderBuilder, SampleSource};
use crate::loader::position::Identity;
use crate::loader::streamed::{StreamOptions, Streamed};
use crate::{Collate, DataError, DataLoader, IterableDataset, OnError};

/// The default of [`DataLoaderBuilder::interleave`].
const INTERLEAVE: usize = 4;
/// The default of [`DataLoaderBuilder::shuffle_buffer_bytes`]: 256 MiB.
const SHUFFLE_BUFFER_BYTES: usize = 256 << 20;
/// With more, a saved state would take more than a kilobyte.
const MAX_INTERLEAVE: usize = 24;

/// A stream and the order in which a loader reads it.
pub struct FromStream<D> {
    dataset: D,
    shuffle_buffer: usize,
    shuffle_buffer_bytes: Option<usize>,
    interleave: usize,
    rank: usize,
    world_size: usize,
    batches_per_epoch: Option<usize>,
}

impl<D> FromStream<D> {
    pub(crate) fn new(dataset: D) -> Self {
        Self {
            dataset,
            shuffle_buffer: 1,
            shuffle_buffer_bytes: None,
            interleave: INTERLEAVE,
            rank: 0,
            world_size: 1,
            batches_per_epoch: None,
        }
    }
}

impl<D: IterableDataset> SampleSource for FromStream<D> {
    type Sample = D::Sample;
}

impl<D: IterableDataset, C> DataLoaderBuilder<FromStream<D>, C> {
    /// How many shards are open at a time, taking turns sample by sample; 4 unless set, at most 24 per rank. The order
    /// of the samples depends on it.
    pub fn interleave(mut self, shards: usize) -> Self {
        self.source.interleave = shards;
        self
    }

    /// The size of the windows in which each of the [interleaved](Self::interleave) shards is shuffled; 1, the default,
    /// does not shuffle. Memory holds this many samples for each interleaved shard, or
    /// [`shuffle_buffer_bytes`](Self::shuffle_buffer_bytes) of them.
    ///
    /// A shard is shuffled window by window, unlike a sliding shuffle buffer, so a saved state only needs to say where
    /// a window begins.
    pub fn shuffle_buffer(mut self, samples: usize) -> Self {
        self.source.shuffle_buffer = samples;
        self
    }

    /// How many bytes a window of [`shuffle_buffer`](Self::shuffle_buffer) may take; 256 MiB unless set. A window ends
    /// with the sample that reaches it, so that large samples are shuffled with fewer others. The order of the samples
    /// depends on it.
    ///
    /// The bytes are those of samples as they are read, before `map` and the collate function: known for WebDataset and
    /// TFRecord, in part for rows of Parquet, and where a stream of your own sets [`Deferred::of_bytes`](crate::Deferred::of_bytes).
    pub fn shuffle_buffer_bytes(mut self, bytes: usize) -> Self {
        self.source.shuffle_buffer_bytes = Some(bytes);
        self
    }

    /// Reads the share of one of several ranks: every `world_size`-th of the interleaved shards, from number `rank` on.
    ///
    /// Shards differ in length, and bad samples shorten them, so the ranks' shares differ: set
    /// [`batches_per_epoch`](Self::batches_per_epoch) where every rank needs the same number of batches.
    pub fn rank(mut self, rank: usize, world_size: usize) -> Self {
        (self.source.rank, self.source.world_size) = (rank, world_size);
        self
    }

    /// Makes an epoch exactly this many batches, on every rank and despite bad samples; where there are no samples for one
    /// of them, the epoch ends with [`DataError::StreamEnded`]. The next epoch continues where this one ends; at the end
    /// of the stream another pass over the shards begins, in a new order.
    pub fn batches_per_epoch(mut self, batches: usize) -> Self {
        self.source.batches_per_epoch = Some(batches);
        self
    }
}

impl<D, C> DataLoaderBuilder<FromStream<D>, C>
where
    D: IterableDataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    /// Makes the loader; no thread is started and no shard opened yet.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for numbers out of range, for `OnError::Replace` (a stream has no other sample to
    /// draw; `Skip` takes the next one), and for a `world_size` that does not divide `interleave`; [`DataError::Torch`]
    /// when the device is not available.
    pub fn build(self) -> Result<DataLoader<C::Batch>, DataError> {
        let Self { source, collate, options } = self;
        let FromStream { dataset, shuffle_buffer, interleave, rank, world_size, batches_per_epoch, .. } = source;
        let batch_size = options.batch_size.unwrap_or(1);
        let shuffle_buffer_bytes = source.shuffle_buffer_bytes.unwrap_or(SHUFFLE_BUFFER_BYTES);
        let sizes = [("shuffle_buffer", shuffle_buffer), ("shuffle_buffer_bytes", shuffle_buffer_bytes)];
        for (option, value) in [("batch_size", batch_size)].into_iter().chain(sizes) {
            DataError::at_least_1(option, value)?;
        }
        if rank >= world_size {
            return Err(DataError::option("rank", format!("less than world_size, {world_size}"), rank));
        }
        if !(1..=MAX_INTERLEAVE.saturating_mul(world_size)).contains(&interleave) {
            let expected = format!("1 to {MAX_INTERLEAVE} per rank");
            return Err(DataError::option("interleave", expected, interleave));
        }
        if world_size > 1 && dataset.shards() < interleave {
            let expected = format!("at least as many shards as all ranks interleave, {interleave}");
            return Err(DataError::option("shards", expected, dataset.shards()));
        }
        if world_size > 1 && (interleave % world_size != 0 || batch_size % (interleave / world_size) != 0) {
            let expected = "a multiple of world_size, and a batch_size that is a multiple of interleave / world_size";
            let found = format!("interleave {interleave}, world_size {world_size}, batch_size {batch_size}");
            return Err(DataError::option("interleave", expected, found));
        }
        if options.on_error == OnError::Replace {
            return Err(DataError::option("on_error", "Fail or Skip for a stream", "Replace"));
        }
        let stream = StreamOptions {
            batch_size,
            drop_last: options.drop_last,
            shuffle: options.shuffle,
            shuffle_buffer,
            shuffle_buffer_bytes,
            batch_bytes: options.memory_budget.unwrap_or(usize::MAX),
            interleave,
            rank,
            world_size,
            batches_per_epoch,
        };
        let global_batch_size = batch_size.saturating_mul(world_size);
        let mut order = vec![
            ("interleave", interleave as i64),
            ("shuffle_buffer", shuffle_buffer as i64),
            ("shuffle", i64::from(options.shuffle)),
            ("drop_last", i64::from(options.drop_last)),
            ("batches_per_epoch", batches_per_epoch.map_or(-1, |batches| batches as i64)),
        ];
        // Kept short: without it, a state has the default.
        order.extend(source.shuffle_buffer_bytes.map(|bytes| ("window_bytes", bytes as i64)));
        order.extend(names(&dataset).map(|crc| ("names", i64::from(crc))));
        order.extend(Some(dataset.fingerprint()).filter(|&it| it != 0).map(|it| ("fingerprint", it as i64)));
        let identity = Identity { stream: true, len: dataset.shards(), global_batch_size, seed: options.seed, order };
        let (stages, machinery) = options.assemble(collate)?;
        let source = Streamed { dataset: Arc::new(dataset), stages: Arc::new(stages), options: stream, identity };
        Ok(DataLoader::new(Arc::new(source), machinery))
    }
}

/// A checksum of the shards' file names without their folders; `None` when a shard has no name.
pub(crate) fn names(dataset: &impl IterableDataset) -> Option<u32> {
    (0..dataset.shards()).try_fold(0, |crc, shard| {
        let name = dataset.shard_name(shard)?;
        let last = name.rsplit(['/', '\\']).next().unwrap_or_default();
        // The zero byte, which no name has, tells "a", "bc" from "ab", "c".
        Some(crc32c::crc32c_append(crc32c::crc32c_append(crc, last.as_bytes()), b"\0"))
    })
}

/// A checksum of what decides about a stream; see [`IterableDataset::fingerprint`].
pub(crate) fn fingerprint(of: &impl std::fmt::Debug) -> u64 {
    // Never 0, which stands for nothing.
    1 << 32 | u64::from(crc32c::crc32c(format!("{of:?}").as_bytes()))
}
