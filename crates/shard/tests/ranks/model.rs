//! A small model in float64, its data, and comparisons.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use overdrive_core::{Entry, Optimizer, StateDict};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

pub const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
/// How many samples a rank has in a micro-batch.
pub const SAMPLES: i64 = 4;

/// Four layers of different sizes, so that parts of ranks differ too.
#[derive(Debug)]
pub struct Model {
    pub vs: nn::VarStore,
    layers: Vec<nn::Linear>,
}

impl Model {
    pub fn new(seed: i64) -> Self {
        Self::of(seed, &[[5, 16], [16, 12], [12, 8], [8, 3]])
    }

    /// The same in float32.
    pub fn float(seed: i64) -> Self {
        let mut model = Self::new(seed);
        model.vs.float();
        model
    }

    /// One whose second layer has a weight of over 1 MiB, which is exchanged by itself, in rows that 2, 3 and 4 ranks share
    /// evenly.
    pub fn large(seed: i64) -> Self {
        Self::of(seed, &[[5, 400], [400, 336], [336, 8], [8, 3]])
    }

    /// The same in rows that they do not share evenly.
    pub fn large_uneven(seed: i64) -> Self {
        Self::of(seed, &[[5, 400], [400, 331], [331, 8], [8, 3]])
    }

    fn of(seed: i64, layers: &[[i64; 2]; 4]) -> Self {
        tch::manual_seed(seed);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let layer = |(number, &[inputs, outputs]): (usize, &[i64; 2])| {
            nn::linear(vs.root() / format!("layer{number}"), inputs, outputs, Default::default())
        };
        let layers = layers.iter().enumerate().map(layer).collect();
        vs.double();
        Self { vs, layers }
    }

    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        self.forward_from(0, inputs)
    }

    /// From this layer on.
    pub fn forward_from(&self, first: usize, inputs: &Tensor) -> Tensor {
        let (last, hidden) = self.layers[first..].split_last().unwrap();
        last.forward(&hidden.iter().fold(inputs.shallow_clone(), |x, layer| layer.forward(&x).tanh()))
    }

    /// One layer alone, with the activation after it.
    pub fn layer(&self, number: usize, inputs: &Tensor) -> Tensor {
        let outputs = self.layers[number].forward(inputs);
        if number + 1 == self.layers.len() { outputs } else { outputs.tanh() }
    }

    /// The parameters of a layer.
    pub fn layer_parameters(&self, number: usize) -> Vec<(String, Tensor)> {
        let prefix = format!("layer{number}.");
        self.vs
            .variables()
            .into_iter()
            .filter(|(name, _)| name.starts_with(&prefix))
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect()
    }

    pub fn loss(&self, batch: &(Tensor, Tensor)) -> Tensor {
        (self.forward(&batch.0) - &batch.1).square().mean(None)
    }

    /// Names and values of the parameters.
    pub fn values(&self) -> Vec<(String, Tensor)> {
        let mut values: Vec<_> = self.vs.variables().into_iter().map(|(name, it)| (name, it.detach().copy())).collect();
        values.sort_by(|one, other| one.0.cmp(&other.0));
        values
    }
}

/// A rank's data in a micro-batch; every rank can compute every other's.
pub fn data(step: usize, micro: usize, rank: usize) -> (Tensor, Tensor) {
    tch::manual_seed((1_000_000 + step * 1000 + micro * 100 + rank) as i64);
    (Tensor::randn([SAMPLES, 5], DOUBLE), Tensor::randn([SAMPLES, 3], DOUBLE))
}

/// All ranks' data of all micro-batches of a step, as one batch.
pub fn large_batch(step: usize, micro_batches: usize, ranks: usize) -> (Tensor, Tensor) {
    let parts: Vec<_> = (0..micro_batches * ranks).map(|at| data(step, at / ranks, at % ranks)).collect();
    let (inputs, targets): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    (Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0))
}

/// Equal to 1e-11 of the largest number of each tensor.
pub fn close(found: &[(String, Tensor)], expected: &[(String, Tensor)]) -> Result<()> {
    ensure!(found.len() == expected.len());
    for ((name, found), (other, expected)) in found.iter().zip(expected) {
        let error = (found - expected).abs().max().double_value(&[]);
        let scale = expected.abs().max().double_value(&[]);
        ensure!(name == other && error <= 1e-11 * scale, "{name}: off by {error} of {scale}");
    }
    Ok(())
}

/// Equal to the bit.
pub fn same(found: &[(String, Tensor)], expected: &[(String, Tensor)]) -> Result<()> {
    ensure!(found.len() == expected.len());
    for ((name, found), (other, expected)) in found.iter().zip(expected) {
        ensure!(name == other && found.equal(expected), "{name} differs:\n{found}\n{expected}");
    }
    Ok(())
}

/// The tensors of a state by name.
pub fn tensors(state: &StateDict) -> Vec<(String, Tensor)> {
    let tensor = |(key, entry): (&str, &Entry)| match entry {
        Entry::Tensor(tensor) => Some((key.to_owned(), tensor.copy())),
        _ => None,
    };
    state.iter().filter_map(tensor).collect()
}

/// Equal entries, tensors to the bit.
pub fn same_state(found: &StateDict, expected: &StateDict) -> Result<()> {
    let plain = |state: &StateDict| {
        let text = |(key, entry): (&str, &Entry)| match entry {
            Entry::Tensor(tensor) => format!("{key}: {:?} {:?}", tensor.kind(), tensor.size()),
            other => format!("{key}: {other:?}"),
        };
        state.iter().map(text).collect::<Vec<_>>()
    };
    let (ours, theirs) = (plain(found), plain(expected));
    ensure!(ours == theirs, "{ours:#?}\n{theirs:#?}");
    same(&tensors(found), &tensors(expected))
}

/// Bytes of all tensors of a state.
pub fn bytes(state: &StateDict) -> usize {
    tensors(state).iter().map(|(_, tensor)| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
}

/// One step of a model alone.
pub fn step_alone(
    model: &Model,
    opt: &mut dyn Optimizer,
    batch: &(Tensor, Tensor),
    max_norm: Option<f64>,
) -> Result<()> {
    model.loss(batch).backward();
    if let Some(max_norm) = max_norm {
        overdrive_optim::clip_grad_norm_(opt.parameters(), max_norm).context("clipping")?;
    }
    opt.step()?;
    Ok(opt.zero_grad()?)
}
