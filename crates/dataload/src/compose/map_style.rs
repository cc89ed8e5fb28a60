//! Anything indexed as a dataset.

use std::fmt;
use std::marker::PhantomData;

use crate::{DataError, Dataset};

/// A dataset of what a list in memory holds: a `Vec`, an array, a slice, a `Box<[T]>`, an `Arc<[T]>`.
///
/// A sample is a clone, so large ones belong behind an `Arc`. What is indexed in another way is an
/// [`FnDataset`](crate::FnDataset).
///
/// ```
/// use overdrive_dataload::{Dataset, map_style};
///
/// let words = map_style(vec!["one", "two"]).map(|word| Ok(word.len()));
/// assert_eq!((words.len(), words.get(1)?), (2, 3));
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// A list as the dataset of `torch.utils.data.DataLoader`: anything with `__getitem__` and `__len__` is a map-style
/// dataset.
pub fn map_style<T, I>(items: I) -> MapStyle<T, I>
where
    T: Clone + Send,
    I: AsRef<[T]> + Send + Sync,
{
    MapStyle { items, samples: PhantomData }
}

/// A list as a dataset; made by [`map_style`].
pub struct MapStyle<T, I> {
    items: I,
    samples: PhantomData<fn() -> T>,
}

impl<T, I> Dataset for MapStyle<T, I>
where
    T: Clone + Send,
    I: AsRef<[T]> + Send + Sync,
{
    type Sample = T;

    fn len(&self) -> usize {
        self.items.as_ref().len()
    }

    fn get(&self, index: usize) -> Result<T, DataError> {
        let items = self.items.as_ref();
        items.get(index).cloned().ok_or(DataError::IndexOutOfRange { index, len: items.len() })
    }
}

impl<T, I: Clone> Clone for MapStyle<T, I> {
    fn clone(&self) -> Self {
        Self { items: self.items.clone(), samples: PhantomData }
    }
}

impl<T, I: AsRef<[T]>> fmt::Debug for MapStyle<T, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MapStyle {{ len: {} }}", self.items.as_ref().len())
    }
}
