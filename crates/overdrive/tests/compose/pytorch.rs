//! Runs that continue in PyTorch, and PyTorch's that continue here: model, optimizer, scaler and schedule.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use overdrive::checkpoint::load;
use overdrive::prelude::*;
use serde_json::Value;
use tch::nn;

const NAMES: [&str; 4] = ["0.weight", "0.bias", "2.weight", "2.bias"];

/// A Python with torch, found in the same way as by `cargo xtask parity`.
fn python() -> Option<PathBuf> {
    let has_torch = "import importlib.metadata as m, sys; sys.exit(not m.version('torch').startswith('2.11.'))";
    let chosen = std::env::var_os("OVERDRIVE_PYTHON").filter(|value| !value.is_empty()).map(PathBuf::from);
    let around = std::env::var_os("LIBTORCH").and_then(|path| PathBuf::from(path).canonicalize().ok());
    let around = around.and_then(|path| Some(path.ancestors().nth(4)?.join("bin/python3")));
    let fits = |python: &PathBuf| {
        let probe = Command::new(python).args(["-c", has_torch]).stderr(Stdio::null()).status();
        probe.is_ok_and(|status| status.success())
    };
    let candidates = match chosen {
        Some(python) => vec![Some(python)],
        None => vec![around, Some("python3".into())],
    };
    candidates.into_iter().flatten().find(fits)
}

fn output(python: &Path, script: &str, arguments: &[&str]) -> Result<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    // The loader path has this program's libtorch; Python must find its own.
    let output = Command::new(python).arg(script).args(arguments).env_remove("LD_LIBRARY_PATH").output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn export(python: &Path, arguments: &[&str]) -> Result<String> {
    output(python, "../../docs/export_pt.py", arguments)
}

fn trained(python: &Path, what: &str, folder: &Path, steps: u64) -> Result<Value> {
    let folder = folder.to_str().context("a folder's name")?;
    Ok(serde_json::from_str(&output(python, "tests/compose/pytorch.py", &[what, folder, &steps.to_string()])?)?)
}

struct Run {
    vs: nn::VarStore,
    params: Vec<Tensor>,
    opt: AdamW,
    scaler: GradScaler,
    sched: LrScheduler,
}

impl Run {
    /// The same run as `Run` in pytorch.py.
    fn new() -> Result<Self> {
        let vs = nn::VarStore::new(Device::Cpu);
        let _ = nn::linear(vs.root() / "0", 6, 8, Default::default());
        let _ = nn::linear(vs.root() / "2", 8, 4, Default::default());
        let variables = vs.variables();
        let params: Vec<Tensor> = NAMES.iter().map(|name| variables[*name].shallow_clone()).collect();
        for (place, param) in params.iter().enumerate() {
            let values = (Tensor::arange(param.numel() as i64, (Kind::Float, Device::Cpu)) * 0.1 + place as i64).sin();
            tch::no_grad(|| param.shallow_clone().copy_(&values.view_as(param)));
        }
        let (first, second) = params.split_at(2);
        let groups = AdamW::builder(first).lr(0.01).betas(0.8, 0.9);
        let second = AdamW::group(second).lr(0.02).betas(0.9, 0.999);
        let mut opt = groups.add_param_group(second).weight_decay(0.1).build()?;
        let scaler = GradScaler::builder(Device::Cpu).init_scale(1024.0).growth_interval(3).build()?;
        let sched = LrScheduler::new(&mut opt, StepLr::new(3).gamma(0.5))?;
        Ok(Self { vs, params, opt, scaler, sched })
    }

    fn train(&mut self, first: i64, steps: i64) -> Result<()> {
        for step in first..first + steps {
            let loss = |param: &Tensor| (param * (param.detach() * 3.0 + step).sin()).sum(Kind::Float);
            let loss: Tensor = self.params.iter().map(loss).sum();
            self.scaler.scale(&loss)?.backward();
            self.scaler.step(&mut self.opt)?;
            self.scaler.update()?;
            self.opt.zero_grad()?;
            self.sched.step(&mut self.opt)?;
        }
        Ok(())
    }

