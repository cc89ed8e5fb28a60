//! Training over ranks compared with one process that sees all their data, step by step, in float64.

use std::cell::Cell;

use anyhow::{Context, Result, ensure};
use overdrive_core::GradientSync;
use overdrive_ddp::{DdpBuilder, DdpError, DistributedDataParallel, ProcessGroup};
use overdrive_ffi::TensorList;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

/// In the first two, buckets get their final order and static graphs are learned; in the others, the paths that are left
/// out change five times.
const STEPS: usize = 12;
const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// A common layer followed by two paths, so that one can be left out.
pub struct Model {
    pub vs: nn::VarStore,
    common: nn::Linear,
    paths: [nn::Linear; 2],
}

impl Model {
    pub fn new(seed: i64) -> Self {
        tch::manual_seed(seed);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let root = vs.root();
        let common = nn::linear(&root / "common", 5, 16, Default::default());
        let paths = [0, 1].map(|path| nn::linear(&root / format!("path{path}"), 16, 3, Default::default()));
        vs.double();
        Self { vs, common, paths }
    }

    pub fn forward(&self, inputs: &Tensor, paths: &[usize]) -> Tensor {
        let hidden = self.common.forward(inputs).tanh();
        let outputs: Vec<Tensor> = paths.iter().map(|&path| self.paths[path].forward(&hidden)).collect();
        Tensor::stack(&outputs, 0).sum_dim_intlist(0, false, None::<Kind>)
    }

    pub fn loss(&self, batch: &(Tensor, Tensor), paths: &[usize]) -> Tensor {
        (self.forward(&batch.0, paths) - &batch.1).square().mean(Kind::Double)
    }

    pub fn step(&self, in_place: bool) {
        step(&self.vs, in_place);
    }
}

/// SGD by hand; parameters without a gradient stay. `in_place`: zero the gradients instead of freeing them.
pub fn step(vs: &nn::VarStore, in_place: bool) {
    tch::no_grad(|| {
        for mut param in vs.trainable_variables() {
            let mut grad = param.grad();
            if !grad.defined() {
                continue;
            }
            let _ = param.g_sub_(&(&grad * 0.2));
            if in_place {
                let _ = grad.zero_();
            }
        }
    });
    if !in_place {
        TensorList::new(&vs.trainable_variables()).and_then(|list| list.clear_grads()).unwrap();
    }
}

/// Rank `rank`'s data in a micro-batch; every rank can compute every other's.
pub fn data(step: usize, micro: usize, rank: usize) -> (Tensor, Tensor) {
    tch::manual_seed((1_000_000 + step * 1000 + micro * 100 + rank) as i64);
    (Tensor::randn([4, 5], DOUBLE), Tensor::randn([4, 3], DOUBLE))
}

pub fn assert_equal(ours: &Model, reference: &Model, step: usize) -> Result<()> {
    let expected = reference.vs.variables();
    for (name, ours) in ours.vs.variables() {
        close(&ours, &expected[&name]).with_context(|| format!("step {step}, {name}"))?;
    }
    Ok(())
}

/// Checks equality to 1e-6 of the largest number.
pub fn close(found: &Tensor, expected: &Tensor) -> Result<()> {
    let error = (found - expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]);
    ensure!(error <= 1e-6 * scale, "off by {error} of {scale}");
    Ok(())
}

/// How a run differs from the plain one.
#[derive(Clone, Copy, Default)]
struct Way {
    micro_batches: usize,
    /// Hold back by `no_sync`; otherwise as the accumulator does, between forward and backward.
    no_sync: bool,
    unused: Unused,
    in_place: bool,
}

/// Which of the model's paths are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Unused {
    #[default]
    Nothing,
    /// The same path on all ranks, another at each step.
    Alternating,
    /// Another path on each rank.
    ByRank,
    /// The same at all steps.
    Always,
}

