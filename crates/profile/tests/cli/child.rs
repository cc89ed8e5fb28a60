//! A program to be recorded.

use std::env;
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use overdrive_profile::{Phase, RunRecorder, StepTimer};
use rustix::process::{Signal, getpid, kill_process};
use tch::{Device, Kind, Tensor};

use crate::clock;

/// The variable with the program's task: `exit CODE` or `kill` after training; `clock ..`.
pub const TASK: &str = "OVERDRIVE_TEST_TASK";
/// The variable with the milliseconds of each forward pass, by a clock that nothing else moves. Without it, a forward
/// pass takes 2 ms or more of the real time.
const FORWARD: &str = "OVERDRIVE_TEST_FORWARD";

/// If this process was started as the program to record: trains for 12 steps, and ends as the task says.
pub fn train_if_told() {
    let Ok(task) = env::var(TASK) else { return };
    if let Some(what) = task.strip_prefix("clock ") {
        clock::train_with_fake_clock(what);
        exit(0);
    }
    // Like the feature `record`, which is off in tests.
    let count = |name: &str| env::var(name).unwrap().parse::<u64>().unwrap();
    let recorder = RunRecorder::new()
        .folder(env::var_os("OVERDRIVE_PROFILE").unwrap())
        .steps_before(count("OVERDRIVE_PROFILE_BEFORE"))
        .profiled_steps(count("OVERDRIVE_PROFILE_STEPS"))
        .sample_interval(Duration::from_millis(10));
    let forward = env::var(FORWARD).ok().map(|milliseconds| milliseconds.parse::<u64>().unwrap());
    let now = Arc::new(AtomicU64::new(0));
    let mut timer = StepTimer::builder().warmup_steps(0).record(recorder);
    if forward.is_some() {
        let now = Arc::clone(&now);
        timer = timer.clock(move || Duration::from_millis(now.load(Ordering::Relaxed)));
    }
    let timer = timer.build().unwrap();
    let weight = Tensor::ones([16, 16], (Kind::Float, Device::Cpu));
    for _ in 0..12 {
        {
            let _phase = timer.phase(Phase::Forward);
            let _ = weight.matmul(&weight);
            match forward {
                Some(milliseconds) => _ = now.fetch_add(milliseconds, Ordering::Relaxed),
                None => std::thread::sleep(Duration::from_millis(2)),
            }
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
