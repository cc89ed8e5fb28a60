//! One run of one technique, in a process of its own: memory peaks are then the run's alone, and nothing is warm that
//! another run has warmed.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use overdrive::dataload::Mnist;
use overdrive::ffi;
use overdrive_bench_report::machine::peak_rss_bytes;
use overdrive_bench_report::{DeviceKind, EpochMark, Run, Technique};
use serde::{Deserialize, Serialize};
use tch::{Cuda, Device, Tensor};

use crate::feed::{Feed, to_tensors};
use crate::trainer::Trainer;

/// Images a step, whatever the technique.
pub const BATCH_SIZE: usize = 128;
/// Micro-batches a step where gradients are accumulated.
pub const MICRO_BATCHES: usize = 2;

/// What to run; handed to the process as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The technique.
    pub technique: Technique,
    /// Where to train.
    pub device: DeviceKind,
    /// Which repetition this is.
    pub repetition: u32,
    /// Epochs to train.
    pub epochs: u32,
    /// Seed of weights and order.
    pub seed: u32,
    /// Threads that libtorch computes with.
    pub threads: u32,
    /// Training images, from the first.
    pub train_images: usize,
    /// Test images, from the first.
    pub test_images: usize,
    /// The folder with the idx files.
    pub idx: PathBuf,
    /// The folder with the encoded training images.
    pub png: PathBuf,
}

/// What the process says on its standard output, one JSON value a line.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// So many steps are done.
    Steps(u64),
    /// The run is over.
    Done(Run),
}

impl Job {
    /// Images that go through the model at once.
    pub fn micro_batch(&self) -> usize {
        if self.accumulates() { BATCH_SIZE / MICRO_BATCHES } else { BATCH_SIZE }
    }

    /// Whether gradients are accumulated over micro-batches.
    pub fn accumulates(&self) -> bool {
        matches!(self.technique, Technique::Accumulate | Technique::Combined)
    }

    /// Steps of the whole run.
    pub fn steps(&self) -> u64 {
        self.train_images.div_ceil(BATCH_SIZE) as u64 * u64::from(self.epochs)
    }

    fn tch_device(&self) -> Device {
        match self.device {
            DeviceKind::Cpu => Device::Cpu,
            DeviceKind::Cuda => Device::Cuda(0),
        }
    }

    /// Trains, and reports on standard output.
    ///
    /// # Errors
    /// When the data cannot be read or libtorch fails.
    pub fn run(&self) -> Result<()> {
        let device = self.tch_device();
        tch::set_num_threads(i32::try_from(self.threads)?);
        ffi::context::set_allow_tf32(self.technique == Technique::Tf32)?;
        let (test_images, test_labels) = self.test_set(device)?;

        let mut trainer = Trainer::new(self, device)?;
        trainer.warm_up()?;
        if device.is_cuda() {
            ffi::cuda::reset_peak_memory_stats(0)?;
        }

        let mut clock = Clock::start(device);
        let feed = Feed::open(self, device)?;
        let mut epochs = Vec::new();
        let mut final_loss = f64::NAN;
        for epoch in 0..self.epochs {
            let outcome =
                trainer.train_epoch(feed.epoch(u64::from(epoch)), &mut |steps| say(&Message::Steps(steps)))?;
            final_loss = outcome.last_loss;
            let seconds = clock.pause();
            let accuracy = trainer.accuracy(&test_images, &test_labels)?;
            epochs.push(EpochMark {
                seconds,
                accuracy,
                loss: outcome.mean_loss.is_finite().then_some(outcome.mean_loss),
            });
            clock.resume();
        }
        let peak_device_bytes = match device.is_cuda() {
            true => u64::try_from(ffi::cuda::memory_stats(0)?.allocated_peak_bytes).ok(),
            false => None,
        };
        say(&Message::Done(Run {
            technique: self.technique,
            device: self.device,
            repetition: self.repetition,
            seconds: epochs.last().map_or(0.0, |mark: &EpochMark| mark.seconds),
            data_wait_seconds: trainer.data_wait_seconds(),
            epochs,
            final_loss,
            peak_rss_bytes: peak_rss_bytes(),
            peak_device_bytes,
        }))
    }

    fn test_set(&self, device: Device) -> Result<(Tensor, Tensor)> {
        let test = Mnist::open(&self.idx)?.test;
        let (images, labels) = to_tensors(test.images(), test.labels(), self.test_images)?;
        Ok((images.f_to_device(device)?, labels.f_to_device(device)?))
    }
}

fn say(message: &Message) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, message).context("cannot report to the bench")?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Seconds of training, the device's queued work included, testing excluded.
struct Clock {
    device: Device,
    started: Instant,
    elapsed: f64,
}

impl Clock {
    fn start(device: Device) -> Self {
        synchronize(device);
        Self { device, started: Instant::now(), elapsed: 0.0 }
    }

    /// Stops it and returns the seconds so far.
    fn pause(&mut self) -> f64 {
        synchronize(self.device);
        self.elapsed += self.started.elapsed().as_secs_f64();
        self.elapsed
    }

    fn resume(&mut self) {
        synchronize(self.device);
        self.started = Instant::now();
    }
}

fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}
