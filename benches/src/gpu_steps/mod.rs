//! Training steps on a device, by name: ours here, PyTorch's in `peers/gpu_counts.py`. A stand-in for CUDA's runtime counts
//! what each one launches, copies and waits for.

mod counted;
mod loops;
mod models;
mod optimizers;
pub mod ours;
pub mod plain_tch;

pub use counted::{
    Counted, DISTANCE_WITHIN, Step, count, count_plain_tch, difference, differences, losses_on_host, waits_of_a_step,
    with_fault,
};
use overdrive::prelude::{Kind, Tensor};
use serde::Serialize;

/// What a step trains, and how. The Python side reads it as JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Recipe {
    /// `mlp`, `cnn`, `gpt`, or `lookup`, whose gradients are sparse.
    pub model: &'static str,
    /// The optimizer by PyTorch's name.
    pub optimizer: &'static str,
    /// `float16` (with a scaler), `bfloat16`, or nothing.
    pub autocast: Option<&'static str>,
    /// Clip the gradients' norm.
    pub clip: bool,
    /// Micro-batches a step.
    pub accumulate: usize,
    /// An exponential average of the weights.
    pub ema: bool,
    /// A learning rate that changes at each step.
    pub schedule: bool,
    /// An average of the losses, which nobody reads.
    pub meter: bool,
    /// Each step's batch comes from pinned memory; images as uint8, which the device converts.
    pub upload: bool,
}

impl Recipe {
    /// The model in float32, and nothing else.
    pub fn new(model: &'static str, optimizer: &'static str) -> Self {
        Self {
            model,
            optimizer,
            autocast: None,
            clip: false,
            accumulate: 1,
            ema: false,
            schedule: false,
            meter: false,
            upload: false,
        }
    }

    /// With all techniques.
    pub fn with_all(self) -> Self {
        Self {
            autocast: Some("float16"),
            clip: true,
            accumulate: 4,
            ema: true,
            schedule: true,
            meter: true,
            upload: true,
            ..self
        }
    }

    /// Bytes of a batch.
    pub fn batch_bytes(&self) -> f64 {
        let (inputs, targets) = models::batch(self);
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        (bytes(&inputs) + bytes(&targets)) as f64
    }

    /// The dtype of the weights, where that is not float32.
    fn weights(&self) -> Option<Kind> {
        ["MasterCopy", "StochasticRounding"].contains(&self.optimizer).then_some(Kind::BFloat16)
    }

    /// How often a step may wait for the device.
    pub fn waits(&self) -> f64 {
        match self.optimizer {
            // As its documentation says, for one group of one dtype.
            "Prodigy" => 1.0,
            "LBFGS" => LBFGS_WAITS,
            // How many rows a sparse gradient has.
            "SparseAdam" => 1.0,
            _ if self.autocast == Some("float16") && !self.skips_on_device() => 1.0,
            _ => 0.0,
        }
    }

    /// Whether the host's own steps have the same losses. Autocast of the host has other lists of operators, and its
    /// generator other numbers.
    pub fn equals_host(&self) -> bool {
        self.autocast.is_none() && self.weights().is_none()
    }

    /// Whether its optimizer skips an overflowed step on the device. With another one the host reads a flag, as in PyTorch.
    fn skips_on_device(&self) -> bool {
        ["AdamW", "Adam", "SGD"].contains(&self.optimizer)
    }

