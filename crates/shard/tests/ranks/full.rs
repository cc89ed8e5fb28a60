//! ZeRO-3 beside one process with the large batch.

use anyhow::{Context, Result, ensure};
use overdrive_accum::{Accumulator, Samples};
use overdrive_core::{GradientSync, IntoParameters, Optimizer};
use overdrive_ddp::ProcessGroup;
use overdrive_ffi::autograd::{GradOptions, backward};
use overdrive_optim::Lion;
use overdrive_shard::{
    Exchange, FullyShardedBuilder, FullyShardedDataParallel, FullyShardedOptimizer, ShardError, ShardedUnit,
};
use tch::{Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, SAMPLES, close, data, large_batch, step_alone};
use crate::zero::{Build, adamw, sgd};

const STEPS: usize = 50;

pub type Opt = FullyShardedOptimizer<Box<dyn Optimizer>>;

/// A model of four layers, some of which are units.
pub struct Sharded {
    pub model: Model,
    units: Vec<Option<ShardedUnit>>,
    pub fsdp: FullyShardedDataParallel,
    part: (usize, usize),
}

impl Sharded {
    pub fn new(group: &ProcessGroup, seed: i64) -> Result<Self> {
        Self::with(group, seed, &[1, 2], |builder| builder)
    }

    pub fn with(
        group: &ProcessGroup,
        seed: i64,
        units: &[usize],
        options: impl FnOnce(FullyShardedBuilder) -> FullyShardedBuilder,
    ) -> Result<Self> {
        let builder = options(FullyShardedDataParallel::builder(group)?);
        Self::over(builder, seed, units, (group.rank(), group.size()))
    }

    /// `part`: which of how many parts this rank has.
    pub fn over(builder: FullyShardedBuilder, seed: i64, units: &[usize], part: (usize, usize)) -> Result<Self> {
        Self::of(Model::new(seed), builder, units, part)
    }

    pub fn of(model: Model, mut builder: FullyShardedBuilder, units: &[usize], part: (usize, usize)) -> Result<Self> {
        let units = (0..4)
            .map(|number| match units.contains(&number) {
                true => Ok(Some(builder.unit(&format!("layer{number}"), model.layer_parameters(number))?)),
                false => Ok(None),
            })
            .collect::<Result<Vec<_>>>()?;
        let fsdp = builder.build(&model.vs)?;
        Ok(Self { model, units, fsdp, part })
    }

    pub fn layer(&self, number: usize, inputs: Tensor) -> Result<Tensor, ShardError> {
        match &self.units[number] {
            Some(unit) => unit.forward(inputs, |inputs| self.model.layer(number, &inputs)),
            None => Ok(self.model.layer(number, &inputs)),
        }
    }

    pub fn forward(&self, inputs: &Tensor) -> Result<Tensor, ShardError> {
        let layers = |inputs| (0..4).try_fold(inputs, |x, number| self.layer(number, x));
        self.fsdp.try_forward(inputs.shallow_clone(), layers)
    }

    pub fn loss(&self, batch: &(Tensor, Tensor)) -> Result<Tensor, ShardError> {
        Ok((self.forward(&batch.0)? - &batch.1).square().mean(None))
    }

    /// This rank's rows are those of the whole model.
    pub fn close_to(&self, whole: &Model) -> Result<()> {
        close(&self.rows(|param| param.detach())?, &rows_of(self.part, &whole.values()))
    }

    fn rows(&self, of: impl Fn(&Tensor) -> Tensor) -> Result<Vec<(String, Tensor)>> {
        let named =
            |param: &overdrive_core::Parameter| Ok((param.name().context("a name")?.to_owned(), of(param.tensor())));
        let mut rows = self.fsdp.parameters().iter().map(named).collect::<Result<Vec<_>>>()?;
        rows.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(rows.into_iter().filter(|(_, it)| it.numel() > 0).collect())
    }

    /// The gradients of this rank's rows are those of the whole model.
    pub fn gradients_close_to(&self, whole: &Model) -> Result<()> {
        let mut expected: Vec<_> = whole.vs.variables().into_iter().map(|(name, it)| (name, it.grad())).collect();
        expected.sort_by(|one, other| one.0.cmp(&other.0));
        close(&self.rows(Tensor::grad)?, &rows_of(self.part, &expected))
    }
}

