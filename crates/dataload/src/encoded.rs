//! Images as they lie on the disk, to be decoded where the batch is made.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::read::read_file;
use crate::{DataError, Dataset, ImageFolder, MAX_IMAGE_BYTES};

/// The bytes of an image file, and what a pipeline needs to know beside them.
#[derive(Clone, Debug)]
pub struct EncodedImage {
    /// The file's content.
    pub bytes: Arc<[u8]>,
    /// Names the file in errors.
    pub path: Arc<Path>,
    /// The sample's index in its dataset, from which its random parameters follow.
    pub index: usize,
    /// The epoch, from which they follow too.
    pub epoch: u64,
}

/// The files of an [`ImageFolder`], only read: what an [`ImagePipeline`](crate::ImagePipeline) takes.
#[derive(Debug)]
pub struct EncodedImageFolder {
    files: Vec<(Arc<Path>, i64)>,
    classes: Vec<String>,
    epoch: AtomicU64,
}

impl EncodedImageFolder {
    /// Lists the classes and files below `root`; nothing is read yet.
    ///
    /// # Errors
    /// As [`ImageFolder::open`].
    pub fn open(root: impl AsRef<Path>) -> Result<Self, DataError> {
        Ok(Self::from(&ImageFolder::open(root)?))
    }

    /// The names of the classes; a class's position is its label.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The epoch that samples read from now on belong to; 0 unless set.
    pub fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Relaxed);
    }
}

impl From<&ImageFolder> for EncodedImageFolder {
    fn from(folder: &ImageFolder) -> Self {
        let shared = |(path, label): &(PathBuf, i64)| (Arc::from(path.as_path()), *label);
        Self {
            files: folder.files().iter().map(shared).collect(),
            classes: folder.classes().to_vec(),
            epoch: AtomicU64::new(0),
        }
    }
}

impl Dataset for EncodedImageFolder {
    type Sample = (EncodedImage, i64);

    fn len(&self) -> usize {
        self.files.len()
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        let (path, label) = self.files.get(index).ok_or(DataError::IndexOutOfRange { index, len: self.files.len() })?;
        let bytes = read_file(path, MAX_IMAGE_BYTES)?.into();
        let epoch = self.epoch.load(Ordering::Relaxed);
        Ok((EncodedImage { bytes, path: path.clone(), index, epoch }, *label))
    }
}
