//! Converts images to normalised float32 in the worker.

use std::sync::Arc;

use overdrive_ffi::{Arg, DeviceConstants, HostBuffer, LazyOp};
use tch::{Kind, Tensor};

use crate::collate::{Planes, targets};
use crate::{Collate, DataError, Image};

static DIV: LazyOp = LazyOp::new("aten::div", "Scalar");

/// A float32 value in the machine's byte order, ready to be copied into a tensor.
type FloatBytes = [u8; 4];

/// Stacks images as float32 `(value / 255 - mean) / std`, bit for bit as torchvision does.
///
/// # Shapes
/// `N` samples `(Image, i64)` give float32 `[N, C, H, W]` and int64 `[N]`.
///
/// # Source
/// `torchvision.transforms.ToTensor` followed by `torchvision.transforms.Normalize`.
#[derive(Clone, Debug)]
#[doc(alias = "ToTensor")]
#[doc(alias = "Normalize")]
pub struct ToFloat {
    /// The result for each of the 256 values, by channel; a single table serves all channels.
    tables: Vec<[FloatBytes; 256]>,
    mean: Vec<f32>,
    std: Vec<f32>,
    /// Mean and std for [`apply`](Self::apply).
    on_devices: Arc<DeviceConstants<2>>,
}

impl ToFloat {
    /// Normalises channel `c` with `mean[c]` and `std[c]`, given on the scale from 0 to 1.
    ///
    /// With a single mean and std, images may have any number of channels.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when `mean` and `std` differ in length or are empty, when a value is not finite, or
    /// when a `std` is 0.
    pub fn new(mean: &[f32], std: &[f32]) -> Result<Self, DataError> {
        if mean.is_empty() || mean.len() != std.len() {
            let found = format!("{} and {}", mean.len(), std.len());
            return Err(DataError::option("mean and std", "equally many values, one for each channel", found));
        }
        if let Some(bad) = mean.iter().find(|mean| !mean.is_finite()) {
            return Err(DataError::option("mean", "finite values", bad));
        }
        if let Some(bad) = std.iter().find(|std| !std.is_finite() || **std == 0.0) {
            return Err(DataError::option("std", "finite values other than 0", bad));
        }
        let tables = mean.iter().zip(std).map(|(&mean, &std)| table(mean, std)).collect();
        Ok(Self { tables, mean: mean.to_vec(), std: std.to_vec(), on_devices: Arc::default() })
    }

    /// Only scales to the range 0 to 1.
    pub fn unit() -> Self {
        Self { tables: vec![table(0.0, 1.0)], mean: vec![0.0], std: vec![1.0], on_devices: Arc::default() }
    }
}

impl Default for ToFloat {
    /// [`ToFloat::unit`].
    fn default() -> Self {
        Self::unit()
    }
}

fn table(mean: f32, std: f32) -> [FloatBytes; 256] {
    std::array::from_fn(|value| ((value as f32 / 255.0 - mean) / std).to_ne_bytes())
}

impl ToFloat {
    /// Converts a uint8 batch on its device: copying uint8 to a GPU takes a quarter of the bytes of float32.
    ///
    /// # Shapes
    /// uint8 `[N, C, H, W]` gives float32 `[N, C, H, W]` in the same memory format.
    ///
    /// # Syncs
    /// Only the first time on a device.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for another kind, shape or number of channels; [`DataError::Torch`].
    pub fn apply(&self, images: &Tensor) -> Result<Tensor, DataError> {
        let (kind, shape, values) = (images.kind(), images.size(), self.mean.len());
        if kind != Kind::Uint8 || shape.len() != 4 || (values != 1 && values as i64 != shape[1]) {
            let expected = format!("uint8 [N, C, H, W] with {values} channels, or a single mean and std");
            return Err(DataError::option("images", expected, format!("{kind:?} {shape:?}")));
        }
        // Divides in float32, without a tensor of the values before.
        let unit = DIV.tensor(&[Arg::Tensor(images), Arg::Double(255.0)])?.f_to_kind(Kind::Float)?;
        if self.mean == [0.0] && self.std == [1.0] {
            return Ok(unit);
        }
        let by_channel = |values: &[f32]| Tensor::f_from_slice(values)?.f_view([-1, 1, 1]);
        let make = || Ok::<_, DataError>([by_channel(&self.mean)?, by_channel(&self.std)?]);
        let [mean, std] = self.on_devices.on(images.device(), make)?;
        Ok(unit.f_sub(&mean)?.f_div(&std)?)
    }

