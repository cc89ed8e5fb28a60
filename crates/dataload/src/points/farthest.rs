//! Farthest-point sampling.

use crate::{DataError, Draws, PointCloud};

/// How many distances are compared together, so that the compiler can use vector instructions.
const LANES: usize = 16;

impl PointCloud {
    /// The indices of `count` points that cover the cloud evenly: after a random first point, each next one is the
    /// point farthest from all chosen ones; of equally far points the first.
    ///
    /// It takes time proportional to `count` times the number of points. If `count` exceeds the number of points, they
    /// are repeated in the same order.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for fewer than three channels, and for an empty cloud unless `count` is 0.
    ///
    /// # Source
    /// Eldar et al., "The Farthest Point Strategy for Progressive Image Sampling" (1997); `sample_farthest_points` of
    /// PyTorch3D, with a random start.
    #[doc(alias = "fps")]
    #[doc(alias = "sample_farthest_points")]
    pub fn farthest(&self, count: usize, draws: &mut Draws) -> Result<Vec<usize>, DataError> {
        let first = draws.below(self.len());
        self.farthest_from(first, count)
    }

    /// The same, beginning with the point whose index is `first`.
    ///
    /// # Errors
    /// As [`farthest`](Self::farthest), and [`DataError::IndexOutOfRange`] for a `first` past the last point.
    pub fn farthest_from(&self, first: usize, count: usize) -> Result<Vec<usize>, DataError> {
        self.not_empty(count)?;
        let [mut x, mut y, mut z] = [const { Vec::new() }; 3];
        for point in self.xyz()? {
            x.push(point[0]);
            y.push(point[1]);
            z.push(point[2]);
        }
        if count > 0 && first >= self.len() {
            return Err(DataError::IndexOutOfRange { index: first, len: self.len() });
        }
        // Squared distances to the nearest chosen point; -1 for chosen points, below all others.
        let mut distances = vec![f32::INFINITY; self.len()];
        let mut chosen = Vec::with_capacity(count);
        let mut next = first;
        while chosen.len() < count.min(self.len()) {
            chosen.push(next);
            distances[next] = -1.0;
            let [px, py, pz] = [x[next], y[next], z[next]];
            for (((distance, x), y), z) in distances.iter_mut().zip(&x).zip(&y).zip(&z) {
                let (dx, dy, dz) = (x - px, y - py, z - pz);
                let new = dx * dx + dy * dy + dz * dz;
                // The comparison is false for NaN: a point with NaN coordinates keeps an infinite distance, and is
                // chosen early.
                *distance = if new < *distance { new } else { *distance };
            }
            let greatest = greatest(&distances);
            next = distances.iter().position(|&distance| distance == greatest).unwrap_or(0);
        }
        Ok(chosen.iter().copied().cycle().take(count).collect())
    }
}

/// The greatest value, ignoring NaN.
fn greatest(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (lanes, rest) = values.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for chunk in lanes {
        most.iter_mut().zip(chunk).for_each(|(most, &value)| *most = larger(*most, value));
    }
    most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random_cloud(points: usize, channels: usize) -> PointCloud {
        let mut draws = Draws::new(0, 1, 2, 3);
        let data: Vec<f32> = (0..points * channels).map(|_| draws.uniform(-1.0, 1.0) as f32).collect();
        PointCloud::new(data, channels).unwrap()
    }

    /// The distance of the point at `index` to the nearest of `chosen`, squared.
    fn nearest(cloud: &PointCloud, index: usize, chosen: &[usize]) -> f32 {
        let at = |index: usize, axis: usize| cloud.data()[index * cloud.channels() + axis];
        let between = |other: usize| (0..3).map(|axis| (at(index, axis) - at(other, axis)).powi(2)).sum::<f32>();
        chosen.iter().map(|&other| between(other)).fold(f32::INFINITY, f32::min)
    }

    #[test]
    fn every_point_is_the_farthest_from_earlier_ones() -> Result<(), DataError> {
        let cloud = random_cloud(333, 5);
        let chosen = cloud.farthest(40, &mut Draws::new(4, 0, 0, 0))?;
        for taken in 1..40 {
            let farthest = (0..333).map(|index| nearest(&cloud, index, &chosen[..taken])).fold(0.0, f32::max);
            assert_eq!(nearest(&cloud, chosen[taken], &chosen[..taken]), farthest);
        }
        assert_ne!(chosen, cloud.farthest(40, &mut Draws::new(4, 1, 0, 0))?);
        Ok(())
    }

    #[test]
    fn coinciding_points_are_each_chosen_once_then_repeated() -> Result<(), DataError> {
        let cloud = PointCloud::new([0.5; 15], 3)?;
        assert_eq!(cloud.farthest_from(2, 7)?, [2, 0, 1, 3, 4, 2, 0]);
        let strange = PointCloud::new([0.0, 0.0, 0.0, f32::NAN, 0.0, 0.0, 1.0, 0.0, 0.0], 3)?;
        assert_eq!(strange.farthest_from(0, 3)?, [0, 1, 2]);
        Ok(())
    }

    #[test]
    fn clouds_without_coordinates_are_refused() -> Result<(), DataError> {
        let draws = &mut Draws::new(0, 0, 0, 0);
        assert!(PointCloud::new([0.0; 4], 2)?.farthest(1, draws).is_err());
        assert!(PointCloud::new([], 3)?.farthest(1, draws).is_err());
        assert!(PointCloud::new([], 3)?.farthest(0, draws)?.is_empty());
        assert!(matches!(random_cloud(3, 3).farthest_from(3, 1), Err(DataError::IndexOutOfRange { index: 3, len: 3 })));
        Ok(())
    }
}
