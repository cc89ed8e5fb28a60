//! The training loop of all Rust contenders. The job's parts switch the techniques.

use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result};
use overdrive_accum::{Accumulator, Samples};
use overdrive_amp::{GradScaler, autocast};
use overdrive_bench_report::Contender;
use overdrive_compile::{self as compile, CompiledLoss, LossResult};
use overdrive_core::{Optimizer, Parameter, TchOptimizer};
use overdrive_dataload::DataError;
use overdrive_ffi as ffi;
use overdrive_optim::AdamW;
use overdrive_profile::{Phase, StepTimer};
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use super::initial;
use super::job::Job;

/// The learning rate of AdamW, also in Python.
pub const LEARNING_RATE: f64 = 1e-3;
/// Its weight decay; PyTorch's default.
const WEIGHT_DECAY: f64 = 0.01;

/// Inputs and targets.
pub type Batch = (Tensor, Tensor);

/// Batches, on the host or on the device.
pub type Batches<'a> = Box<dyn Iterator<Item = Result<Batch, DataError>> + 'a>;

/// A source of batches.
pub trait Feed {
    /// The batches of one epoch, each a micro-batch of the job.
    fn epoch(&self, epoch: u64) -> Batches<'_>;

    /// The most batches that workers read ahead.
    fn read_ahead(&self) -> usize {
        0
    }
}

/// Computes logits from inputs; the flag is true in training.
pub type Model = Box<dyn Fn(&Tensor, bool) -> Tensor>;

/// Computes the loss of inputs and targets.
type Loss = Box<dyn FnMut(&[Tensor]) -> LossResult>;

/// A model with its optimizer.
pub struct Trainer {
    model: Rc<Model>,
    device: Device,
    loss: TrainedLoss,
    opt: Box<dyn Optimizer>,
    scaler: GradScaler,
    accum: Accumulator,
    channels_last: bool,
    /// Whether batches of the host are copied from pinned memory, as PyTorch tuned by hand does.
    pins: bool,
    micro_batches: usize,
}

/// How long to train.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// For this number of steps.
    Steps(u64),
    /// For this number of seconds on the host, and at least one step.
    Seconds(f64),
}

impl Until {
    fn is_over(self, steps: u64, begun: Instant) -> bool {
        match self {
            Self::Steps(most) => steps >= most,
            Self::Seconds(most) => steps > 0 && begun.elapsed().as_secs_f64() >= most,
        }
    }
}

/// The result of some steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steps {
    /// Steps made: fewer than asked for if the batches end.
    pub steps: u64,
    /// Inputs trained on.
    pub inputs: u64,
    /// Seconds spent in getting batches.
    pub wait_seconds: f64,
    /// Mean loss of the inputs.
    pub loss: f64,
}

