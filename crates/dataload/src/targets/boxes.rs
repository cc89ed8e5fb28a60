//! Bounding boxes.

use super::{Geometry, Target, TargetPart, geometry};
use crate::columns::{Array, Element, Words};
use crate::{DataError, Ragged, Size, Stackable};

/// How far beyond the image, in parts of its side, a box may be by the rounding of a resize or flip in float32.
const SLACK: f32 = 8.0 * f32::EPSILON;

/// What the four numbers of a bounding box are, in pixels from the image's upper left corner.
///
/// # Source
/// `torchvision.tv_tensors.BoundingBoxFormat`, without its rotated boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoundingBoxFormat {
    /// Left, top, right, bottom: Pascal VOC's, and torchvision's models'.
    #[doc(alias = "XYXY")]
    Xyxy,
    /// Left, top, width, height: COCO's.
    #[doc(alias = "XYWH")]
    Xywh,
    /// The middle, width, height: DETR's and, divided by the image's size, YOLO's.
    #[doc(alias = "CXCYWH")]
    Cxcywh,
}

/// The bounding boxes of an image.
///
/// # Shapes
/// A batch of `N` images is a [`Ragged`] with `N` rows of values `[4]`, float32; its
/// [`to_padded`](Ragged::to_padded) gives `[N, most boxes, 4]`.
///
/// # Source
/// `torchvision.tv_tensors.BoundingBoxes`; the size of the canvas is that of the image.
#[derive(Clone, Debug, PartialEq)]
pub struct BoundingBoxes {
    boxes: Vec<[f32; 4]>,
    format: BoundingBoxFormat,
    clamped: bool,
}

impl BoundingBoxes {
    /// Boxes of this format.
    pub fn new(boxes: impl Into<Vec<[f32; 4]>>, format: BoundingBoxFormat) -> Self {
        Self { boxes: boxes.into(), format, clamped: true }
    }

    /// Whether crops, borders and maps of the plane cut boxes off at the image's edges; on unless set. Boxes outside
    /// become empty ones at an edge, which [`SanitizeBoundingBoxes`](crate::SanitizeBoundingBoxes) removes.
    ///
    /// # Source
    /// `clamping_mode`; its modes `"soft"` and `"hard"` differ for rotated boxes alone.
    #[doc(alias = "clamping_mode")]
    pub fn clamped(mut self, clamped: bool) -> Self {
        self.clamped = clamped;
        self
    }

    /// The boxes.
    pub fn boxes(&self) -> &[[f32; 4]] {
        &self.boxes
    }

    /// The boxes, to be changed; as many as before where other parts of the target have an entry for each.
    pub fn boxes_mut(&mut self) -> &mut Vec<[f32; 4]> {
        &mut self.boxes
    }

    /// What their numbers are.
    pub fn format(&self) -> BoundingBoxFormat {
        self.format
    }

    /// The number of boxes.
    pub fn len(&self) -> usize {
        self.boxes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.boxes.is_empty()
    }

    /// The same boxes in another format.
    pub fn to_format(&self, format: BoundingBoxFormat) -> Self {
        let boxes = if format == self.format {
            self.boxes.clone()
        } else {
            self.boxes.iter().map(|&it| from_corners(corners(it, self.format), format)).collect()
        };
        Self { boxes, format, clamped: self.clamped }
    }

    /// Cuts the boxes off at the edges of an image of this size.
    pub fn clamp(&mut self, size: Size) {
        self.boxes.iter_mut().for_each(|it| *it = clamped(*it, self.format, size));
    }

    pub(super) fn change(&mut self, geometry: &Geometry) {
        match *geometry {
            Geometry::Crop(region) => self.shift(-(region.left as f32), -(region.top as f32)),
            Geometry::Pad { padding, .. } => self.shift(padding.left as f32, padding.top as f32),
            Geometry::Resize { from, to } => {
                let [x, y] = geometry::ratios(from, to);
                let ratios = [x, y, x, y];
                self.boxes.iter_mut().flatten().zip(ratios.into_iter().cycle()).for_each(|(at, ratio)| *at *= ratio);
            }
            Geometry::FlipHorizontal { width } => self.flip(0, width as f32),
            Geometry::FlipVertical { height } => self.flip(1, height as f32),
            Geometry::Map { map, .. } => {
                for it in &mut self.boxes {
                    let [left, top, right, bottom] = corners(*it, self.format);
                    let places = [[left, top], [right, top], [right, bottom], [left, bottom]];
                    let places = places.map(|place| map.place(place));
                    let least = |axis: usize| places.iter().map(|place| place[axis]).fold(f32::INFINITY, f32::min);
                    let most = |axis: usize| places.iter().map(|place| place[axis]).fold(f32::NEG_INFINITY, f32::max);
                    *it = from_corners([least(0), least(1), most(0), most(1)], self.format);
                }
            }
        }
        if let (true, Some(size)) = (self.clamped, geometry.clamps()) {
            self.clamp(size);
        }
    }

    fn shift(&mut self, x: f32, y: f32) {
        for it in &mut self.boxes {
            (it[0], it[1]) = (it[0] + x, it[1] + y);
            if self.format == BoundingBoxFormat::Xyxy {
                (it[2], it[3]) = (it[2] + x, it[3] + y);
            }
        }
    }

