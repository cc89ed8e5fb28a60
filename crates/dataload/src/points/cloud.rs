//! Point clouds.

use crate::permutation::permutations;
use crate::{DataError, Draws};

/// Points, float32 `[N, C]`: the coordinates come first, then other features, if any.
///
/// Sub-sampling returns the points' indices, which also select per-point labels: [`sample`](Self::sample),
/// [`farthest`](Self::farthest), [`voxels`](Self::voxels). The random choice is a function of the [`Draws`] of (seed,
/// epoch, draw): new in each epoch, and the same in each run.
///
/// ```
/// use overdrive_dataload::{Draws, PointCloud};
///
/// let cloud = PointCloud::new([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0], 3)?;
/// let (seed, epoch, draw) = (0, 3, 17);
/// let chosen = cloud.sample(2, &mut Draws::new(seed, epoch, draw, 0))?;
/// assert_eq!(cloud.select(&chosen)?.len(), 2);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PointCloud {
    data: Vec<f32>,
    channels: usize,
}

impl PointCloud {
    /// A cloud from values, point by point, with `channels` values per point.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for 0 channels, or a number of values that is not a multiple of `channels`.
    pub fn new(data: impl Into<Vec<f32>>, channels: usize) -> Result<Self, DataError> {
        let data = data.into();
        DataError::at_least_1("channels", channels)?;
        if !data.len().is_multiple_of(channels) {
            return Err(DataError::option(
                "values",
                format!("a multiple of the number of channels, {channels}"),
                data.len(),
            ));
        }
        Ok(Self { data, channels })
    }

    /// How many points there are.
    pub fn len(&self) -> usize {
        self.data.len() / self.channels
    }

    /// Whether there is no point at all.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Values per point.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The values, point by point.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// The points with these indices, in this order; an index may occur more than once.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for an index past the last point.
    pub fn select(&self, indices: &[usize]) -> Result<Self, DataError> {
        let mut data = Vec::with_capacity(indices.len() * self.channels);
        for &index in indices {
            let point = self.data.chunks_exact(self.channels).nth(index);
            data.extend_from_slice(point.ok_or(DataError::IndexOutOfRange { index, len: self.len() })?);
        }
        Ok(Self { data, channels: self.channels })
    }

    /// The indices of `count` points, chosen uniformly without repetition.
    ///
    /// If `count` exceeds the number of points, all points are returned in a random order, then again in another one,
    /// up to `count`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an empty cloud, unless `count` is 0.
    pub fn sample(&self, count: usize, draws: &mut Draws) -> Result<Vec<usize>, DataError> {
        self.not_empty(count)?;
        Ok(permutations(self.len(), count, || draws.bits()))
    }

    /// The first three values of every point.
    pub(super) fn xyz(&self) -> Result<impl ExactSizeIterator<Item = [f32; 3]>, DataError> {
        if self.channels < 3 {
            return Err(DataError::option("channels", "at least 3, for the coordinates", self.channels));
        }
        Ok(self.data.chunks_exact(self.channels).map(|point| [point[0], point[1], point[2]]))
    }

    pub(super) fn not_empty(&self, count: usize) -> Result<(), DataError> {
        if self.is_empty() && count > 0 {
            return Err(DataError::option("count", "0, since the cloud is empty", count));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_points_are_distinct_uniform_and_new_in_each_epoch() -> Result<(), DataError> {
        let cloud = PointCloud::new(vec![0.0; 50 * 4], 4)?;
        let mut counts = [0u32; 50];
        for epoch in 0..5000 {
            let mut chosen = cloud.sample(10, &mut Draws::new(1, epoch, 7, 0))?;
            chosen.iter().for_each(|&index| counts[index] += 1);
            chosen.sort_unstable();
            chosen.dedup();
            assert_eq!(chosen.len(), 10);
        }
        // Five standard deviations of a binomial count with p = 1/5.
        assert!(counts.iter().all(|count| count.abs_diff(1000) < 142), "{counts:?}");
        let at = |epoch| cloud.sample(10, &mut Draws::new(1, epoch, 7, 0)).ok();
        assert_eq!(at(3), at(3));
        assert_ne!(at(3), at(4));
        Ok(())
    }

    #[test]
    fn small_clouds_repeat_points_and_empty_ones_are_refused() -> Result<(), DataError> {
        let cloud = PointCloud::new([1.0, 2.0, 3.0], 1)?;
        let chosen = cloud.sample(7, &mut Draws::new(0, 0, 0, 0))?;
        let times = [0, 1, 2].map(|point| chosen.iter().filter(|&&index| index == point).count());
        assert!(times.iter().all(|&times| times == 2 || times == 3) && chosen.len() == 7, "{chosen:?}");
        assert_eq!(cloud.select(&[2, 0, 2])?.data(), [3.0, 1.0, 3.0]);
        assert!(matches!(cloud.select(&[3]), Err(DataError::IndexOutOfRange { index: 3, len: 3 })));
        let empty = PointCloud::new([], 3)?;
        assert!(empty.sample(0, &mut Draws::new(0, 0, 0, 0))?.is_empty());
        assert!(empty.sample(1, &mut Draws::new(0, 0, 0, 0)).is_err());
        Ok(())
    }

    #[test]
    fn incomplete_points_are_refused() {
        assert!(matches!(PointCloud::new([1.0; 4], 3), Err(DataError::InvalidOption { option: "values", .. })));
        assert!(matches!(PointCloud::new([], 0), Err(DataError::InvalidOption { option: "channels", .. })));
    }
}
