//! Combinations of options that do not change the result, against one process that sees all ranks' data, over 50 steps
//! with two ranks and over 12 with more: each way to treat unused parameters, with each of five other options alone, with
//! four options at once, and with none. The model has a buffer, and paths that some steps leave out. Not every set of
//! options is tried.

use anyhow::{Context, Result};
use overdrive_core::GradientSync;
use overdrive_ddp::{DdpBuilder, DistributedDataParallel, ProcessGroup};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::training::{Unused, close, data, step};

const WIDTH: i64 = 16;

/// More ranks take longer, and show nothing in later steps that two would not.
fn steps(ranks: usize) -> usize {
    if ranks > 2 { 12 } else { 50 }
}

/// A layer followed by two paths, and between them a buffer that each forward pass updates and reads.
struct Model {
    vs: nn::VarStore,
    common: nn::Linear,
    paths: [nn::Linear; 2],
    seen: Tensor,
}

impl Model {
    fn new(seed: i64) -> Self {
        tch::manual_seed(seed);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let root = vs.root();
        let common = nn::linear(&root / "common", 5, WIDTH, Default::default());
        let paths = [0, 1].map(|path| nn::linear(&root / format!("path{path}"), WIDTH, 3, Default::default()));
        let seen = root.zeros_no_train("seen", &[WIDTH]);
        vs.double();
        Self { vs, common, paths, seen }
    }

    /// With the caller's buffer, so that one process can hold every rank's.
    fn forward(&self, inputs: &Tensor, paths: &[usize], seen: &Tensor) -> Tensor {
        let hidden = self.common.forward(inputs).tanh();
        let moved = seen * 0.9 + hidden.detach().mean_dim(0, false, None::<Kind>) * 0.1;
        seen.shallow_clone().copy_(&moved);
        let centred = hidden - moved;
        paths.iter().map(|&path| self.paths[path].forward(&centred)).reduce(|one, other| one + other).unwrap()
    }
}

type Options = fn(DdpBuilder) -> DdpBuilder;

/// How a run differs from the plain one.
#[derive(Clone, Copy)]
struct Way {
    options: Options,
    /// Buffers follow rank 0 from window to window.
    broadcast: bool,
    micro_batches: usize,
    /// Hold back by `no_sync`; otherwise as the accumulator does, between forward and backward.
    no_sync: bool,
    /// Zero the gradients in place instead of freeing them.
    in_place: bool,
}

const PLAIN: Way = Way { options: |ddp| ddp, broadcast: true, micro_batches: 1, no_sync: false, in_place: false };
/// Several buckets, which DDP reorders after the first step.
const SMALL_MIB: f64 = 1.0 / 1024.0;

const GRAPHS: [(&str, Options, Unused); 5] = [
    ("all used", |ddp| ddp, Unused::Nothing),
    ("all used, static", |ddp| ddp.static_graph(true), Unused::Nothing),
    ("unused in turns", |ddp| ddp.find_unused_parameters(true), Unused::Alternating),
    ("unused by rank", |ddp| ddp.find_unused_parameters(true), Unused::ByRank),
    ("always unused, static", |ddp| ddp.static_graph(true), Unused::Always),
];

const WAYS: [(&str, Way); 7] = [
    ("plain", PLAIN),
    ("small buckets", Way { options: |ddp| ddp.bucket_cap_mb(SMALL_MIB), ..PLAIN }),
    ("views, zeroed", Way { options: |ddp| ddp.gradient_as_bucket_view(true), in_place: true, ..PLAIN }),
    ("buffers of their own", Way { options: |ddp| ddp.broadcast_buffers(false), broadcast: false, ..PLAIN }),
    ("no_sync", Way { micro_batches: 2, no_sync: true, ..PLAIN }),
    ("accumulation", Way { micro_batches: 2, ..PLAIN }),
    (
        "small buckets, views, buffers of their own, no_sync",
        Way {
            options: |ddp| ddp.bucket_cap_mb(SMALL_MIB).gradient_as_bucket_view(true).broadcast_buffers(false),
            broadcast: false,
            micro_batches: 2,
            no_sync: true,
            in_place: false,
        },
    ),
];

