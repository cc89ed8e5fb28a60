//! Datasets side by side.

use std::collections::BTreeMap;

use crate::tuples::for_tuples;
use crate::{DataError, Dataset};

/// Datasets of one length side by side: sample `i` has sample `i` of each.
///
/// ```
/// use overdrive_dataload::{Dataset, FnDataset, Zip, map_style};
///
/// let squares = FnDataset::new(3, |index| Ok(index * index));
/// let named = Zip::new((squares, map_style(vec!["zero", "one", "two"])))?;
/// assert_eq!(named.get(2)?, (4, "two"));
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torch.utils.data.StackDataset`.
#[derive(Clone, Debug)]
#[doc(alias = "StackDataset")]
pub struct Zip<P> {
    parts: P,
    len: usize,
}

impl<P: ZipParts> Zip<P> {
    /// A tuple of datasets, or a map of datasets by name, whose samples are such tuples or maps.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when their lengths differ, or there is no dataset.
    pub fn new(parts: P) -> Result<Self, DataError> {
        let lens = parts.lens();
        match lens.first() {
            Some(&len) if lens.iter().all(|&other| other == len) => Ok(Self { parts, len }),
            Some(_) => Err(DataError::option("datasets", "one length for all", format!("{lens:?}"))),
            None => Err(DataError::option("datasets", "at least one", 0)),
        }
    }

    /// The datasets.
    pub fn parts(&self) -> &P {
        &self.parts
    }
}

impl<P: ZipParts> Dataset for Zip<P> {
    type Sample = P::Sample;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<P::Sample, DataError> {
        DataError::check_index(index, self.len)?;
        self.parts.sample(index)
    }

    fn key(&self, index: usize) -> Option<String> {
        self.parts.sample_key(index)
    }
}

/// What [`Zip`] puts side by side: tuples of one to six datasets, and maps of datasets of one type by name.
pub trait ZipParts: Send + Sync {
    /// A sample of each.
    type Sample: Send;

    /// The length of each.
    fn lens(&self) -> Vec<usize>;

    /// Sample `index` of each.
    ///
    /// # Errors
    /// The first error of a dataset.
    fn sample(&self, index: usize) -> Result<Self::Sample, DataError>;

    /// The name that the first dataset with names has for sample `index`.
    fn sample_key(&self, index: usize) -> Option<String>;
}

macro_rules! zip_tuples {
    ($($part:ident $index:tt),+) => {
        impl<$($part: Dataset),+> ZipParts for ($($part,)+) {
            type Sample = ($($part::Sample,)+);

            fn lens(&self) -> Vec<usize> {
                vec![$(self.$index.len()),+]
            }

            fn sample(&self, index: usize) -> Result<Self::Sample, DataError> {
                Ok(($(self.$index.get(index)?,)+))
            }

            fn sample_key(&self, index: usize) -> Option<String> {
                None$(.or_else(|| self.$index.key(index)))+
            }
        }
    };
}

for_tuples!(zip_tuples);

impl<D: Dataset> ZipParts for BTreeMap<String, D> {
    type Sample = BTreeMap<String, D::Sample>;

    fn lens(&self) -> Vec<usize> {
        self.values().map(D::len).collect()
    }

    fn sample(&self, index: usize) -> Result<Self::Sample, DataError> {
        self.iter().map(|(name, dataset)| Ok((name.clone(), dataset.get(index)?))).collect()
    }

    fn sample_key(&self, index: usize) -> Option<String> {
        self.values().find_map(|dataset| dataset.key(index))
    }
}
