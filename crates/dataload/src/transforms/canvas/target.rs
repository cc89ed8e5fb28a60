//! The target of an image, which changes with it.

use super::Canvas;
use crate::targets::{Geometry, visit_all};
use crate::{DataError, Size, Target, TargetPart};

impl<'a> Canvas<'a> {
    /// Changes `target` with the image from now on.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a mask of another size than the image.
    pub(crate) fn with_target(mut self, target: &'a mut dyn Target) -> Result<Self, DataError> {
        let size = Size { height: self.height, width: self.width };
        let mut other = None;
        visit_all(target, &mut |part| match part {
            TargetPart::Mask(mask) if mask.size() != size => other = Some(mask.size()),
            _ => {}
        });
        if let Some(other) = other {
            let expected = format!("the size of its image, {} x {}", self.height, self.width);
            return Err(DataError::option("mask", expected, format!("{} x {}", other.height, other.width)));
        }
        self.target = Some(target);
        Ok(self)
    }

    /// Visits the parts of the image's target, see [`Target`]; none if it has no target.
    pub fn visit_target(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        if let Some(target) = &mut self.target {
            target.visit(visit);
        }
    }

    /// The same, and in the place of a [`PerBox`](crate::PerBox) the parts of its entries.
    pub(crate) fn visit_whole_target(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        if let Some(target) = &mut self.target {
            visit_all(*target, visit);
        }
    }

    /// Changes the target as the image is about to be changed.
    pub(crate) fn change_target(&mut self, geometry: &Geometry) -> Result<(), DataError> {
        self.target.as_deref_mut().map_or(Ok(()), |target| geometry.apply(target))
    }
}
