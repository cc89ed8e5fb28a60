//! Sharded training on several ranks, which are processes: forks of this program, with a variable that names the
//! scenario. Each run has a time limit, after which its processes are killed and the test fails; nothing else is timed.

#[allow(dead_code)] // Shared with overdrive-ddp's tests, which use more of it.
#[path = "../../../ddp/tests/ranks/harness.rs"]
mod harness;
mod mesh;

use std::process::ExitCode;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};

use harness::{Scenario, rank_main, run};

/// The scenarios that a rank can run.
const SCENARIOS: &[(&str, Scenario)] =
    &[("mesh", mesh::scenario), ("mesh_refusals", mesh::refusals), ("meshes_that_differ", mesh::that_differ)];

fn main() -> Result<ExitCode> {
    if let Some(code) = harness::forked(SCENARIOS) {
        return Ok(code);
    }
    if let Some(name) = harness::told() {
        return rank_main(&name, SCENARIOS).map(|()| ExitCode::SUCCESS);
    }
    let tests = [
        ("a_mesh_of_4_has_the_groups_of_its_lines", "mesh", 4),
        ("meshes_that_do_not_fit_4_ranks_are_refused", "mesh_refusals", 4),
        ("meshes_that_differ_are_named_on_every_rank", "meshes_that_differ", 3),
    ];
    let mut arguments = Arguments::from_args();
    // Each test is several processes already.
    arguments.test_threads = arguments.test_threads.or(Some(2));
    let trial = |(name, scenario, ranks): (&str, &'static str, usize)| {
        Trial::test(name, move || run(scenario, ranks).map(drop).map_err(|error| Failed::from(format!("{error:#}"))))
    };
    libtest_mimic::run(&arguments, tests.into_iter().map(trial).collect()).exit()
}