/// A rank's rows of whole tensors, as `torch.chunk` parts them; those of which it has none are left out.
pub fn rows_of((part, parts): (usize, usize), whole: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let row = |(name, tensor): &(String, Tensor)| {
        let parts = tensor.chunk(parts as i64, 0);
        Some((name.clone(), parts.get(part)?.shallow_clone()))
    };
    whole.iter().filter_map(row).collect()
}

/// How gradients of several micro-batches are added up.
#[derive(Clone, Copy, PartialEq)]
enum Adding {
    Exchanged,
    Held,
    Accumulator,
}

#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    build: Build,
    model: fn(i64) -> Model,
    units: &'static [usize],
    micro_batches: usize,
    adding: Adding,
    max_norm: Option<f64>,
    reshards: bool,
    prefetches: bool,
}

const WAY: Way = Way {
    name: "",
    build: sgd,
    model: Model::new,
    units: &[1, 2],
    micro_batches: 1,
    adding: Adding::Exchanged,
    max_norm: None,
    reshards: true,
    prefetches: true,
};

pub fn training(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let lion: Build = |params| Ok(Box::new(Lion::builder(params).lr(1e-3).build()?));
    let ways = [
        Way { name: "SGD with momentum", ..WAY },
        Way { name: "AdamW in two groups", build: adamw, ..WAY },
        Way { name: "Lion", build: lion, ..WAY },
        Way { name: "AdamW, each layer a unit", build: adamw, units: &[0, 1, 2, 3], ..WAY },
        Way { name: "AdamW, one unit", build: adamw, units: &[], ..WAY },
        Way { name: "AdamW, kept after the forward", build: adamw, reshards: false, ..WAY },
        Way { name: "AdamW, not prefetched", build: adamw, prefetches: false, ..WAY },
        Way { name: "SGD, large parameters", model: Model::large, ..WAY },
        Way { name: "SGD, large parameters, uneven", model: Model::large_uneven, micro_batches: 2, ..WAY },
        Way { name: "SGD, accumulated with exchange", micro_batches: 3, ..WAY },
        Way { name: "SGD, accumulated without exchange", micro_batches: 3, adding: Adding::Held, ..WAY },
        Way {
            name: "SGD, large parameters, accumulated without exchange",
            model: Model::large,
            micro_batches: 3,
            adding: Adding::Held,
            ..WAY
        },
        Way {
            name: "SGD, large parameters, accumulator",
            model: Model::large,
            micro_batches: 3,
            adding: Adding::Accumulator,
            ..WAY
        },
        Way { name: "AdamW, accumulator", build: adamw, micro_batches: 3, adding: Adding::Accumulator, ..WAY },
        Way { name: "AdamW, clipped", build: adamw, max_norm: Some(0.5), ..WAY },
        Way {
            name: "AdamW, accumulated and clipped",
            build: adamw,
            micro_batches: 2,
            adding: Adding::Accumulator,
            max_norm: Some(0.5),
            units: &[0, 1, 2, 3],
            ..WAY
        },
    ];
    // All of them over 2 and 4 ranks.
    let fewer = if group.size() % 2 == 0 { ways.len() } else { 4 };
    for way in ways.into_iter().take(fewer) {
        trains(&group, way).with_context(|| format!("{}, {} ranks", way.name, group.size()))?;
    }
    Ok(())
}

