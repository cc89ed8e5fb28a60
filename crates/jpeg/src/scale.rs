//! Sizes that an image can be decoded at.

/// The size that an image is decoded at. Scaling takes no time of its own: at a half, only a quarter of the samples is
/// computed.
///
/// # Source
/// libjpeg's `scale_num` of 8, 4, 2 and 1 over `scale_denom` of 8; `PIL.Image.draft`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias("draft", "scale_num"))]
pub enum Scale {
    /// The size of the image.
    #[default]
    Full = 8,
    /// Half of each side.
    Half = 4,
    /// A quarter of each side.
    Quarter = 2,
    /// An eighth of each side.
    Eighth = 1,
}

impl Scale {
    /// Eighths of the image's size: 8, 4, 2 or 1.
    pub fn eighths(self) -> usize {
        self as usize
    }

    /// The scaled length of a side of `side` pixels, rounded up.
    pub fn side(self, side: usize) -> usize {
        side.div_ceil(8 / self.eighths())
    }
}
