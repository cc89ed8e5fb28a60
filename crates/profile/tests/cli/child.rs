//! A program to be recorded.

use std::env;
use std::process::exit;
use std::time::Duration;

use overdrive_profile::{Phase, RunRecorder, StepTimer};
use rustix::process::{Signal, getpid, kill_process};
use tch::{Device, Kind, Tensor};

use crate::clock;

/// What it does: `exit CODE` or `kill`, once it has trained; `clock ..`.
pub const TASK: &str = "OVERDRIVE_TEST_TASK";
/// Milliseconds of each of its forward passes, 2 where nothing is said.
const FORWARD: &str = "OVERDRIVE_TEST_FORWARD";

/// Trains for 12 steps in a program that was started to do so, and ends as it was told.
pub fn train_if_told() {
    let Ok(task) = env::var(TASK) else { return };
    if let Some(what) = task.strip_prefix("clock ") {
        clock::train_under_it(what);
        exit(0);
    }
    // As the feature `record` does it, which tests are built without.
    let count = |name: &str| env::var(name).unwrap().parse::<u64>().unwrap();
    let recorder = RunRecorder::new()
        .folder(env::var_os("OVERDRIVE_PROFILE").unwrap())
        .steps_before(count("OVERDRIVE_PROFILE_BEFORE"))
        .profiled_steps(count("OVERDRIVE_PROFILE_STEPS"))
        .sample_interval(Duration::from_millis(10));
    let timer = StepTimer::builder().warmup_steps(0).record(recorder).build().unwrap();
    let forward = env::var(FORWARD).map_or(2, |milliseconds| milliseconds.parse().unwrap());
    let weight = Tensor::ones([16, 16], (Kind::Float, Device::Cpu));
    for _ in 0..12 {
        {
            let _phase = timer.phase(Phase::Forward);
            let _ = weight.matmul(&weight);
            std::thread::sleep(Duration::from_millis(forward));
        }
        timer.step(4);
    }
    println!("trained");
    match task.split_once(' ') {
        Some(("exit", code)) => {
            timer.finish().unwrap();
            exit(code.parse().unwrap())
        }
        _ => {
            kill_process(getpid(), Signal::KILL).unwrap();
            unreachable!("killed")
        }
    }
}