    /// What it is called in tables.
    pub fn name(&self) -> String {
        let accumulation = (self.accumulate > 1).then(|| format!("{} micro-batches", self.accumulate));
        let parts = [
            Some(format!("{}, {}", self.model, self.optimizer)),
            self.autocast
                .map(|kind| if kind == "float16" { "float16 with scaler".to_owned() } else { kind.to_owned() }),
            self.clip.then(|| "clipping".to_owned()),
            accumulation,
            self.ema.then(|| "EMA".to_owned()),
            self.schedule.then(|| "schedule".to_owned()),
            self.meter.then(|| "meter".to_owned()),
            self.upload.then(|| "batch from pinned memory".to_owned()),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// The optimizers that PyTorch has too.
pub const OPTIMIZERS: [&str; 13] = [
    "AdamW",
    "Adam",
    "SGD",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "Adafactor",
    "Muon",
];

/// A step of L-BFGS with 4 iterations reads what it decides by: the first loss and the largest gradient (2); in each
/// iteration whether the curvature is used, two numbers for each of the 4 steps in its history, and the slope (10); and
/// after each but the last one the loss, the largest gradient and the largest change (3). So does PyTorch's.
const LBFGS_WAITS: f64 = 2.0 + 4.0 * 10.0 + 3.0 * 3.0;

/// The optimizers that PyTorch does not have, and forms of those that it has: around another one (SAM, Lookahead, Muon
/// joined with AdamW), SGD in the backward pass, and AdamW over weights of bfloat16.
pub const OUR_OPTIMIZERS: [&str; 14] = [
    "Lion",
    "LAMB",
    "LARS",
    "AdamW8bit",
    "Prodigy",
    "SGDScheduleFree",
    "AdamWScheduleFree",
    "T5Adafactor",
    "SAM",
    "Lookahead",
    "Joint",
    "InBackward",
    "MasterCopy",
    "StochasticRounding",
];

/// Each technique alone and all of them, with each model; each other optimizer with each model; L-BFGS, which takes a
/// closure and fits no other technique; and SparseAdam, for sparse gradients alone.
pub fn recipes() -> Vec<Recipe> {
    let techniques = |model| {
        let plain = Recipe::new(model, "AdamW");
        let of = |change: fn(&mut Recipe)| {
            let mut recipe = plain.clone();
            change(&mut recipe);
            recipe
        };
        [
            of(|_| ()),
            of(|it| it.clip = true),
            of(|it| it.autocast = Some("bfloat16")),
            of(|it| it.autocast = Some("float16")),
            of(|it| (it.autocast, it.clip) = (Some("float16"), true)),
            of(|it| it.accumulate = 4),
            of(|it| it.ema = true),
            of(|it| it.schedule = true),
            of(|it| it.meter = true),
            of(|it| it.upload = true),
            plain.clone().with_all(),
        ]
    };
    // The small model is enough.
    let combined = || {
        let alone: Vec<String> = techniques("mlp").iter().map(Recipe::name).collect();
        combined("AdamW").filter(move |it| !alone.contains(&it.name()))
    };
    let with_optimizers = OPTIMIZERS[1..].iter().flat_map(|optimizer| {
        let plain = Recipe::new("mlp", optimizer);
        let scaled = Recipe { autocast: Some("float16"), ..plain.clone() };
        let all = ["mlp", "cnn", "gpt"].map(|model| Recipe::new(model, optimizer).with_all());
        [plain, scaled].into_iter().chain(all)
    });
    let all = ["mlp", "cnn", "gpt"].into_iter().flat_map(techniques).chain(combined()).chain(with_optimizers);
    all.chain([Recipe::new("mlp", "LBFGS"), Recipe::new("lookup", "SparseAdam")]).collect()
}

/// The MLP with an optimizer in each dtype: with each of clipping, micro-batches and an average of the weights, every two
/// of them, all three, and none.
fn combined(optimizer: &'static str) -> impl Iterator<Item = Recipe> {
    let kinds = [None, Some("bfloat16"), Some("float16")];
    let all = kinds.into_iter().flat_map(|autocast| (0..8).map(move |bits| (autocast, bits)));
    all.map(move |(autocast, bits): (_, u8)| Recipe {
        autocast,
        clip: bits & 1 != 0,
        accumulate: if bits & 2 != 0 { 4 } else { 1 },
        ema: bits & 4 != 0,
        ..Recipe::new("mlp", optimizer)
    })
}

/// What is held as [`recipes`] are, but in no table: each other optimizer with every combination that AdamW has there.
pub fn combinations() -> Vec<Recipe> {
    let listed: Vec<String> = recipes().iter().map(Recipe::name).collect();
    let all = OPTIMIZERS[1..].iter().flat_map(|optimizer| combined(optimizer));
    all.filter(|it| !listed.contains(&it.name())).collect()
}
