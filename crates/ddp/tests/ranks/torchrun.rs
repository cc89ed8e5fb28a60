//! Ranks that Python's torchrun starts.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use overdrive_ddp::{DistributedDataParallel, ReduceOp};
use tch::{Kind, Tensor};

use crate::harness::{Meeting, TOLD};
use crate::training::{Model, assert_equal, data};

/// A Python with torch 2.11, found as `cargo xtask parity` finds it.
pub fn python() -> Option<PathBuf> {
    let has_torch = "import importlib.metadata as m, sys; sys.exit(not m.version('torch').startswith('2.11.'))";
    let chosen = std::env::var_os("OVERDRIVE_PYTHON").filter(|value| !value.is_empty()).map(PathBuf::from);
    let candidates = match chosen {
        Some(python) => vec![python],
        None => {
            let libtorch = std::env::var_os("LIBTORCH").and_then(|path| PathBuf::from(path).canonicalize().ok());
            let around = libtorch.and_then(|path| Some(path.ancestors().nth(4)?.join("bin/python3")));
            let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.libtorch/bin/python");
            [around, Some(workspace), Some("python3".into())].into_iter().flatten().collect()
        }
    };
    let fits = |python: &PathBuf| {
        let probe = Command::new(python).args(["-c", has_torch]).stderr(Stdio::null()).status();
        probe.is_ok_and(|status| status.success())
    };
    candidates.into_iter().find(fits)
}

/// Starts this program as a user would; `--standalone` chooses a free port.
pub fn starts_ranks() -> Result<()> {
    let Some(python) = python() else { anyhow::bail!("no Python has torch 2.11") };
    let output = Command::new(python)
        .args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"])
        .arg(std::env::current_exe()?)
        .env(TOLD, "torchrun")
        .env("OMP_NUM_THREADS", "1")
        .env_remove("RUST_BACKTRACE")
        .output()?;
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{}: {said}{errors}", output.status);
    for rank in 0..2 {
        ensure!(said.contains(&format!("rank {rank} is through")), "{said}{errors}");
    }
    Ok(())
}

/// Every rank, also rank 0, is a client of the agent's store; the ranks sum, and train a model together.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let agent = std::env::var("TORCHELASTIC_USE_AGENT_STORE")?;
    ensure!(agent == "True", "TORCHELASTIC_USE_AGENT_STORE is {agent:?}");
    let group = meeting.group()?;
    ensure!(group.size() == 2 && group.rank() == meeting.rank && group.local_rank() == Some(meeting.rank));
    let mut sum = Tensor::from(meeting.rank as i64 + 1);
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum.int64_value(&[]) == 3, "{sum}");

    let (model, reference) = (Model::new(1 + meeting.rank as i64), Model::new(1));
    let ddp = DistributedDataParallel::new(&model.vs, &group)?;
    for step in 0..10 {
        let batch = data(step, 0, meeting.rank);
        let outputs = ddp.forward(|| model.forward(&batch.0, &[0, 1]))?;
        ddp.backward(&(outputs - &batch.1).square().mean(Kind::Double))?;
        model.step(false);
        for rank in 0..2 {
            (reference.loss(&data(step, 0, rank), &[0, 1]) / 2.0).backward();
        }
        reference.step(false);
        assert_equal(&model, &reference, step)?;
    }
    for param in model.vs.trainable_variables() {
        for other in group.all_gather(&param.detach())? {
            ensure!(other.equal(&param), "the ranks' models differ");
        }
    }
    Ok(())
}
