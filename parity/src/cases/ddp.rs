//! Distributed training. The ranks are this program and copies of it, or a Python process.

#[path = "../../../crates/launch/tests/launch/port.rs"]
mod port;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_ddp::{Backend, DdpBuilder, DistributedDataParallel, InitMethod, MixedPrecision, ProcessGroup};
use tch::{Kind, Tensor};

use self::port::free_port;
use super::ddp_collectives::collectives;
use crate::record::{Found, Given, Record};

const STEPS: usize = 50;
/// How many steps a mixed group of Rust and Python runs, comparing every gradient.
const STEPS_BESIDE_PYTHON: usize = 5;
/// Environment variables for the process of another rank: the job, the file for its results, and the folder of Python's
/// records.
const JOB: &str = "OVERDRIVE_PARITY_JOB";
const OUT: &str = "OVERDRIVE_PARITY_OUT";
const RECORDS: &str = "OVERDRIVE_PARITY_RECORDS";
/// How long a collective may take, and how long another rank may take to exit.
const RANK_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) type Results = BTreeMap<String, Tensor>;
type Job = fn(&Given<'_>, &ProcessGroup) -> Result<Results>;

/// The jobs of ranks: the case's name, the number of ranks, and the function.
const JOBS: [(&str, usize, Job); 4] = [
    ("ddp_training", 2, train),
    ("ddp_training_of_more", 4, train_more),
    ("ddp_mixed_precision", 2, train_mixed),
    ("ddp_collectives", 2, collectives),
];

pub fn ddp_training(given: &Given<'_>) -> Result<Found> {
    Ok(found(ranks(given, "ddp_training")?.swap_remove(0)))
}

pub fn ddp_training_of_more(given: &Given<'_>) -> Result<Found> {
    Ok(found(ranks(given, "ddp_training_of_more")?.swap_remove(0)))
}

pub fn ddp_mixed_precision(given: &Given<'_>) -> Result<Found> {
    Ok(found(ranks(given, "ddp_mixed_precision")?.swap_remove(0)))
}

pub fn ddp_collectives(given: &Given<'_>) -> Result<Found> {
    let mut all = Found::default();
    for (rank, results) in ranks(given, "ddp_collectives")?.into_iter().enumerate() {
        for (name, tensor) in results {
            all.insert(format!("{name}.{rank}"), &tensor);
        }
    }
    Ok(all)
}

/// Rank 0 is this process, rank 1 a Python process.
pub fn ddp_beside_python(given: &Given<'_>) -> Result<Found> {
    let port = free_port();
    let out = tempfile::tempdir()?;
    let mut python = Command::new(given.value::<String>("python")?);
    python.arg(given.value::<String>("rank")?).arg("one_step").arg(out.path().join("1.pt"));
    python.envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("OMP_NUM_THREADS", "1")]);
    // This program's library path has our libtorch; Python has to load its own.
    python.env("MASTER_PORT", port.to_string()).env_remove("LD_LIBRARY_PATH");
    let mut python = Peer(python.spawn().context("the Python rank")?);
    let group = meet(0, 2, port)?;
    let model = Model::new(given, &group, |ddp| ddp.check_model(false))?;
    let mut results = Results::new();
    for step in 0..STEPS_BESIDE_PYTHON {
        for (_, param) in &model.params {
            param.shallow_clone().zero_grad();
        }
        model.backward(given, step)?;
        for (name, param) in &model.params {
            results.insert(format!("{step}.{name}"), param.grad().copy());
        }
    }
    group.barrier()?;
    python.end()?;
    Ok(found(results))
}

/// Runs another rank's part, if this process was started as another rank.
pub fn other_rank() -> Option<Result<()>> {
    let job = std::env::var(JOB).ok()?;
    Some(run_other_rank(&job).with_context(|| format!("another rank of {job}")))
}

fn run_other_rank(job: &str) -> Result<()> {
    let (size, run) = job_of(job)?;
    tch::set_num_threads(1);
    let records = PathBuf::from(std::env::var_os(RECORDS).context(RECORDS)?);
    let record = Record::read(&records, job)?;
    let given = Given::new(&record, &records, Path::new(""));
    let group = meet(std::env::var("RANK")?.parse()?, size, std::env::var("MASTER_PORT")?.parse()?)?;
    let results: Vec<(String, Tensor)> = run(&given, &group)?.into_iter().collect();
    Tensor::write_safetensors(&results, std::env::var_os(OUT).context(OUT)?)?;
    group.barrier()?;
    Ok(())
}

fn job_of(name: &str) -> Result<(usize, Job)> {
    let (_, size, run) = JOBS.into_iter().find(|(known, ..)| *known == name).context("there is no such job")?;
    Ok((size, run))
}

/// Runs a job on all ranks, this process as rank 0, and returns every rank's results.
fn ranks(given: &Given<'_>, job: &str) -> Result<Vec<Results>> {
    let (size, run) = job_of(job)?;
    let port = free_port();
    let out = tempfile::tempdir()?;
    let file = |rank: usize| out.path().join(format!("{rank}.safetensors"));
    let start = |rank: usize| {
        let mut other = Command::new(std::env::current_exe()?);
        other.env(JOB, job).env(OUT, file(rank)).env("RANK", rank.to_string()).env("MASTER_PORT", port.to_string());
        other.env(RECORDS, given.records());
        other.spawn().map(Peer).context("another rank")
    };
    let mut others = (1..size).map(start).collect::<Result<Vec<_>>>()?;
    let group = meet(0, size, port)?;
    let ours = run(given, &group)?;
    group.barrier()?;
    others.iter_mut().try_for_each(Peer::end)?;
    let theirs = (1..size).map(|rank| Ok(Tensor::read_safetensors(file(rank))?.into_iter().collect()));
    std::iter::once(Ok(ours)).chain(theirs).collect()
}