/// A finished run: every rank's parameters and buffer after each step, flat.
struct Ran {
    name: String,
    unused: Unused,
    way: Way,
    found: Vec<Tensor>,
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let mut to_check = Vec::new();
    let combined = GRAPHS.into_iter().flat_map(|graph| WAYS.map(|way| (graph, way)));
    for (number, ((graph, told, unused), (name, way))) in combined.enumerate() {
        let name = format!("{graph}; {name}");
        let found = trains(&group, told, unused, way).with_context(|| name.clone())?;
        let found = group.all_gather(&found)?;
        if number % group.size() == group.rank() {
            to_check.push(Ran { name, unused, way, found });
        }
    }
    // After all runs, so that the ranks check at the same time, each its share.
    to_check.iter().try_for_each(|ran| check(ran).with_context(|| ran.name.clone()))
}

fn states(vs: &nn::VarStore, seen: &Tensor) -> Vec<Tensor> {
    vs.trainable_variables().iter().chain([seen]).map(|tensor| tensor.detach().flatten(0, -1)).collect()
}

/// This rank's parameters and buffer after each step.
fn trains(group: &ProcessGroup, told: Options, unused: Unused, way: Way) -> Result<Tensor> {
    let (rank, micro_batches) = (group.rank(), way.micro_batches);
    // Every rank starts with other values, and gets rank 0's parameters and buffer.
    let model = Model::new(1 + rank as i64);
    let _ = model.seen.shallow_clone().fill_(rank as i64);
    let ddp = (way.options)(told(DistributedDataParallel::builder(group))).build(&model.vs)?;
    let mut found = Vec::new();
    for number in 0..steps(group.size()) {
        for micro in 0..micro_batches {
            let last = micro + 1 == micro_batches;
            let _guard = (way.no_sync && !last).then(|| ddp.no_sync());
            let (inputs, targets) = data(number, micro, rank);
            let outputs = ddp.forward(|| model.forward(&inputs, unused.paths(number, rank), &model.seen))?;
            if !way.no_sync && micro_batches > 1 && (micro == 0 || last) {
                ddp.hold_back(!last).map_err(|error| anyhow::anyhow!("{error}"))?;
            }
            ddp.backward(&((outputs - targets).square().mean(Kind::Double) / micro_batches as f64))?;
        }
        step(&model.vs, way.in_place);
        found.push(Tensor::cat(&states(&model.vs, &model.seen), 0));
    }
    Ok(Tensor::stack(&found, 0))
}

/// Computes the same in this process alone, and compares.
fn check(ran: &Ran) -> Result<()> {
    let Ran { unused, way, found, .. } = ran;
    let (ranks, reference) = (found.len(), Model::new(1));
    let seen: Vec<Tensor> = (0..ranks).map(|_| reference.seen.copy()).collect();
    for number in 0..steps(ranks) {
        if way.broadcast {
            seen[1..].iter().for_each(|own| own.shallow_clone().copy_(&seen[0]));
        }
        for (rank, own) in seen.iter().enumerate() {
            for micro in 0..way.micro_batches {
                let (inputs, targets) = data(number, micro, rank);
                let outputs = reference.forward(&inputs, unused.paths(number, rank), own);
                ((outputs - targets).square().mean(Kind::Double) / (way.micro_batches * ranks) as f64).backward();
            }
        }
        step(&reference.vs, way.in_place);
        for (rank, own) in seen.iter().enumerate() {
            let expected = states(&reference.vs, own);
            let sizes: Vec<i64> = expected.iter().map(|tensor| tensor.size()[0]).collect();
            let found = found[rank].get(number as i64).split_with_sizes(&sizes[..], 0);
            for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                close(found, expected).with_context(|| format!("step {number}, rank {rank}, tensor {place}"))?;
            }
        }
    }
    Ok(())
}
