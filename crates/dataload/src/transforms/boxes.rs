//! Changes of an image's boxes and key points alone.

use crate::{BoundingBoxFormat, Canvas, DataError, Draws, Size, TargetPart, Transform};

/// Converts the image's bounding boxes to another format.
///
/// # Source
/// `torchvision.transforms.v2.ConvertBoundingBoxFormat`.
#[derive(Clone, Copy, Debug)]
pub struct ConvertBoundingBoxFormat {
    format: BoundingBoxFormat,
}

impl ConvertBoundingBoxFormat {
    /// Converts to this format.
    pub fn new(format: BoundingBoxFormat) -> Self {
        Self { format }
    }
}

impl Transform for ConvertBoundingBoxFormat {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        canvas.visit_target(&mut |part| {
            if let TargetPart::Boxes(boxes) = part {
                *boxes = boxes.to_format(self.format);
            }
        });
        Ok(())
    }
}

/// Cuts the image's bounding boxes off at its edges, also those that are not [clamped](crate::BoundingBoxes::clamped) by
/// every transform.
///
/// # Source
/// `torchvision.transforms.v2.ClampBoundingBoxes`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClampBoundingBoxes;

impl Transform for ClampBoundingBoxes {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        let size = size(canvas);
        canvas.visit_target(&mut |part| {
            if let TargetPart::Boxes(boxes) = part {
                boxes.clamp(size);
            }
        });
        Ok(())
    }
}

/// Moves key points outside of the image to its outermost pixels.
///
/// # Source
/// `torchvision.transforms.v2.ClampKeyPoints`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClampKeyPoints;

impl Transform for ClampKeyPoints {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        let size = size(canvas);
        canvas.visit_whole_target(&mut |part| {
            if let TargetPart::KeyPoints(points) = part {
                points.clamp(size);
            }
        });
        Ok(())
    }
}

pub(super) fn size(canvas: &Canvas<'_>) -> Size {
    Size { height: canvas.height(), width: canvas.width() }
}