impl Trainer {
    /// A trainer of a model, which `build` creates on the CPU, with these initial weights.
    ///
    /// # Errors
    /// When memory runs out, or the weights are not the model's.
    pub fn new(
        job: &Job,
        device: Device,
        weights: &[Parameter],
        build: impl FnOnce(&nn::Path<'_>) -> Result<Model>,
    ) -> Result<Self> {
        tch::manual_seed(i64::from(job.seed));
        // Created on the CPU, so that a seed gives the same weights on every device.
        let mut vs = VarStore::new(Device::Cpu);
        let model = build(&vs.root())?;
        initial::write(weights, &vs)?;
        vs.set_device(device);
        let channels_last = job.has(Contender::ChannelsLast);
        if channels_last {
            vs.variables()
                .into_values()
                .for_each(|mut variable| variable.set_data(&to_channels_last(&variable.detach())));
        }
        let model = Rc::new(model);
        let precision = match job {
            job if job.has(Contender::Bf16) => Some(Kind::BFloat16),
            job if job.has(Contender::Fp16) => Some(Kind::Half),
            _ => None,
        };
        let opt: Box<dyn Optimizer> = if job.has(Contender::Fused) {
            Box::new(AdamW::builder(&vs).lr(LEARNING_RATE).weight_decay(WEIGHT_DECAY).fused(true).build()?)
        } else {
            let adamw = nn::AdamW { wd: WEIGHT_DECAY, ..nn::AdamW::default() };
            Box::new(TchOptimizer::new(adamw.build(&vs, LEARNING_RATE)?))
        };
        let scaler = GradScaler::builder(device).enabled(precision == Some(Kind::Half)).build()?;
        let micro_batches = job.micro_batches();
        let accum = Accumulator::new(micro_batches)?;
        let loss = loss(model.clone(), device, precision);
        let loss = if job.has(Contender::Compiled) { compiled(vs, loss) } else { TrainedLoss::Plain(loss, vs) };
        let pins = device.is_cuda() && job.contender == Contender::Combined;
        Ok(Self { model, device, loss, opt, scaler, accum, channels_last, pins, micro_batches })
    }

    /// Trains. Waits for the device at the end.
    ///
    /// # Errors
    /// When a batch cannot be read, or libtorch fails.
    pub fn train(&mut self, batches: &mut Batches<'_>, until: Until, timer: Option<&StepTimer>) -> Result<Steps> {
        let (mut done, begun) = (Steps::default(), Instant::now());
        // Summed on the device, because reading each loss would make the host wait for the device.
        let mut loss_sum = Tensor::zeros([], (Kind::Double, self.device));
        'steps: while !until.is_over(done.steps, begun) {
            let mut samples = 0;
            for micro in 1..=self.micro_batches {
                let begun = Instant::now();
                let batch = {
                    let _phase = timer.map(|timer| timer.phase(Phase::DataWait));
                    batches.next()
                };
                done.wait_seconds += begun.elapsed().as_secs_f64();
                let Some(batch) = batch else { break 'steps };
                let (inputs, targets) = batch?;
                let count = inputs.size()[0];
                let loss = {
                    let _phase = timer.map(|timer| timer.phase(Phase::Forward));
                    self.loss(&inputs, &targets)?
                };
                {
                    let _phase = timer.map(|timer| timer.phase(Phase::Backward));
                    let loss = self.scaler.scale(&loss)?;
                    self.accum.backward(&self.opt, &loss, Samples(count), micro == self.micro_batches)?;
                }
                loss_sum += loss.detach() * count as f64;
                samples += count;
            }
            {
                let _phase = timer.map(|timer| timer.phase(Phase::Optimizer));
                self.scaler.step(&mut *self.opt)?;
                if self.scaler.is_enabled() {
                    self.scaler.update()?;
                }
                self.opt.zero_grad()?;
            }
            if let Some(timer) = timer {
                timer.step(samples as u64);
            }
            done.inputs += samples as u64;
            done.steps += 1;
        }
        // This waits for the device, so the caller's clock includes its work.
        done.loss = loss_sum.double_value(&[]) / done.inputs.max(1) as f64;
        Ok(done)
    }

    fn loss(&mut self, inputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (inputs, targets) = (self.upload(inputs)?, self.upload(targets)?);
        let inputs = if self.channels_last { to_channels_last(&inputs) } else { inputs };
        let batch = [inputs, targets];
        match &mut self.loss {
            TrainedLoss::Plain(loss, _) => loss(&batch).map_err(anyhow::Error::from_boxed),
            TrainedLoss::Compiled(loss) => Ok(loss.run(&batch)?),
        }
    }

    /// On the device. From pinned memory the host does not wait for the copy.
    fn upload(&self, tensor: &Tensor) -> Result<Tensor> {
        if !self.pins || tensor.device() != Device::Cpu {
            return Ok(tensor.f_to_device(self.device)?);
        }
        let mut pinned = ffi::empty_pinned(&tensor.size(), tensor.kind())?;
        pinned.f_copy_(tensor)?;
        Ok(pinned.f_to_device_(self.device, tensor.kind(), true, false)?)
    }

    /// The share of images classified correctly, in float32 as in Python.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn accuracy(&self, images: &Tensor, labels: &Tensor) -> Result<f64> {
        let _no_grad = tch::no_grad_guard();
        let mut correct = 0;
        for (images, labels) in images.split(250, 0).iter().zip(labels.split(250, 0)) {
            let images = images.to_device(self.device);
            let logits = (self.model)(&images, false);
            correct +=
                logits.argmax(-1, false).eq_tensor(&labels.to_device(self.device)).sum(Kind::Int64).int64_value(&[]);
        }
        let count = labels.size().first().copied().filter(|count| *count > 0).context("no test images")?;
        Ok(correct as f64 / count as f64)
    }
}

/// The loss, with the variables of its model.
enum TrainedLoss {
    Plain(Loss, #[expect(dead_code, reason = "the model and the optimizer use its variables")] VarStore),
    Compiled(CompiledLoss<'static, VarStore, Loss>),
}

fn loss(model: Rc<Model>, device: Device, precision: Option<Kind>) -> Loss {
    Box::new(move |batch| {
        let loss = || {
            let logits = model(&batch[0], true);
            let classes = *logits.size().last().unwrap_or(&1);
            let targets = batch[1].reshape([-1]);
            logits.reshape([-1, classes]).f_cross_entropy_loss::<Tensor>(
                &targets,
                None,
                tch::Reduction::Mean,
                -100,
                0.0,
            )
        };
        Ok(match precision {
            Some(kind) => autocast(device, kind, loss)??,
            None => loss()?,
        })
    })
}

/// Keeps the variables to the end of the process, because a compiled loss borrows what it watches.
fn compiled(vs: VarStore, loss: Loss) -> TrainedLoss {
    let options = compile::Options { strict: true, verbose: false, ..Default::default() };
    TrainedLoss::Compiled(compile::loss(Box::leak(Box::new(vs)), loss).options(options))
}

/// Converts a tensor of four dimensions to the channels-last memory format; others are returned unchanged.
fn to_channels_last(tensor: &Tensor) -> Tensor {
    match tensor.size().len() {
        4 => tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
        _ => tensor.shallow_clone(),
    }
}
