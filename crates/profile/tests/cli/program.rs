//! Runs `overdrive-profile` with a time limit.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::child::TASK;

const PROGRAM: &str = env!("CARGO_BIN_EXE_overdrive-profile");
/// Only stops tests that hang.
const LIMIT: Duration = Duration::from_secs(600);

/// How `overdrive-profile` ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    pub fn says(&self, what: &str) {
        assert!(self.err.contains(what), "{what:?} is not in\n{}", self.err);
    }
}

pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(args);
    // The tests may run with these variables set, in a rank or under `overdrive-profile`.
    for name in ["RANK", "WORLD_SIZE", "OVERDRIVE_PROFILE", "OVERDRIVE_PROFILE_BEFORE", "OVERDRIVE_PROFILE_STEPS"] {
        command.env_remove(name);
    }
    command
}

/// `run` with a shell script, in which `$TRAIN` is a program that trains.
pub fn run_script(out: &Path, script: &str) -> Command {
    let out = out.to_str().unwrap();
    let mut command = command(&["run", "--out", out, "--before", "3", "--steps", "2", "--", "sh", "-c", script]);
    command.env("TRAIN", std::env::current_exe().unwrap()).env(TASK, "exit 0");
    command
}

pub fn start(mut command: Command) -> Running {
    Running(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

pub fn end(command: Command) -> Ended {
    start(command).end()
}

/// A running `overdrive-profile`; killed when a test fails.
pub struct Running(Child);

impl Running {
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    pub fn end(mut self) -> Ended {
        let start = Instant::now();
        while self.0.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < LIMIT, "it hangs");
            thread::sleep(Duration::from_millis(2));
        }
        let text = |from: &mut dyn std::io::Read| {
            let mut text = String::new();
            from.read_to_string(&mut text).unwrap();
            text
        };
        let code = self.0.wait().unwrap().code();
        let out = text(self.0.stdout.as_mut().unwrap());
        Ended { code, out, err: text(self.0.stderr.as_mut().unwrap()) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

pub fn wait_for_file(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < LIMIT, "waited in vain for {}", path.display());
        thread::sleep(Duration::from_millis(2));
    }
}

/// The names in a folder, including hidden files.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
