//! Points in an image.

use super::boxes::ragged;
use super::{Geometry, Target, TargetPart, geometry};
use crate::columns::Element;
use crate::{DataError, Ragged, Size, Stackable};

/// Points in an image, each as x and y in pixels.
///
/// Those of the objects in boxes are a [`PerBox`](crate::PerBox) of key points, equally many each.
///
/// # Shapes
/// A batch of `N` images is a [`Ragged`] with `N` rows of values `[2]`, float32.
///
/// # Source
/// `torchvision.tv_tensors.KeyPoints`.
#[derive(Clone, Debug, PartialEq)]
#[doc(alias = "landmarks")]
pub struct KeyPoints {
    points: Vec<[f32; 2]>,
}

impl KeyPoints {
    /// These points.
    pub fn new(points: impl Into<Vec<[f32; 2]>>) -> Self {
        Self { points: points.into() }
    }

    /// The points.
    pub fn points(&self) -> &[[f32; 2]] {
        &self.points
    }

    /// The points, to be changed.
    pub fn points_mut(&mut self) -> &mut Vec<[f32; 2]> {
        &mut self.points
    }

    /// Moves points outside of an image of this size to its outermost pixels.
    pub fn clamp(&mut self, size: Size) {
        let [right, bottom] = [size.width, size.height].map(|side| side.saturating_sub(1) as f32);
        for [x, y] in &mut self.points {
            (*x, *y) = (x.clamp(0.0, right), y.clamp(0.0, bottom));
        }
    }

    /// Removes points outside of an image of this size.
    pub(crate) fn sanitize(&mut self, size: Size) {
        let [width, height] = [size.width, size.height].map(|side| side as f32);
        self.points.retain(|&[x, y]| x >= 0.0 && x < width && y >= 0.0 && y < height);
    }

    pub(super) fn change(&mut self, geometry: &Geometry) {
        let change: &dyn Fn([f32; 2]) -> [f32; 2] = match geometry {
            Geometry::Crop(region) => &|[x, y]| [x - region.left as f32, y - region.top as f32],
            Geometry::Pad { padding, .. } => &|[x, y]| [x + padding.left as f32, y + padding.top as f32],
            Geometry::Resize { from, to } => {
                let [columns, rows] = geometry::ratios(*from, *to);
                &move |[x, y]: [f32; 2]| [x * columns, y * rows]
            }
            // The place of the pixel, where a box has its edges.
            Geometry::FlipHorizontal { width } => &|[x, y]| [(*width as f32 - 1.0) - x, y],
            Geometry::FlipVertical { height } => &|[x, y]| [x, (*height as f32 - 1.0) - y],
            Geometry::Map { map, .. } => &|place| map.place(place),
        };
        self.points.iter_mut().for_each(|point| *point = change(*point));
    }
}

impl Target for KeyPoints {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        visit(TargetPart::KeyPoints(self));
    }
}

impl Stackable for KeyPoints {
    type Batch = Ragged;

    fn stack(samples: Vec<Self>) -> Result<Ragged, DataError> {
        ragged(samples.iter().map(|sample| sample.points.as_slice()), Element::Float, vec![2])
    }
}
