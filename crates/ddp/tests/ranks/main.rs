//! Runs ranks as processes: forks of this program, with a variable that names the scenario. Each run has a time limit,
//! after which its processes are killed and the test fails; nothing else is timed.

mod averages;
mod buffers;
mod coalesced;
mod collectives;
mod combinations;
mod ends;
mod faults;
mod frozen;
mod harness;
mod hierarchy;
mod hook_failures;
mod hooks;
#[allow(dead_code)] // Shared with the tests of faults, which use more of it.
mod hosts;
mod infinities;
mod joins;
mod kills;
mod listeners;
mod metrics;
mod moments;
mod nccl;
mod network;
mod node_checks;
mod options;
mod power_sgd;
mod precision;
mod resumes;
mod shared_memory;
mod sparse;
mod spawned;
mod starts;
mod strangers;
mod torchrun;
mod training;
mod windows;

use std::process::ExitCode;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};

use harness::{Scenario, rank_main, run};

/// The scenarios that a rank can run.
const SCENARIOS: &[(&str, Scenario)] = &[
    ("collectives", collectives::scenario),
    ("sub_groups", collectives::sub_groups),
    ("refusals", collectives::refusals),
    ("coalesced", coalesced::scenario),
    ("coalesced_verified", coalesced::verified),
    ("coalesced_refusals", coalesced::refusals),
    ("coalesced_others", coalesced::other_lists),
    ("objects", collectives::objects),
    ("metrics", metrics::scenario),
    ("metrics_refusals", metrics::refusals),
    ("options", options::scenario),
    ("training", training::scenario),
    ("combinations", combinations::scenario),
    ("models_that_differ", training::models_that_differ),
    ("join", training::join),
    ("joins", joins::scenario),
    ("sync_batch_norm", averages::sync_batch_norm),
    ("local_sgd", averages::local_sgd),
    ("buffers", buffers::scenario),
    ("hooks", hooks::scenario),
    ("power_sgd", power_sgd::scenario),
    ("precision", precision::scenario),
    ("infinities", infinities::scenario),
    ("hierarchy", hierarchy::scenario),
    ("hierarchy_on_the_wire", network::hierarchy),
    ("resumes", resumes::scenario),
    ("starts", starts::scenario),
    ("sparse", sparse::scenario),
    ("ends", ends::scenario),
    ("panicking_hook", hook_failures::panicking),
    ("failing_hook", hook_failures::failing),
    ("hook_failure_left", hook_failures::left),
    ("failing_hook_in_join", hook_failures::in_join),
    ("listeners", listeners::scenario),
    ("besieged", strangers::scenario),
    ("alone", collectives::alone_at_any_port),
    ("endless_sums", faults::endless_sums),
    ("endless_training", faults::endless_training),
    ("stalls", faults::stalls),
    ("stalls_in_backward", faults::stalls_in_backward),
    ("other_collective", faults::other_collective),
    ("other_shape", faults::other_shape),
    ("monitored", faults::monitored),
    ("dropped_work", faults::dropped_work),
    ("frozen", frozen::scenario),
    ("ends_with_work", faults::ends_with_work),
    ("windows", windows::scenario),
    ("within_backward", windows::within_backward),
    ("wire", network::wire),
    ("torchrun", torchrun::scenario),
    ("killed_meeting", kills::meeting),
    ("killed_collectives", kills::collectives),
    ("killed_training", kills::training),
    ("node_check", node_checks::scenario),
    ("late", ends::late),
    ("held", ends::held),
    ("shared_memory", shared_memory::scenario),
    ("shared_memory_divisions", shared_memory::divisions),
    ("shared_memory_lost", shared_memory::lost),
    ("shared_memory_lost_at_first", shared_memory::lost_at_first),
    ("nccl_collectives", nccl::collectives),
    ("nccl_training", nccl::training),
];

