//! Generates photographs from a seed, with the spectrum and noise of a camera, so that the JPEG files are about as large as
//! a camera's.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use overdrive_dataload::ImageFolder;
use sha2::{Digest, Sha256};

use super::digits_files::count_files;

/// Pixels of a photograph: 3.1 megapixels.
const WIDTH: usize = 2048;
const HEIGHT: usize = 1536;
const QUALITY: u8 = 90;
pub const CLASSES: usize = 8;
/// Counted up whenever `pixels` changes, so that older files are not used.
const VERSION: u32 = 1;

/// The photographs of a bench.
#[derive(Clone, Debug)]
pub struct Photos {
    /// One folder per class. Each file has several names (hard links), so that an epoch is long enough.
    pub train: PathBuf,
    /// One folder per class.
    pub test: Option<PathBuf>,
    pub test_images: usize,
    /// The sentence about them in the report.
    pub fact: String,
}

/// Where Debian's packages of photographs install them: mate-backgrounds, lomiri-wallpapers-16.04 and -20.04.
const INSTALLED: &str = "/usr/share/backgrounds";
/// Smaller files are drawings, or small.
const LEAST_BYTES: u64 = 250_000;

/// The photographs of Debian's packages that are installed here.
pub fn installed() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from(INSTALLED)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let (path, is_jpeg) = (entry.path(), entry.path().extension().is_some_and(|it| it == "jpg"));
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => folders.push(path),
                Ok(metadata) if metadata.is_file() && is_jpeg && metadata.len() >= LEAST_BYTES => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

