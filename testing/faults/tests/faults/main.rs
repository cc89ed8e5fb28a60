//! The kill table: runs that lose a rank, a link or a node at a moment drawn from a seed, over Gloo, and over NCCL on the
//! stand-in. Each is checked as a whole: the launcher names the cause; no process, port or file is left; and the run,
//! which goes on or is started again, ends with the same bytes as one that nothing has disturbed.
//!
//! `cargo test` does a few of each. `OVERDRIVE_FAULTS=50,20,20,10` sets the numbers of kills, stalls, cut links and
//! lost nodes. `OVERDRIVE_TEST_SEED` draws other moments. Each row says how many runs had ended or gone on within their
//! timeout and two seconds: all, on an idle machine.
#![forbid(unsafe_code)]

mod cases;
#[allow(dead_code)] // Shared with overdrive-ddp's tests, which use more of it.
#[path = "../../../../crates/ddp/tests/ranks/harness.rs"]
mod harness;
#[path = "../../../../crates/ddp/tests/ranks/hosts.rs"]
mod hosts;
mod left;
#[allow(dead_code)] // As above.
#[path = "../../../../crates/ddp/tests/ranks/moments.rs"]
mod moments;
mod nodes;
mod rank;
mod table;

use std::process::ExitCode;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};

use cases::Fault;
use nodes::Transport;

fn main() -> Result<ExitCode> {
    overdrive_launch::helper();
    if let Some(code) = nodes::launch_if_told() {
        return Ok(code);
    }
    if rank::is_told() {
        return Ok(overdrive_launch::record(rank::train));
    }
    let mut arguments = Arguments::from_args();
    let no_hosts = hosts::missing();
    let no_stand_in = overdrive_fakecuda::is_off().then(|| "no CUDA device".to_owned());
    let numbers = table::numbers()?;
    let mut trials = Vec::new();
    for transport in [Transport::Gloo, Transport::Nccl] {
        for (fault, number) in Fault::ALL.into_iter().zip(numbers) {
            let missing = match (transport, fault) {
                (Transport::Gloo, Fault::Cut) => &no_hosts,
                (Transport::Gloo, _) => &None,
                (Transport::Nccl, _) => &no_stand_in,
            };
            let name = format!("{}_runs_{}_end_or_go_on_to_the_same_bytes", transport.name(), fault.name());
            if let (Some(reason), false) = (missing, arguments.list) {
                println!("{name}: skipped: {reason}");
            }
            let test = move || table::row(transport, fault, number).map_err(|error| Failed::from(format!("{error:#}")));
            trials.push(Trial::test(name, test).with_ignored_flag(missing.is_some()));
        }
    }
    // Each run has several processes, whose times count.
    arguments.test_threads = arguments.test_threads.or(Some(1));
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}
