//! A test that does not end on a real device, which can wait for ever: it is ended, and the tests after it still run.

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
/// Is set for a process that shows it, whose limit is short.
const SHOWN: &str = "OVERDRIVE_GPU_TESTS_SHOW_PATIENCE";
/// The tests that have ended, or were ended, separated by commas: for the process that runs the rest.
const ENDED: &str = "OVERDRIVE_GPU_TESTS_ENDED";

static DONE: Mutex<Vec<&str>> = Mutex::new(Vec::new());

fn ended() -> String {
    std::env::var(ENDED).unwrap_or_default()
}

/// Whether a process before this one has run the test.
pub fn has_ended(name: &str) -> bool {
    ended().split(',').any(|it| it == name)
}

/// Whether a test has not ended by itself.
pub fn has_ended_tests() -> bool {
    !ended().is_empty()
}

/// Runs a test. If it takes too long, this process goes on as a new one, with the tests after it.
pub fn run(name: &'static str, test: impl FnOnce() -> Result<()>) -> Result<()> {
    let longer = LONGER.iter().find(|(beginning, _)| name.starts_with(beginning)).map(|(_, limit)| *limit);
    let limit = if std::env::var_os(SHOWN).is_some() { Duration::from_millis(1) } else { longer.unwrap_or(LIMIT) };
    let (done, is_done) = channel::<()>();
    let watch = thread::spawn(move || {
        if is_done.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            go_on_without(name, limit);
        }
    });
    let result = test();
    drop(done);
    let _ = watch.join();
    // This process may not come to the end, where failures are listed.
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
            .env(ENDED, [ended(), done, name.to_owned()].join(","))
            .exec()
    });
    println!("they cannot be started: {error:?}");
    std::process::exit(101);
}

/// Tests for a process that shows it: one that does not end, and one after it.
pub fn examples() -> Vec<Trial> {
    if std::env::var_os(SHOWN).is_none() {
        return Vec::new();
    }
    let hang = || {
        run("patience::example_hangs", || {
            loop {
                thread::park()
            }
        })
    };
    let examples = [
        ("patience::example_hangs", Trial::test("patience::example_hangs", move || Ok(hang()?))),
        ("patience::example_follows", Trial::test("patience::example_follows", || Ok(()))),
    ];
    examples.into_iter().filter(|(name, _)| !has_ended(name)).map(|(_, trial)| trial).collect()
}

pub fn a_test_that_hangs_fails_and_the_next_one_runs() -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.args(["patience::example", "--test-threads", "1"]).env(SHOWN, "1").output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains("example_hangs has not ended after 1ms"), "{said}");
    ensure!(said.contains("test patience::example_follows ... ok") && output.status.code() == Some(101), "{said}");
    Ok(())
}
