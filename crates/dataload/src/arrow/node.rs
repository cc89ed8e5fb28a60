//! Arrays whose buffers are read in place.

use std::ops::Range;

use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use overdrive_ffi::MappedFile;

use super::layout::Leaf;

/// A source that bytes are copied from.
pub(super) trait Bytes {
    /// Fills `out` with the bytes from `at` on. If there are fewer, copies nothing and returns false.
    fn copy(&self, at: usize, out: &mut [u8]) -> bool;
}

impl Bytes for MappedFile {
    fn copy(&self, at: usize, out: &mut [u8]) -> bool {
        self.read(at, out)
    }
}

macro_rules! bytes_in_memory {
    ($($owner:ty),*) => {$(
        impl Bytes for $owner {
            fn copy(&self, at: usize, out: &mut [u8]) -> bool {
                let found = self.get(at..).and_then(|rest| rest.get(..out.len()));
                found.map(|found| out.copy_from_slice(found)).is_some()
            }
        }
    )*};
}

bytes_in_memory!(Vec<u8>, Buffer);

/// A buffer of an array.
#[derive(Clone)]
pub(super) struct Piece<'a> {
    pub(super) bytes: &'a dyn Bytes,
    /// Its place within `bytes`.
    pub(super) range: Range<usize>,
}

impl Piece<'_> {
    pub(super) fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether it has `len` bytes from `at` on.
    pub(super) fn has(&self, at: usize, len: usize) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.len())
    }

    /// Fills `out` with the bytes from `at` on; false if the buffer has fewer.
    #[must_use]
    pub(super) fn read(&self, at: usize, out: &mut [u8]) -> bool {
        self.has(at, out.len()) && self.bytes.copy(self.range.start + at, out)
    }

    /// The `len` bytes from `at` on; `None` if the buffer has fewer.
    pub(super) fn take(&self, at: usize, len: usize) -> Option<Vec<u8>> {
        if !self.has(at, len) {
            return None;
        }
        let mut bytes = vec![0; len];
        self.read(at, &mut bytes).then_some(bytes)
    }
}

/// An array.
pub(super) struct Node<'a> {
    pub(super) len: usize,
    /// The index of its first element in its buffers.
    pub(super) offset: usize,
    /// The validity bitmap, in which a bit is set if its element is not null, and the index of the first element's bit.
    /// `None` if no element is null.
    pub(super) valid: Option<(Piece<'a>, usize)>,
    /// The buffers after the validity bitmap.
    pub(super) buffers: Vec<Piece<'a>>,
}

/// The arrays from the schema's field to the values of a column.
pub(super) fn arrays<'a>(leaf: &Leaf, columns: &'a [ArrayData]) -> Option<Vec<&'a ArrayData>> {
    let mut children = columns;
    let mut arrays = Vec::with_capacity(leaf.levels.len());
    for level in &leaf.levels {
        let array = children.get(level.child)?;
        children = array.child_data();
        arrays.push(array);
    }
    Some(arrays)
}

impl<'a> Node<'a> {
    pub(super) fn of(array: &'a ArrayData) -> Self {
        let piece = |buffer: &'a Buffer| Piece { bytes: buffer, range: 0..buffer.len() };
        let nulls = array.nulls().filter(|nulls| nulls.null_count() > 0);
        Self {
            len: array.len(),
            offset: array.offset(),
            valid: nulls.map(|nulls| (piece(nulls.buffer()), nulls.offset())),
            buffers: array.buffers().iter().map(piece).collect(),
        }
    }
}