fn main() -> Result<ExitCode> {
    if let Some(code) = harness::forked(SCENARIOS) {
        return Ok(code);
    }
    overdrive_launch::helper();
    if let Some(ended) = spawned::main_if_told() {
        return ended.map(|()| ExitCode::SUCCESS);
    }
    if let Some(name) = harness::told() {
        return rank_main(&name, SCENARIOS).map(|()| ExitCode::SUCCESS);
    }
    let plain = |name: &'static str, scenario: &'static str, ranks: usize| {
        (name, Box::new(move || run(scenario, ranks).map(drop)) as Box<dyn FnOnce() -> Result<()> + Send>)
    };
    let mut tests = vec![
        plain("collectives_of_2", "collectives", 2),
        plain("collectives_of_3", "collectives", 3),
        plain("coalesced_collectives_of_2", "coalesced", 2),
        plain("coalesced_collectives_of_3", "coalesced", 3),
        plain("verified_coalesced_collectives_of_2", "coalesced_verified", 2),
        plain("verified_coalesced_collectives_of_3", "coalesced_verified", 3),
        plain("lists_that_cannot_be_sent_are_refused", "coalesced_refusals", 2),
        plain("lists_that_differ_are_reported_on_every_rank", "coalesced_others", 2),
        plain("sub_groups_of_3", "sub_groups", 3),
        plain("tensors_that_cannot_be_sent_are_refused", "refusals", 2),
        plain("objects_of_3", "objects", 3),
        plain("metrics_of_2_leave_repeats_out", "metrics", 2),
        plain("metrics_of_3_leave_repeats_out", "metrics", 3),
        plain("metrics_of_uneven_tensors_are_refused", "metrics_refusals", 2),
        plain("options_of_2", "options", 2),
        plain("training_of_1_equals_the_large_batch", "training", 1),
        plain("training_of_2_equals_the_large_batch", "training", 2),
        plain("training_of_3_equals_the_large_batch", "training", 3),
        plain("training_of_4_equals_the_large_batch", "training", 4),
        plain("options_of_2_in_combinations_equal_the_large_batch", "combinations", 2),
        plain("options_of_3_in_combinations_equal_the_large_batch", "combinations", 3),
        plain("options_of_4_in_combinations_equal_the_large_batch", "combinations", 4),
        plain("models_that_differ_are_named_on_every_rank", "models_that_differ", 3),
        plain("join_of_3_with_uneven_inputs", "join", 3),
        plain("sync_batch_norm_of_2_equals_the_large_batch", "sync_batch_norm", 2),
        plain("sync_batch_norm_of_3_equals_the_large_batch", "sync_batch_norm", 3),
        plain("sync_batch_norm_of_4_equals_the_large_batch", "sync_batch_norm", 4),
        plain("local_sgd_of_3", "local_sgd", 3),
        plain("hooks_of_2", "hooks", 2),
        plain("hooks_of_3", "hooks", 3),
        plain("power_sgd_of_2_is_its_algorithm", "power_sgd", 2),
        plain("power_sgd_of_3_is_its_algorithm", "power_sgd", 3),
        plain("passes_of_2_in_low_precision_train_in_full_precision", "precision", 2),
        plain("passes_of_3_in_low_precision_train_in_full_precision", "precision", 3),
        plain("infinities_pass_and_invalid_parameters_are_refused", "infinities", 2),
        plain("gradients_are_averaged_inside_of_hosts_first", "hierarchy", 4),
        plain("buffers_are_what_their_hook_makes_of_them", "buffers", 2),
        plain("others_join_and_loops_end_with_the_shortest", "joins", 3),
        plain("groups_and_reducers_start_and_end_in_any_order", "starts", 2),
        plain("runs_of_3_resume_to_the_bit_with_each_hook", "resumes", 3),
        plain("sparse_gradients_are_averaged", "sparse", 3),
        plain("groups_end_in_order", "ends", 2),
        plain("gradients_of_2_in_shared_memory_are_averaged_to_the_bit", "shared_memory", 2),
        plain("gradients_of_3_in_shared_memory_are_averaged", "shared_memory", 3),
        plain("gradients_in_shared_memory_are_divided_as_ddp_does", "shared_memory_divisions", 3),
        plain("a_rank_that_ends_is_reported_with_shared_memory", "shared_memory_lost", 2),
        plain("a_rank_that_ends_before_shared_memory_is_made_is_reported", "shared_memory_lost_at_first", 2),
        plain("a_hooks_panic_is_resumed_in_the_caller", "panicking_hook", 2),
        plain("a_hooks_error_is_returned_and_stays", "failing_hook", 2),
        plain("a_hooks_failure_stays_for_the_next_pass", "hook_failure_left", 2),
        plain("a_hook_that_failed_is_not_run_again_in_join", "failing_hook_in_join", 2),
        plain("windows_of_2_that_close_with_nothing", "windows", 2),
        plain("windows_of_3_that_close_with_nothing", "windows", 3),
        plain("calls_within_backward_are_refused", "within_backward", 2),
        plain("a_rank_that_stalls_in_backward_is_reported", "stalls_in_backward", 2),
        plain("different_collectives_are_reported_on_every_rank", "other_collective", 3),
        plain("different_shapes_are_reported_on_every_rank", "other_shape", 2),
        plain("a_monitored_barrier_names_missing_ranks", "monitored", 3),
        plain("a_process_ends_with_work_under_way", "ends_with_work", 2),
        plain("a_healthy_host_passes_its_check_and_a_slow_one_is_named", "node_check", 2),
        plain("a_group_waits_at_its_end_for_members_that_connect", "late", 2),
    ];
    type Test = fn() -> Result<()>;
    let more: [(&'static str, Test); 21] = [
        ("a_launcher_checks_its_host_by_overdrive_node_check", node_checks::by_a_launcher),
        ("a_rank_that_stalls_is_reported", faults::stalled),
        ("dropped_work_neither_waits_nor_ends_the_process", faults::dropped),
        ("ranks_killed_at_13_fixed_moments_while_meeting_are_reported", kills::while_meeting),
        ("ranks_killed_at_13_fixed_moments_in_collectives_are_reported", kills::in_collectives),
        ("ranks_killed_at_12_fixed_moments_in_backward_are_reported", kills::in_backward),
        ("a_killed_rank_is_reported_in_collectives", faults::killed_in_collectives),
        ("a_killed_rank_is_reported_in_backward", faults::killed_in_backward),
        ("a_group_that_waits_at_its_end_leaves_its_store_to_others", ends::store_is_left),
        ("a_frozen_server_of_the_store_ends_questions_at_the_timeout", frozen::ends_questions),
        ("a_server_of_the_store_that_thaws_gives_no_wrong_answers", frozen::goes_on_when_it_thaws),
        ("a_wrong_world_size_is_reported", faults::wrong_world_size),
        ("a_taken_port_is_reported", faults::taken_port),
        ("a_missing_rank_is_reported", faults::absent_rank),
        ("a_file_that_ranks_meet_at", collectives::meet_at_a_file),
        ("a_rank_alone_meets_at_any_port", collectives::meet_alone),
        ("ranks_of_one_host_listen_at_the_loopback_alone", listeners::of_one_host),
        ("stores_of_one_process_share_a_server", listeners::shared),
        ("a_thousand_hostile_connections_change_nothing", strangers::change_nothing),
        ("spawned_ranks_meet", spawned::ranks_meet),
        ("a_spawned_rank_that_fails_is_reported", spawned::a_failure_is_reported),
    ];
    tests.extend(more.map(|(name, test)| (name, Box::new(test) as Box<dyn FnOnce() -> Result<()> + Send>)));
    let mut arguments = Arguments::from_args();
    // Each test is several processes already.
    arguments.test_threads = arguments.test_threads.or(Some(3));
    let trial = |name: &'static str, test: Box<dyn FnOnce() -> Result<()> + Send>| {
        Trial::test(name, move || test().map_err(|error| Failed::from(format!("{error:#}"))))
    };
    let mut trials: Vec<Trial> = tests.into_iter().map(|(name, test)| trial(name, test)).collect();
    // Tests that need something not every machine has are ignored where it is missing.
    let no_network = hosts::missing();
    let no_python = torchrun::python().is_none().then(|| "no Python with torch 2.11".to_owned());
    let no_gpu = nccl::missing();
    let needy: [(&'static str, Test, &Option<String>); 8] = [
        ("nccl_sums_and_copies", nccl::sums_and_copies, &no_gpu),
        ("nccl_trains", nccl::trains, &no_gpu),
        ("hooks_send_the_bytes_that_their_ratios_predict", network::bytes_on_the_wire, &no_network),
        ("a_hosts_gradients_cross_the_network_once", network::a_host_sends_once, &no_network),
        ("a_cut_link_is_reported", network::cut_link, &no_network),
        ("ranks_of_one_host_listen_at_the_loopback_whatever_its_name", network::listeners_of_one_host, &no_network),
        ("ranks_of_two_hosts_listen_at_their_addresses_alone", network::listeners, &no_network),
        ("python_s_torchrun_starts_ranks", torchrun::starts_ranks, &no_python),
    ];
    for (name, test, missing) in needy {
        if let (Some(reason), false) = (missing, arguments.list) {
            println!("{name}: skipped: {reason}");
        }
        trials.push(trial(name, Box::new(test)).with_ignored_flag(missing.is_some()));
    }
    libtest_mimic::run(&arguments, trials).exit()
}
