//! Random access to samples, and adapters that make one dataset from another.

use std::sync::Arc;

use crate::DataError;

/// Samples by index, read from several threads at once.
///
/// A dataset is a pure function of the index: random augmentation belongs to a later stage, so that a cache can sit in
/// between.
///
/// # Source
/// `torch.utils.data.Dataset` with `__getitem__` and `__len__`.
pub trait Dataset: Send + Sync {
    /// The type of a sample.
    type Sample: Send;

    /// How many samples there are.
    fn len(&self) -> usize;

    /// Reads the sample at `index`, which is below [`len`](Dataset::len).
    ///
    /// # Errors
    /// When the sample cannot be read; [`DataError::other`] wraps errors of other crates.
    fn get(&self, index: usize) -> Result<Self::Sample, DataError>;

    /// A name for the sample at `index` that says more than the number, a file name for example; errors and faults show
    /// it.
    fn key(&self, _index: usize) -> Option<String> {
        None
    }

    /// Whether there is no sample at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A dataset that passes every sample through `transform`.
    fn map<T, F>(self, transform: F) -> Map<Self, F>
    where
        Self: Sized,
        T: Send,
        F: Fn(Self::Sample) -> Result<T, DataError> + Send + Sync,
    {
        Map::new(self, transform)
    }

    /// A dataset of the samples for which `keep` is true, in this dataset's order.
    ///
    /// Every sample is read here, once and on this thread: [`map`](Self::map) to what is slow to make after filtering,
    /// and where the indices are known without reading, use [`subset`](Self::subset).
    ///
    /// ```
    /// use overdrive_dataload::{Dataset, FnDataset};
    ///
    /// let even = FnDataset::new(10, Ok).filter(|number| Ok(number % 2 == 0))?;
    /// assert_eq!((even.len(), even.get(4)?), (5, 8));
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    ///
    /// # Errors
    /// [`DataError::Sample`] for a sample that cannot be read, or for which `keep` fails.
    ///
    /// # Source
    /// `datasets.Dataset.filter` of Hugging Face.
    fn filter(self, keep: impl Fn(&Self::Sample) -> Result<bool, DataError>) -> Result<Subset<Self>, DataError>
    where
        Self: Sized,
    {
        let mut indices = Vec::new();
        for index in 0..self.len() {
            match self.get(index).and_then(|sample| keep(&sample)) {
                Ok(true) => indices.push(index),
                Ok(false) => {}
                Err(error) => {
                    return Err(DataError::Sample { index, key: self.key(index), error: Box::new(error) });
                }
            }
        }
        Ok(Subset { dataset: self, indices })
    }

    /// A dataset of the samples at `indices`, in that order.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for an index that this dataset does not have.
    fn subset(self, indices: impl Into<Vec<usize>>) -> Result<Subset<Self>, DataError>
    where
        Self: Sized,
    {
        Subset::new(self, indices)
    }
}

macro_rules! forward_dataset {
    ($($pointer:ty),*) => {$(
        impl<D: Dataset + ?Sized> Dataset for $pointer {
            type Sample = D::Sample;

            fn len(&self) -> usize {
                (**self).len()
            }

            fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
                (**self).get(index)
            }

            fn key(&self, index: usize) -> Option<String> {
                (**self).key(index)
            }
        }
    )*};
}

forward_dataset!(&D, Box<D>, Arc<D>);

/// A closure as a dataset.
///
/// ```
/// use overdrive_dataload::{Dataset, FnDataset};
///
/// let squares = FnDataset::new(10, |index| Ok(index * index));
/// assert_eq!(squares.get(3)?, 9);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FnDataset<F> {
    len: usize,
    get: F,
}

impl<F> FnDataset<F> {
    /// A dataset of `len` samples, the one at index `i` being `get(i)`.
    pub fn new<S>(len: usize, get: F) -> Self
    where
        F: Fn(usize) -> Result<S, DataError> + Send + Sync,
    {
        Self { len, get }
    }
}

impl<S, F> Dataset for FnDataset<F>
where
    S: Send,
    F: Fn(usize) -> Result<S, DataError> + Send + Sync,
{
    type Sample = S;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<S, DataError> {
        DataError::check_index(index, self.len)?;
        (self.get)(index)
    }
}

