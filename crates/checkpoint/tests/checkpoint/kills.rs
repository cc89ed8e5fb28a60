//! Runs that are ended by SIGKILL at moments drawn from a fixed seed, and by SIGTERM and SIGINT.
#![cfg(unix)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::child::{self, KILLED, LAST_STEP, STEPS};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const KILLS: usize = 20;
const SEED: u64 = 20_261_121;

/// Splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

fn start(folder: &Path, variable: Option<(&str, u64)>) -> std::io::Result<(Child, BufReader<ChildStdout>)> {
    let mut command = Command::new(std::env::current_exe()?);
    let variable = variable.map(|(name, value)| (name, value.to_string()));
    let mut child = child::arguments(&mut command, "train", folder).envs(variable).stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
    Ok((child, BufReader::new(output)))
}

/// Reads until the child has printed step `target` or a later one.
fn step_from(output: &mut BufReader<ChildStdout>, target: u64) -> std::io::Result<()> {
    while let Some(line) = moments(output, 1)? {
        let step = line.split_once("moment: step ").and_then(|(_, step)| step.trim().parse::<u64>().ok());
        if step.is_some_and(|step| step >= target) {
            break;
        }
    }
    Ok(())
}

/// Reads `count` moments of the child, and returns the last line; none if the output ends before.
fn moments(output: &mut BufReader<ChildStdout>, count: u64) -> std::io::Result<Option<String>> {
    let (mut line, mut seen) = (String::new(), 0);
    while seen < count {
        line.clear();
        if output.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        seen += u64::from(line.contains("moment:"));
    }
    Ok(Some(line))
}

fn run_to_end(folder: &Path) -> Outcome {
    let (mut child, mut output) = start(folder, None)?;
    assert!(moments(&mut output, u64::MAX)?.is_none());
    assert!(child.wait()?.success());
    Ok(())
}

/// All files of the last checkpoint, by name.
fn last(folder: &Path) -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder.join(format!("step-{STEPS:012}")))? {
        let path = entry?.path();
        files.push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), fs::read(&path)?));
    }
    files.sort();
    Ok(files)
}

#[test]
fn a_run_killed_twenty_times_ends_bit_for_bit_like_an_uninterrupted_one() -> Outcome {
    let (whole, killed) = (tempfile::tempdir()?, tempfile::tempdir()?);
    run_to_end(whole.path())?;
    let mut random = Random(SEED);
    let mut at = Vec::new();
    for kill in 0..KILLS {
        // One kill in five comes before any step; the others are spread over the run, but not to its end, because the
        // child continues while its output is read.
        let step = (random.below(5) > 0).then(|| 1 + 7 * kill as u64 + random.below(8));
        let (mut child, mut output) = start(killed.path(), Some((KILLED, step.unwrap_or(0))))?;
        if let Some(step) = step {
            step_from(&mut output, step)?;
        }
        let moment = moments(&mut output, 1 + random.below(2))?;
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        child.kill()?;
        let status = child.wait()?;
        assert!(!status.success(), "the run ended by itself before kill {kill} of {KILLS}");
        at.push(moment.unwrap_or_default().trim().to_owned());
    }
    println!("seed {SEED}, killed after {at:?}");
    run_to_end(killed.path())?;
    let (whole, killed) = (last(whole.path())?, last(killed.path())?);
    assert_eq!(
        whole.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["manifest.json", "model.safetensors", "rng.safetensors", "trainer.safetensors"]
    );
    assert!(whole == killed, "the final checkpoints differ");
    Ok(())
}

#[test]
fn after_a_signal_the_run_saves_at_the_next_step_and_exits_cleanly() -> Outcome {
    for signal in [Signal::TERM, Signal::INT] {
        let folder = tempfile::tempdir()?;
        // It would train for long after the signal.
        let (mut child, mut output) = start(folder.path(), Some((LAST_STEP, 1_000_000)))?;
        assert!(moments(&mut output, 4)?.is_some());
        kill_process(Pid::from_child(&child), signal)?;
        let rest = output.lines().collect::<Result<Vec<_>, _>>()?;
        assert!(child.wait()?.success(), "{rest:?}");
        let stopped = rest.iter().find_map(|line| line.strip_prefix("stopped at ")).ok_or("it did not stop")?;
        let saved = folder.path().join(format!("step-{:012}", stopped.parse::<u64>()?));
        assert!(saved.join("manifest.json").is_file(), "{rest:?}");
    }
    Ok(())
}
