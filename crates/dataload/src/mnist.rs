//! MNIST, and data sets in its format (Fashion-MNIST, a subset of either), from their four idx files.

use std::path::{Path, PathBuf};

use crate::read::first_of;
use crate::{DataError, Dataset, Image, read_idx};

const CLASSES: u8 = 10;

/// The training and test images of MNIST.
///
/// # Source
/// `torchvision.datasets.MNIST`.
#[derive(Clone, Debug)]
pub struct Mnist {
    /// 60,000 images in the full set.
    pub train: MnistSplit,
    /// 10,000 images in the full set.
    pub test: MnistSplit,
}

impl Mnist {
    /// Opens the four files in `dir`, each raw or gzip-compressed.
    ///
    /// The names are `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
    /// `t10k-labels-idx1-ubyte`, or with a dot (`train-images.idx3-ubyte`), with or without `.gz`.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a missing file, images that are not 28x28, or a different number of labels than
    /// images; [`DataError::Corrupt`] for a damaged file or a label above 9; [`DataError::Io`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, DataError> {
        let dir = dir.as_ref();
        Ok(Self { train: MnistSplit::open(dir, "train")?, test: MnistSplit::open(dir, "t10k")? })
    }
}

/// One split of [`Mnist`], in memory; a dataset of `(Image, i64)`.
#[derive(Clone, Debug)]
pub struct MnistSplit {
    images: Vec<u8>,
    labels: Vec<u8>,
}

impl MnistSplit {
    /// Rows of an image.
    pub const HEIGHT: usize = 28;
    /// Columns of an image.
    pub const WIDTH: usize = 28;
    /// Bytes of an image.
    pub const IMAGE_BYTES: usize = Self::HEIGHT * Self::WIDTH;

    fn open(dir: &Path, prefix: &str) -> Result<Self, DataError> {
        let images_path = find(dir, prefix, "images", 3)?;
        let images = read_idx(&images_path)?;
        let &[count, Self::HEIGHT, Self::WIDTH] = images.shape.as_slice() else {
            return Err(DataError::layout(&images_path, "images of shape [N, 28, 28]", format!("{:?}", images.shape)));
        };
        let labels_path = find(dir, prefix, "labels", 1)?;
        let labels = read_idx(&labels_path)?;
        if labels.shape != [count] {
            let expected = format!("{count} labels, one for each image in {}", images_path.display());
            return Err(DataError::layout(&labels_path, expected, format!("shape {:?}", labels.shape)));
        }
        if let Some(position) = labels.data.iter().position(|&label| label >= CLASSES) {
            const HEADER_BYTES: u64 = 8;
            let found = labels.data[position].to_string();
            return Err(DataError::corrupt(&labels_path, HEADER_BYTES + position as u64, "a label below 10", found));
        }
        Ok(Self { images: images.data, labels: labels.data })
    }

    /// All images, [`IMAGE_BYTES`](Self::IMAGE_BYTES) each, row by row; 0 is the background.
    ///
    /// # Shapes
    /// `[N, 28, 28]`.
    pub fn images(&self) -> &[u8] {
        &self.images
    }

    /// The digit of every image, 0 to 9.
    ///
    /// # Shapes
    /// `[N]`.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// The first `count` images with their labels, or all when there are fewer.
    pub fn first(&self, count: usize) -> Self {
        let count = count.min(self.labels.len());
        Self { images: self.images[..count * Self::IMAGE_BYTES].to_vec(), labels: self.labels[..count].to_vec() }
    }
}

impl Dataset for MnistSplit {
    type Sample = (Image, i64);

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        let bytes = self.images.chunks_exact(Self::IMAGE_BYTES).nth(index);
        match (bytes, self.labels.get(index)) {
            (Some(bytes), Some(&label)) => Ok((Image::new(bytes, Self::HEIGHT, Self::WIDTH, 1)?, label.into())),
            _ => Err(DataError::IndexOutOfRange { index, len: self.len() }),
        }
    }
}

/// The first of a file's four possible names that exists.
fn find(dir: &Path, prefix: &str, content: &str, dimensions: usize) -> Result<PathBuf, DataError> {
    let name = |separator: char| format!("{prefix}-{content}{separator}idx{dimensions}-ubyte");
    let names = [name('-'), name('-') + ".gz", name('.'), name('.') + ".gz"];
    match first_of(&names.each_ref().map(|name| dir.join(name)))? {
        Some(path) => Ok(path.clone()),
        None => Err(DataError::layout(dir, format!("one of the files {}", names.join(", ")), "none of them")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, name: &str, shape: &[u32], values: &[u8]) {
        let mut bytes = vec![0, 0, 8, shape.len() as u8];
        shape.iter().for_each(|size| bytes.extend(size.to_be_bytes()));
        bytes.extend(values);
        std::fs::write(dir.join(name), bytes).unwrap();
    }

    fn small(dir: &Path) {
        let pixels: Vec<u8> = (0..2 * 784).map(|i| (i % 256) as u8).collect();
        write(dir, "train-images-idx3-ubyte", &[2, 28, 28], &pixels);
        write(dir, "train-labels-idx1-ubyte", &[2], &[3, 9]);
        write(dir, "t10k-images.idx3-ubyte", &[1, 28, 28], &pixels[..784]);
        write(dir, "t10k-labels.idx1-ubyte", &[1], &[0]);
    }

    #[test]
    fn both_spellings_are_found_and_samples_agree_with_the_bytes() -> Result<(), DataError> {
        let dir = tempfile::tempdir().unwrap();
        small(dir.path());
        let mnist = Mnist::open(dir.path())?;
        let (image, label) = mnist.train.get(1)?;
        assert_eq!((image.data(), label), (&mnist.train.images()[784..], 9));
        assert_eq!((mnist.train.len(), mnist.test.len(), mnist.train.first(1).labels()), (2, 1, &[3][..]));
        assert!(matches!(mnist.test.get(1), Err(DataError::IndexOutOfRange { index: 1, len: 1 })));
        Ok(())
    }

    #[test]
    fn every_disagreement_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Mnist::open(dir.path()).unwrap_err().to_string();
        assert!(open().contains("train-images-idx3-ubyte.gz"));
        small(dir.path());
        write(dir.path(), "train-labels-idx1-ubyte", &[3], &[1, 2, 3]);
        assert!(open().contains("2 labels"), "{}", open());
        write(dir.path(), "train-labels-idx1-ubyte", &[2], &[1, 10]);
        assert!(open().contains("at byte 9: expected a label below 10, found 10"), "{}", open());
        write(dir.path(), "train-images-idx3-ubyte", &[2, 8, 8], &[0; 128]);
        assert!(open().contains("[2, 8, 8]"), "{}", open());
    }
}
