//! Where a loader keeps samples: [`Ram`], [`Disk`] or [`OnDevice`].

use std::path::PathBuf;

use tch::Device;

use crate::cache::{Cached, DiskCached, Storable};
use crate::{Collate, DataError, DataLoaderBuilder, Dataset, FromDataset, TensorBatch};

/// Keeps every sample in memory, see [`Cached`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Ram;

/// Keeps every sample in a file, see [`DiskCached`].
#[derive(Clone, Debug)]
pub struct Disk(pub PathBuf);

/// Keeps the samples of finished batches in the memory of a device. Later epochs gather their batches there, in any
/// order.
///
/// A sample stays what it was in its first batch, so with this cache the collate function must not be random. Every
/// tensor of a batch must have the samples along its first dimension, and the same other dimensions in every batch.
/// Batches have to be of tensors alone, always as many ([`TensorBatch::has_structure_of`]); others are an error.
#[derive(Clone, Copy, Debug)]
pub struct OnDevice(pub Device);

/// A kind of cache that [`DataLoaderBuilder::cache`] takes: [`Ram`], [`Disk`] or [`OnDevice`].
pub trait CacheKind<D, C> {
    /// The builder that [`apply`](Self::apply) returns.
    type Builder;

    /// Adds the cache after the builder's dataset.
    ///
    /// # Errors
    /// As [`DiskCached::open`]; the other kinds have no errors.
    fn apply(self, builder: DataLoaderBuilder<FromDataset<D>, C>) -> Result<Self::Builder, DataError>;
}

impl<D: Dataset, C> CacheKind<D, C> for Ram
where
    D::Sample: Clone + Sync,
{
    type Builder = DataLoaderBuilder<FromDataset<Cached<D>>, C>;

    fn apply(self, builder: DataLoaderBuilder<FromDataset<D>, C>) -> Result<Self::Builder, DataError> {
        builder.wrap_dataset(|dataset| Ok(Cached::new(dataset)))
    }
}

impl<D: Dataset, C> CacheKind<D, C> for Disk
where
    D::Sample: Storable,
{
    type Builder = DataLoaderBuilder<FromDataset<DiskCached<D>>, C>;

    fn apply(self, builder: DataLoaderBuilder<FromDataset<D>, C>) -> Result<Self::Builder, DataError> {
        builder.wrap_dataset(|dataset| DiskCached::open(dataset, self.0))
    }
}

impl<D: Dataset, C: Collate<D::Sample>> CacheKind<D, C> for OnDevice
where
    C::Batch: TensorBatch + 'static,
{
    type Builder = DataLoaderBuilder<FromDataset<D>, C>;

    fn apply(self, builder: DataLoaderBuilder<FromDataset<D>, C>) -> Result<Self::Builder, DataError> {
        Ok(builder.to_device(self.0).keep_on_device())
    }
}
