//! What each test needs to run.

use anyhow::{Result, ensure};
use overdrive_fakecuda::Fake;
use tch::Cuda;

use crate::ranks;

/// A fake device rounds as the host does, runs no code that Inductor makes, and has what a test tells NVML.
const REAL_ONLY: &[&str] = &[
    "tf32_changes_products_only_while_allowed",
    "compiled::steps_compiled_for_the_device_equal_uncompiled_ones",
    "profiling::the_monitor_samples_a_real_device",
];

/// A real device does not tell what it was asked for, in which order, or what was nearly too early.
const FAKE_ONLY: &[&str] = &[
    "compiled::a_step_compiled_for_the_device_launches_less_and_never_waits",
    "compiled::updates_compiled_for_the_device_are_the_formulas",
    "compiled::gradients_of_convolutions_that_compiled_code_asks_for_have_numbers",
    "offload::steps::a_forgotten_wait_for_a_step_on_the_host_is_found",
    "offload::steps::a_step_on_the_host_waits_once_and_allocates_nothing",
    "offload::steps::a_step_whose_last_copies_fail_is_completed_by_the_next_call",
    "offload::steps::a_step_with_state_on_disk_waits_once",
    "offload::overlap::a_forgotten_wait_for_a_parameter_is_found",
    "offload::overlap::a_layer_waits_for_its_own_parameters_alone",
    "offload::overlap::copies_run_beside_the_layers",
    "offload::overlap::a_step_whose_overlapping_copies_fail_is_completed_by_the_next_call",
    "offload::stored::a_forgotten_wait_for_a_tensor_on_disk_is_found",
    "offload::stored::nobody_but_the_writer_waits_for_a_tensor_on_disk",
    "offload::a_forgotten_wait_for_a_saved_tensor_is_found",
    "offload::a_step_that_saves_on_the_host_neither_waits_nor_allocates",
    "offload::tensors_of_the_host_are_not_copied",
    "offload::stored::compressed_tensors_are_never_early_and_nothing_waits",
    "loading::a_cache_on_the_device_is_filled_beside_the_computation",
    "ranks::failures::collectives_of_two_groups_in_opposite_orders_are_found_by_the_fake",
    "profiling::the_monitor_samples_the_device",
    "loading::a_loader_begins_on_its_own_device_alone",
    "ranks::full::no_step_of_full_shards_waits_or_asks_for_memory",
    "ranks::full::a_step_of_full_shards_on_the_host_waits_twice",
    "ranks::no_step_waits_to_read_a_timer",
    "ranks::times_are_measured_where_they_are_asked_for",
    "loading::a_batch_dropped_early_is_found",
    "loading::a_loader_that_forgets_a_wait_is_found",
    "ranks::failures::a_cut_link_times_out_where_the_host_waits",
    "uploads::every_wait_is_counted",
    "uploads::what_the_driver_is_asked_for_is_counted_in_every_way",
    "the_tests_fail_where_their_stand_in_is_not_loaded",
    "uploads::transforms_upload_nothing",
    "uploads::rows_on_the_device_are_gathered_without_waiting",
    "uploads::a_cache_on_the_device_uploads_each_sample_once",
    "uploads::a_new_scale_is_set_without_waiting",
    "uploads::steps_fed_by_a_loader_neither_wait_nor_upload_more_than_the_batch",
    "uploads::accumulation_over_nccl_neither_waits_nor_uploads",
    "uploads::a_step_within_join_neither_waits_nor_uploads",
    "uploads::hooks_and_statistics_over_nccl_neither_wait_nor_upload",
    "optimizers::an_eight_bit_step_launches_equally_often_for_more_parameters",
    "loading::later_epochs_ask_the_driver_for_one_epoch_at_most",
    "loading::a_long_epoch_asks_the_driver_for_what_is_under_way_alone",
    "loading::nothing_is_early_or_on_another_device",
    "loading::tables_with_lists_go_to_the_device_without_waiting",
    "loading::a_missing_wait_is_found",
    "loading::a_missing_record_stream_is_found",
    "loading::a_pinned_buffer_used_again_is_found",
    "ranks::exchanges_are_pytorchs",
    "ranks::exchanges_begin_before_backward_ends",
    "ranks::a_split_asks_nccl_for_one_and_streams_are_of_the_priority_asked_for",
    "ranks::failures::a_dead_rank_is_lost",
    "ranks::failures::a_rank_that_has_lost_another_ends",
    "ranks::failures::a_mismatch_without_verifying_is_found_by_the_fake",
    "ranks::failures::a_hook_that_fails_is_told_where_it_fails",
    "failures::a_launch_that_fails_is_the_steps_error_and_the_next_step_works",
    "failures::a_kernel_that_fails_is_told_by_whatever_waits_next",
    "failures::a_lost_device_ends_an_epoch_with_an_error",
    "failures::a_full_device_ends_an_epoch_and_the_next_one_is_whole",
    "failures::a_full_device_leaves_an_optimizer_as_it_was",
    "poison::numbers_that_nobody_computed_fail_by_name",
    "poison::what_is_written_over_numbers_that_nobody_computed_is_known",
    "poison::memory_of_a_freed_tensor_is_poison",
    "poison::work_under_way_still_reads_a_freed_tensor",
    "poison::a_reset_keeps_what_has_read_poison",
    "poison::what_the_host_decides_reads_poison",
    "poison::what_the_host_decides_comes_in_its_order",
    "poison::a_result_that_the_host_does_without_is_poison",
    "reports::equal_waits_are_told_once_and_by_the_program",
    "reports::a_context_is_told_with_what_made_it",
    "reports::a_race_is_told_once",
    "reports::a_failure_that_nothing_meets_fails_its_test",
    "reports::what_a_test_sets_ends_with_it",
    "reports::variables_of_a_gpu_do_not_reach_the_stand_ins",
];