    fn flip(&mut self, axis: usize, side: f32) {
        for it in &mut self.boxes {
            match self.format {
                BoundingBoxFormat::Xyxy => (it[axis], it[axis + 2]) = (side - it[axis + 2], side - it[axis]),
                BoundingBoxFormat::Xywh => it[axis] = side - (it[axis] + it[axis + 2]),
                BoundingBoxFormat::Cxcywh => it[axis] = side - it[axis],
            }
        }
    }

    /// Which boxes are within the image, but for what [`SLACK`] allows, and of at least this size and area.
    pub(crate) fn valid(&self, size: Size, min_size: f32, min_area: f32) -> Vec<bool> {
        let valid = |&it: &[f32; 4]| {
            let [left, top, right, bottom] = corners(it, self.format);
            let (columns, rows) = (right - left, bottom - top);
            self.excess(it, size).is_some() && columns >= min_size && rows >= min_size && columns * rows >= min_area
        };
        self.boxes.iter().map(valid).collect()
    }

    /// Whether the box is beyond the image by rounding; `None` for one that is beyond it by more.
    fn excess(&self, it: [f32; 4], size: Size) -> Option<bool> {
        let [width, height] = [size.width, size.height].map(|side| side as f32);
        let [left, top, right, bottom] = corners(it, self.format);
        let within = |slack: f32| {
            [(left, width), (right, width), (top, height), (bottom, height)]
                .iter()
                .all(|&(at, side)| at >= -slack * side && at <= side + slack * side)
        };
        within(SLACK).then(|| !within(0.0))
    }

    /// Keeps the boxes for which `kept` is true, and cuts off what rounding left beyond an image of this size.
    pub(crate) fn retain(&mut self, kept: &[bool], size: Size) {
        super::per_box::retain(&mut self.boxes, kept);
        for at in 0..self.boxes.len() {
            if self.excess(self.boxes[at], size) == Some(true) {
                self.boxes[at] = clamped(self.boxes[at], self.format, size);
            }
        }
    }
}

/// The box within an image of this size.
fn clamped(it: [f32; 4], format: BoundingBoxFormat, size: Size) -> [f32; 4] {
    let [right, bottom] = [size.width, size.height].map(|side| side as f32);
    let [left, top, x, y] = corners(it, format);
    let limited = [(left, right), (top, bottom), (x, right), (y, bottom)].map(|(at, most)| at.clamp(0.0, most));
    from_corners(limited, format)
}

/// Left, top, right, bottom.
fn corners([x, y, w, h]: [f32; 4], format: BoundingBoxFormat) -> [f32; 4] {
    match format {
        BoundingBoxFormat::Xyxy => [x, y, w, h],
        BoundingBoxFormat::Xywh => [x, y, w + x, h + y],
        BoundingBoxFormat::Cxcywh => {
            let (left, top) = (x - w / 2.0, y - h / 2.0);
            [left, top, w + left, h + top]
        }
    }
}

fn from_corners([left, top, right, bottom]: [f32; 4], format: BoundingBoxFormat) -> [f32; 4] {
    let (width, height) = (right - left, bottom - top);
    match format {
        BoundingBoxFormat::Xyxy => [left, top, right, bottom],
        BoundingBoxFormat::Xywh => [left, top, width, height],
        BoundingBoxFormat::Cxcywh => [(left * 2.0 + width) / 2.0, (top * 2.0 + height) / 2.0, width, height],
    }
}

impl Target for BoundingBoxes {
    fn visit(&mut self, visit: &mut dyn FnMut(TargetPart<'_>)) {
        visit(TargetPart::Boxes(self));
    }
}

impl Stackable for BoundingBoxes {
    type Batch = Ragged;

    fn stack(samples: Vec<Self>) -> Result<Ragged, DataError> {
        // One batch has one format.
        let first = samples.first().map_or(BoundingBoxFormat::Xyxy, |sample| sample.format);
        let odd = (0..samples.len()).filter(|&position| samples[position].format != first);
        crate::stack::misfits(odd, &format!("boxes of the format {first:?}"), "another format")?;
        ragged(samples.iter().map(|sample| sample.boxes.as_slice()), Element::Float, vec![4])
    }
}

/// Rows of values of these dimensions, one row for each sample and one `T` for each value.
pub(super) fn ragged<'a, T: bytemuck::NoUninit>(
    rows: impl Iterator<Item = &'a [T]> + Clone,
    element: Element,
    item: Vec<i64>,
) -> Result<Ragged, DataError> {
    ragged_items(rows.clone(), rows.map(<[T]>::len), element, item)
}

/// The same where a row has `counts` values in any number of `T`.
pub(super) fn ragged_items<'a, T: bytemuck::NoUninit>(
    rows: impl Iterator<Item = &'a [T]>,
    counts: impl Iterator<Item = usize>,
    element: Element,
    item: Vec<i64>,
) -> Result<Ragged, DataError> {
    let (mut offsets, mut words, mut count) = (vec![0], Words::default(), 0);
    for (row, values) in rows.zip(counts) {
        let bytes: &[u8] = bytemuck::cast_slice(row);
        words.extend(bytes.len())?.copy_from_slice(bytes);
        count += values as i64;
        offsets.push(count);
    }
    Ragged::of_items(Array::of_lists(element, vec![offsets], words), count, item, false)
}
