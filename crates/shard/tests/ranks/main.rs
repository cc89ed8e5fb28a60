//! Sharded training on several ranks, which are processes: forks of this program, with a variable that names the
//! scenario. Each run has a time limit, after which its processes are killed and the test fails; nothing else is timed.

mod added;
mod averages;
mod beside_python;
mod counted;
mod deepspeed;
mod deepspeed_full;
mod edges;
mod float32;
mod full;
mod full_accumulated;
mod full_agreed;
mod full_beside_python;
mod full_buffers;
mod full_changed;
mod full_edges;
mod full_failures;
mod full_hybrid;
mod full_memory;
mod full_offload;
mod full_random;
mod full_refusals;
mod full_state;
#[allow(dead_code)] // Shared with overdrive-ddp's tests, which use more of it.
#[path = "../../../ddp/tests/ranks/harness.rs"]
mod harness;
mod joined;
mod lost;
mod mesh;
mod micro;
mod model;
#[allow(dead_code)] // As above.
#[path = "../../../ddp/tests/ranks/moments.rs"]
mod moments;
mod optimizers;
mod planned;
mod rates;
mod refusals;
mod resharded;
mod resharded_kills;
mod resharded_wrappers;
mod saved;
mod sharded;
mod sharded_failures;
mod shared_gradients;
mod zero;

use std::process::ExitCode;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};

use harness::{Scenario, rank_main, run};

/// The scenarios that a rank can run.
const SCENARIOS: &[(&str, Scenario)] = &[
    ("added_later", added::later),
    ("added_out_of_memory", added::out_of_memory),
    ("averages_full", averages::full),
    ("averages_out_of_memory", averages::out_of_memory),
    ("averages_zero", averages::zero),
    ("averages_saved", averages::checkpoints),
    ("averages_hybrid", averages::hybrid),
    ("mesh", mesh::scenario),
    ("mesh_refusals", mesh::refusals),
    ("meshes_that_differ", mesh::that_differ),
    ("zero", zero::training),
    ("zero_memory", zero::memory),
    ("zero_few_parameters", zero::few_parameters),
    ("zero_resume", zero::resume),
    ("zero_refusals", refusals::building),
    ("zero_steps_refused", refusals::steps),
    ("zero_scaler", refusals::scaler),
    ("zero_states_refused", refusals::states),
    ("beside_python", beside_python::scenario),
    ("optimizers", optimizers::scenario),
    ("joined_accumulators", joined::accumulators),
    ("joined_optimizers", joined::optimizers),
    ("joined_failures", joined::failures),
    ("lost_in_a_step", lost::in_a_step),
    ("lost_in_backward", lost::in_backward),
    ("lost_in_a_mesh", lost::in_a_mesh),
    ("sharded", sharded::training),
    ("sharded_freed", sharded::freed),
    ("sharded_twice", sharded_failures::twice),
    ("sharded_passes", sharded::passes),
    ("sharded_unused", sharded::unused),
    ("sharded_failures", sharded_failures::failures),
    ("sharded_windows", sharded_failures::windows),
    ("sharded_scaler", sharded_failures::scaler),
    ("micro_out_of_memory", micro::out_of_memory),
    ("micro_uneven", micro::uneven),
    ("rates", rates::scenario),
    ("edges", edges::scenario),
    ("deepspeed", deepspeed::scenario),
    ("float32", float32::scenario),
    ("full", full::training),
    ("full_passes", full::passes),
    ("full_order", full::order),
    ("full_random", full_random::scenario),
    ("full_hybrid", full_hybrid::scenario),
    ("full_hybrid_nothing", full_hybrid::with_nothing),
    ("full_forward", full_failures::forward),
    ("full_backward", full_failures::backward_passes),
    ("full_steps", full_failures::steps),
    ("full_refusals", full_refusals::scenario),
    ("counted", counted::scenario),
    ("shared_gradients", shared_gradients::scenario),
    ("full_large", full_memory::scenario),
    ("full_on_disk", full_memory::on_disk),
    ("full_offload", full_offload::scenario),
    ("full_disk", full_offload::full_disk),
    ("deepspeed_full", deepspeed_full::scenario),
    ("planned", planned::scenario),
    ("full_edges", full_edges::scenario),
    ("full_lost", full_edges::lost),
    ("full_accumulated", full_accumulated::scenario),
    ("full_changed", full_changed::scenario),
    ("full_kept", full_changed::kept),
    ("full_values", full_agreed::values),
    ("full_ahead", full_agreed::ahead),
    ("full_follows", full_agreed::follows),
    ("full_ends", full_agreed::ends),
    ("full_panics", full_agreed::panics),
    ("full_whole", full_state::whole),
    ("full_optimizers", full_state::optimizers),
    ("full_saved", full_state::saved),
    ("full_buffers", full_buffers::scenario),
    ("full_beside_python", full_beside_python::scenario),
    ("saved", saved::scenario),
    ("resharded_stages", resharded::stages),
    ("resharded_memory", resharded::memory),
    ("resharded_killed", resharded_kills::scenario),
    ("resharded_wrappers", resharded_wrappers::scenario),
    ("resharded_slow_rows", resharded_wrappers::pairs),
    ("resharded_hybrid", resharded::hybrid),
    ("resharded_other_model", resharded::other_model),
    ("lost_memory", lost::memory),
    ("lost_in_a_sum", lost::in_a_sum),
];

