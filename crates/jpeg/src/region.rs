//! A rectangle of an image.

/// A rectangle in pixels; it may be empty, or lie outside of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The first row.
    pub top: usize,
    /// The first column.
    pub left: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

impl Region {
    /// A whole image.
    pub fn whole(height: usize, width: usize) -> Self {
        Self { top: 0, left: 0, height, width }
    }

    /// Whether it has at least one pixel and lies within an image of this size.
    pub fn fits(&self, height: usize, width: usize) -> bool {
        let ends = |start: usize, length: usize, size| start.checked_add(length).is_some_and(|end| end <= size);
        self.height > 0 && self.width > 0 && ends(self.top, self.height, height) && ends(self.left, self.width, width)
    }
}
