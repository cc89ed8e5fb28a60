//! Why a file, or a part of it, is not decoded.

use crate::Region;

/// Why a file, or a part of it, is not decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that is damaged or cut off.
    #[error("at byte {at}: expected an intact JPEG image, found {found}")]
    Damaged {
        /// The offset in the file; in compressed data, that of its scan.
        at: usize,
        /// What is wrong there.
        found: &'static str,
    },
    /// A kind of JPEG that this crate does not decode.
    #[error("at byte {at}: expected a baseline or progressive JPEG image of 8 bits a sample, found {found}")]
    Unsupported {
        /// The offset in the file.
        at: usize,
        /// What is not supported.
        found: &'static str,
    },
    /// A header that declares more pixels than a file of this length can hold.
    #[error("expected data for {width} x {height} pixels, found {bytes} bytes")]
    TooShort {
        /// Columns.
        width: usize,
        /// Rows.
        height: usize,
        /// The length of the file.
        bytes: usize,
    },
    /// A region that is empty, or reaches beyond the scaled image.
    #[error("expected a region within {height} x {width} pixels, found {region:?}")]
    Region {
        /// Rows of the scaled image.
        height: usize,
        /// Columns of the scaled image.
        width: usize,
        /// The region.
        region: Region,
    },
    /// A buffer of another length than the pixels have.
    #[error("expected a buffer of {expected} bytes, found {found}")]
    Buffer {
        /// The bytes of the region's pixels.
        expected: usize,
        /// The buffer's length.
        found: usize,
    },
    /// One byte a pixel was asked of an image in colour.
    #[error("expected 3 or 4 bytes a pixel for an image in colour, found 1")]
    NotGrey,
}