fn trains(group: &ProcessGroup, way: Way) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    // Every rank starts with other values, and gets rank 0's.
    let options = |builder: FullyShardedBuilder| builder.reshard_after_forward(way.reshards).prefetch(way.prefetches);
    let builder = options(FullyShardedDataParallel::builder(group)?);
    let sharded = Sharded::of((way.model)(1 + rank as i64), builder, way.units, (rank, ranks))?;
    let alone = (way.model)(1);
    let mut opt = sharded.fsdp.optimizer(way.build)?;
    let mut single = (way.build)((&alone.vs).into_parameters())?;
    sharded.close_to(&alone).context("after the first broadcast")?;
    for step in 0..STEPS {
        let mut accum = Accumulator::new(way.micro_batches)?.with_sync(&sharded.fsdp);
        for micro in 0..way.micro_batches {
            let closes = micro + 1 == way.micro_batches;
            let loss = sharded.loss(&data(step, micro, rank))?;
            if way.adding == Adding::Accumulator {
                accum.backward(&opt, &loss, Samples(SAMPLES), closes)?;
                continue;
            }
            let _held = (way.adding == Adding::Held && !closes).then(|| sharded.fsdp.no_sync());
            sharded.fsdp.backward(&(loss / way.micro_batches as f64))?;
        }
        let whole_grads = sharded.model.vs.variables().values().filter(|it| it.grad().defined()).count();
        ensure!(whole_grads == 0, "whole gradients are freed");
        if let Some(max_norm) = way.max_norm {
            let norm = sharded.fsdp.clip_grad_norm_(max_norm)?.double_value(&[]);
            let norms = group.all_gather_object(&norm)?;
            ensure!(norms.iter().all(|it| *it == norm) && norm > 0.0, "{norms:?}");
        }
        opt.step()?;
        opt.zero_grad()?;
        step_alone(&alone, &mut *single, &large_batch(step, way.micro_batches, ranks), way.max_norm)?;
        sharded.close_to(&alone).with_context(|| format!("step {step}"))?;
    }
    // Evaluation, by all ranks.
    let inputs = data(STEPS, 0, rank).0;
    let found = tch::no_grad(|| sharded.forward(&inputs))?;
    let expected = tch::no_grad(|| alone.forward(&inputs));
    close(&[(String::new(), found)], &[(String::new(), expected)]).context("evaluation")
}

/// Passes with and without exchange, graphs that are kept, units that are used twice or not at all, a window that closes
/// with nothing.
pub fn passes(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, ranks) = (group.rank(), group.size());
    let sharded = Sharded::with(&group, 1, &[0, 1, 2, 3], |builder| builder)?;
    let (fsdp, alone) = (&sharded.fsdp, Model::new(1));
    let mut opt: Opt = fsdp.optimizer(sgd)?;
    let mut single = sgd((&alone.vs).into_parameters())?;
    let mean = |step: usize| alone.loss(&large_batch(step, 1, ranks)).backward();
    // H: held; X: exchanged; Z: gradients are freed; K: with a graph that is kept, twice; E: evaluation.
    let orders = ["XX", "HX", "XHX", "XHHX", "XZX", "XHZX", "HZX", "KX", "HKX", "XEX", "EHEXE"];
    for (number, order) in orders.into_iter().enumerate() {
        for (place, letter) in order.chars().enumerate() {
            let step = 10 * number + place;
            let batch = data(step, 0, rank);
            match letter {
                'Z' => {
                    opt.zero_grad()?;
                    single.zero_grad()?;
                    continue;
                }
                'E' => {
                    let _loss = tch::no_grad(|| sharded.loss(&batch))?;
                    continue;
                }
                'K' => {
                    mean(step);
                    let loss = sharded.loss(&batch)?;
                    let options = GradOptions { retain_graph: true, ..GradOptions::default() };
                    fsdp.backward_with(|| backward::<Tensor>(&[&loss], &[], options))?;
                    fsdp.backward(&loss)?;
                }
                'H' => {
                    let _held = fsdp.no_sync();
                    fsdp.backward(&sharded.loss(&batch)?)?;
                }
                _ => fsdp.backward(&sharded.loss(&batch)?)?,
            }
            mean(step);
        }
        sharded.gradients_close_to(&alone).context(order)?;
        opt.zero_grad()?;
        single.zero_grad()?;
    }
    // The last micro-batch of the last rank counts nothing: it takes part in the others' pass.
    let mut accum = Accumulator::new(2)?.with_sync(fsdp);
    let last = rank + 1 == ranks;
    accum.backward(&opt, &sharded.loss(&data(900, 0, rank))?, Samples(SAMPLES), false)?;
    let loss = sharded.loss(&data(900, 1, rank))?;
    accum.backward(&opt, &loss, Samples(if last { 0 } else { SAMPLES }), true)?;
    let parts: Vec<_> = (0..2 * ranks - 1).map(|at| data(900, at / ranks, at % ranks)).collect();
    let (inputs, targets): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    alone.loss(&(Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0))).backward();
    sharded.gradients_close_to(&alone).context("a window that closes with nothing")?;
    opt.zero_grad()?;
    single.zero_grad()?;
    // All ranks close with nothing.
    fsdp.close_with_nothing()?;
    twice_and_unused(&group)
}

