//! DeepSpeed's JSON, turned into Overdrive's objects.
//!
//! [`DeepSpeedConfig`] reads the file as it is. Each key is honoured, or accepted because it changes nothing, or refused by
//! its path with the reason; a key that DeepSpeed does not have is refused too. [The book's page] has the table of all keys.
//!
//! ```no_run
//! use overdrive_accum::{Accumulator, Samples};
//! use overdrive_core::Optimizer;
//! use overdrive_ddp::{Backend, InitMethod, init_process_group};
//! use overdrive_sched::LrScheduler;
//! use overdrive_shard::deepspeed::{DeepSpeedConfig, TrainingArguments};
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//!
//! // Arguments are what "auto" in the file stands for.
//! let arguments = TrainingArguments::new(group.size()).learning_rate(3e-4).max_steps(1000).warmup_steps(50);
//! let config = DeepSpeedConfig::from_file("ds_config.json", &arguments)?;
//!
//! let mut opt = config.zero_optimizer(&vs, &group)?;          // stages 1 and 2; for stage 3 see `fully_sharded`
//! let sharded = config.sharded_data_parallel(&mut opt)?;      // stage 2
//! let mut sched = config.schedule().map(|schedule| LrScheduler::new(&mut opt, schedule)).transpose()?;
//! let mut scaler = config.loss_scaler(vs.device())?;
//! let mut accum = Accumulator::new(config.gradient_accumulation_steps())?.with_sync(&sharded);
//! let samples = config.train_micro_batch_size_per_gpu() as i64;
//! # let loader: Vec<Tensor> = Vec::new();
//! for micro in accum.windows(loader) {
//!     let loss = config.autocast(vs.device()).run(|| model.forward(&micro.batch).square().mean(Kind::Float))?;
//!     accum.backward(&opt, &scaler.scale(&loss)?, Samples(samples), micro.closes)?;
//!     if micro.closes {
//!         if let Some(max_norm) = config.gradient_clipping() {
//!             scaler.unscale_(&mut opt)?;
//!             sharded.clip_grad_norm_(max_norm)?;
//!         }
//!         let is_stepped = scaler.step(&mut opt)?;
//!         opt.zero_grad()?;
//!         if let (true, Some(sched)) = (is_stepped, &mut sched) {
//!             sched.step(&mut opt)?;
//!         }
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [The book's page]: https://github.com/overdrive-rs/overdrive/blob/main/docs/sharding.md#from-deepspeeds-json

mod arguments;
mod batch;
#[cfg(test)]
mod book;
mod build;
mod error;
mod keys;
mod loss_scaler;
mod optimizer;
mod precision;
mod schedule;
mod schema;
#[cfg(test)]
mod tests;
mod tree;
mod zero;

use std::path::Path;

pub use arguments::{MixedPrecision, TrainingArguments};
pub use error::DeepSpeedError;
pub use loss_scaler::LossScaler;
pub use schedule::LrSchedule;
pub use zero::ZeroStage;

use batch::Batch;
use optimizer::Chosen;
use precision::Precision;
use tree::Tree;
use zero::Zero;

/// DeepSpeed's default of `gradient_clipping`.
const GRADIENT_CLIPPING: f64 = 1.0;
/// The second of `betas`, while `OneCycle` cycles the first.
const BETA2_OF_ONE_CYCLE: f64 = 0.99;

/// A DeepSpeed configuration: what it says, and the objects that are made of it. See the [module](self) for a program.
///
/// All of a loop is in the program: it asks for each part, and uses it.
///
/// # Source
/// `deepspeed.DeepSpeedConfig`, DeepSpeed of August 2026
#[derive(Clone, Debug, PartialEq)]
pub struct DeepSpeedConfig {
    world_size: usize,
    batch: Batch,
    gradient_clipping: f64,
    precision: Precision,
    /// Whether that is by `fp16` or `bf16`.
    converts_parameters: bool,
    zero: Zero,
    optimizer: Option<Chosen>,
    schedule: Option<LrSchedule>,
    has_activation_checkpointing: bool,
    steps_per_print: Option<u64>,
    dataloader_drop_last: bool,
}

impl DeepSpeedConfig {
    /// Reads a file, DeepSpeed's `ds_config.json`, and fills in its `"auto"` values.
    ///
    /// # Errors
    /// [`DeepSpeedError::Read`] when the file cannot be read, and those of [`from_json`](Self::from_json).
    pub fn from_file(path: impl AsRef<Path>, arguments: &TrainingArguments) -> Result<Self, DeepSpeedError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| DeepSpeedError::Read { path: path.to_owned(), source })?;
        Self::from_json(&text, arguments)
    }

    /// The same from a text. A byte order mark before it is passed over.
    ///
    /// # Errors
    /// With the path of the key: when the text is not JSON or a key is given twice; when a key is unknown, has a value of
    /// another type or out of range, or is refused; when keys contradict each other or the arguments; when an `"auto"` has
    /// no argument, and when batch sizes do not multiply.
    pub fn from_json(text: &str, arguments: &TrainingArguments) -> Result<Self, DeepSpeedError> {
        // As Windows' editors write it.
        let mut tree = Tree::parse(text.strip_prefix('\u{feff}').unwrap_or(text))?;
        zero::modernise(&mut tree)?;
        arguments.fill(&mut tree)?;
        schema::check(&tree)?;
        let zero = Zero::read(&tree)?;
        let mut optimizer = Chosen::read(&tree)?;
        let schedule = LrSchedule::read(&tree, optimizer.as_ref())?;
        if let (Some(optimizer), true) = (&mut optimizer, schedule.as_ref().is_some_and(LrSchedule::cycles_momentum)) {
            optimizer.betas.1 = BETA2_OF_ONE_CYCLE;
        }
        Ok(Self {
            world_size: arguments.world_size,
            batch: Batch::read(&tree, arguments.world_size)?,
            gradient_clipping: tree.size("gradient_clipping")?.unwrap_or(GRADIENT_CLIPPING),
            precision: Precision::read(&tree, zero.stage)?,
            converts_parameters: tree.flag("torch_autocast.enabled")? != Some(true),
            zero,
            optimizer,
            schedule,
            has_activation_checkpointing: tree.at("activation_checkpointing").is_some(),
            steps_per_print: tree.count("steps_per_print", 1)?,
            dataloader_drop_last: tree.flag("dataloader_drop_last")?.unwrap_or(false),
        })
    }

    /// The samples of a step, over all ranks and micro-batches.
    pub fn train_batch_size(&self) -> usize {
        size(self.batch.total)
    }

    /// The samples of a rank's micro-batch.
    pub fn train_micro_batch_size_per_gpu(&self) -> usize {
        size(self.batch.micro)
    }

    /// The micro-batches of a step on a rank, for `Accumulator::new`.
    ///
    /// DeepSpeed divides each loss by this number. An `Accumulator` weights it by the samples that it averages over, which is
    /// the same for micro-batches of one size.
    pub fn gradient_accumulation_steps(&self) -> usize {
        size(self.batch.steps)
    }

    /// The norm to clip gradients to, by [`clip_grad_norm_`](crate::ShardedDataParallel::clip_grad_norm_) or that of
    /// `overdrive-optim`. Where the file does not say, 1.0 as in DeepSpeed of August 2026 (older releases do not clip then);
    /// `None` where it says 0.
    pub fn gradient_clipping(&self) -> Option<f64> {
        (self.gradient_clipping > 0.0).then_some(self.gradient_clipping)
    }

    /// What is partitioned over ranks.
    pub fn stage(&self) -> ZeroStage {
        self.zero.stage
    }

    /// The learning rate schedule, for an `LrScheduler`; `None` without a section `scheduler`.
    pub fn schedule(&self) -> Option<LrSchedule> {
        self.schedule.clone()
    }

    /// After how many steps to print something, if the file says it.
    pub fn steps_per_print(&self) -> Option<u64> {
        self.steps_per_print
    }

    /// Whether the loader leaves out a last batch that is smaller; false where the file does not say.
    pub fn dataloader_drop_last(&self) -> bool {
        self.dataloader_drop_last
    }
}

/// Sizes are below 2^53.
fn size(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
