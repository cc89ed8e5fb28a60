//! A folder of images, with one sub-folder per class.

mod listing;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use self::listing::Folder;
use crate::read::{Version, is_url, read_file};
use crate::{Color, DataError, Dataset, EncodedImage, Image, MAX_IMAGE_BYTES, decode_image};

/// The file names that count as images.
const EXTENSIONS: [&str; 4] = ["jpg", "jpeg", "png", "webp"];
/// Further extensions that torchvision treats as images, and that this crate cannot decode.
const UNDECODED: [&str; 5] = ["bmp", "pgm", "ppm", "tif", "tiff"];

/// `root/class/*.jpg` as a dataset of `(EncodedImage, i64)`; every access opens and reads one file.
///
/// The loader's [`ImagePipeline`](crate::ImagePipeline) decodes an image straight into its batch, and of a crop only the
/// part that it needs. [`decoded`](Self::decoded) gives decoded images instead, to be cached or stacked.
///
/// ```no_run
/// use overdrive_dataload::{DataLoader, ImageFolder, ImagePipeline, RandomResizedCrop};
///
/// let crops = ImagePipeline::new(0).then(RandomResizedCrop::new(224));
/// let loader = DataLoader::builder(ImageFolder::open("train")?).batch_size(64).shuffle(true).collate(crops).build()?;
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// Classes are the sub-folders sorted by name, and their indices are the labels. Files of nested folders are included,
/// sorted within each folder.
///
/// Images are files that end in `.jpg`, `.jpeg`, `.png` or `.webp`. A folder with other images that torchvision reads
/// (`.bmp`, `.pgm`, `.ppm`, `.tif`, `.tiff`) is refused rather than read in part: convert them, or choose the files by
/// [`with_extensions`](ImageFolder::with_extensions). Any other file is ignored, as in torchvision.
///
/// A folder of a store (`s3://bucket/train`) is listed once, and an image is fetched when it is read, in one request; then
/// it is in the cache. Web servers do not list their files.
///
/// # Source
/// `torchvision.datasets.ImageFolder`
#[derive(Clone, Debug)]
pub struct ImageFolder {
    classes: Vec<String>,
    files: Vec<(Arc<Path>, i64)>,
    /// What a store's list has said of each file; empty for files of this machine.
    versions: Arc<[Version]>,
}

/// The images of an [`ImageFolder`], decoded: `(Image, i64)`. Made by [`ImageFolder::decoded`].
///
/// An image keeps its channels unless [`color`](Self::color) is set.
///
/// # Source
/// `torchvision.datasets.ImageFolder`, which corresponds to [`Color::Rgb`].
#[derive(Clone, Debug)]
pub struct DecodedImageFolder {
    folder: ImageFolder,
    color: Color,
}

impl ImageFolder {
    /// Lists the classes and files below `root`; nothing is read yet.
    ///
    /// # Errors
    /// [`DataError::Layout`] when there is no class, a class without an image, or images of a format that cannot be
    /// decoded (with their number), and for the address of a web server; [`DataError::Io`]; [`DataError::Remote`].
    pub fn open(root: impl AsRef<Path>) -> Result<Self, DataError> {
        Self::list(root.as_ref(), &EXTENSIONS, &UNDECODED)
    }

    /// Like [`open`](Self::open), for the files that have one of these extensions, in upper or lower case; all others
    /// are ignored.
    ///
    /// The format is recognised by the first bytes, so a JPEG image may be called `.jfif`.
    ///
    /// # Errors
    /// [`DataError::Layout`] when there is no class, or a class without a matching file; [`DataError::InvalidOption`]
    /// when `extensions` is empty; [`DataError::Io`].
    ///
    /// # Source
    /// `extensions` of `torchvision.datasets.DatasetFolder`; here the leading dot is optional.
    #[doc(alias = "is_valid_file")]
    pub fn with_extensions<E: AsRef<str>>(
        root: impl AsRef<Path>,
        extensions: impl IntoIterator<Item = E>,
    ) -> Result<Self, DataError> {
        let extensions: Vec<E> = extensions.into_iter().collect();
        let names: Vec<&str> = extensions.iter().map(|name| name.as_ref().trim_start_matches('.')).collect();
        match names.is_empty() {
            true => Err(DataError::option("extensions", "at least one", 0)),
            false => Self::list(root.as_ref(), &names, &[]),
        }
    }