    /// Compares with the final state that Python printed.
    fn compare(&self, found: &Value) -> Result<()> {
        for (name, param) in NAMES.iter().zip(&self.params) {
            let theirs: Vec<f64> = serde_json::from_value(found["weights"][*name].clone())?;
            let theirs = Tensor::from_slice(&theirs).to_kind(Kind::Float).view_as(param);
            // PyTorch's kernel for small tensors rounds differently.
            ensure!(param.allclose(&theirs, 1e-5, 1e-6, false), "{name}: {param} and {theirs}");
        }
        let rates = |key: &str| serde_json::from_value::<Vec<f64>>(found[key].clone());
        let (lrs, base) = (rates("lrs")?, rates("initial_lrs")?);
        for (group, lr) in lrs.iter().enumerate() {
            let ours = self.opt.lr(group).context("a rate")?;
            ensure!((lr - ours).abs() < 1e-15, "group {group}: {lr} and {ours}");
        }
        ensure!(base == self.sched.base_lrs(), "{base:?} and {:?}", self.sched.base_lrs());
        ensure!(found["scale"].as_f64() == Some(self.scaler.scale_value()?), "{}", found["scale"]);
        ensure!(found["last_epoch"].as_u64() == Some(self.sched.last_epoch()), "{}", found["last_epoch"]);
        Ok(())
    }
}

#[test]
fn pytorch_continues_from_a_checkpoint() -> Result<()> {
    let _turn = crate::turn();
    let Some(python) = python() else {
        println!("skipped: no Python with torch 2.11");
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let mut run = Run::new()?;
    run.train(0, 4)?;
    let mut checkpoint = Checkpoint::builder(folder.path().join("run")).build()?;
    let parts: &[(&str, &dyn Stateful)] =
        &[("model", &run.vs), ("optimizer", &run.opt), ("scaler", &run.scaler), ("schedule", &run.sched)];
    checkpoint.save(4, parts)?;
    checkpoint.wait()?;
    let (saved, file) = (checkpoint.path(4), folder.path().join("run.pt"));
    let arguments = ["--to-pt", file.to_str().context("a name")?, saved.to_str().context("a name")?];
    let said = export(&python, &arguments)?;
    ensure!(said.trim_end().ends_with("model, optimizer, scaler, scheduler, step, fields"), "{said}");
    let found = trained(&python, "resume", folder.path(), 7)?;
    run.train(4, 7)?;
    run.compare(&found)
}

#[test]
fn a_run_of_pytorch_continues_here() -> Result<()> {
    let _turn = crate::turn();
    let Some(python) = python() else {
        println!("skipped: no Python with torch 2.11");
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    trained(&python, "start", folder.path(), 4)?;
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let saved = path("step-000000000004");
    let files =
        ["model", "optimizer", "scaler", "scheduler"].map(|name| [format!("--{name}"), path(&format!("{name}.pt"))]);
    let mut arguments: Vec<&str> = files.iter().flatten().map(String::as_str).collect();
    arguments.extend(["--step", "4", &saved]);
    export(&python, &arguments)?;
    ensure!(export(&python, &arguments).is_err(), "an existing checkpoint is not overwritten");

    let mut run = Run::new()?;
    let parts: &mut [(&str, &mut dyn Stateful)] = &mut [
        ("model", &mut run.vs),
        ("optimizer", &mut run.opt),
        ("scaler", &mut run.scaler),
        ("schedule", &mut run.sched),
    ];
    let loaded = load(&saved, parts)?;
    run.sched.apply(&mut run.opt)?;
    ensure!((loaded.step, run.sched.last_epoch(), run.scaler.scale_value()?) == (4, 4, 2048.0));
    let left: Vec<Value> = loaded.get("param_groups")?.context("no param_groups")?;
    ensure!(left == [serde_json::json!({ "initial_lr": 0.01 }), serde_json::json!({ "initial_lr": 0.02 })], "{left:?}");
    run.train(4, 7)?;
    run.compare(&trained(&python, "go_on", folder.path(), 7)?)?;

    // A schedule that depends on a metric, on its own.
    let saved = path("plateau");
    export(&python, &["--scheduler", &path("plateau.pt"), &saved])?;
    let mut plateau = ReduceLrOnPlateau::builder().patience(1).build(&[1.0, 1.0])?;
    load(&saved, &mut [("schedule", &mut plateau)])?;
    let state = plateau.state_dict()?;
    ensure!((state.float("best")?, state.int("last_epoch")?, state.int("num_bad_epochs")?) == (2.0, 4, 1));
    // The step schedule's rates, once multiplied by 0.1.
    let rates = plateau.last_lr();
    ensure!((rates[0] - 0.0005).abs() < 1e-15 && (rates[1] - 0.001).abs() < 1e-15, "{rates:?}");
    Ok(())
}

#[test]
fn every_optimizer_and_schedule_of_pytorch_survives_a_round_trip() -> Result<()> {
    let Some(python) = python() else {
        println!("skipped: no Python with torch 2.11");
        return Ok(());
    };
    trained(&python, "there_and_back", tempfile::tempdir()?.path(), 5).map(drop)
}