/// They run PyTorch's side too.
const BESIDE_PYTORCH: &[&str] = &[
    "compiled::a_step_compiled_for_the_device_launches_less_and_never_waits",
    "compiled::updates_compiled_for_the_device_are_the_formulas",
    "compiled::gradients_of_convolutions_that_compiled_code_asks_for_have_numbers",
    "compiled::steps_compiled_for_the_device_equal_uncompiled_ones",
    "ranks::exchanges_are_pytorchs",
    "ranks::no_step_waits_to_read_a_timer",
    "ranks::times_are_measured_where_they_are_asked_for",
];

/// Inductor starts a compiler.
const COMPILING: &[&str] = &[
    "compiled::a_step_compiled_for_the_device_launches_less_and_never_waits",
    "compiled::steps_compiled_for_the_device_equal_uncompiled_ones",
];

/// Each rank has a GPU of its own.
const GPUS: &[(&str, i64)] = &[
    ("ranks::full::no_step_of_full_shards_waits_or_asks_for_memory", 2),
    ("ranks::full::a_step_of_full_shards_on_the_host_waits_twice", 2),
    ("ranks::full::full_shards_of_1_over_nccl_equal_gloos", 1),
    ("ranks::full::full_shards_of_2_over_nccl_equal_gloos", 2),
    ("ranks::full::full_shards_of_4_over_nccl_equal_gloos", 4),
    ("ranks::full::full_shards_of_2_on_the_host_equal_gloos", 2),
    ("ranks::full::full_shards_of_2_on_disk_equal_gloos", 2),
    ("ranks::ddp_of_1_over_nccl_equals_gloos", 1),
    ("ranks::ddp_of_2_over_nccl_equals_gloos", 2),
    ("ranks::ddp_of_4_over_nccl_equals_gloos", 4),
    ("ranks::without_a_launcher_each_rank_uses_its_own_device", 2),
    ("ranks::parts::hooks_over_nccl_equal_gloos", 2),
    ("ranks::parts::statistics_of_uneven_batches_over_nccl_equal_gloos", 2),
    ("ranks::parts::join_over_nccl_equals_gloos", 2),
    ("ranks::offload::steps_on_the_host_over_nccl_equal_plain_ones_over_gloo", 2),
    ("ranks::failures::an_absent_rank_is_a_rendezvous_error", 2),
    ("ranks::failures::where_ranks_meet_anew_a_dead_one_times_out", 3),
    ("ranks::failures::a_first_exchange_waits_for_a_stalled_rank_without_a_limit", 3),
    ("ranks::failures::a_group_can_be_dropped_after_a_failure_and_in_a_panic", 3),
    ("ranks::failures::a_work_can_be_waited_for_again", 3),
    ("ranks::failures::those_that_live_go_on_in_a_new_group", 3),
    ("ranks::each_rank_has_a_device_of_its_own_or_is_told", 2),
    ("ranks::a_ring_sends_and_receives_in_one_batch", 3),
    ("ranks::groups_are_split_into_parts", 4),
    ("ranks::pools::memory_of_registered_pools_is_registered_before_collectives", 2),
    ("ranks::pools::pools_that_cannot_be_registered_are_errors", 2),
    ("ranks::pools::pools_end_before_and_after_their_groups", 2),
    ("ranks::pools::aborted_communicators_keep_their_pools", 2),
    ("ranks::pools::several_groups_register_one_pool", 2),
    ("ranks::pools::pools_are_used_by_one_thread_at_a_time", 2),
    ("ranks::failures::a_stalled_rank_times_out_where_the_host_waits", 3),
    ("ranks::failures::a_stalled_rank_ends_the_others_where_the_device_waits", 3),
    ("ranks::failures::a_frozen_rank_that_serves_the_store_ends_the_others", 2),
    ("ranks::failures::a_frozen_rank_that_serves_the_store_times_out_in_the_first_collective", 2),
    ("ranks::failures::a_mismatch_is_told_to_every_rank_that_verifies", 3),
    ("ranks::failures::a_model_that_differs_is_told_to_every_rank", 3),
    ("ranks::failures::what_is_under_way_can_be_dropped", 3),
];

