//! A time limit for each test on a real device, where a wait may never end. A test beyond its limit fails, and the tests
//! after it run in a new process.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use libtest_mimic::Trial;

/// All tests together took 14 s on an H100.
const LIMIT: Duration = Duration::from_secs(60);
/// Those of ranks end theirs after 500 s, and Inductor compiles for a minute a model.
const LONGER: [(&str, Duration); 2] =
    [("ranks::", Duration::from_secs(600)), ("compiled::steps_compiled", Duration::from_secs(600))];
/// Set for a process that runs [`examples`], with a limit of a millisecond.
const EXAMPLES: &str = "OVERDRIVE_GPU_TESTS_LIMIT_EXAMPLES";
/// Tells a new process which tests have been run, separated by commas.
const RUN: &str = "OVERDRIVE_GPU_TESTS_RUN";

static DONE: Mutex<Vec<&str>> = Mutex::new(Vec::new());

fn run_before() -> String {
    std::env::var(RUN).unwrap_or_default()
}

/// Whether an earlier process has run this test.
pub fn has_run(name: &str) -> bool {
    run_before().split(',').any(|it| it == name)
}

/// Whether a test was beyond its limit: only then is there an earlier process.
pub fn was_exceeded() -> bool {
    !run_before().is_empty()
}

/// Runs a test. Beyond its limit, this process is replaced by one that runs the tests after it.
pub fn run(name: &'static str, test: impl FnOnce() -> Result<()>) -> Result<()> {
    let longer = LONGER.iter().find(|(beginning, _)| name.starts_with(beginning)).map(|(_, limit)| *limit);
    let limit = if std::env::var_os(EXAMPLES).is_some() { Duration::from_millis(1) } else { longer.unwrap_or(LIMIT) };
    let (done, is_done) = channel::<()>();
    let watch = thread::spawn(move || {
        if is_done.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            go_on_without(name, limit);
        }
    });
    let result = test();
    drop(done);
    let _ = watch.join();
    // Failures are listed at the end, which this process does not reach if a later test is beyond its limit.
    if let Err(error) = &result {
        println!("{error:#}");
    }
    DONE.lock().unwrap_or_else(PoisonError::into_inner).push(name);
    result
}

fn go_on_without(name: &str, limit: Duration) {
    println!("FAILED\n{name} has not ended after {limit:?}; the tests after it follow");
    let done = DONE.lock().unwrap_or_else(PoisonError::into_inner).join(",");
    let error = std::env::current_exe().map(|program| {
        Command::new(program)
            .args(std::env::args_os().skip(1))
            .env(RUN, [run_before(), done, name.to_owned()].join(","))
            .exec()
    });
    println!("they cannot be started: {error:?}");
    std::process::exit(101);
}

/// A test that does not end, and one after it.
pub fn examples() -> Vec<Trial> {
    if std::env::var_os(EXAMPLES).is_none() {
        return Vec::new();
    }
    let hang = || {
        run("limits::example_hangs", || {
            loop {
                thread::park()
            }
        })
    };
    let examples = [
        ("limits::example_hangs", Trial::test("limits::example_hangs", move || Ok(hang()?))),
        ("limits::example_follows", Trial::test("limits::example_follows", || Ok(()))),
    ];
    examples.into_iter().filter(|(name, _)| !has_run(name)).map(|(_, trial)| trial).collect()
}

pub fn a_test_that_hangs_fails_and_the_next_one_runs() -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.args(["limits::example", "--test-threads", "1"]).env(EXAMPLES, "1").output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains("example_hangs has not ended after 1ms"), "{said}");
    ensure!(said.contains("test limits::example_follows ... ok") && output.status.code() == Some(101), "{said}");
    Ok(())
}
