//! Images as they are stored on disk, to be decoded where the batch is made.

use std::path::Path;
use std::sync::Arc;

/// The bytes of an image file, and its name.
#[derive(Clone, Debug)]
pub struct EncodedImage {
    /// The file's content.
    pub bytes: Arc<[u8]>,
    /// Names the file in errors.
    pub path: Arc<Path>,
}

impl EncodedImage {
    /// An image from anywhere: a database's value, a file of a tar shard. `name` takes the place of a path in errors.
    pub fn new(bytes: impl Into<Arc<[u8]>>, name: impl AsRef<Path>) -> Self {
        Self { bytes: bytes.into(), path: name.as_ref().into() }
    }
}
