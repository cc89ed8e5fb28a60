//! Lists with an entry for each bounding box.

use super::boxes::{ragged, ragged_items};
use super::{KeyPoints, Mask, Target, TargetPart};
use crate::columns::Element;
use crate::stack::misfits;
use crate::{DataError, Ragged, Size, Stackable};

/// An entry for each bounding box of an image: its class, its mask, its key points.
///
/// Where a box is removed, its entry is too.
///
/// # Shapes
/// | an entry | a batch of `N` images |
/// |---|---|
/// | a number or a bool | a [`Ragged`] with `N` rows of numbers |
/// | a [`Mask`] | a [`Ragged`] with `N` rows of values `[H, W]`, uint8 |
/// | [`KeyPoints`], `K` each | a [`Ragged`] with `N` rows of values `[K, 2]`, float32 |
/// | a `String` | a `Vec` of them for each image |
///
/// A batch without any box does not know `H`, `W` and `K`: they are 0 there, so that it cannot be concatenated with others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PerBox<T>(pub Vec<T>);

/// What [`PerBox`] can have for each box.
pub trait PerBoxItem: Send + Sized {
    /// What a batch is.
    type Batch: Send;

    /// Visits the parts that change with the image; a number has none.
    fn visit(&mut self, _visit: &mut dyn FnMut(TargetPart<'_>)) {}

    /// Puts the entries of all images into one batch.
    ///
    /// # Errors
    /// For entries that do not fit together.
    fn stack(samples: Vec<Vec<Self>>) -> Result<Self::Batch, DataError>;
}

/// A [`PerBox`] of any entries.
pub trait PerBoxRows {
    /// The number of entries.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keeps the entries for which `kept`, which is as long, is true.
    fn retain(&mut self, kept: &[bool]);

    /// Visits the parts of all entries that change with the image.
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>));
}

impl<T: PerBoxItem> PerBoxRows for PerBox<T> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn retain(&mut self, kept: &[bool]) {
        retain(&mut self.0, kept);
    }

    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        self.0.iter_mut().for_each(|entry| entry.visit(visit));
    }
}

/// Keeps the entries for which `kept`, which is as long, is true.
pub(super) fn retain<T>(entries: &mut Vec<T>, kept: &[bool]) {
    let mut kept = kept.iter();
    entries.retain(|_| kept.next() == Some(&true));
}

impl<T: PerBoxItem> Target for PerBox<T> {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        visit(TargetPart::PerBox(self));
    }
}

impl<T: PerBoxItem> Stackable for PerBox<T> {
    type Batch = T::Batch;

    fn stack(samples: Vec<Self>) -> Result<T::Batch, DataError> {
        T::stack(samples.into_iter().map(|sample| sample.0).collect())
    }
}

macro_rules! numbers {
    ($($number:ty: $element:ident),*) => {$(
        impl PerBoxItem for $number {
            type Batch = Ragged;

            fn stack(samples: Vec<Vec<Self>>) -> Result<Ragged, DataError> {
                ragged(samples.iter().map(Vec::as_slice), Element::$element, Vec::new())
            }
        }
    )*};
}

numbers!(bool: Bool, u8: Uint8, i8: Int8, i16: Int16, i32: Int32, i64: Int64, f32: Float, f64: Double);

impl PerBoxItem for String {
    type Batch = Vec<Vec<String>>;

    fn stack(samples: Vec<Vec<Self>>) -> Result<Self::Batch, DataError> {
        Ok(samples)
    }
}

impl PerBoxItem for Mask {
    type Batch = Ragged;

    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        visit(TargetPart::Mask(self));
    }

    fn stack(samples: Vec<Vec<Self>>) -> Result<Ragged, DataError> {
        let first = samples.iter().flatten().map(Mask::size).next().unwrap_or(Size { height: 0, width: 0 });
        let odd = |sample: &Vec<Self>| sample.iter().any(|mask| mask.size() != first);
        let odd = (0..samples.len()).filter(|&position| odd(&samples[position]));
        let Size { height, width } = first;
        misfits(odd, &format!("masks of {height} x {width} pixels"), "another size")?;
        let pixels = samples.iter().map(|masks| masks.iter().flat_map(Mask::values).copied().collect::<Vec<u8>>());
        let pixels: Vec<Vec<u8>> = pixels.collect();
        let counts = samples.iter().map(Vec::len);
        let item = vec![height as i64, width as i64];
        ragged_items(pixels.iter().map(Vec::as_slice), counts, Element::Uint8, item)
    }
}

impl PerBoxItem for KeyPoints {
    type Batch = Ragged;

    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        visit(TargetPart::KeyPoints(self));
    }

    fn stack(samples: Vec<Vec<Self>>) -> Result<Ragged, DataError> {
        let each = samples.iter().flatten().map(|points| points.points().len()).next().unwrap_or(0);
        let odd = |sample: &Vec<Self>| sample.iter().any(|points| points.points().len() != each);
        let odd = (0..samples.len()).filter(|&position| odd(&samples[position]));
        misfits(odd, &format!("{each} key points in each box"), "another number")?;
        let points = samples.iter().map(|sample| sample.iter().flat_map(KeyPoints::points).copied().collect());
        let points: Vec<Vec<[f32; 2]>> = points.collect();
        let counts = samples.iter().map(Vec::len);
        ragged_items(points.iter().map(Vec::as_slice), counts, Element::Float, vec![each as i64, 2])
    }
}
