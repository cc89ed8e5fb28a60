//! Buffers of a fully sharded model, a batch norm's running statistics: whole on each rank and its own, and saved with the
//! parameters, as `fully_shard` does.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive_checkpoint::{Checkpoint, CheckpointError, Writers, consolidate, consolidate_from_rank_0};
use overdrive_core::Stateful;
use overdrive_ddp::ProcessGroup;
use overdrive_optim::{AdamW, AveragedModel, Averaging};
use overdrive_shard::{FullyShardedDataParallel, ShardError, ShardedUnit};
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

use crate::harness::{Meeting, all_through, free_port, start};
use crate::model::{data, same, same_state, tensors};

const FOLDER: &str = "OVERDRIVE_TEST_FOLDER";
const MEAN: &str = "norm.running_mean";

pub fn run() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = [(FOLDER, folder.path().to_str().context("a path in UTF-8")?)];
    let port = free_port();
    let ranks = (0..2).map(|rank| start("full_buffers", rank, 2, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(ranks, Instant::now()).map(drop)
}

struct Model {
    vs: nn::VarStore,
    first: nn::Linear,
    norm: nn::BatchNorm,
    last: nn::Linear,
}

impl Model {
    fn new(seed: i64, kind: Kind) -> Self {
        tch::manual_seed(seed);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "first", 5, 7, Default::default());
        let norm = nn::batch_norm1d(vs.root() / "norm", 7, Default::default());
        let last = nn::linear(vs.root() / "last", 7, 3, Default::default());
        vs.set_kind(kind);
        Self { vs, first, norm, last }
    }

    fn norm_parameters(&self) -> [(&'static str, &Tensor); 2] {
        [("weight", self.norm.ws.as_ref().unwrap()), ("bias", self.norm.bs.as_ref().unwrap())]
    }

    fn inner(&self, inputs: &Tensor) -> Tensor {
        self.norm.forward_t(&inputs.apply(&self.first), true).tanh()
    }

    fn mean(&self) -> Tensor {
        self.vs.variables()[MEAN].detach().copy()
    }
}

struct Sharded {
    model: Model,
    unit: ShardedUnit,
    fsdp: FullyShardedDataParallel,
}

impl Sharded {
    fn new(group: &ProcessGroup, seed: i64) -> Result<Self> {
        let model = Model::new(seed, Kind::Double);
        let mut builder = FullyShardedDataParallel::builder(group)?;
        let mut params = model.norm_parameters().map(|(name, it)| (name.to_owned(), it)).to_vec();
        params.push(("first".to_owned(), &model.first.ws));
        let unit = builder.unit("inner", params)?;
        let fsdp = builder.build(&model.vs)?;
        Ok(Self { model, unit, fsdp })
    }

    fn train(&self, rank: usize) -> Result<()> {
        let mut opt = self.fsdp.optimizer(|params| AdamW::builder(params).lr(1e-2).build())?;
        for step in 0..3 {
            let (inputs, targets) = data(step, 0, rank);
            let outputs = self.fsdp.try_forward(inputs, |inputs| {
                let hidden = self.unit.forward(inputs, |inputs| self.model.inner(&inputs))?;
                Ok::<_, ShardError>(hidden.apply(&self.model.last))
            })?;
            self.fsdp.backward(&(outputs - targets).square().mean(Kind::Double))?;
            overdrive_core::Optimizer::step(&mut opt)?;
            overdrive_core::Optimizer::zero_grad(&mut opt)?;
        }
        Ok(())
    }

    fn mean(&self) -> Result<Tensor> {
        Ok(self.fsdp.state_dict()?.tensor(MEAN, &[7], Kind::Double)?.copy())
    }
}

fn checkpoint(group: &ProcessGroup) -> Result<Checkpoint> {
    let folder = PathBuf::from(std::env::var_os(FOLDER).context(FOLDER)?);
    Ok(Checkpoint::builder(folder.join("run")).ranks(group.clone(), Writers::Each).build()?)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, sharded) = (group.rank(), Sharded::new(&group, 1)?);
    // The statistics of the first pass are those of this rank's data alone, as of the plain model.
    let plain = Model::new(1, Kind::Double);
    let _ = plain.inner(&data(0, 0, rank).0);
    let before = sharded.mean()?;
    ensure!(before.equal(&before.zeros_like()));
    let forward = |inputs| sharded.unit.forward(inputs, |inputs| sharded.model.inner(&inputs));
    let _ = sharded.fsdp.try_forward(data(0, 0, rank).0, forward)?;
    ensure!(sharded.mean()?.equal(&plain.mean()), "{} {}", sharded.mean()?, plain.mean());
    ensure!(sharded.model.mean().equal(&plain.mean()), "the model's own tensor");
    sharded.train(rank)?;

    // Under the plain model's names, whole, and rank 0's in the state of all.
    let (own, whole) = (sharded.fsdp.state_dict()?, sharded.fsdp.consolidate_state_dict(0)?);
    ensure!(own.rows(MEAN).is_none() && own.rows("norm.weight").is_some());
    if let Some(whole) = &whole {
        ensure!(whole.tensor(MEAN, &[7], Kind::Double)?.equal(&sharded.mean()?));
        let mut other = Model::new(2, Kind::Double);
        other.vs.load_state_dict(whole)?;
        same_state(&other.vs.state_dict()?, whole)?;
    }
    // And back: from what a plain model has saved.
    let mut loaded = Sharded::new(&group, 3)?;
    let trained = Model::new(4, Kind::Double);
    let _ = trained.inner(&data(7, 0, 0).0);
    loaded.fsdp.load_state_dict(&trained.vs.state_dict()?)?;
    ensure!(loaded.mean()?.equal(&trained.mean()));

    // Averages of the weights have them too.
    let mut averages = AveragedModel::new(&sharded.fsdp, Averaging::Swa)?;
    averages.update()?;
    let averaged = averages.state_dict()?;
    ensure!(averaged.tensor("module.norm.running_mean", &[7], Kind::Double)?.equal(&sharded.mean()?));
    ensure!(averaged.rows("module.norm.weight") == own.rows("norm.weight"));

    saved(&group, &sharded)?;
    mixed(&group)?;
    refusals(&group)
}

