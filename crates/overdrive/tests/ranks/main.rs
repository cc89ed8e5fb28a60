//! The crates together on several ranks, which are processes: forks of this program, with a variable that names the
//! scenario.

mod agreed;
mod checkpoints;
mod compiled;
#[allow(dead_code)] // Shared with overdrive-ddp's tests, which use more of it.
#[path = "../../../ddp/tests/ranks/harness.rs"]
mod harness;
mod inside;
mod killed;
mod memory;
mod mixed;
#[allow(dead_code)] // As above.
#[path = "../../../ddp/tests/ranks/moments.rs"]
mod moments;
mod records;
mod restarts;
mod streams;
mod tracks;
mod unmarked;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use libtest_mimic::{Arguments, Failed, Trial};

use harness::{Scenario, rank_main, run};

/// The scenarios that a rank can run.
const SCENARIOS: &[(&str, Scenario)] = &[
    ("mixed", mixed::scenario),
    ("inside", inside::scenario),
    ("one_bit_adam", mixed::one_bit_adam),
    ("abandoned", mixed::abandoned),
    ("lost_in_window", mixed::lost_in_window),
    ("killed_saving", checkpoints::scenario),
    ("restarts", restarts::scenario),
    ("accumulating", killed::scenario),
    ("agreed", agreed::scenario),
    ("records", records::scenario),
    ("streams", streams::scenario),
    ("unmarked", unmarked::scenario),
    ("tracks", tracks::scenario),
    ("compiled", compiled::scenario),
    ("compiled_mixed", compiled::mixed),
    ("compiled_within", compiled::within),
    ("checkpointed", memory::checkpointed),
    ("smaller", memory::smaller),
    ("unequal", memory::unequal),
];

/// The folder that the ranks of one run share.
fn folder() -> Result<PathBuf> {
    Ok(std::env::var_os(moments::FOLDER).context("no folder was named")?.into())
}

fn main() -> Result<ExitCode> {
    if let Some(code) = harness::forked(SCENARIOS) {
        return Ok(code);
    }
    overdrive_launch::helper();
    if let Some(name) = harness::told() {
        return rank_main(&name, SCENARIOS).map(|()| ExitCode::SUCCESS);
    }
    type Test = fn() -> Result<()>;
    let tests: &[(&str, Test)] = &[
        ("scaled_autocast_clipped_accumulation_of_2_equals_the_large_batch", || run("mixed", 2).map(drop)),
        ("steps_in_backward_of_2_equal_those_of_the_large_batch", || run("inside", 2).map(drop)),
        ("a_compiled_loss_of_2_follows_the_plain_one", || run("compiled", 2).map(drop)),
        ("a_compiled_loss_of_2_within_autocast_follows_the_plain_one", || run("compiled_mixed", 2).map(drop)),
        ("a_forward_pass_of_ddp_within_a_step_is_not_compiled", || run("compiled_within", 2).map(drop)),
        ("checkpointed_layers_of_2_train_as_plain_ones", || run("checkpointed", 2).map(drop)),
        ("ranks_take_smaller_parts_where_one_has_less_memory", || run("smaller", 2).map(drop)),
        ("ranks_with_unequal_batches_shrink_and_grow_together", || run("unequal", 2).map(drop)),
        ("one_bit_adam_of_2_refuses_a_scaler", || run("one_bit_adam", 2).map(drop)),
        ("a_window_reports_the_hooks_failure_and_is_abandoned", || run("abandoned", 2).map(drop)),
        ("a_lost_rank_is_reported_in_a_window", || run("lost_in_window", 2).map(drop)),
        ("ranks_killed_at_12_fixed_moments_while_saving_are_reported", checkpoints::killed_while_saving),
        ("a_run_restarted_6_times_ends_like_an_uninterrupted_one", restarts::ends_alike),
        ("an_accumulating_run_killed_10_times_ends_like_an_uninterrupted_one", killed::while_accumulating),
        ("ranks_killed_while_saving_leave_a_step_that_all_resume_at", agreed::killed),
        ("all_ranks_stop_at_the_same_step_when_one_is_asked_to", agreed::asked),
        ("a_stream_of_2_is_resumed_by_1", streams::are_resumed_by_others),
        ("stragglers_are_named_from_the_records_of_both_ranks", records::stragglers_are_named),
        ("exchanges_of_ddp_are_in_the_traces_of_2_ranks", || run("tracks", 2).map(drop)),
        ("large_exchanges_are_named_from_the_records_of_both_ranks", records::large_exchanges_are_named),
        ("programs_without_a_timer_are_recorded_by_their_loader", unmarked::with_a_loader),
        ("programs_without_a_timer_are_recorded_by_their_optimizer", unmarked::without_a_loader),
        ("programs_without_a_timer_whose_loop_changes_are_recorded", unmarked::whose_loop_changes),
        ("programs_with_a_timer_are_recorded_only_by_it", unmarked::with_a_timer),
        ("programs_with_several_timers_are_recorded_by_each", unmarked::with_several_timers),
        ("programs_without_a_timer_that_exit_early_are_recorded", unmarked::that_exit_early),
        ("programs_without_a_timer_are_recorded_under_ddp", unmarked::under_ddp),
    ];
    let trials = tests
        .iter()
        .map(|&(name, test)| Trial::test(name, move || test().map_err(|error| Failed::from(format!("{error:#}")))));
    let mut arguments = Arguments::from_args();
    // Each test already runs several processes.
    arguments.test_threads = arguments.test_threads.or(Some(1));
    libtest_mimic::run(&arguments, trials.collect()).exit()
}