/// Two layers of one shape, of which one is used twice and the other by some ranks.
fn twice_and_unused(group: &ProcessGroup) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let values = |seed: i64| {
        tch::manual_seed(seed);
        Tensor::randn([5, 5], DOUBLE).set_requires_grad(true)
    };
    let (used, by_rank_1, never) = (values(1), values(2), values(3));
    let whole = [&used, &by_rank_1, &never].map(|it| it.detach().copy().set_requires_grad(true));
    let mut builder = FullyShardedDataParallel::builder(group)?;
    let unit = builder.unit("used", [("used", &used)])?;
    let fsdp = builder.build([("used", &used), ("by_rank_1", &by_rank_1), ("never", &never)])?;
    let mut opt: Opt = fsdp.optimizer(sgd)?;
    let inputs = |rank: usize| {
        tch::manual_seed(50 + rank as i64);
        Tensor::randn([3, 5], DOUBLE)
    };
    for _ in 0..2 {
        let loss = fsdp.try_forward(inputs(rank), |x| {
            let x = unit.forward(x, |x| x.matmul(&used).tanh())?;
            let x = unit.forward(x, |x| x.matmul(&used).tanh())?;
            Ok::<_, ShardError>(if rank == 1 { x.matmul(&by_rank_1) } else { x }.square().sum(Kind::Double))
        })?;
        fsdp.backward(&loss)?;
        for other in 0..ranks {
            let x = inputs(other).matmul(&whole[0]).tanh().matmul(&whole[0]).tanh();
            let x = if other == 1 { x.matmul(&whole[1]) } else { x };
            (x.square().sum(Kind::Double) / ranks as f64).backward();
        }
    }
    let grads = |tensors: &[Tensor]| -> Vec<(String, Tensor)> {
        let defined = tensors.iter().enumerate().filter(|(_, it)| it.grad().defined());
        defined.map(|(at, it)| (at.to_string(), it.grad())).collect()
    };
    let found: Vec<Tensor> = fsdp.parameters().iter().map(|it| it.tensor().shallow_clone()).collect();
    ensure!(!found[2].grad().defined(), "no rank has used it");
    let expected = rows_of((rank, ranks), &grads(&whole));
    close(&grads(&found).into_iter().filter(|(_, it)| it.numel() > 0).collect::<Vec<_>>(), &expected)?;
    opt.step()?;
    Ok(())
}

/// Gathers are started before they are needed, in the order of the last pass, and units are freed in between.
pub fn order(meeting: &Meeting) -> Result<()> {
    use Exchange::{Freed, GatherStarted, GatherUsed, ReductionStarted};
    let group = meeting.group()?;
    let sharded = Sharded::with(&group, 1, &[0, 1, 2, 3], |builder| builder)?;
    let step = |number: usize| -> Result<Vec<Exchange>> {
        sharded.fsdp.backward(&sharded.loss(&data(number, 0, group.rank()))?)?;
        Ok(sharded.fsdp.exchanges())
    };
    step(0)?;
    // The forward's exchanges come after those of the backward pass before.
    let before = sharded.fsdp.exchanges().len();
    let loss = sharded.loss(&data(1, 0, group.rank()))?;
    let forward = sharded.fsdp.exchanges().split_off(before);
    let name = |number: usize| format!("layer{number}");
    let (started, used) = (|at| GatherStarted(name(at)), |at| GatherUsed(name(at)));
    let (freed, reduced) = (|at| Freed(name(at)), |at| ReductionStarted(name(at)));
    let expected = [
        started(0),
        started(1),
        used(0),
        freed(0),
        started(2),
        used(1),
        freed(1),
        started(3),
        used(2),
        freed(2),
        used(3),
        freed(3),
    ];
    ensure!(forward == expected, "{forward:?}");
    sharded.fsdp.backward(&loss)?;
    let backward = sharded.fsdp.exchanges();
    let expected = [
        started(3),
        started(2),
        used(3),
        freed(3),
        reduced(3),
        started(1),
        used(2),
        freed(2),
        reduced(2),
        started(0),
        used(1),
        freed(1),
        reduced(1),
        used(0),
        freed(0),
        reduced(0),
    ];
    ensure!(backward == expected, "{backward:?}");
    Ok(())
}