/// Generates `train` photographs and `test` others, unless they exist. The training folder also has links to the `real`
/// ones; each of its files has `times` names.
///
/// # Errors
/// When the folder cannot be written.
pub fn prepare(work: &Path, (train, test): (usize, usize), times: usize, real: &[PathBuf]) -> Result<Photos> {
    let made_as = format!("{WIDTH}x{HEIGHT}-q{QUALITY}-c{CLASSES}-v{VERSION}");
    let root = work.join(format!("photos-{made_as}-{train}x{times}-{test}-{}", mark_of(real)?));
    let names = (train + real.len()) * times;
    // Counted, because a lost file would change what is trained on without a word.
    if count_files(&root.join("train")) != names || count_files(&root.join("test")) != test {
        let cannot = || format!("cannot write photographs to {}", root.display());
        if root.exists() {
            fs::remove_dir_all(&root).with_context(cannot)?;
        }
        fs::create_dir_all(work).with_context(cannot)?;
        // Written aside and renamed, so that a folder of this name is always whole.
        let aside = tempfile::tempdir_in(work).with_context(cannot)?;
        let numbers: Vec<usize> = (0..train + test).collect();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let parts = numbers.chunks(numbers.len().div_ceil(cores));
            let threads: Vec<_> = parts
                .map(|part| {
                    let aside = aside.path();
                    scope.spawn(move || part.iter().try_for_each(|&number| write(aside, number, train, times)))
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        for (number, photo) in real.iter().enumerate() {
            let folder = aside.path().join("train").join(format!("{:02}", number % CLASSES));
            fs::create_dir_all(&folder).with_context(cannot)?;
            (0..times).try_for_each(|copy| symlink(photo, folder.join(format!("real-{number}-{copy}.jpg"))))?;
        }
        match fs::rename(aside.path(), &root) {
            // Another benchmark was quicker.
            Err(_) if count_files(&root.join("train")) == names => {}
            renamed => renamed.with_context(cannot)?,
        }
    }
    let bytes = bytes_below(&root.join("test"))?;
    let kilobytes = bytes as f64 / 1e3 / (test * WIDTH * HEIGHT) as f64 * 1e6;
    let real = match real.len() {
        0 => String::new(),
        count => format!("; and {count} of Debian packages"),
    };
    let fact = format!(
        "{train} photographs of {WIDTH}x{HEIGHT} pixels in {CLASSES} classes, made by a seed, JPEG of quality {QUALITY}, \
         {kilobytes:.0} kB a megapixel{real}. An epoch takes each {times} times."
    );
    Ok(Photos { train: root.join("train"), test: Some(root.join("test")), test_images: test, fact })
}

/// Tells sets of real photographs apart, by their paths and sizes.
fn mark_of(real: &[PathBuf]) -> Result<String> {
    let mut hash = Sha256::new();
    for path in real {
        hash.update(path.as_os_str().as_encoded_bytes());
        hash.update(fs::metadata(path)?.len().to_le_bytes());
    }
    let digits: String = hash.finalize()[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{}-{digits}", real.len()))
}

/// Photographs of the user, at least a batch of them.
///
/// # Errors
/// When the folder has fewer, or no sub-folders with images.
pub fn of_user(folder: &Path, least: usize) -> Result<Photos> {
    let photos = ImageFolder::open(folder)
        .with_context(|| format!("--photos: cannot read {} as a folder of one folder a class", folder.display()))?;
    let (files, classes) = (photos.files().len(), photos.classes().len());
    ensure!(
        files >= least,
        "--photos: {} holds {files} photographs, fewer than a batch of {least}: give more",
        folder.display()
    );
    let is_jpeg = |extension: &OsStr| extension.eq_ignore_ascii_case("jpg") || extension.eq_ignore_ascii_case("jpeg");
    if let Some((other, _)) = photos.files().iter().find(|(path, _)| !path.extension().is_some_and(is_jpeg)) {
        bail!("--photos: {} is not a .jpg or .jpeg file: give a folder of JPEG photographs alone", other.display());
    }
    let fact = format!("{files} photographs in {classes} classes, given by --photos.");
    Ok(Photos { train: folder.to_owned(), test: None, test_images: 0, fact })
}

fn bytes_below(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for class in fs::read_dir(folder)? {
        for file in fs::read_dir(class?.path())? {
            bytes += file?.metadata()?.len();
        }
    }
    Ok(bytes)
}

fn write(root: &Path, number: usize, train: usize, times: usize) -> Result<()> {
    let class = number % CLASSES;
    let half = if number < train { "train" } else { "test" };
    let folder = root.join(half).join(format!("{class:02}"));
    fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{number:05}.jpg"));
    let file = std::io::BufWriter::new(fs::File::create(&path)?);
    let mut encoder = Encoder::new(file, QUALITY);
    encoder.set_sampling_factor(SamplingFactor::R_4_2_0);
    encoder.encode(&pixels(number as u64, class), WIDTH as u16, HEIGHT as u16, ColorType::Rgb)?;
    for copy in 1..times {
        if number < train {
            fs::hard_link(&path, folder.join(format!("{number:05}-{copy}.jpg")))?;
        }
    }
    Ok(())
}

/// Smooth noise in octaves, as in natural images; stripes whose direction is the class; and sensor noise.
fn pixels(number: u64, class: usize) -> Vec<u8> {
    const LAYERS: [(usize, f32); 9] =
        [(512, 46.0), (256, 30.0), (128, 20.0), (64, 14.0), (32, 10.0), (16, 8.0), (8, 7.0), (4, 7.0), (2, 7.0)];
    let mut random = Random(number.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut light = vec![118f32; WIDTH * HEIGHT];
    for (cell, strength) in LAYERS {
        add_layer(&mut light, cell, strength, &mut random);
    }
    let (sin, cos) = (std::f32::consts::PI * class as f32 / CLASSES as f32).sin_cos();
    let tints: [f32; 3] = std::array::from_fn(|_| 0.8 + 0.4 * random.unit());
    let phase = 6.0 * random.unit();
    let mut bytes = Vec::with_capacity(3 * WIDTH * HEIGHT);
    for y in 0..HEIGHT {
        for x in 0..WIDTH {
            let along = (x as f32 * cos + y as f32 * sin) / 60.0 + phase;
            // A triangle wave is cheaper than a sine.
            let stripe = 24.0 * (4.0 * (along - along.floor() - 0.5).abs() - 1.0);
            let pixel = light[y * WIDTH + x] + stripe;
            bytes.extend(tints.map(|tint| (pixel * tint + 5.0 * random.bell()).clamp(0.0, 255.0) as u8));
        }
    }
    bytes
}

/// Adds noise: random at every `cell` pixels, and linear in between.
fn add_layer(light: &mut [f32], cell: usize, strength: f32, random: &mut Random) {
    let columns = WIDTH / cell + 2;
    let knots: Vec<f32> = (0..columns * (HEIGHT / cell + 2)).map(|_| strength * random.bell()).collect();
    for (y, line) in light.chunks_exact_mut(WIDTH).enumerate() {
        let (row, down) = (y / cell, (y % cell) as f32 / cell as f32);
        let knot = |column: usize| {
            let at = row * columns + column;
            knots[at] + (knots[at + columns] - knots[at]) * down
        };
        for (column, part) in line.chunks_mut(cell).enumerate() {
            let (left, right) = (knot(column), knot(column + 1));
            let step = (right - left) / cell as f32;
            part.iter_mut().enumerate().for_each(|(x, pixel)| *pixel += left + step * x as f32);
        }
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Approximately normal with deviation 1: the sum of four uniform numbers.
    fn bell(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|part| bits >> (16 * part) & 0xFFFF).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.732
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn photographs_of_the_user_are_jpeg_files() {
        let folder = tempfile::tempdir().unwrap();
        let class = folder.path().join("cats");
        fs::create_dir(&class).unwrap();
        fs::write(class.join("1.jpg"), "").unwrap();
        fs::write(class.join("2.JPEG"), "").unwrap();
        assert!(of_user(folder.path(), 2).unwrap().fact.starts_with("2 photographs in 1 classes"));
        fs::write(class.join("3.png"), "").unwrap();
        let error = of_user(folder.path(), 2).unwrap_err().to_string();
        assert!(error.contains("3.png is not a .jpg or .jpeg file"), "{error}");
    }

    #[test]
    fn a_lost_file_is_made_again_and_real_photographs_are_linked() {
        let work = tempfile::tempdir().unwrap();
        let real = work.path().join("real.jpg");
        fs::write(&real, "a photograph").unwrap();
        let prepare = || prepare(work.path(), (1, 1), 2, std::slice::from_ref(&real)).unwrap();
        let photos = prepare();
        assert_eq!((count_files(&photos.train), photos.test_images), (4, 1));
        assert!(photos.fact.contains("and 1 of Debian packages"), "{}", photos.fact);
        let link = photos.train.join("00/real-0-1.jpg");
        assert_eq!(fs::read_to_string(&link).unwrap(), "a photograph");
        fs::remove_file(&link).unwrap();
        assert_eq!(count_files(&prepare().train), 4);
        // Another photograph of the same number is another folder.
        fs::write(&real, "a larger photograph").unwrap();
        assert_ne!(prepare().train, photos.train);
    }
}