/// An error if a name in these lists is no test's, or a test of ranks is in no list: with too few GPUs it would wait for
/// ever.
pub fn check(tests: &[&str]) -> Result<()> {
    let of_ranks = FAKE_ONLY.iter().copied().chain(GPUS.iter().map(|(name, _)| *name));
    let listed: Vec<&str> =
        [REAL_ONLY, BESIDE_PYTORCH, COMPILING].concat().into_iter().chain(of_ranks.clone()).collect();
    let unknown: Vec<&&str> = listed.iter().filter(|name| !tests.contains(name)).collect();
    ensure!(unknown.is_empty(), "no tests: {unknown:?}");
    let of_ranks: Vec<&str> = of_ranks.collect();
    let missing: Vec<&&str> =
        tests.iter().filter(|name| name.starts_with("ranks::") && !of_ranks.contains(name)).collect();
    ensure!(missing.is_empty(), "how many GPUs do they need? {missing:?}");
    Ok(())
}

/// Why a test cannot run here.
pub fn missing(name: &str) -> Option<String> {
    let is_fake = Fake::get().is_some();
    let gpus = GPUS.iter().find(|(test, _)| *test == name).map_or(1, |(_, gpus)| *gpus);
    let reason = if !Cuda::is_available() {
        "no CUDA device".to_owned()
    } else if is_fake && REAL_ONLY.contains(&name) {
        "only a real device can show it".to_owned()
    } else if !is_fake && FAKE_ONLY.contains(&name) {
        "only a fake device can show it".to_owned()
    } else if !is_fake && Cuda::device_count() < gpus {
        format!("it needs {gpus} GPUs")
    } else if COMPILING.contains(&name) && overdrive_compile::check_compiler().is_err() {
        "no C++ compiler".to_owned()
    } else if BESIDE_PYTORCH.contains(&name) && ranks::python().is_none() {
        "no Python with torch".to_owned()
    } else {
        return None;
    };
    Some(reason)
}
