//! Random parts of a dataset.

use crate::generator::Generator;
use crate::{DataError, Dataset, Subset};

/// Cuts a dataset into parts of these lengths, or of these shares of its length ([`split_lengths`]), at random and
/// without overlap. The order is drawn from `generator`, or with `None` from libtorch's default generator, as PyTorch
/// draws it.
///
/// ```
/// use overdrive_dataload::{Dataset, FnDataset, Generator, random_split};
///
/// let data = FnDataset::new(10, Ok);
/// let parts = random_split(&data, &[0.8, 0.2], Some(&mut Generator::manual_seed(42)))?;
/// assert_eq!((parts[0].len(), parts[1].len()), (8, 2));
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Errors
/// [`DataError::InvalidOption`] when the lengths do not add up to the dataset's, or the shares to 1.
///
/// # Source
/// `torch.utils.data.random_split`
pub fn random_split<D: Dataset + Clone, L: PartLength>(
    dataset: D,
    lengths: &[L],
    generator: Option<&mut Generator>,
) -> Result<Vec<Subset<D>>, DataError> {
    let lengths = L::lengths(lengths, dataset.len())?;
    let total = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
    if total != Some(dataset.len()) {
        let expected = format!("lengths that add up to the dataset's, {}", dataset.len());
        return Err(DataError::option("lengths", expected, format!("{lengths:?}")));
    }
    let order = match generator {
        Some(generator) => generator.randperm(dataset.len()),
        None => {
            let mut generator = Generator::of_torch()?;
            let order = generator.randperm(dataset.len());
            generator.continue_in_torch()?;
            order
        }
    };
    let mut rest = order.as_slice();
    let mut part = |&length: &usize| {
        let (own, others) = rest.split_at(length);
        rest = others;
        Subset::new(dataset.clone(), own)
    };
    lengths.iter().map(&mut part).collect()
}

/// How [`random_split`] is told the length of a part: a number of samples (`usize`), or a share of all (`f64`).
pub trait PartLength: Sized {
    /// The parts' numbers of samples, for a dataset of `len`.
    ///
    /// # Errors
    /// As [`split_lengths`].
    fn lengths(parts: &[Self], len: usize) -> Result<Vec<usize>, DataError>;
}

impl PartLength for usize {
    fn lengths(parts: &[Self], _len: usize) -> Result<Vec<usize>, DataError> {
        Ok(parts.to_vec())
    }
}

impl PartLength for f64 {
    fn lengths(parts: &[Self], len: usize) -> Result<Vec<usize>, DataError> {
        split_lengths(len, parts)
    }
}

/// The lengths of parts that are given as shares of `len` and add up to 1: each share rounded down, and what is left
/// dealt out one by one from the first part on.
///
/// # Errors
/// [`DataError::InvalidOption`] for a share outside 0 to 1, or shares that do not add up to 1 (to a billionth, and not
/// more than 1, as in PyTorch).
///
/// # Source
/// `torch.utils.data.random_split` with fractions
pub fn split_lengths(len: usize, shares: &[f64]) -> Result<Vec<usize>, DataError> {
    let total: f64 = shares.iter().fold(0.0, |sum, share| sum + share);
    if !(1.0 - 1e-9..=1.0).contains(&total) || shares.iter().any(|share| !(0.0..=1.0).contains(share)) {
        return Err(DataError::option("shares", "shares from 0 to 1 that add up to 1", format!("{shares:?}")));
    }
    let mut lengths: Vec<usize> = shares.iter().map(|share| (len as f64 * share).floor() as usize).collect();
    let left = len.saturating_sub(lengths.iter().sum());
    let count = lengths.len();
    (0..left).for_each(|part| lengths[part % count] += 1);
    Ok(lengths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FnDataset;

    #[test]
    fn parts_cover_the_dataset_without_overlap() -> Result<(), DataError> {
        let data = FnDataset::new(10, Ok);
        let parts = random_split(&data, &[3, 0, 7], Some(&mut Generator::manual_seed(1)))?;
        assert_eq!(parts.iter().map(Dataset::len).collect::<Vec<_>>(), [3, 0, 7]);
        let all = parts.iter().flat_map(|part| (0..part.len()).map(|index| part.get(index)));
        let mut all = all.collect::<Result<Vec<_>, _>>()?;
        assert_ne!(all, (0..10).collect::<Vec<_>>());
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        let error = random_split(&data, &[3, 6], None).err().map(|error| error.to_string());
        let expected = "lengths: expected lengths that add up to the dataset's, 10, found [3, 6]";
        assert_eq!(error.as_deref(), Some(expected));
        assert!(random_split(&data, &[usize::MAX, 11], None).is_err());
        let shares = random_split(&data, &[0.33, 0.67], Some(&mut Generator::manual_seed(1)))?;
        let lengths = random_split(&data, &[4, 6], Some(&mut Generator::manual_seed(1)))?;
        assert_eq!(shares[0].indices(), lengths[0].indices());
        assert!(random_split(&data, &[0.5, 0.4], None).is_err());
        Ok(())
    }

    #[test]
    fn shares_are_rounded_down_and_the_rest_dealt_out() -> Result<(), DataError> {
        assert_eq!(split_lengths(30, &[0.3, 0.3, 0.4])?, [9, 9, 12]);
        assert_eq!(split_lengths(10, &[0.33, 0.33, 0.34])?, [4, 3, 3]);
        assert_eq!(split_lengths(7, &[0.25; 4])?, [2, 2, 2, 1]);
        for bad in [&[0.5, 0.4][..], &[0.6, 0.6], &[1.5, -0.5], &[f64::NAN], &[]] {
            assert!(split_lengths(10, bad).is_err(), "{bad:?}");
        }
        Ok(())
    }
}