fn main() -> Result<ExitCode> {
    if let Some(code) = harness::forked(SCENARIOS) {
        return Ok(code);
    }
    if let Some(name) = harness::told() {
        return rank_main(&name, SCENARIOS).map(|()| ExitCode::SUCCESS);
    }
    let tests = [
        ("parameters_added_after_sharding_are_named_on_every_rank", "added_later", 2),
        ("memory_that_runs_out_within_a_unit_is_told_on_every_rank", "added_out_of_memory", 2),
        ("averages_of_rows_of_2_equal_one_process", "averages_full", 2),
        ("averages_of_rows_of_3_equal_one_process", "averages_full", 3),
        ("averages_that_memory_is_too_small_for_are_an_error_on_every_rank", "averages_out_of_memory", 2),
        ("averages_beside_zero_of_2_are_the_same_on_all_ranks", "averages_zero", 2),
        ("averages_beside_zero_of_3_are_the_same_on_all_ranks", "averages_zero", 3),
        ("a_mesh_of_4_has_the_groups_of_its_lines", "mesh", 4),
        ("meshes_that_do_not_fit_4_ranks_are_refused", "mesh_refusals", 4),
        ("meshes_that_differ_are_named_on_every_rank", "meshes_that_differ", 3),
        ("zero_of_1_equals_the_large_batch", "zero", 1),
        ("zero_of_2_equals_the_large_batch", "zero", 2),
        ("zero_of_3_equals_the_large_batch", "zero", 3),
        ("zero_of_4_equals_the_large_batch", "zero", 4),
        ("zero_of_2_keeps_half_of_the_state_on_a_rank", "zero_memory", 2),
        ("zero_of_4_keeps_a_quarter_of_the_state_on_a_rank", "zero_memory", 4),
        ("gradients_that_share_memory_are_averaged_apart_by_2", "shared_gradients", 2),
        ("gradients_that_share_memory_are_averaged_apart_by_3", "shared_gradients", 3),
        ("stages_of_4_take_their_share_of_memory", "counted", 4),
        ("zero_of_4_with_two_parameters", "zero_few_parameters", 4),
        ("zero_of_4_resumes_to_the_bit_from_parts_and_from_the_whole", "zero_resume", 4),
        ("zero_refuses_what_differs_or_fails_on_a_rank_on_all", "zero_refusals", 3),
        ("zero_steps_on_all_ranks_or_on_none", "zero_steps_refused", 3),
        ("zero_skips_steps_of_a_scaler_on_all_ranks_or_on_none", "zero_scaler", 3),
        ("zero_refuses_states_of_others_and_changes_nothing", "zero_states_refused", 2),
        ("sharded_gradients_of_1_equal_the_large_batch", "sharded", 1),
        ("sharded_gradients_of_2_equal_the_large_batch", "sharded", 2),
        ("sharded_gradients_of_3_equal_the_large_batch", "sharded", 3),
        ("sharded_gradients_of_4_equal_the_large_batch", "sharded", 4),
        ("gradients_of_other_ranks_are_freed_while_the_pass_goes_on", "sharded_freed", 2),
        ("a_gradient_that_comes_twice_in_a_pass_is_refused_on_all", "sharded_twice", 2),
        ("passes_of_2_with_and_without_exchange_add_up", "sharded_passes", 2),
        ("passes_of_3_with_and_without_exchange_add_up", "sharded_passes", 3),
        ("parameters_that_no_rank_uses_have_no_gradient", "sharded_unused", 3),
        ("a_backward_pass_that_fails_on_a_rank_fails_on_all", "sharded_failures", 3),
        ("a_window_that_failed_begins_anew_on_all_ranks_or_on_none", "sharded_windows", 3),
        ("sharded_gradients_skip_steps_of_a_scaler_on_all_ranks", "sharded_scaler", 3),
        ("a_part_that_runs_out_of_memory_on_a_rank_begins_again_on_all", "micro_out_of_memory", 3),
        ("uneven_parts_equal_the_large_batch_or_are_refused", "micro_uneven", 3),
        ("rates_and_momenta_are_those_of_the_whole_optimizer", "rates", 3),
        ("unusual_parameters_norms_and_states_of_4_equal_one_process", "edges", 4),
        ("a_run_of_2_from_deepspeed_s_json_equals_the_same_by_hand_to_the_bit", "deepspeed", 2),
        ("a_run_of_3_from_deepspeed_s_json_equals_the_same_by_hand_to_the_bit", "deepspeed", 3),
        ("every_optimizer_over_2_ranks_steps_and_saves_as_the_whole", "optimizers", 2),
        ("every_optimizer_over_3_ranks_steps_and_saves_as_the_whole", "optimizers", 3),
        ("accumulators_and_estimates_that_would_not_average_are_refused", "joined_accumulators", 2),
        ("wrappers_of_sharded_optimizers_are_the_same_on_all_ranks", "joined_optimizers", 2),
        ("what_fails_in_a_step_or_a_scaler_on_a_rank_fails_on_all", "joined_failures", 3),
        ("every_stage_of_2_in_float32_equals_the_large_batch", "float32", 2),
        ("full_shards_over_pairs_of_4_in_float32_equal_the_large_batch", "float32", 4),
        ("full_shards_of_1_equal_the_large_batch", "full", 1),
        ("full_shards_of_2_equal_the_large_batch", "full", 2),
        ("full_shards_of_3_equal_the_large_batch", "full", 3),
        ("full_shards_of_4_equal_the_large_batch", "full", 4),
        ("full_passes_of_2_add_up", "full_passes", 2),
        ("full_passes_of_3_add_up", "full_passes", 3),
        ("full_units_are_gathered_ahead_in_the_order_of_the_last_pass", "full_order", 2),
        ("full_shards_of_3_through_random_passes_and_failures", "full_random", 3),
        ("full_shards_over_pairs_of_4_equal_the_large_batch", "full_hybrid", 4),
        ("replicas_of_full_shards_close_with_nothing", "full_hybrid_nothing", 4),
        ("full_forward_that_fails_on_a_rank_fails_on_all", "full_forward", 3),
        ("full_backward_that_fails_on_a_rank_fails_on_all", "full_backward", 3),
        ("full_step_that_fails_on_a_rank_fails_on_all", "full_steps", 3),
        ("full_shards_that_cannot_be_are_named_on_every_rank", "full_refusals", 3),
        ("full_edges_of_1", "full_edges", 1),
        ("full_edges_of_3", "full_edges", 3),
        ("full_shards_report_a_rank_that_is_gone", "full_lost", 3),
        ("full_gradients_of_1_add_up_within_a_pass_and_a_window", "full_accumulated", 1),
        ("full_gradients_of_3_add_up_within_a_pass_and_a_window", "full_accumulated", 3),
        ("full_shards_of_1_that_change_before_backward_are_refused", "full_changed", 1),
        ("full_shards_of_3_that_change_before_backward_are_refused", "full_changed", 3),
        ("full_shards_that_one_rank_writes_to_are_gathered_anew_by_all", "full_kept", 3),
        ("full_values_that_differ_by_rank_are_named_on_all", "full_values", 3),
        ("full_units_ahead_are_the_same_after_a_failure_of_one_rank", "full_ahead", 3),
        ("full_passes_that_a_rank_only_follows_end_on_all", "full_follows", 3),
        ("full_passes_that_fail_at_their_end_fail_on_all", "full_ends", 3),
        ("full_panics_and_failed_saving_of_a_rank_end_on_all", "full_panics", 3),
        ("full_states_of_4_are_those_of_a_plain_run_and_of_2", "full_whole", 4),
        ("full_optimizers_over_rows_of_2_step_and_save_as_the_whole", "full_optimizers", 2),
        ("full_optimizers_over_rows_of_4_step_and_save_as_the_whole", "full_optimizers", 4),
        ("full_shards_of_2_need_half_of_the_memory", "full_large", 2),
        ("full_shards_of_4_need_less_than_0_30_of_the_memory", "full_large", 4),
        ("full_shards_of_4_on_disk_need_an_eighth_of_one_process", "full_on_disk", 4),
        ("deepspeed_s_stage_3_trains_as_by_hand", "deepspeed_full", 2),
        ("plans_of_2_are_near_what_runs_need", "planned", 2),
        ("full_shards_of_2_off_the_device_train_save_and_load_as_on_it", "full_offload", 2),
        ("a_rank_that_is_gone_is_reported_in_a_step", "lost_in_a_step", 3),
        ("a_rank_that_is_gone_is_reported_in_backward", "lost_in_backward", 3),
        ("a_rank_that_is_gone_is_reported_in_a_sum_of_counts", "lost_in_a_sum", 3),
        ("memory_that_runs_out_while_a_rank_sends_ends_all", "lost_memory", 2),
        ("a_rank_that_is_gone_is_reported_in_making_a_mesh", "lost_in_a_mesh", 2),
    ];
    let mut arguments = Arguments::from_args();
    // Each test is several processes already.
    arguments.test_threads = arguments.test_threads.or(Some(2));
    let trial = |(name, scenario, ranks): (&str, &'static str, usize)| {
        Trial::test(name, move || run(scenario, ranks).map(drop).map_err(|error| Failed::from(format!("{error:#}"))))
    };
    let mut trials: Vec<Trial> = tests.into_iter().map(trial).collect();
    type Run = fn() -> Result<()>;
    let alone =
        |name: &str, run: Run| Trial::test(name, move || run().map_err(|error| Failed::from(format!("{error:#}"))));
    trials.push(alone("a_checkpoint_of_each_rank_resumes_to_the_bit", saved::run));
    trials.push(alone("averages_of_rows_are_loaded_by_other_ranks_and_whole_models", averages::saved));
    trials.push(alone("averages_of_rows_over_pairs_of_4_are_loaded_by_3_and_by_4", averages::saved_hybrid));
    trials.push(alone(full_offload::FULL_DISK, full_offload::run_full_disk));
    trials.push(alone("full_shards_of_each_rank_resume_to_the_bit", full_state::run));
    trials.push(alone("buffers_of_full_shards_are_each_rank_s_and_saved", full_buffers::run));
    for (name, run) in resharded::TESTS {
        trials.push(alone(name, *run));
    }
    trials.push(alone("a_run_killed_50_times_ends_to_the_bit_as_an_undisturbed_one", resharded_kills::ends_alike));
    // Ignored where there is no such Python.
    let no_python = beside_python::python().is_none();
    let beside: [(&str, Run); 2] = [
        ("zero_of_2_trains_as_python_s", beside_python::equals),
        ("full_shards_of_2_train_as_python_s", full_beside_python::equals),
    ];
    for (name, run) in beside {
        if no_python && !arguments.list {
            println!("{name}: skipped: no Python with torch 2.11");
        }
        trials.push(alone(name, run).with_ignored_flag(no_python));
    }
    libtest_mimic::run(&arguments, trials).exit()
}