impl Unused {
    /// The paths that are not left out.
    pub fn paths(self, step: usize, rank: usize) -> &'static [usize] {
        match self {
            Self::Nothing => &[0, 1],
            Self::Alternating if step.is_multiple_of(2) => &[0],
            Self::Alternating => &[1],
            Self::ByRank if rank.is_multiple_of(2) => &[0],
            Self::ByRank => &[1],
            Self::Always => &[1],
        }
    }
}

fn trains(group: &ProcessGroup, options: impl Fn(DdpBuilder) -> DdpBuilder, way: Way) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let micro_batches = way.micro_batches.max(1);
    // Every rank starts with other values, and gets rank 0's parameters.
    let model = Model::new(1 + rank as i64);
    let reference = Model::new(1);
    let ddp = options(DistributedDataParallel::builder(group)).build(&model.vs)?;
    assert_equal(&model, &reference, 0).context("after the first broadcast")?;
    for step in 0..STEPS {
        for micro in 0..micro_batches {
            let last = micro + 1 == micro_batches;
            let _guard = (way.no_sync && !last).then(|| ddp.no_sync());
            let batch = data(step, micro, rank);
            let paths = way.unused.paths(step, rank);
            let outputs = ddp.forward(|| model.forward(&batch.0, paths))?;
            let loss = (outputs - &batch.1).square().mean(Kind::Double);
            if !way.no_sync && micro_batches > 1 && (micro == 0 || last) {
                // As the accumulator does: between forward and backward, when it knows whether the window closes.
                ddp.hold_back(!last).map_err(|error| anyhow::anyhow!("{error}"))?;
            }
            ddp.backward(&(loss / micro_batches as f64))?;
        }
        for micro in 0..micro_batches {
            for other in 0..ranks {
                let loss = reference.loss(&data(step, micro, other), way.unused.paths(step, other));
                (loss / (micro_batches * ranks) as f64).backward();
            }
        }
        model.step(way.in_place);
        reference.step(way.in_place);
        assert_equal(&model, &reference, step + 1)?;
    }
    Ok(())
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let plain = Way::default();
    let twice = Way { micro_batches: 2, ..plain };
    let unused = |unused| Way { unused, ..plain };
    trains(&group, |ddp| ddp, plain).context("plain")?;
    // 1 KiB: several buckets, which DDP reorders after the first step.
    trains(&group, |ddp| ddp.bucket_cap_mb(1.0 / 1024.0), plain).context("small buckets")?;
    let in_place = Way { in_place: true, ..plain };
    trains(&group, |ddp| ddp.gradient_as_bucket_view(true), in_place).context("views, zeroed")?;
    trains(&group, |ddp| ddp.gradient_as_bucket_view(true).bucket_cap_mb(1.0 / 1024.0), plain).context("views")?;
    trains(&group, |ddp| ddp, twice).context("accumulation")?;
    trains(&group, |ddp| ddp, Way { micro_batches: 3, no_sync: true, ..plain }).context("no_sync")?;
    trains(&group, |ddp| ddp.static_graph(true), plain).context("static graph")?;
    trains(&group, |ddp| ddp.static_graph(true), Way { micro_batches: 3, ..plain })
        .context("static graph, accumulation")?;
    trains(&group, |ddp| ddp.static_graph(true), unused(Unused::Always)).context("static graph, unused")?;
    for way in [unused(Unused::Alternating), unused(Unused::ByRank), twice] {
        let unused = way.unused;
        trains(&group, |ddp| ddp.find_unused_parameters(true), way)
            .with_context(|| format!("unused parameters {unused:?}"))?;
    }
    let accumulated = Way { micro_batches: 2, unused: Unused::ByRank, ..plain };
    trains(&group, |ddp| ddp.find_unused_parameters(true), accumulated).context("unused parameters, accumulation")?;
    Ok(())
}

