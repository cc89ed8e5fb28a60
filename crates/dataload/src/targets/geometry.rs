//! The ways in which an image's plane changes, and what they do to the parts of a target.

use super::{TargetPart, visit_all};
use crate::transforms::{Inverse, Padding, PaddingMode};
use crate::{DataError, Region, Size, Target};

/// A change of the plane. Sizes are those before it.
pub(crate) enum Geometry {
    /// Only this region stays.
    Crop(Region),
    /// Everything is scaled.
    Resize { from: Size, to: Size },
    /// Left and right are swapped.
    FlipHorizontal { width: usize },
    /// Top and bottom are swapped.
    FlipVertical { height: usize },
    /// There is more around.
    Pad { padding: Padding, mode: PaddingMode, from: Size },
    /// Every place moves, the size stays.
    Map { map: Map, size: Size },
}

/// A map of the plane, and its inverse.
#[derive(Clone, Copy)]
pub(crate) struct Map {
    pub(crate) inverse: Inverse,
    forward: Inverse,
}

impl Map {
    pub(crate) fn new(inverse: Inverse) -> Self {
        let [a, b, c, d, e, f] = inverse;
        let determinant = a * e - b * d;
        let [a, b, d, e] = [e / determinant, -b / determinant, -d / determinant, a / determinant];
        Self { inverse, forward: [a, b, -a * c - b * f, d, e, -d * c - e * f] }
    }

    /// Where a place goes.
    pub(super) fn place(&self, [x, y]: [f32; 2]) -> [f32; 2] {
        let [a, b, c, d, e, f] = self.forward;
        let (x, y) = (f64::from(x), f64::from(y));
        [(a * x + b * y + c) as f32, (d * x + e * y + f) as f32]
    }
}

/// By how much a size grows, in x and y.
pub(super) fn ratios(from: Size, to: Size) -> [f32; 2] {
    [(to.width, from.width), (to.height, from.height)].map(|(to, from)| (to as f64 / from as f64) as f32)
}

impl Geometry {
    /// The size at whose edges boxes are cut off.
    pub(super) fn clamps(&self) -> Option<Size> {
        match *self {
            Self::Crop(Region { height, width, .. }) => Some(Size { height, width }),
            Self::Pad { padding, from, .. } => Some(padding.around(from)),
            Self::Map { size, .. } => Some(size),
            _ => None,
        }
    }

    /// Changes every part of a target.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a border that shows the image again, around boxes or key points.
    pub(crate) fn apply(&self, target: &mut dyn Target) -> Result<(), DataError> {
        let mut done = Ok(());
        visit_all(target, &mut |part| {
            if done.is_ok() {
                done = self.change(part);
            }
        });
        done
    }

    fn change(&self, part: TargetPart<'_>) -> Result<(), DataError> {
        if let Self::Pad { mode, .. } = self
            && *mode != PaddingMode::Constant
            && matches!(part, TargetPart::Boxes(_) | TargetPart::KeyPoints(_))
        {
            // What is seen twice would need two boxes.
            let expected = "`Constant` for images with boxes or key points";
            return Err(DataError::option("padding_mode", expected, format!("{mode:?}")));
        }
        match part {
            TargetPart::Boxes(boxes) => boxes.change(self),
            TargetPart::KeyPoints(points) => points.change(self),
            TargetPart::Mask(mask) => mask.change(self)?,
            // Its entries are visited in its place.
            TargetPart::PerBox(_) => {}
        }
        Ok(())
    }
}
