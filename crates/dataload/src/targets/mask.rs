//! Masks of an image.

use std::path::Path;

use tch::{Kind, Tensor};

use super::{Geometry, Target, TargetPart};
use crate::decode::png_depth;
use crate::stack::common_shape;
use crate::tensor::tensor_from_bytes;
use crate::transforms::nearest;
use crate::{Color, DataError, Size, Stackable, decode_image};

/// A value for each pixel of an image: the class that it shows, or whether an object covers it.
///
/// It has the image's size, and is always interpolated by the nearest value. The masks of the objects in boxes are a
/// [`PerBox`](crate::PerBox) of masks.
///
/// # Shapes
/// A batch of `N` images is uint8 `[N, H, W]`.
///
/// # Source
/// `torchvision.tv_tensors.Mask`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    values: Vec<u8>,
    size: Size,
    fill: u8,
}

impl Mask {
    /// A mask of `height * width` values, row by row.
    ///
    /// # Errors
    /// [`DataError::ImageShape`] when `values` has another length.
    pub fn new(values: impl Into<Vec<u8>>, height: usize, width: usize) -> Result<Self, DataError> {
        let values = values.into();
        if height.checked_mul(width) != Some(values.len()) {
            return Err(DataError::ImageShape { height, width, channels: 1, bytes: values.len() });
        }
        Ok(Self { values, size: Size { height, width }, fill: 0 })
    }

    /// A mask that is stored as a grey PNG file; `name` is its name in errors. Values of less than 8 bits are spread from
    /// 0 to 255, as Pillow does.
    ///
    /// # Errors
    /// An error of the decoder; [`DataError::InvalidOption`] for an image with colours, as which files with a palette
    /// are read, for one of 16 bits, of which half would be lost, and for JPEG, whose values are not those that were
    /// encoded.
    pub fn decode(encoded: &[u8], name: impl AsRef<Path>) -> Result<Self, DataError> {
        let refused = |what: &str, found: &dyn std::fmt::Display| {
            Err(DataError::option("mask", format!("{what} in {}", name.as_ref().display()), found))
        };
        if encoded.starts_with(overdrive_jpeg::MAGIC) {
            return refused("a lossless image", &"JPEG, which changes values");
        }
        let image = decode_image(encoded, Color::AsStored, name.as_ref())?;
        if image.channels() != 1 {
            return refused("one channel", &image.channels());
        }
        if png_depth(encoded) == Some(16) {
            return refused("values of 8 bits", &"16 bits: take `Mask::new` with its values as classes below 256");
        }
        Self::new(image.data(), image.height(), image.width())
    }

    /// The value outside of the image, for borders and maps of the plane: 255 where that is the class to ignore; 0
    /// unless set.
    pub fn fill(mut self, fill: u8) -> Self {
        self.fill = fill;
        self
    }

    /// The values, row by row.
    pub fn values(&self) -> &[u8] {
        &self.values
    }

    /// Rows and columns.
    pub fn size(&self) -> Size {
        self.size
    }

    pub(super) fn change(&mut self, geometry: &Geometry) -> Result<(), DataError> {
        let size = self.size;
        let width = size.width;
        match geometry {
            Geometry::Crop(region) => {
                let rows = self.values.chunks_exact(width.max(1)).skip(region.top).take(region.height);
                self.values = rows.flat_map(|row| &row[region.left..][..region.width]).copied().collect();
                self.size = Size { height: region.height, width: region.width };
            }
            Geometry::FlipHorizontal { .. } => {
                self.values.chunks_exact_mut(width.max(1)).for_each(<[u8]>::reverse);
            }
            Geometry::FlipVertical { .. } => {
                self.values.reverse();
                self.values.chunks_exact_mut(width.max(1)).for_each(<[u8]>::reverse);
            }
            Geometry::Resize { to, .. } => self.gather(*to, |row, column| {
                let places = [(row, size.height, to.height), (column, size.width, to.width)];
                let [row, column] = places.map(|(at, from, to)| Some(scaled(at, from, to)));
                row.zip(column)
            })?,
            Geometry::Pad { padding, mode, from } => self.gather(padding.around(*from), |row, column| {
                mode.source(row, padding.top, size.height).zip(mode.source(column, padding.left, width))
            })?,
            Geometry::Map { map, .. } => {
                let mut mapped = vec![self.fill; self.values.len()];
                nearest(&self.values, &mut mapped, [size.height, width], map.inverse, self.fill);
                self.values = mapped;
            }
        }
        Ok(())
    }

    /// Becomes a mask of another size, whose values are at these places in the present one.
    fn gather(&mut self, to: Size, place: impl Fn(usize, usize) -> Option<(usize, usize)>) -> Result<(), DataError> {
        crate::decode::check_size(to.height, to.width, 1, Path::new("mask"))?;
        let places = (0..to.height).flat_map(|row| (0..to.width).map(move |column| (row, column)));
        let value = |(row, column)| match place(row, column) {
            Some((row, column)) => self.values[row * self.size.width + column],
            None => self.fill,
        };
        self.values = places.map(value).collect();
        self.size = to;
        Ok(())
    }
}

/// The nearest of `from` places for number `at` of `to`, as `torch.nn.functional.interpolate` rounds it.
fn scaled(at: usize, from: usize, to: usize) -> usize {
    let scale = from as f32 / to as f32;
    ((at as f32 * scale).floor() as usize).min(from.saturating_sub(1))
}

impl Target for Mask {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        visit(TargetPart::Mask(self));
    }
}

impl Stackable for Mask {
    type Batch = Tensor;

    fn stack(samples: Vec<Self>) -> Result<Tensor, DataError> {
        let shapes: Vec<[usize; 2]> = samples.iter().map(|mask| [mask.size.height, mask.size.width]).collect();
        let [height, width] = *common_shape(&shapes)?;
        let mut values = Vec::with_capacity(samples.len() * height * width);
        samples.iter().for_each(|mask| values.extend_from_slice(&mask.values));
        tensor_from_bytes(&values, Kind::Uint8, &[samples.len(), height, width].map(|side| side as i64))
    }
}
