//! What belongs to an image, and moves with it: boxes, masks, key points.

mod boxes;
mod geometry;
mod key_points;
mod mask;
mod per_box;
mod plain;

pub use boxes::{BoundingBoxFormat, BoundingBoxes};
pub(crate) use geometry::{Geometry, Map};
pub use key_points::KeyPoints;
pub use mask::Mask;
pub use per_box::{PerBox, PerBoxItem, PerBoxRows};

/// The label of an image, of any shape: a class, a caption, boxes, or a structure of them.
///
/// Numbers, strings and tensors belong to an image and do not change with it; [`BoundingBoxes`], [`Mask`] and
/// [`KeyPoints`] do, and [`PerBox`] is as long as the boxes. Tuples, arrays, vectors, options and maps of targets are
/// targets, and so is a structure that names its parts:
///
/// ```
/// use overdrive_dataload::{BoundingBoxes, PerBox, Target, TargetPart};
///
/// struct Annotation {
///     caption: String,
///     boxes: BoundingBoxes,
///     classes: PerBox<i64>,
/// }
///
/// impl Target for Annotation {
///     fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
///         self.boxes.visit(visit);
///         self.classes.visit(visit);
///     }
/// }
/// ```
///
/// Integers are `i64`, the kind of PyTorch's labels; others are no targets.
///
/// # Source
/// The structures that `torchvision.transforms.v2` walks through.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the label of an image",
    note = "integers are i64, as PyTorch's labels; a type of your own implements `Target`"
)]
pub trait Target: Send {
    /// Visits the parts that change with the image, in an order that does not change.
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>));
}

/// Visits the parts of a target, and in the place of a [`PerBox`] those of its entries.
pub(crate) fn visit_all(target: &mut dyn Target, visit: &mut dyn FnMut(TargetPart<'_>)) {
    target.visit(&mut |part| match part {
        TargetPart::PerBox(rows) => rows.visit(visit),
        part => visit(part),
    });
}

/// A part of a [`Target`] that changes with its image.
#[non_exhaustive]
pub enum TargetPart<'a> {
    /// Bounding boxes; a target has them at most once.
    Boxes(&'a mut BoundingBoxes),
    /// Points.
    KeyPoints(&'a mut KeyPoints),
    /// A mask of the whole image.
    Mask(&'a mut Mask),
    /// A list with an entry for each box.
    PerBox(&'a mut dyn PerBoxRows),
}