    fn list(root: &Path, extensions: &[&str], refused: &[&'static str]) -> Result<Self, DataError> {
        let folders = if is_url(root) { listing::remote(root)? } else { listing::local(root)? };
        if folders.is_empty() {
            return Err(DataError::layout(root, "a folder for every class", "no folder"));
        }
        let (mut files, mut versions, mut classes) = (Vec::new(), Vec::new(), Vec::with_capacity(folders.len()));
        let mut unread = BTreeMap::<&str, usize>::new();
        for (label, Folder { path: folder, files: listed }) in folders.into_iter().enumerate() {
            let mut found = false;
            for (path, version) in listed {
                let refused = extension_of(&path, refused);
                found |= refused.is_some();
                if let Some(extension) = refused {
                    *unread.entry(extension).or_default() += 1;
                } else if extension_of(&path, extensions).is_some() {
                    found = true;
                    files.push((Arc::from(path), label as i64));
                    versions.extend(version);
                }
            }
            if !found {
                return Err(DataError::layout(&folder, format!("images ({})", extensions.join(", ")), "none"));
            }
            classes.push(folder.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
        match unread.is_empty() {
            true => Ok(Self { classes, files, versions: versions.into() }),
            false => {
                let counts: Vec<String> = unread.iter().map(|(name, count)| format!("{count} .{name}")).collect();
                let found = format!(
                    "{} that cannot ({}): convert them, or choose the files by `with_extensions`",
                    unread.values().sum::<usize>(),
                    counts.join(", ")
                );
                Err(DataError::layout(root, format!("images that can be decoded ({})", extensions.join(", ")), found))
            }
        }
    }

    /// The same images, decoded when they are read.
    pub fn decoded(self) -> DecodedImageFolder {
        DecodedImageFolder { folder: self, color: Color::default() }
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

impl DecodedImageFolder {
    /// The channels that every image is converted to.
    pub fn color(mut self, color: Color) -> Self {
        self.color = color;
        self
    }

    /// The folder of the encoded images.
    pub fn folder(&self) -> &ImageFolder {
        &self.folder
    }
}

impl Dataset for ImageFolder {
    type Sample = (EncodedImage, i64);

    fn len(&self) -> usize {
        self.files.len()
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        let (path, label) = self.files.get(index).ok_or(DataError::IndexOutOfRange { index, len: self.files.len() })?;
        let bytes = read_file(path, self.versions.get(index), MAX_IMAGE_BYTES)?.into();
        Ok((EncodedImage { bytes, path: path.clone() }, *label))
    }

    fn key(&self, index: usize) -> Option<String> {
        Some(self.files.get(index)?.0.display().to_string())
    }
}

impl Dataset for DecodedImageFolder {
    type Sample = (Image, i64);

    fn len(&self) -> usize {
        self.folder.len()
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        let (EncodedImage { bytes, path }, label) = self.folder.get(index)?;
        Ok((decode_image(&bytes, self.color, &path)?, label))
    }

    fn key(&self, index: usize) -> Option<String> {
        self.folder.key(index)
    }
}

/// The one of these extensions that the file's name has.
fn extension_of<'a>(path: &Path, known: &[&'a str]) -> Option<&'a str> {
    let extension = path.extension()?;
    known.iter().copied().find(|known| extension.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::decode::png_tests::encode;
    use png::{BitDepth, ColorType};

    fn grey(value: u8) -> Vec<u8> {
        encode(&[value; 6], 3, 2, ColorType::Grayscale, BitDepth::Eight)
    }

    fn put(root: &Path, name: &str, bytes: &[u8]) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn classes_and_files_are_sorted_as_torchvision_does() -> Result<(), DataError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, value) in [("dog/b.png", 1), ("dog/a.PNG", 2), ("cat/nested/z.png", 3), ("cat/m.png", 4)] {
            put(dir.path(), name, &grey(value));
        }
        put(dir.path(), "dog/notes.txt", b"no image");
        put(dir.path(), "README", b"no class");
        let folder = ImageFolder::open(dir.path())?;
        assert_eq!(folder.classes(), ["cat", "dog"]);
        assert_eq!(folder.class_to_idx()["dog"], 1);
        let decoded = folder.clone().decoded();
        let samples: Vec<_> = (0..folder.len()).map(|i| decoded.get(i).unwrap()).collect();
        let seen: Vec<_> = samples.iter().map(|(image, label)| (image.data()[0], *label)).collect();
        assert_eq!(seen, [(4, 0), (3, 0), (2, 1), (1, 1)]);
        assert_eq!(samples[0].0.chw(), [1, 2, 3]);
        let (encoded, label) = folder.get(1)?;
        assert_eq!((&*encoded.bytes, &encoded.path, label), (&grey(3)[..], &folder.files()[1].0, 0));
        assert_eq!((decoded.folder().len(), decoded.key(1)), (4, folder.key(1)));
        assert_eq!(decoded.color(Color::Rgb).get(0)?.0.chw(), [3, 2, 3]);
        Ok(())
    }

    #[test]
    fn images_that_cannot_be_decoded_are_refused_until_excluded() -> Result<(), DataError> {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cat/a.png", "cat/b.BMP", "cat/c.tif", "dog/d.bmp", "dog/e.jfif", "dog/notes.txt"] {
            put(dir.path(), name, &grey(1));
        }
        let error = ImageFolder::open(dir.path()).unwrap_err();
        let message = "expected images that can be decoded (jpg, jpeg, png, webp), found 3 that cannot (2 .bmp, \
                       1 .tif): convert them, or choose the files by `with_extensions`";
        assert_eq!(error.to_string(), format!("{}: {message}", dir.path().display()));
        let folder = ImageFolder::with_extensions(dir.path(), ["png", ".JFIF"])?;
        let names: Vec<_> = folder.files().iter().map(|(path, label)| (path.file_name().unwrap(), *label)).collect();
        assert_eq!(names, [("a.png".as_ref(), 0), ("e.jfif".as_ref(), 1)]);
        assert_eq!(folder.clone().decoded().get(1)?.0.chw(), [1, 2, 3]);
        let missing = ImageFolder::with_extensions(dir.path(), ["png"]).unwrap_err().to_string();
        assert!(missing.ends_with("dog: expected images (png), found none"), "{missing}");
        let none = ImageFolder::with_extensions(dir.path(), [""; 0]);
        assert!(matches!(none, Err(DataError::InvalidOption { option: "extensions", .. })));
        Ok(())
    }

