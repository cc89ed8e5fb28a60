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

/// Large, so that a step is mostly arithmetic. A step that mostly reads and writes weights takes longer after a wait,
/// because the weights are no longer in the CPU's caches.
const BATCH: usize = 256;
/// Distinct samples: as many as the ten warm-up steps read, so that a cache is full when timing starts.
const SAMPLES: usize = 10 * BATCH;
/// Width and height of a sample, in pixels.
const SIDE: usize = 28;

/// Two workers read from a disk that is much slower than the training. Remedied: samples stay in memory.
pub fn slow_read(form: Form, plan: &Plan) -> Result<RunProfile> {
    let disk = SlowDisk { idle: Mutex::default() };
    match form {
        Form::Planted => train(disk, 2, plan),
        Form::Remedied => train(Cached::new(disk), 2, plan),
    }
}

/// Two workers decode images more slowly than the training takes them. Remedied: decoded images stay in memory.
pub fn slow_decode(form: Form, plan: &Plan) -> Result<RunProfile> {
    let photos = Photos::new(196)?;
    match form {
        Form::Planted => train(photos, 2, plan),
        Form::Remedied => train(Cached::new(photos), 2, plan),
    }
}

/// The training thread decodes images itself, although another core is free. Remedied: two workers decode them.
pub fn too_few_workers(form: Form, plan: &Plan) -> Result<RunProfile> {
    let workers = if form == Form::Planted { 0 } else { 2 };
    train(Photos::new(84)?, workers, plan)
}

fn train(dataset: impl Dataset<Sample = (Image, i64)> + 'static, workers: usize, plan: &Plan) -> Result<RunProfile> {
    // A single epoch that is long enough, so that no start of an epoch is timed.
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

/// Imitates a disk behind a slow network: each connection serves 3 MB/s, and the caller waits in the kernel.
struct SlowDisk {
    /// Connections that no thread is using.
    idle: Mutex<Vec<UnixStream>>,
}

const IMAGE_BYTES: usize = SIDE * SIDE;
const BYTES_PER_SECOND: f64 = 3e6;

impl SlowDisk {
    fn connect() -> io::Result<UnixStream> {
        let (client, mut server) = UnixStream::pair()?;
        let serve = move || -> io::Result<()> {
            loop {
                let mut index = [0; 8];
                server.read_exact(&mut index)?;
                thread::sleep(Duration::from_secs_f64(IMAGE_BYTES as f64 / BYTES_PER_SECOND));
                server.write_all(&[index[0]; IMAGE_BYTES])?;
            }
        };
        // The thread ends with an error when the client's end is closed.
        thread::Builder::new().name("slow-disk".to_owned()).spawn(serve)?;
        Ok(client)
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

/// Grey PNG images, kept encoded in memory. `get` decodes one and scales it down to 28x28 pixels.
struct Photos {
    side: usize,
    encoded: Vec<Vec<u8>>,
}

impl Photos {
    /// Makes square images of `side` times `side` pixels.
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

/// Encodes a smooth image with noise as PNG. It compresses about as well as a photograph.
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
