//! The training loop that all techniques share; what differs is switched by the technique.

use std::time::Instant;

use anyhow::Result;
use overdrive::dataload::DataError;
use overdrive::prelude::*;
use overdrive_bench_report::Technique;
use tch::nn::VarStore;

use crate::feed::Batch;
use crate::job::{Job, MICRO_BATCHES};
use crate::model::{Cnn, count_correct, cross_entropy};

/// Learning rate of the bench's AdamW.
pub const LEARNING_RATE: f64 = 1e-3;

/// A model, what trains it, and how long it has waited for data.
pub struct Trainer {
    device: Device,
    precision: Option<Kind>,
    vs: VarStore,
    model: Cnn,
    opt: AdamW,
    scaler: GradScaler,
    accum: Accumulator,
    data_wait_seconds: f64,
    steps: u64,
}

/// What an epoch's losses were.
#[derive(Clone, Copy, Debug)]
pub struct EpochLosses {
    /// The mean over the epoch's samples.
    pub mean_loss: f64,
    /// That of the last batch.
    pub last_loss: f64,
}

impl Trainer {
    /// A fresh model with the job's seed.
    ///
    /// # Errors
    /// When the device is missing or memory runs out.
    pub fn new(job: &Job, device: Device) -> Result<Self> {
        tch::manual_seed(i64::from(job.seed));
        // Made on the host first, so that a seed gives the same weights on every device.
        let mut vs = VarStore::new(Device::Cpu);
        let model = Cnn::new(&vs.root());
        vs.set_device(device);
        let precision = match job.technique {
            Technique::AmpBf16 | Technique::Combined => Some(Kind::BFloat16),
            Technique::AmpFp16 => Some(Kind::Half),
            _ => None,
        };
        let opt = AdamW::builder(&vs).lr(LEARNING_RATE).build()?;
        let scaler = GradScaler::builder(device).enabled(precision == Some(Kind::Half)).build()?;
        let accum = Accumulator::new(if job.accumulates() { MICRO_BATCHES } else { 1 })?;
        Ok(Self { device, precision, vs, model, opt, scaler, accum, data_wait_seconds: 0.0, steps: 0 })
    }

    /// One forward and backward pass on made-up images, so that no run pays for libtorch's first calls.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn warm_up(&mut self) -> Result<()> {
        let images = Tensor::zeros([crate::job::BATCH_SIZE as i64, 1, 28, 28], (Kind::Float, self.device));
        let targets = Tensor::zeros([crate::job::BATCH_SIZE as i64], (Kind::Int64, self.device));
        self.loss(&images, &targets)?.backward();
        Ok(self.opt.zero_grad()?)
    }

    /// Trains on an epoch's batches, reporting the steps done so far every now and then.
    ///
    /// # Errors
    /// When a batch cannot be read, or libtorch fails.
    pub fn train_epoch(
        &mut self,
        batches: impl Iterator<Item = Result<Batch, DataError>>,
        report: &mut impl FnMut(u64) -> Result<()>,
    ) -> Result<EpochLosses> {
        // Summed on the device: reading each loss would make the host wait for it.
        let mut loss_sum = Tensor::zeros([], (Kind::Double, self.device));
        let (mut samples, mut last_loss) = (0, None);
        let mut waited = 0.0;
        for micro in self.accum.windows(Timed { batches, waited: &mut waited }) {
            let (images, targets) = micro.batch?;
            let count = images.size()[0];
            let (images, targets) = (images.to_device(self.device), targets.to_device(self.device));
            let loss = self.loss(&images, &targets)?;
            self.accum.backward(&self.opt, &self.scaler.scale(&loss)?, Samples(count), micro.closes)?;
            if micro.closes {
                self.scaler.step(&mut self.opt)?;
                if self.scaler.is_enabled() {
                    self.scaler.update()?;
                }
                self.opt.zero_grad()?;
                self.steps += 1;
                if self.steps.is_multiple_of(10) {
                    report(self.steps)?;
                }
            }
            let loss = loss.detach();
            loss_sum += &loss * count as f64;
            samples += count;
            last_loss = Some(loss);
        }
        self.data_wait_seconds += waited;
        let last_loss = last_loss.map_or(f64::NAN, |loss| loss.double_value(&[]));
        Ok(EpochLosses { mean_loss: loss_sum.double_value(&[]) / samples.max(1) as f64, last_loss })
    }

    fn loss(&self, images: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let loss = || cross_entropy(&self.model.forward(images), targets);
        Ok(match self.precision {
            Some(kind) => autocast(self.device, kind, loss)?,
            None => loss(),
        })
    }

    /// The share of images recognised, in the precision of training.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn accuracy(&self, images: &Tensor, labels: &Tensor) -> Result<f64> {
        let _no_grad = tch::no_grad_guard();
        let mut correct = Tensor::zeros([], (Kind::Int64, self.device));
        for (images, labels) in images.split(1000, 0).iter().zip(labels.split(1000, 0)) {
            let logits = match self.precision {
                Some(kind) => autocast(self.device, kind, || self.model.forward(images))?,
                None => self.model.forward(images),
            };
            correct += count_correct(&logits, &labels);
        }
        Ok(correct.int64_value(&[]) as f64 / labels.size()[0] as f64)
    }

    /// Seconds that the training thread has spent getting batches.
    pub fn data_wait_seconds(&self) -> f64 {
        self.data_wait_seconds
    }

    /// The model's variables.
    pub fn variables(&self) -> &VarStore {
        &self.vs
    }
}

/// Adds up the time that `next` takes.
struct Timed<'a, I> {
    batches: I,
    waited: &'a mut f64,
}

impl<I: Iterator> Iterator for Timed<'_, I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let started = Instant::now();
        let batch = self.batches.next();
        *self.waited += started.elapsed().as_secs_f64();
        batch
    }
}