    /// Converts the planes of a batch of shape `[N, C, H, W]`.
    pub(crate) fn planes(&self, pixels: &[u8], shape: [usize; 4], pinned: bool) -> Result<Tensor, DataError> {
        let [_, channels, height, width] = shape;
        if self.tables.len() != 1 && self.tables.len() != channels {
            let expected = format!("1 or {channels} values, one for each channel");
            return Err(DataError::option("mean and std", expected, self.tables.len()));
        }
        let bytes = size_of::<FloatBytes>() * pixels.len();
        let mut buffer = if pinned { HostBuffer::pinned(bytes) } else { HostBuffer::zeroed(bytes, false) }?;
        let floats = buffer.as_mut_slice().as_chunks_mut::<{ size_of::<FloatBytes>() }>().0;
        // `max(1)` only guards the chunk size from 0; without pixels there are no chunks.
        let plane = (height * width).max(1);
        let planes = floats.chunks_mut(plane).zip(pixels.chunks(plane));
        for ((floats, pixels), table) in planes.zip(self.tables.iter().cycle()) {
            for (float, &pixel) in floats.iter_mut().zip(pixels) {
                *float = table[usize::from(pixel)];
            }
        }
        Ok(buffer.into_tensor(Kind::Float, &shape.map(|size| size as i64))?)
    }
}

impl Collate<(Image, i64)> for ToFloat {
    type Batch = (Tensor, Tensor);

    fn collate(&self, samples: Vec<(Image, i64)>) -> Result<Self::Batch, DataError> {
        // Copying first is faster: a copy keeps many memory reads in flight, table look-ups from cold memory do not.
        let planes = Planes::stack(samples.iter().map(|(image, _)| image))?;
        Ok((self.planes(&planes.bytes, planes.shape(), false)?, targets(&samples)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_torch_bit_for_bit() -> Result<(), Box<dyn std::error::Error>> {
        let (mean, std) = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);
        let pixels: Vec<u8> = (0..=255).flat_map(|value: u8| [value, value ^ 0x5a, 255 - value]).collect();
        let image = Image::new(pixels, 16, 16, 3)?;
        let (ours, _) = ToFloat::new(&mean, &std)?.collate_one(image.clone())?;
        let (stacked, _) = crate::Stack.collate(vec![(image, 0)])?;
        let as_channels = |values: &[f32]| Tensor::from_slice(values).view([1, 3, 1, 1]);
        let torch = (stacked.to_kind(Kind::Float) / 255.0 - as_channels(&mean)) / as_channels(&std);
        assert!(ours.equal(&torch));
        let on_device = ToFloat::new(&mean, &std)?;
        assert!(on_device.apply(&stacked)?.equal(&torch));
        assert!(on_device.apply(&torch).is_err() && on_device.apply(&stacked.narrow(1, 0, 2)).is_err());
        Ok(())
    }

    #[test]
    fn one_value_serves_any_number_of_channels() -> Result<(), DataError> {
        let (images, _) = ToFloat::new(&[0.5], &[0.5])?.collate_one(Image::new([0, 255, 0, 255], 1, 2, 2)?)?;
        assert_eq!(Vec::<f32>::try_from(images.view(-1)).map_err(DataError::Tensor)?, [-1.0, -1.0, 1.0, 1.0]);
        assert_eq!(ToFloat::unit().collate_one(Image::new([], 0, 3, 1)?)?.0.size(), [1, 1, 0, 3]);
        Ok(())
    }

    #[test]
    fn bad_statistics_are_refused() -> Result<(), DataError> {
        let bad: [(&[f32], &[f32]); 5] =
            [(&[], &[]), (&[0.0], &[1.0, 1.0]), (&[f32::NAN], &[1.0]), (&[0.0], &[0.0]), (&[0.0], &[f32::INFINITY])];
        for (mean, std) in bad {
            assert!(matches!(ToFloat::new(mean, std), Err(DataError::InvalidOption { .. })), "{mean:?} {std:?}");
        }
        let rgb = ToFloat::new(&[0.0; 3], &[1.0; 3])?;
        assert!(matches!(rgb.collate_one(Image::new([1], 1, 1, 1)?), Err(DataError::InvalidOption { .. })));
        Ok(())
    }

    impl ToFloat {
        fn collate_one(&self, image: Image) -> Result<(Tensor, Tensor), DataError> {
            self.collate(vec![(image, 0)])
        }
    }
}
