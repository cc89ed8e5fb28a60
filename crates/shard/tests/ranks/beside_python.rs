//! ZeRO-1 beside Python's `ZeroRedundancyOptimizer` on as many ranks over Gloo: losses, parameters and owners are equal
//! to the bit, both with fused kernels and in the same order of sums.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_core::{Optimizer, OptimizerError, Parameter};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_optim::{AdamW, Sgd};
use overdrive_shard::ZeroRedundancyOptimizer;
use tch::{Device, Kind, Tensor};

use crate::harness::{Meeting, all_through, free_port, start};
use crate::zero::Build;

pub const FOLDER: &str = "OVERDRIVE_TEST_FOLDER";
const SHAPES: [&[i64]; 6] = [&[24, 10], &[24], &[16, 24], &[16], &[3, 16], &[3]];
const STEPS: usize = 20;
/// Only a limit against hanging.
const LIMIT: Duration = Duration::from_secs(600);

/// A Python with torch 2.11: the one that is named, or that of libtorch.
pub fn python() -> Option<PathBuf> {
    let has_torch = "import importlib.metadata as m, sys; sys.exit(not m.version('torch').startswith('2.11.'))";
    let chosen = std::env::var_os("OVERDRIVE_PYTHON").filter(|value| !value.is_empty()).map(PathBuf::from);
    let libtorch = std::env::var_os("LIBTORCH").and_then(|path| PathBuf::from(path).canonicalize().ok());
    let around = libtorch.and_then(|path| Some(path.ancestors().nth(4)?.join("bin/python3")));
    let fits = |python: &PathBuf| {
        let probe = Command::new(python).args(["-c", has_torch]).stderr(Stdio::null()).status();
        probe.is_ok_and(|status| status.success())
    };
    [chosen, around].into_iter().flatten().find(fits)
}

/// Killed when dropped.
struct PythonRank(Child);

impl Drop for PythonRank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Python's ranks write what they have trained, and ours compare.
pub fn equals() -> Result<()> {
    beside("zero_rank.py", "beside_python")
}

/// Two ranks of a Python program, then two of a scenario that reads what they wrote.
pub fn beside(script: &str, scenario: &str) -> Result<()> {
    let python = python().context("no Python has torch 2.11")?;
    let folder = tempfile::tempdir()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ranks").join(script);
    let port = free_port().to_string();
    let begin = |rank: usize| {
        let mut command = Command::new(&python);
        command.arg(&script).arg(folder.path()).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).env("OMP_NUM_THREADS", "1");
        // This program's loader path has our libtorch; Python must load its own.
        command.env_remove("LD_LIBRARY_PATH");
        command.spawn().map(PythonRank).context("a Python rank")
    };
    let started = Instant::now();
    let mut theirs = (0..2).map(begin).collect::<Result<Vec<_>>>()?;
    for rank in &mut theirs {
        loop {
            match rank.0.try_wait()? {
                Some(status) => break ensure!(status.success(), "a Python rank: {status}"),
                None if started.elapsed() > LIMIT => bail!("Python's ranks are still running at the limit"),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
    let port = free_port();
    let vars = [(FOLDER, folder.path().to_str().context("a path in UTF-8")?)];
    let ours = (0..2).map(|rank| start(scenario, rank, 2, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(ours, Instant::now()).map(drop)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = PathBuf::from(std::env::var_os(FOLDER).context(FOLDER)?);
    let sgd: Build =
        |params: Vec<Parameter>| Ok(Box::new(Sgd::builder(params).lr(0.1).momentum(0.9).weight_decay(1e-3).build()?));
    let adamw: Build = |params| Ok(Box::new(AdamW::builder(params).lr(0.01).weight_decay(0.1).build()?));
    trains(&group, &folder, "sgd", sgd).context("SGD")?;
    trains(&group, &folder, "adamw", adamw).context("AdamW")
}

/// The numbers of a file of float32.
pub fn numbers(path: PathBuf) -> Result<Vec<f32>> {
    let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
    Ok(bytes.chunks_exact(4).map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]])).collect())
}

fn trains(
    group: &ProcessGroup,
    folder: &Path,
    name: &str,
    build: impl Fn(Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError>,
) -> Result<()> {
    let float = (Kind::Float, Device::Cpu);
    tch::manual_seed(1);
    let params = SHAPES.map(|shape| (Tensor::randn(shape, float) * 0.3).set_requires_grad(true));
    let mut vs = tch::nn::VarStore::new(Device::Cpu);
    let params: Vec<Tensor> = (params.iter().enumerate())
        .map(|(number, param)| vs.root().add(&format!("p{number}"), param.detach(), true))
        .collect();
    vs.unfreeze();
    let ddp = DistributedDataParallel::new(&vs, group)?;
    let mut opt = ZeroRedundancyOptimizer::new(&params, group, build)?;
    let owners: Vec<String> = opt.owners().iter().map(ToString::to_string).collect();
    ensure!(owners.join(" ") == std::fs::read_to_string(folder.join(format!("{name}.owners")))?, "{owners:?}");
    let losses = numbers(folder.join(format!("{name}.losses.{}", group.rank())))?;
    let theirs = numbers(folder.join(name))?;
    let count: usize = SHAPES.iter().map(|shape| shape.iter().product::<i64>() as usize).sum();
    ensure!(losses.len() == STEPS && theirs.len() == STEPS * count);
    for step in 0..STEPS {
        tch::manual_seed((1000 + 10 * step + group.rank()) as i64);
        let (x, y) = (Tensor::randn([8, 10], float), Tensor::randn([8, 3], float));
        let forward = || {
            (0..3).fold(x.shallow_clone(), |x, layer| {
                let x = x.linear(&params[2 * layer], Some(&params[2 * layer + 1]));
                if layer < 2 { x.tanh() } else { x }
            })
        };
        let loss = (ddp.forward(forward)? - &y).square().mean(Kind::Float);
        ddp.backward(&loss)?;
        opt.step()?;
        opt.zero_grad()?;
        let (loss, expected) = (loss.double_value(&[]) as f32, losses[step]);
        ensure!(loss == expected, "step {step}: a loss of {loss}, Python's is {expected}");
        let ours = Tensor::cat(&params.iter().map(|it| it.detach().view([-1])).collect::<Vec<_>>(), 0);
        let theirs = Tensor::from_slice(&theirs[step * count..(step + 1) * count]);
        let off = (&ours - &theirs).abs().max().double_value(&[]);
        ensure!(off == 0.0, "step {step}: parameters are off by {off}");
    }
    Ok(())
}
