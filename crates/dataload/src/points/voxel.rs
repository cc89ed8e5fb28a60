//! Keeps one point per voxel of a grid.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::{DataError, Draws, PointCloud};

impl PointCloud {
    /// The index of one random point of each occupied voxel. Voxels are cubes with sides of `size`, in the units of the
    /// coordinates. The indices are in the order in which the voxels first occur.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `size` that is not finite and above 0, or fewer than three channels.
    ///
    /// # Source
    /// `GridSampling3D` of Torch-Points3D keeps the last point or the mean, `voxel_down_sample` of Open3D the mean;
    /// this keeps a random point.
    #[doc(alias = "GridSampling3D")]
    #[doc(alias = "voxel_down_sample")]
    pub fn voxels(&self, size: f32, draws: &mut Draws) -> Result<Vec<usize>, DataError> {
        if !(size > 0.0 && size.is_finite()) {
            return Err(DataError::option("size", "a finite number above 0", size));
        }
        let mut voxel_numbers: HashMap<[i64; 3], usize> = HashMap::new();
        // For each voxel: the point kept, and how many have been seen.
        let mut voxels: Vec<(usize, usize)> = Vec::new();
        for (index, point) in self.xyz()?.enumerate() {
            let voxel = point.map(|value| (value / size).floor() as i64);
            match voxel_numbers.entry(voxel) {
                Entry::Vacant(entry) => {
                    entry.insert(voxels.len());
                    voxels.push((index, 1));
                }
                Entry::Occupied(entry) => {
                    let (kept, seen) = &mut voxels[*entry.get()];
                    *seen += 1;
                    // Reservoir sampling: the n-th point of a voxel replaces the kept one with probability 1/n.
                    if draws.below(*seen) == 0 {
                        *kept = index;
                    }
                }
            }
        }
        Ok(voxels.into_iter().map(|(kept, _)| kept).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_voxel_keeps_one_of_its_points_at_random() -> Result<(), DataError> {
        let points = [[0.1, 0.1, 0.1], [-0.1, 0.1, 0.1], [0.9, 0.9, 0.9], [0.1, 0.1, 1.1], [0.5, 0.2, 0.8]];
        let cloud = PointCloud::new(points.as_flattened(), 3)?;
        let mut counts = [0u32; 5];
        for epoch in 0..3000 {
            let chosen = cloud.voxels(1.0, &mut Draws::new(2, epoch, 0, 0))?;
            assert_eq!((chosen.len(), chosen[1], chosen[2]), (3, 1, 3));
            chosen.into_iter().for_each(|index| counts[index] += 1);
        }
        // Five standard deviations of a binomial count with p = 1/3.
        assert!([0, 2, 4].iter().all(|&index: &usize| counts[index].abs_diff(1000) < 130), "{counts:?}");
        Ok(())
    }

    #[test]
    fn sizes_and_places_out_of_range() -> Result<(), DataError> {
        let cloud = PointCloud::new([f32::NAN, 0.0, 0.0, f32::INFINITY, f32::MIN, 0.0], 3)?;
        let draws = &mut Draws::new(0, 0, 0, 0);
        assert_eq!(cloud.voxels(f32::MIN_POSITIVE, draws)?, [0, 1]);
        for size in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(matches!(cloud.voxels(size, draws), Err(DataError::InvalidOption { option: "size", .. })));
        }
        assert!(PointCloud::new([0.0], 1)?.voxels(1.0, draws).is_err());
        Ok(())
    }
}
