//! Runs commands, a few at a time.

use std::num::NonZero;
use std::process::{Command, ExitStatus};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::workspace;

/// How many commands run at a time at most: each has as many threads as there are cores.
const MOST: usize = 4;

/// What a command has printed, and how it ended.
pub struct Ended {
    /// Its number in the list of commands.
    pub number: usize,
    pub lines: Vec<String>,
    pub status: ExitStatus,
    pub time: Duration,
}

/// Runs these commands, and passes on how each ended. A line of libtest about a test that takes long is printed at once.
///
/// # Errors
/// When a command cannot be started.
pub fn run(commands: Vec<Command>, ended: impl FnMut(Ended) -> Result<()> + Send) -> Result<()> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let (queue, ended) = (Mutex::new(commands.into_iter().enumerate()), Mutex::new(ended));
    let work = || -> Result<()> {
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some((number, mut command)) = next() {
            let (begun, mut lines) = (Instant::now(), Vec::new());
            println!("    Starting {}", workspace::shown(&command));
            let status = workspace::lines(&mut command, |line| {
                if line.contains("has been running for over") {
                    println!("{line}");
                }
                lines.push(line.to_owned());
            })?;
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            (*ended)(Ended { number, lines, status, time: begun.elapsed() })?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..cores.min(MOST)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| anyhow!("a thread has panicked"))?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_is_passed_on_once_with_what_it_printed() {
        let command = |number: usize| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("echo {number}; echo an error >&2; exit {number}")]);
            command
        };
        let mut found = Vec::new();
        run((0..9).map(command).collect(), |ended| {
            found.push((ended.number, ended.lines, ended.status.code()));
            Ok(())
        })
        .unwrap();
        found.sort();
        let expected = |number: usize| (number, vec![number.to_string(), "an error".to_owned()], Some(number as i32));
        assert_eq!(found, (0..9).map(expected).collect::<Vec<_>>());
    }

    #[test]
    fn a_command_that_does_not_exist_is_an_error() {
        let error = run(vec![Command::new("/no/such/program")], |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("cannot start `program`"), "{error}");
    }
}
