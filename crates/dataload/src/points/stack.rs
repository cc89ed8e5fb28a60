//! Stacks clouds of equally many points.

use tch::{Kind, Tensor};

use crate::stack::common_shape;
use crate::tensor::tensor_from_bytes;
use crate::{Collate, DataError, PointCloud};

/// Stacks clouds, which must have equally many points, and labels if there are any.
///
/// # Shapes
/// `B` clouds of `N` points give float32 `[B, N, C]`; `B` pairs of a cloud and a label also give int64 `[B]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct StackPoints;

impl Collate<PointCloud> for StackPoints {
    type Batch = Tensor;

    fn collate(&self, samples: Vec<PointCloud>) -> Result<Tensor, DataError> {
        stack(&samples.iter().collect::<Vec<_>>())
    }
}

impl Collate<(PointCloud, i64)> for StackPoints {
    type Batch = (Tensor, Tensor);

    fn collate(&self, samples: Vec<(PointCloud, i64)>) -> Result<Self::Batch, DataError> {
        let (clouds, labels): (Vec<_>, Vec<i64>) = samples.iter().map(|(cloud, label)| (cloud, *label)).unzip();
        Ok((stack(&clouds)?, Tensor::f_from_slice(&labels)?))
    }
}

fn stack(clouds: &[&PointCloud]) -> Result<Tensor, DataError> {
    let shapes: Vec<_> = clouds.iter().map(|cloud| [cloud.len(), cloud.channels()]).collect();
    let shape = common_shape(&shapes)?;
    let values: Vec<f32> = clouds.iter().flat_map(|cloud| cloud.data()).copied().collect();
    let sizes = [clouds.len(), shape[0], shape[1]].map(|size| size as i64);
    tensor_from_bytes(bytemuck::cast_slice(&values), Kind::Float, &sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clouds_of_one_size_are_stacked_and_others_named() -> Result<(), DataError> {
        let cloud = |first: u8| PointCloud::new((first..first + 8).map(f32::from).collect::<Vec<_>>(), 4);
        let (points, labels) = StackPoints.collate(vec![(cloud(0)?, 3), (cloud(100)?, 5)])?;
        assert_eq!((points.size(), points.kind()), (vec![2, 2, 4], Kind::Float));
        assert_eq!(points.double_value(&[1, 1, 3]), 107.0);
        assert_eq!(Vec::<i64>::try_from(labels).map_err(DataError::Tensor)?, [3, 5]);
        assert_eq!(StackPoints.collate(vec![cloud(1)?])?.double_value(&[0, 1, 0]), 5.0);
        let other = PointCloud::new([0.0; 4], 4)?;
        let error = StackPoints.collate(vec![cloud(0)?, other]).unwrap_err();
        let message = "shape mismatch at position 1 of the batch: expected [2, 4], found [1, 4]: resize or pad samples to one shape";
        assert_eq!(error.to_string(), message);
        assert!(matches!(StackPoints.collate(Vec::<PointCloud>::new()), Err(DataError::EmptyBatch)));
        Ok(())
    }
}