/// A dataset or stream whose samples pass through a transform; made by [`Dataset::map`] and
/// [`IterableDataset::map`](crate::IterableDataset::map).
///
/// Implements [`Dataset`] over a dataset and [`IterableDataset`](crate::IterableDataset) over a stream; a
/// [`ParquetDataset`](crate::ParquetDataset), for example, is a stream.
#[derive(Debug)]
pub struct Map<D, F> {
    pub(crate) dataset: D,
    /// Shared with the open shards of a stream.
    pub(crate) transform: Arc<F>,
}

impl<D: Clone, F> Clone for Map<D, F> {
    fn clone(&self) -> Self {
        Self { dataset: self.dataset.clone(), transform: self.transform.clone() }
    }
}

impl<D, F> Map<D, F> {
    pub(crate) fn new(dataset: D, transform: F) -> Self {
        Self { dataset, transform: Arc::new(transform) }
    }

    /// Adds another transform after this one; see [`Dataset::map`] and
    /// [`IterableDataset::map`](crate::IterableDataset::map).
    pub fn map<S, T, U, G>(self, transform: G) -> Map<Self, G>
    where
        F: Fn(S) -> Result<T, DataError>,
        G: Fn(T) -> Result<U, DataError> + Send + Sync,
    {
        Map::new(self, transform)
    }
}

impl<T, D, F> Dataset for Map<D, F>
where
    T: Send,
    D: Dataset,
    F: Fn(D::Sample) -> Result<T, DataError> + Send + Sync,
{
    type Sample = T;

    fn len(&self) -> usize {
        self.dataset.len()
    }

    fn get(&self, index: usize) -> Result<T, DataError> {
        (self.transform)(self.dataset.get(index)?)
    }

    fn key(&self, index: usize) -> Option<String> {
        self.dataset.key(index)
    }
}

/// Some samples of another dataset.
///
/// # Source
/// `torch.utils.data.Subset`.
#[derive(Clone, Debug)]
pub struct Subset<D> {
    dataset: D,
    indices: Vec<usize>,
}

impl<D: Dataset> Subset<D> {
    /// The samples of `dataset` at `indices`, in that order; an index may appear more than once.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for an index that `dataset` does not have.
    pub fn new(dataset: D, indices: impl Into<Vec<usize>>) -> Result<Self, DataError> {
        let indices = indices.into();
        let len = dataset.len();
        match indices.iter().find(|&&index| index >= len) {
            Some(&index) => Err(DataError::IndexOutOfRange { index, len }),
            None => Ok(Self { dataset, indices }),
        }
    }

    /// The indices in the other dataset, in this one's order.
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    type Sample = D::Sample;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn get(&self, index: usize) -> Result<D::Sample, DataError> {
        match self.indices.get(index) {
            Some(&inner) => self.dataset.get(inner),
            None => Err(DataError::IndexOutOfRange { index, len: self.indices.len() }),
        }
    }

    fn key(&self, index: usize) -> Option<String> {
        self.dataset.key(*self.indices.get(index)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closures_maps_subsets_and_pointers_are_datasets() -> Result<(), DataError> {
        let doubled = FnDataset::new(5, Ok).map(|index| Ok(index * 2));
        let shared: Arc<dyn Dataset<Sample = usize>> = Arc::new(doubled.clone());
        let borrowed: &dyn Dataset<Sample = usize> = &doubled;
        assert_eq!(borrowed.map(|index| Ok(index + 1)).get(4)?, 9);
        assert_eq!(shared.len(), 5);
        let subset = shared.subset([3, 1, 3])?;
        assert_eq!((subset.get(0)?, subset.get(1)?, subset.get(2)?), (6, 2, 6));
        assert!(!subset.is_empty());
        Ok(())
    }

    #[test]
    fn indices_out_of_range_are_errors() {
        let dataset = FnDataset::new(5, Ok);
        assert!(matches!(dataset.get(5), Err(DataError::IndexOutOfRange { index: 5, len: 5 })));
        assert!(matches!((&dataset).subset([0, 9]), Err(DataError::IndexOutOfRange { index: 9, len: 5 })));
        assert!(matches!(dataset.subset([0]).map(|s| s.get(1)), Ok(Err(DataError::IndexOutOfRange { index: 1, .. }))));
    }
}
