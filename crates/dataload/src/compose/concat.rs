//! Datasets one after the other.

use crate::{DataError, Dataset};

/// The samples of several datasets, one dataset after the other.
///
/// Datasets of different types with the same type of sample go in as `Box<dyn Dataset<Sample = S>>`.
///
/// ```
/// use overdrive_dataload::{Concat, Dataset, map_style};
///
/// let both = Concat::new([map_style(vec!["a", "b"]), map_style(vec!["c"])])?;
/// assert_eq!((both.len(), both.get(2)?), (3, "c"));
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torch.utils.data.ConcatDataset`.
#[derive(Clone, Debug)]
#[doc(alias = "ConcatDataset")]
pub struct Concat<D> {
    datasets: Vec<D>,
    cumulative_sizes: Vec<usize>,
}

impl<D: Dataset> Concat<D> {
    /// These datasets, in this order.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when there is no dataset, or their lengths together exceed `usize`.
    pub fn new(datasets: impl IntoIterator<Item = D>) -> Result<Self, DataError> {
        let datasets: Vec<D> = datasets.into_iter().collect();
        let cumulative_sizes = cumulative(datasets.iter().map(D::len))?;
        Ok(Self { datasets, cumulative_sizes })
    }

    /// The datasets, in order.
    pub fn datasets(&self) -> &[D] {
        &self.datasets
    }

    /// For each dataset, how many samples it and those before it have.
    pub fn cumulative_sizes(&self) -> &[usize] {
        &self.cumulative_sizes
    }

    /// How many samples each dataset has; a [`Mixture`](crate::Mixture) takes them.
    pub fn lens(&self) -> Vec<usize> {
        self.datasets.iter().map(D::len).collect()
    }

    /// The number of the dataset that sample `index` belongs to, and the sample's index there.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`].
    pub fn locate(&self, index: usize) -> Result<(usize, usize), DataError> {
        locate(&self.cumulative_sizes, index)
    }
}

/// The sums of the first one, two, and so on; at least one number is needed.
pub(super) fn cumulative(lens: impl Iterator<Item = usize>) -> Result<Vec<usize>, DataError> {
    let mut total = 0usize;
    let sums = lens.map(|len| {
        total = total.checked_add(len)?;
        Some(total)
    });
    let sums: Option<Vec<usize>> = sums.collect();
    match sums {
        Some(sums) if !sums.is_empty() => Ok(sums),
        Some(_) => Err(DataError::option("datasets", "at least one", 0)),
        None => Err(DataError::option("datasets", format!("at most {} samples in total", usize::MAX), "more")),
    }
}

/// The part that `index` falls into, and its position there.
pub(crate) fn locate(cumulative_sizes: &[usize], index: usize) -> Result<(usize, usize), DataError> {
    let len = cumulative_sizes.last().copied().unwrap_or(0);
    DataError::check_index(index, len)?;
    let part = cumulative_sizes.partition_point(|&end| end <= index);
    let start = part.checked_sub(1).map_or(0, |before| cumulative_sizes[before]);
    Ok((part, index - start))
}

impl<D: Dataset> Dataset for Concat<D> {
    type Sample = D::Sample;

    fn len(&self) -> usize {
        self.cumulative_sizes.last().copied().unwrap_or(0)
    }

    fn get(&self, index: usize) -> Result<D::Sample, DataError> {
        let (dataset, index) = self.locate(index)?;
        self.datasets[dataset].get(index)
    }

    fn key(&self, index: usize) -> Option<String> {
        let (dataset, index) = self.locate(index).ok()?;
        self.datasets[dataset].key(index)
    }
}
