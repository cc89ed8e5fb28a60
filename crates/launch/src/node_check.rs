//! A check of this host before its ranks start: a program that is run as ranks of this host alone.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::attempt::{self, Ended, Outcome, Team};
use crate::error::{LaunchError, RankEnd};
use crate::failures::Failures;
use crate::host::Host;
use crate::port::ReservedPort;

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct NodeCheck {
    /// As the user gave it.
    pub program: OsString,
    /// The path at which `program` was found.
    pub file: OsString,
    pub args: Vec<OsString>,
    pub timeout: Duration,
}

/// What a check has found.
pub enum Found {
    Fit,
    Unfit(Fault),
    LauncherGone,
}

/// Why this host cannot take part.
pub struct Fault {
    /// On one line, for the other hosts.
    pub summary: String,
    /// With the output of what has failed.
    report: String,
}

impl Fault {
    fn short(summary: String) -> Self {
        Self { report: summary.clone(), summary }
    }

    pub fn into_error(self, host: &Host) -> LaunchError {
        LaunchError::NodeUnfit(format!("host {} has failed its check and takes no part: {}", host.name, self.report))
    }
}

/// Runs the check, if there is one.
pub fn run(host: &Host) -> Result<Found, LaunchError> {
    let Some(check) = &host.plan.node_check else { return Ok(Found::Fit) };
    let port = ReservedPort::new()?;
    let team = Team {
        attempt: 0,
        restarts: 0,
        node_rank: 0,
        nnodes: 1,
        first_rank: 0,
        world_size: host.plan.nproc,
        master_addr: "127.0.0.1".to_owned(),
        master_port: port.number,
    };
    host.console.say(&format!("checking this host: {}", check.program.display()));
    let start = Instant::now();
    let Ended { outcome, ends, told_to_end, timed_out } = attempt::check(host, &team, check)?;
    if let Some(signal) = told_to_end {
        return Err(LaunchError::Interrupted { signal, host: None });
    }
    if timed_out {
        let limit = check.timeout.as_secs_f64();
        return Ok(Found::Unfit(Fault::short(format!("its check had not ended after {limit} s"))));
    }
    Ok(match outcome {
        Outcome::Done => {
            host.console.say(&format!("this host has passed its check in {:.1} s", start.elapsed().as_secs_f64()));
            Found::Fit
        }
        Outcome::Failed(failures) => Found::Unfit(fault(failures, ends)),
        Outcome::LauncherGone => Found::LauncherGone,
        Outcome::Interrupted(signal) => return Err(LaunchError::Interrupted { signal, host: None }),
        // Node 0 is not there yet.
        Outcome::NodeZero(_) => Found::Unfit(Fault::short("its check was ended".to_owned())),
    })
}

fn fault(failures: Failures, ends: Vec<(usize, RankEnd)>) -> Fault {
    let cause = failures.report(ends, 0);
    let rank = cause.cause();
    let recorded = rank.error.as_ref().and_then(|error| error.message.lines().next());
    let said = recorded.or_else(|| rank.output.last().map(String::as_str)).unwrap_or("it wrote nothing");
    Fault { summary: format!("local rank {}, {}: {said}", rank.local_rank, rank.end), report: cause.to_string() }
}