/// As many ranks load their own statistics; others say whose they take.
fn saved(group: &ProcessGroup, sharded: &Sharded) -> Result<()> {
    let mut own = checkpoint(group)?;
    own.save(1, &[("model", &sharded.fsdp)])?;
    own.finish()?;
    let mut again = Sharded::new(group, 5)?;
    checkpoint(group)?.resume(&mut [("model", &mut again.fsdp)])?.context("nothing was saved")?;
    same(&tensors(&again.fsdp.state_dict()?), &tensors(&sharded.fsdp.state_dict()?))?;
    let (means, whole) = (group.all_gather_object(&Vec::<f64>::try_from(sharded.mean()?)?)?, group.rank() == 0);
    ensure!(means[0] != means[1], "each rank has seen other data");
    let expected = sharded.fsdp.consolidate_state_dict(0)?;
    if let (true, Some(expected)) = (whole, expected) {
        let folder = PathBuf::from(std::env::var_os(FOLDER).context(FOLDER)?);
        let is_it =
            |told: &CheckpointError| matches!(told, CheckpointError::RanksDiffer { entry, .. } if entry == MEAN);
        let mut plain = Model::new(6, Kind::Double);
        let mut alone = Checkpoint::builder(folder.join("run")).build()?;
        let told = alone.resume(&mut [("model", &mut plain.vs)]).err().context("it was loaded")?;
        ensure!(is_it(&told), "{told}");
        drop(alone);
        let mut alone = Checkpoint::builder(folder.join("run")).from_rank_0(["model"]).build()?;
        alone.resume(&mut [("model", &mut plain.vs)])?.context("nothing was saved")?;
        same_state(&plain.vs.state_dict()?, &expected)?;
        let file = folder.join("model.safetensors");
        let told = consolidate(folder.join("run"), None, "model", &file).err().context("it was written")?;
        ensure!(is_it(&told), "{told}");
        consolidate_from_rank_0(folder.join("run"), None, "model", &file)?;
        let found = Tensor::read_safetensors(&file)?;
        let found = found.iter().find(|(name, _)| name == MEAN).context("no statistics")?;
        ensure!(found.1.equal(expected.tensor(MEAN, &[7], Kind::Double)?));
    }
    Ok(group.barrier()?)
}

/// Lower precision is that of parameters: buffers stay as they are.
fn mixed(group: &ProcessGroup) -> Result<()> {
    let model = Model::new(1, Kind::Float);
    let mut builder = FullyShardedDataParallel::builder(group)?;
    // A norm with float32 statistics computes in float32, also of inputs in bfloat16.
    let norm = builder.unit("norm", model.norm_parameters())?;
    let fsdp = builder.mixed_precision(Kind::BFloat16, Some(Kind::Float)).build(&model.vs)?;
    let inputs = data(0, 0, group.rank()).0.to_kind(Kind::BFloat16);
    let outputs = fsdp.try_forward(inputs, |inputs| {
        let hidden = norm.forward(inputs.apply(&model.first), |x| model.norm.forward_t(&x, true))?;
        Ok::<_, ShardError>(hidden.tanh().apply(&model.last))
    })?;
    ensure!(outputs.kind() == Kind::BFloat16);
    fsdp.backward(&outputs.square().mean(Kind::Float))?;
    let state = fsdp.state_dict()?;
    let mean = state.tensor(MEAN, &[7], Kind::Float)?;
    ensure!(!mean.equal(&mean.zeros_like()));
    ensure!(state.tensor("norm.running_var", &[7], Kind::Float).is_ok());
    Ok(())
}

/// Other buffers on another rank, and states without them.
fn refusals(group: &ProcessGroup) -> Result<()> {
    let model = Model::new(1, Kind::Double);
    if group.rank() == 1 {
        let _ = model.vs.root().zeros_no_train("extra", &[2]);
    }
    let told = FullyShardedDataParallel::builder(group)?.build(&model.vs).err().context("it was built")?;
    ensure!(matches!(&told, ShardError::RanksDisagree { .. }) && told.to_string().contains("buffer"), "{told}");
    let mut sharded = Sharded::new(group, 1)?;
    let before = tensors(&sharded.fsdp.state_dict()?);
    let mut state = overdrive_core::StateDict::new();
    for (key, entry) in Model::new(2, Kind::Double).vs.state_dict()? {
        if key != MEAN {
            state.insert(key, entry);
        }
    }
    let told = sharded.fsdp.load_state_dict(&state).err().context("it was loaded")?;
    ensure!(told.to_string().contains(MEAN), "{told}");
    same(&tensors(&sharded.fsdp.state_dict()?), &before)
}
