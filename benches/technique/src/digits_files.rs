//! MNIST as a folder of encoded images, made once from the four idx files.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{Mnist, MnistSplit};
use sha2::{Digest, Sha256};

/// The data of a bench: idx files, and the same training images as one PNG file each.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The folder with the four idx files.
    pub idx: PathBuf,
    /// `<digit>/<number>.png` for each training image.
    pub png: PathBuf,
    /// Training images.
    pub train: usize,
    /// Test images.
    pub test: usize,
}

/// Reads the idx files, takes the first images of each half, and writes the training half as PNG files below `work`,
/// unless they are there already.
///
/// # Errors
/// When a file is missing, damaged or empty, or the folder cannot be written.
pub fn prepare(idx: &Path, work: &Path, max_train: usize, max_test: usize) -> Result<Prepared> {
    let mnist = Mnist::open(idx).with_context(|| {
        format!(
            "cannot read MNIST from {}: give a folder with its four idx files, raw or .gz, with --data",
            idx.display()
        )
    })?;
    let (train, test) = (mnist.train.labels().len().min(max_train), mnist.test.labels().len().min(max_test));
    ensure!(train > 0 && test > 0, "{} holds {train} training and {test} test images: both are needed", idx.display());
    let sha256 = digest(&mnist, train, test);
    let png = work.join(format!("mnist-{}-{train}", &sha256[..12]));
    // Counted, because a file that was lost would change what is trained on without a word.
    if count_files(&png) != train {
        let cannot = || format!("cannot write images to {}", png.display());
        if png.exists() {
            fs::remove_dir_all(&png).with_context(cannot)?;
        }
        write_folder(&mnist.train, train, &png).with_context(cannot)?;
    }
    Ok(Prepared { idx: idx.to_owned(), png, train, test })
}

fn digest(mnist: &Mnist, train: usize, test: usize) -> String {
    let mut hasher = Sha256::new();
    for (split, count) in [(&mnist.train, train), (&mnist.test, test)] {
        hasher.update(&split.images()[..count * MnistSplit::IMAGE_BYTES]);
        hasher.update(&split.labels()[..count]);
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How many files lie in the sub-folders of a folder; 0 where there is none.
pub fn count_files(folder: &Path) -> usize {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    entries(folder).map(|class| entries(&class.path()).count()).sum()
}

/// Written aside and renamed, so that a folder of this name is always whole.
fn write_folder(split: &MnistSplit, count: usize, folder: &Path) -> Result<()> {
    let parent = folder.parent().context("the folder has no parent")?;
    fs::create_dir_all(parent)?;
    let aside = tempfile::tempdir_in(parent)?;
    for class in 0..10 {
        fs::create_dir(aside.path().join(class.to_string()))?;
    }
    let images = split.images().chunks_exact(MnistSplit::IMAGE_BYTES);
    for (number, (image, label)) in images.zip(split.labels()).take(count).enumerate() {
        let path = aside.path().join(label.to_string()).join(format!("{number:07}.png"));
        fs::File::create(path)?.write_all(&encode(image)?)?;
    }
    // A class without images is no class of an image folder.
    for class in 0..10 {
        let _ = fs::remove_dir(aside.path().join(class.to_string()));
    }
    // The temporary folder is removed with its handle when this fails, and the handle has nothing left to do otherwise.
    match fs::rename(aside.path(), folder) {
        // Another bench was quicker.
        Err(_) if count_files(folder) == count => Ok(()),
        renamed => Ok(renamed?),
    }
}

fn encode(image: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, MnistSplit::WIDTH as u32, MnistSplit::HEIGHT as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(image)?;
    Ok(bytes)
}