pub fn models_that_differ(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let odd = meeting.rank == 1;
    let model = |columns: i64, kind: Kind, name: &str| {
        let param = Tensor::zeros([2, columns], (kind, Device::Cpu)).set_requires_grad(true);
        vec![("first".to_owned(), Tensor::zeros([2], DOUBLE).set_requires_grad(true)), (name.to_owned(), param)]
    };
    let cases = [
        (
            if odd { model(4, Kind::Double, "w") } else { model(3, Kind::Double, "w") },
            "\"w\" is Double of shape [2, 4]",
        ),
        (if odd { model(3, Kind::Float, "w") } else { model(3, Kind::Double, "w") }, "\"w\" is Float"),
        (
            if odd { model(3, Kind::Double, "v") } else { model(3, Kind::Double, "w") },
            "tensor 1 is the parameter \"v\"",
        ),
        (
            model(3, Kind::Double, "w").into_iter().take(if odd { 1 } else { 2 }).collect(),
            "the number of parameters and buffers is 1",
        ),
    ];
    for (params, named) in cases {
        // The group remains usable.
        drop(DistributedDataParallel::builder(&group).build_from(model(3, Kind::Double, "w"), Vec::new())?);
        let built = DistributedDataParallel::builder(&group).build_from(params, Vec::new());
        let error = built.err().context("models that differ were accepted")?;
        ensure!(matches!(&error, DdpError::ModelMismatch { rank: 1, .. }), "{error}");
        ensure!(error.to_string().contains(named), "{error} does not say {named:?}");
    }
    // No barrier here: the check keeps rank 0 and its store alive until every rank has its error.
    Ok(())
}

/// Rank r has 4 + 3r inputs. Expected: each step applies the sum of the active ranks' gradients, divided by the world
/// size or by the number of active ranks; at the end every rank has the last active rank's model.
pub fn join(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, ranks) = (group.rank(), group.size());
    let inputs = |rank: usize| 4 + 3 * rank;
    for (by_active, find_unused, bucket) in [(false, false, 25.0), (true, false, 1.0 / 1024.0), (true, true, 25.0)] {
        let model = Model::new(1);
        let reference = Model::new(1);
        let builder = DistributedDataParallel::builder(&group).bucket_cap_mb(bucket);
        let ddp = builder.find_unused_parameters(find_unused).build(&model.vs)?;
        let ran = Cell::new(0);
        ddp.join(by_active, || -> Result<()> {
            for step in 0..inputs(rank) {
                let batch = data(step, 0, rank);
                let outputs = ddp.forward(|| model.forward(&batch.0, &[0, 1]))?;
                ddp.backward(&(outputs - &batch.1).square().mean(Kind::Double))?;
                model.step(false);
                ran.set(step + 1);
            }
            let held = ddp.hold_back(true);
            ensure!(held.is_err(), "accumulation within join was not refused");
            Ok(())
        })??;
        ensure!(ran.get() == inputs(rank));
        for step in 0..inputs(ranks - 1) {
            let active: Vec<usize> = (0..ranks).filter(|&rank| step < inputs(rank)).collect();
            let divisor = if by_active { active.len() } else { ranks };
            for &rank in &active {
                (reference.loss(&data(step, 0, rank), &[0, 1]) / divisor as f64).backward();
            }
            reference.step(false);
        }
        assert_equal(&model, &reference, 0).with_context(|| format!("by active ranks: {by_active}"))?;
        // After join, training works as before it.
        let batch = data(90, 0, rank);
        let outputs = ddp.forward(|| model.forward(&batch.0, &[0, 1]))?;
        ddp.backward(&(outputs - &batch.1).square().mean(Kind::Double))?;
        model.step(false);
        for other in 0..ranks {
            (reference.loss(&data(90, 0, other), &[0, 1]) / ranks as f64).backward();
        }
        reference.step(false);
        assert_equal(&model, &reference, 91).with_context(|| format!("after join, by active ranks: {by_active}"))?;
    }
    Ok(())
}
