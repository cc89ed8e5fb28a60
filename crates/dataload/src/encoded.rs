//! Images as they are stored on disk, to be decoded where the batch is made.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::read::read_file;
use crate::{DataError, Dataset, ImageFolder, MAX_IMAGE_BYTES};

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

/// The files of an [`ImageFolder`], read but not decoded: the input of an [`ImagePipeline`](crate::ImagePipeline).
#[derive(Clone, Debug)]
pub struct EncodedImageFolder {
    files: Vec<(Arc<Path>, i64)>,
    classes: Vec<String>,
}

impl EncodedImageFolder {
    /// Lists the classes and files below `root`; nothing is read yet.
    ///
    /// # Errors
    /// As [`ImageFolder::open`].
    pub fn open(root: impl AsRef<Path>) -> Result<Self, DataError> {
        Ok(Self::from(&ImageFolder::open(root)?))
    }

    /// Like [`open`](Self::open), for the files that have one of these extensions, whether or not this crate can decode
    /// them; all others are ignored.
    ///
    /// # Errors
    /// As [`ImageFolder::with_extensions`].
    pub fn with_extensions<E: AsRef<str>>(
        root: impl AsRef<Path>,
        extensions: impl IntoIterator<Item = E>,
    ) -> Result<Self, DataError> {
        Ok(Self::from(&ImageFolder::with_extensions(root, extensions)?))
    }

    /// The names of the classes; a class's position is its label.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The label of every class.
    pub fn class_to_idx(&self) -> BTreeMap<&str, i64> {
        self.classes.iter().enumerate().map(|(label, class)| (class.as_str(), label as i64)).collect()
    }

    /// Every file with its label, in the dataset's order; count the labels to get weights for a
    /// [`WeightedRandomSampler`](crate::WeightedRandomSampler).
    #[doc(alias = "samples")]
    #[doc(alias = "targets")]
    pub fn files(&self) -> &[(Arc<Path>, i64)] {
        &self.files
    }
}

impl From<&ImageFolder> for EncodedImageFolder {
    fn from(folder: &ImageFolder) -> Self {
        let shared = |(path, label): &(PathBuf, i64)| (Arc::from(path.as_path()), *label);
        Self { files: folder.files().iter().map(shared).collect(), classes: folder.classes().to_vec() }
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
        Ok((EncodedImage { bytes, path: path.clone() }, *label))
    }

    fn key(&self, index: usize) -> Option<String> {
        Some(self.files.get(index)?.0.display().to_string())
    }
}
