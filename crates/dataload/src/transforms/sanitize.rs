//! Removes boxes and key points that are not in the image.

use super::boxes::size;
use crate::{Canvas, DataError, Draws, TargetPart, Transform};

/// Removes bounding boxes that are too small or not within the image, and their entries of every
/// [`PerBox`](crate::PerBox).
///
/// Put it at the end of the transforms: a crop leaves empty boxes of what it cuts off.
///
/// ```
/// use overdrive_dataload::{ImagePipeline, RandomResizedCrop, SanitizeBoundingBoxes};
///
/// let train = ImagePipeline::new(0).then(RandomResizedCrop::new(224)).then(SanitizeBoundingBoxes::new());
/// ```
///
/// A `Vec` or a tensor beside the boxes keeps its length, so that classes in it would no longer be those of their boxes:
/// put what belongs to the boxes into a `PerBox`. A target without one is refused, unless its boxes are said to be
/// [alone](Self::boxes_alone).
///
/// # Source
/// `torchvision.transforms.v2.SanitizeBoundingBoxes`, where `labels_getter` says which labels are removed. It also removes
/// boxes that a resize has rounded to less than a thousandth of a pixel beyond the image; here they stay, cut off at its
/// edge.
#[derive(Clone, Copy, Debug)]
pub struct SanitizeBoundingBoxes {
    min_size: f32,
    min_area: f32,
    alone: bool,
}

impl SanitizeBoundingBoxes {
    /// Torchvision's defaults.
    pub fn new() -> Self {
        Self { min_size: 1.0, min_area: 1.0, alone: false }
    }

    /// Says that nothing in the target belongs to single boxes, so that it needs no [`PerBox`](crate::PerBox).
    ///
    /// # Source
    /// `labels_getter=None`.
    #[doc(alias = "labels_getter")]
    pub fn boxes_alone(mut self) -> Self {
        self.alone = true;
        self
    }

    /// The least width and height, in pixels; 1 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for less than 1.
    pub fn min_size(mut self, min_size: f32) -> Result<Self, DataError> {
        self.min_size = at_least_1("min_size", min_size)?;
        Ok(self)
    }

    /// The least area, in pixels; 1 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for less than 1.
    pub fn min_area(mut self, min_area: f32) -> Result<Self, DataError> {
        self.min_area = at_least_1("min_area", min_area)?;
        Ok(self)
    }
}

fn at_least_1(name: &'static str, least: f32) -> Result<f32, DataError> {
    if least >= 1.0 { Ok(least) } else { Err(DataError::option(name, "at least 1", least)) }
}

impl Default for SanitizeBoundingBoxes {
    /// [`SanitizeBoundingBoxes::new`].
    fn default() -> Self {
        Self::new()
    }
}

impl Transform for SanitizeBoundingBoxes {
    /// # Errors
    /// [`DataError::InvalidOption`] for a target without boxes or with several, without a `PerBox` where the boxes are not
    /// said to be alone, and for a `PerBox` of another length.
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        let (size, mut found) = (size(canvas), Vec::new());
        canvas.visit_target(&mut |part| {
            if let TargetPart::Boxes(boxes) = part {
                found.push(boxes.valid(size, self.min_size, self.min_area));
            }
        });
        let [kept] = found.as_slice() else {
            let expected = "a target with one `BoundingBoxes`";
            return Err(DataError::option("SanitizeBoundingBoxes", expected, found.len()));
        };
        // Before anything is removed.
        let (mut odd, mut alone) = (None, true);
        canvas.visit_target(&mut |part| {
            if let TargetPart::PerBox(rows) = part {
                alone = false;
                odd = Some(rows.len()).filter(|&len| len != kept.len()).or(odd);
            }
        });
        if alone && !self.alone {
            let expected = "a `PerBox` with what belongs to each box, or `boxes_alone()` where nothing does";
            return Err(DataError::option("SanitizeBoundingBoxes", expected, "boxes without one"));
        }
        if let Some(odd) = odd {
            return Err(DataError::option("PerBox", format!("{} entries, one for each box", kept.len()), odd));
        }
        canvas.visit_target(&mut |part| match part {
            TargetPart::Boxes(boxes) => boxes.retain(kept, size),
            TargetPart::PerBox(rows) => rows.retain(kept),
            _ => {}
        });
        Ok(())
    }
}

/// Removes key points outside of the image. Those of objects in boxes, in a [`PerBox`](crate::PerBox), stay, because
/// each object has equally many. A `Vec` or a tensor beside the points, such as their visibilities, is not shortened:
/// [`ClampKeyPoints`](crate::ClampKeyPoints) keeps all points.
///
/// # Source
/// `torchvision.transforms.v2.SanitizeKeyPoints`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SanitizeKeyPoints;

impl Transform for SanitizeKeyPoints {
    fn apply(&self, canvas: &mut Canvas<'_>, _: &mut Draws) -> Result<(), DataError> {
        let size = size(canvas);
        canvas.visit_target(&mut |part| {
            if let TargetPart::KeyPoints(points) = part {
                points.sanitize(size);
            }
        });
        Ok(())
    }
}