    #[test]
    #[cfg(unix)]
    fn links_are_followed_once() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "cat/a.png", &grey(1));
        std::os::unix::fs::symlink(dir.path().join("cat"), dir.path().join("cat/again")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("cat"), dir.path().join("dog")).unwrap();
        assert_eq!(ImageFolder::open(dir.path()).unwrap().len(), 2);
    }

    #[test]
    fn bad_folders_and_bad_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(ImageFolder::open(dir.path().join("none")), Err(DataError::Io { .. })));
        assert!(matches!(ImageFolder::open(dir.path()), Err(DataError::Layout { .. })));
        fs::create_dir(dir.path().join("cat")).unwrap();
        assert!(ImageFolder::open(dir.path()).unwrap_err().to_string().contains("cat: expected images"));
        put(dir.path(), "cat/0.png", b"");
        put(dir.path(), "cat/1.png", &grey(1)[..40]);
        put(dir.path(), "cat/2.jpg", b"\xff\xd8\xff\xe0");
        fs::create_dir(dir.path().join("cat/3.png")).unwrap();
        let folder = ImageFolder::open(dir.path()).unwrap();
        assert_eq!(folder.len(), 3);
        for index in 0..3 {
            let error = folder.clone().decoded().get(index).unwrap_err().to_string();
            assert!(error.contains(&format!("cat/{index}.")), "{error}");
        }
        assert!(matches!(folder.get(3), Err(DataError::IndexOutOfRange { .. })));
    }
}
