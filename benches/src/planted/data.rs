//! Loops that wait for data.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use overdrive::dataload::{Cached, Color, DataError, DataLoader, Dataset, Image, ToFloat, decode_image};
use overdrive_profile::{RunProfile, record_function};
use tch::Device;

use super::training::{Trainer, start_timer};
use super::{Form, Plan};
use crate::digits::{MEAN, STD};

/// Large enough for a step to be arithmetic: one that mostly moves weights takes longer behind every wait, which has cooled
/// the caches.
const BATCH: usize = 256;
/// Samples that differ: as many as the warm-up reads, so that a cache is full behind it.
const SAMPLES: usize = 10 * BATCH;
/// Pixels of a sample's side.
const SIDE: usize = 28;

/// A disk that serves a fraction of what the training takes, to two workers. Remedied: samples stay in memory.
pub fn slow_read(form: Form, plan: &Plan) -> Result<RunProfile> {
    let disk = SlowDisk { idle: Mutex::default() };
    match form {
        Form::Planted => train(disk, 2, plan),
        Form::Remedied => train(Cached::new(disk), 2, plan),
    }
}

/// Photographs that two workers cannot decode in time. Remedied: what was decoded stays in memory.
pub fn slow_decode(form: Form, plan: &Plan) -> Result<RunProfile> {
    let photos = Photos::new(196)?;
    match form {
        Form::Planted => train(photos, 2, plan),
        Form::Remedied => train(Cached::new(photos), 2, plan),
    }
}

/// Images that the training thread decodes itself, though a core is free. Remedied: two workers do.
pub fn too_few_workers(form: Form, plan: &Plan) -> Result<RunProfile> {
    let workers = if form == Form::Planted { 0 } else { 2 };
    train(Photos::new(84)?, workers, plan)
}

fn train(dataset: impl Dataset<Sample = (Image, i64)> + 'static, workers: usize, plan: &Plan) -> Result<RunProfile> {
    // One epoch that is long enough: how an epoch begins is no matter here.
    let samples = BATCH * usize::try_from(plan.all_steps())?;
    let order: Vec<usize> = (0..samples).map(|sample| sample % dataset.len()).collect();
    let loader = DataLoader::builder(dataset.subset(order)?).batch_size(BATCH).num_workers(workers);
    let loader = loader.collate(ToFloat::new(&[MEAN], &[STD])?).build()?;
    let mut trainer = Trainer::mlp(Device::Cpu, &[(SIDE * SIDE) as i64, 512, 512, 10])?;
    let timer = start_timer(plan, Device::Cpu)?;
    for batch in timer.batches(&loader) {
        let (images, targets) = batch?;
        trainer.step(&timer, &images.flatten(1, -1), &targets)?;
    }
    Ok(timer.finish()?)
}

/// A disk behind a slow network: each connection serves 3 MB a second, while the caller waits in the kernel.
struct SlowDisk {
    /// Connections that nobody reads from right now.
    idle: Mutex<Vec<UnixStream>>,
}

const IMAGE_BYTES: usize = SIDE * SIDE;
const BYTES_PER_SECOND: f64 = 3e6;

impl SlowDisk {
    fn connect() -> io::Result<UnixStream> {
        let (ours, mut theirs) = UnixStream::pair()?;
        let serve = move || -> io::Result<()> {
            loop {
                let mut index = [0; 8];
                theirs.read_exact(&mut index)?;
                thread::sleep(Duration::from_secs_f64(IMAGE_BYTES as f64 / BYTES_PER_SECOND));
                theirs.write_all(&[index[0]; IMAGE_BYTES])?;
            }
        };
        // It ends with an error, when the other end is closed.
        thread::Builder::new().name("slow-disk".to_owned()).spawn(serve)?;
        Ok(ours)
    }

    fn read(&self, index: usize) -> io::Result<Vec<u8>> {
        let lock = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = lock().pop();
        let mut connection = idle.map_or_else(Self::connect, Ok)?;
        connection.write_all(&(index as u64).to_le_bytes())?;
        let mut bytes = vec![0; IMAGE_BYTES];
        connection.read_exact(&mut bytes)?;
        lock().push(connection);
        Ok(bytes)
    }
}

impl Dataset for SlowDisk {
    type Sample = (Image, i64);

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        let _scope = record_function("read");
        let bytes = self.read(index).map_err(DataError::other)?;
        Ok((Image::new(bytes, SIDE, SIDE, 1)?, (index % 10) as i64))
    }
}

/// Grey PNG images in memory, each of which is decoded and shrunk when it is asked for.
struct Photos {
    side: usize,
    encoded: Vec<Vec<u8>>,
}

impl Photos {
    /// Squares of `side` pixels.
    fn new(side: usize) -> Result<Self> {
        Ok(Self { side, encoded: (0..8).map(|number| encode(number, side)).collect::<Result<_>>()? })
    }
}

impl Dataset for Photos {
    type Sample = (Image, i64);

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize) -> Result<Self::Sample, DataError> {
        let _scope = record_function("decode");
        let encoded = &self.encoded[index % self.encoded.len()];
        let photo = decode_image(encoded, Color::AsStored, Path::new("photo.png"))?;
        let stride = self.side / SIDE;
        let pixel = |at: usize| photo.data()[at / SIDE * stride * self.side + at % SIDE * stride];
        let small: Vec<u8> = (0..SIDE * SIDE).map(pixel).collect();
        Ok((Image::new(small, SIDE, SIDE, 1)?, (index % 10) as i64))
    }
}

/// A smooth picture with noise, which compresses about as a photograph does.
fn encode(number: u64, side: usize) -> Result<Vec<u8>> {
    let mut random = number;
    let pixels: Vec<u8> = (0..side * side)
        .map(|at| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((at / side + at % side) / 8) as u8 ^ (random >> 60) as u8
        })
        .collect();
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, u32::try_from(side)?, u32::try_from(side)?);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(&pixels)?;
    Ok(bytes)
}