fn meet(rank: usize, size: usize, port: u16) -> Result<ProcessGroup> {
    let address = InitMethod::parse(&format!("tcp://127.0.0.1:{port}?rank={rank}&world_size={size}"))?;
    Ok(ProcessGroup::builder(Backend::Gloo).timeout(RANK_TIMEOUT).init(&address)?)
}

/// Another rank's process, killed when this is dropped.
struct Peer(Child);

impl Peer {
    fn end(&mut self) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < RANK_TIMEOUT {
            if let Some(status) = self.0.try_wait()? {
                ensure!(status.success(), "the other rank ended with {status}");
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!("the other rank has not exited after {RANK_TIMEOUT:?}")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _already_ended = self.0.kill();
        let _ = self.0.wait();
    }
}

fn found(results: Results) -> Found {
    let mut found = Found::default();
    for (name, tensor) in results {
        found.insert(name, &tensor);
    }
    found
}

struct Model {
    params: Vec<(String, Tensor)>,
    ddp: DistributedDataParallel,
}

impl Model {
    fn new(given: &Given<'_>, group: &ProcessGroup, options: impl FnOnce(DdpBuilder) -> DdpBuilder) -> Result<Self> {
        let names = (0..3).flat_map(|layer| ["weight", "bias"].map(|kind| format!("{kind}.{layer}")));
        let params = names.map(|name| {
            let tensor = given.tensor(&name)?.set_requires_grad(true);
            Ok((name, tensor))
        });
        let params: Vec<(String, Tensor)> = params.collect::<Result<_>>()?;
        let handles = params.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        let ddp = options(DistributedDataParallel::builder(group)).build_from(handles, Vec::new())?;
        Ok(Self { params, ddp })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let mut x = x.shallow_clone();
        for (layer, pair) in self.params.chunks(2).enumerate() {
            x = x.linear(&pair[0].1, Some(&pair[1].1));
            x = if layer < 2 { x.tanh() } else { x };
        }
        x
    }

    fn backward(&self, given: &Given<'_>, step: usize) -> Result<()> {
        let rank = self.ddp.group().rank();
        let x = given.tensor(&format!("x.{rank}.{step}"))?;
        let y = given.tensor(&format!("y.{rank}.{step}"))?;
        let loss = (self.ddp.forward(|| self.forward(&x))? - y).square().mean(Kind::Float);
        Ok(self.ddp.backward(&loss)?)
    }
}

fn train(given: &Given<'_>, group: &ProcessGroup) -> Result<Results> {
    const SMALL: f64 = 1.0 / 2048.0;
    let kept: Vec<usize> = given.value("kept")?;
    let mut results = Results::new();
    for way in given.value::<Vec<String>>("ways")? {
        let model = Model::new(given, group, |ddp| match &way[..] {
            "small_buckets" => ddp.bucket_cap_mb(SMALL),
            "views" => ddp.bucket_cap_mb(SMALL).gradient_as_bucket_view(true),
            "static" => ddp.static_graph(true),
            "unused" => ddp.find_unused_parameters(true),
            _ => ddp,
        })?;
        for step in 0..STEPS {
            model.backward(given, step)?;
            tch::no_grad(|| {
                for (name, param) in &model.params {
                    let mut grad = param.grad();
                    let _ = param.shallow_clone().g_sub_(&(&grad * 0.25));
                    let _ = grad.zero_();
                    if kept.contains(&step) {
                        results.insert(format!("{way}.{step}.{name}"), param.detach().copy());
                    }
                }
            });
        }
    }
    Ok(results)
}

fn train_mixed(given: &Given<'_>, group: &ProcessGroup) -> Result<Results> {
    let kept: Vec<usize> = given.value("kept")?;
    let mut results = Results::new();
    for way in given.value::<Vec<String>>("ways")? {
        let param = if way.starts_with("bfloat16") { Kind::BFloat16 } else { Kind::Half };
        let reduce_dtype = way.ends_with("_float32").then_some(Kind::Float);
        let precision = MixedPrecision { param_dtype: Some(param), reduce_dtype, buffer_dtype: None };
        let small = 1.0 / 2048.0;
        let model = Model::new(given, group, |ddp| ddp.mixed_precision(precision).bucket_cap_mb(small))?;
        for step in 0..STEPS {
            let x = given.tensor(&format!("x.{}.{step}", group.rank()))?.to_kind(param);
            let y = given.tensor(&format!("y.{}.{step}", group.rank()))?;
            let loss = (model.ddp.forward(|| model.forward(&x))?.to_kind(Kind::Float) - y).square().mean(Kind::Float);
            model.ddp.backward(&loss)?;
            tch::no_grad(|| {
                for (name, param) in &model.params {
                    let _ = param.shallow_clone().g_sub_(&(param.grad() * 0.25));
                    let _ = param.grad().zero_();
                    if kept.contains(&step) {
                        results.insert(format!("{way}.{step}.{name}"), param.detach().copy());
                    }
                }
            });
        }
    }
    Ok(results)
}

/// Trains on three of four ranks, then on all four.
fn train_more(given: &Given<'_>, group: &ProcessGroup) -> Result<Results> {
    let mut results = Results::new();
    for size in [3, 4] {
        let Some(part) = group.new_group(&Vec::from_iter(0..size))? else { continue };
        results.extend(train(given, &part)?.into_iter().map(|(name, tensor)| (format!("{size}.{name}"), tensor)));
    }
    Ok(results)
}
