//! Ranks that agree on saving, stopping and resuming, over Gloo.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive::checkpoint::Writers;
use overdrive::prelude::*;
use overdrive_ddp::DistributedDataParallel;
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{self, Module};

use crate::harness::{Ended, Meeting, all_through, free_port, start};
use crate::moments::{self, Random};
use crate::restarts::kill_after;

const WRITERS: &str = "OVERDRIVE_TEST_WRITERS";
/// `rank:step:microseconds`
const KILLED: &str = "OVERDRIVE_TEST_KILLED";
/// `rank:step`
const ASKED: &str = "OVERDRIVE_TEST_ASKED";
const RANKS: usize = 2;
const STEPS: u64 = 8;
/// How many more steps a rank trains while its kill is pending, which may be late on a busy machine.
const GRACE: u64 = 1;

/// Two attempts, in each of which a rank is killed while it saves, and a third that resumes.
pub fn killed() -> Result<()> {
    let seed = moments::seed()?;
    let mut random = Random::new(seed, "agreed");
    for (writers, killed) in [("each", [1, 0]), ("each", [0, 1]), ("first", [0, 1])] {
        let folder = tempfile::tempdir()?;
        for rank in killed {
            let kill = format!("{rank}:{}:{}", 3 + random.below(3), random.below(8_000));
            let ended = attempt(folder.path(), writers, &[(KILLED, &kill)])?;
            let died = ended[rank].status.signal() == Some(Signal::KILL.as_raw());
            ensure!(died, "{kill}: {}\n{}", ended[rank].status, ended[rank].errors);
            let other = &ended[1 - rank];
            ensure!(!other.status.success() && other.errors.contains("between ranks"), "{kill}: {}", other.errors);
        }
        let ended = attempt(folder.path(), writers, &[])?;
        let resumed: Vec<_> = ended.iter().map(|ended| said(ended, "resumed at ")).collect::<Result<_>>()?;
        // Ranks are killed at their third step or later, when all have the checkpoint of the first.
        ensure!(resumed[0] == resumed[1] && !resumed[0].starts_with("0 "), "{writers}, seed {seed}: {resumed:?}");
        let ends: Vec<_> = ended.iter().map(|ended| said(ended, "ended at ")).collect::<Result<_>>()?;
        ensure!(ends[0] == ends[1], "{writers}, seed {seed}: {ends:?}");
    }
    Ok(())
}

/// Only one rank is asked to stop.
pub fn asked() -> Result<()> {
    for rank in ["0:3", "1:3"] {
        let folder = tempfile::tempdir()?;
        let ended = attempt(folder.path(), "each", &[(ASKED, rank)])?;
        let stopped: Vec<_> = ended.iter().map(|ended| said(ended, "stopped at ")).collect::<Result<_>>()?;
        ensure!(stopped[0] == stopped[1] && stopped[0].parse::<u64>()? > 3, "{stopped:?}");
        for ended in &attempt(folder.path(), "each", &[])? {
            let resumed = said(ended, "resumed at ")?;
            ensure!(resumed.starts_with(&format!("{} ", stopped[0])), "{resumed} after {stopped:?}");
        }
    }
    Ok(())
}

fn attempt(folder: &Path, writers: &str, vars: &[(&str, &str)]) -> Result<Vec<Ended>> {
    let folder = folder.to_str().context("a folder's name")?;
    let vars: Vec<_> =
        [(moments::FOLDER, folder), (WRITERS, writers)].into_iter().chain(vars.iter().copied()).collect();
    let (port, started) = (free_port(), Instant::now());
    let ranks = (0..RANKS).map(|rank| start("agreed", rank, RANKS, port, &vars)).collect::<Result<Vec<_>>>()?;
    match vars.iter().any(|(name, _)| *name == KILLED) {
        true => ranks.into_iter().map(|rank| rank.end(started)).collect(),
        false => all_through(ranks, started),
    }
}

/// The rest of the line with this beginning.
fn said<'a>(ended: &'a Ended, start: &str) -> Result<&'a str> {
    let line = ended.output.lines().find_map(|line| line.strip_prefix(start));
    line.with_context(|| format!("no line {start:?} in {}", ended.output))
}

/// The numbers in a variable, if it is for this rank.
fn own(variable: &str, rank: usize) -> Result<Option<Vec<u64>>> {
    let Ok(value) = std::env::var(variable) else { return Ok(None) };
    let numbers = value.split(':').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    Ok((numbers[0] == rank as u64).then_some(numbers))
}

fn digest(vs: &nn::VarStore) -> f64 {
    vs.trainable_variables()
        .iter()
        .map(|param| param.to_kind(Kind::Double).abs().sum(Kind::Double))
        .sum::<Tensor>()
        .double_value(&[])
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    tch::manual_seed(1);
    let mut vs = nn::VarStore::new(Device::Cpu);
    let model = nn::seq()
        .add(nn::linear(vs.root() / "in", 64, 512, Default::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(vs.root() / "out", 512, 8, Default::default()));
    let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).build()?;
    let writers = if std::env::var(WRITERS)? == "each" { Writers::Each } else { Writers::First };
    let checkpoint = Checkpoint::builder(crate::folder()?).every(1).keep(1).on_signal(true);
    let mut checkpoint = checkpoint.ranks(group.clone(), writers).build()?;
    let resumed = checkpoint.resume(&mut [("model", &mut vs), ("optimizer", &mut opt)])?;
    let first = resumed.map_or(0, |resumed| resumed.step) + 1;
    println!("resumed at {} with {}", first - 1, digest(&vs));
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    let (killed, asked) = (own(KILLED, meeting.rank)?, own(ASKED, meeting.rank)?);
    for step in first..first + STEPS {
        while killed.as_ref().is_some_and(|kill| step > first - 1 + kill[1] + GRACE) {
            std::thread::park();
        }
        let inputs = (Tensor::arange(256, (Kind::Float, Device::Cpu)) + step as i64).sin().view([4, 64]);
        let loss = ddp.forward(|| model.forward(&inputs))?.square().mean(Kind::Float);
        ddp.backward(&loss).context("between ranks")?;
        opt.step()?;
        opt.zero_grad()?;
        if let Some(kill) = killed.as_ref().filter(|kill| first - 1 + kill[1] == step) {
            kill_after(Duration::from_micros(kill[2]));
        }
        if checkpoint.due(step)? {
            checkpoint.save(step, &[("model", &vs), ("optimizer", &opt)])?;
        }
        if checkpoint.stop_requested() {
            println!("stopped at {step}");
            break;
        }
        if asked.as_ref().is_some_and(|asked| asked[1] == step) {
            kill_process(getpid(), Signal::TERM)?;
        }
    }
    checkpoint.finish()?;
    ensure!(killed.is_none(), "not killed: {killed:?}");
    println!("ended at {}", digest(&vs));
    Ok(())
}
