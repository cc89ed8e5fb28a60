//! Tests of training on a GPU. Without one, they run on a fake one; where libtorch has no CUDA code, each test prints
//! `skipped: no CUDA device` and counts as ignored.
#![forbid(unsafe_code)]

mod calibration;
mod compiled;
mod device;
mod draws;
mod failures;
mod limits;
mod loading;
mod memory;
mod offload;
mod optimizers;
mod poison;
mod profiling;
mod ranks;
mod reports;
mod requirements;
mod training;
mod turns;
mod uploads;

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive::prelude::*;
use overdrive_fakecuda::{Fake, Runs};
use tch::Cuda;

use device::{
    an_exhausted_device_is_out_of_memory, libtorch_sees_the_device, memory_is_counted_and_the_peak_can_be_reset,
    pinned_memory_is_pinned, tf32_changes_products_only_while_allowed,
};
use training::{
    a_fused_scaled_step_never_waits_for_the_device, a_step_that_overflows_is_skipped_on_the_device,
    accumulation_equals_the_large_batch, an_unfused_step_waits_once_to_read_the_flag, autocast_casts_on_the_device,
    float16_training_learns,
};

const GPU: Device = Device::Cuda(0);
const FLOAT: (Kind, Device) = (Kind::Float, GPU);

/// What a test compares: what the device was asked to do, which any stand-in shows, or what it computed.
const CONTROL_FLOW: &str = "control flow";
const NUMBERS: &str = "numbers";
/// Codes and counts that a real device and the stand-in have to agree on.
const CALIBRATION: &str = "calibration";

/// Tests with the names of their functions, and what they compare.
macro_rules! trials {
    ($kind:expr; $($test:path),* $(,)?) => { vec![$((stringify!($test), $test as fn() -> Result<()>, $kind)),*] };
}

fn main() -> Result<ExitCode> {
    if let Some(code) = ranks::main_if_told() {
        return Ok(code);
    }
    let runs = overdrive_fakecuda::start(1)?;
    if let Some(fake) = Fake::get() {
        fake.compute().map_err(anyhow::Error::msg)?;
    }
    if let Some(result) = compiled::main_if_told() {
        return result.map(|()| ExitCode::SUCCESS);
    }
    let left_out = overdrive_fakecuda::LEFT_OUT;
    let may_lack_cuda = runs == Runs::OnNothing || !left_out.is_empty();
    ensure!(may_lack_cuda || Cuda::is_available(), "on {runs}, but libtorch finds none");
    println!("on {runs}{}{left_out}", if left_out.is_empty() { "" } else { "; no stand-ins: " });
    let mut arguments = Arguments::from_args();
    // A real device is shared by all.
    let threads = arguments.test_threads.unwrap_or(2);
    arguments.test_threads = Some(if Fake::get().is_some() { threads } else { 1 });
    let mut tests = trials![
        CONTROL_FLOW;
        the_tests_fail_where_their_stand_in_is_not_loaded,
        limits::a_test_that_hangs_fails_and_the_next_one_runs,
        libtorch_sees_the_device,
        memory_is_counted_and_the_peak_can_be_reset,
        an_exhausted_device_is_out_of_memory,
        pinned_memory_is_pinned,
        a_fused_scaled_step_never_waits_for_the_device,
        an_unfused_step_waits_once_to_read_the_flag,
        loading::nothing_is_early_or_on_another_device,
        loading::a_loader_begins_on_its_own_device_alone,
        loading::batches_need_no_more_memory_where_the_host_is_ahead,
        loading::later_epochs_ask_the_driver_for_one_epoch_at_most,
        loading::a_long_epoch_asks_the_driver_for_what_is_under_way_alone,
        loading::the_last_batch_is_free_when_its_epoch_has_ended,
        loading::a_cache_on_the_device_is_filled_beside_the_computation,
        loading::a_cache_on_the_device_keeps_the_samples_alone,
        loading::batches_ahead_take_no_more_than_the_devices_budget,
        loading::tables_with_lists_go_to_the_device_without_waiting,
        loading::a_missing_wait_is_found,
        loading::a_missing_record_stream_is_found,
        loading::a_pinned_buffer_used_again_is_found,
        loading::a_batch_dropped_early_is_found,
        loading::a_loader_that_forgets_a_wait_is_found,
        uploads::every_wait_is_counted,
        uploads::what_the_driver_is_asked_for_is_counted_in_every_way,
        uploads::transforms_upload_nothing,
        uploads::rows_on_the_device_are_gathered_without_waiting,
        uploads::a_cache_on_the_device_uploads_each_sample_once,
        uploads::a_new_scale_is_set_without_waiting,
        uploads::steps_fed_by_a_loader_neither_wait_nor_upload_more_than_the_batch,
        uploads::pinned_memory_is_not_cleared,
        uploads::accumulation_over_nccl_neither_waits_nor_uploads,
        uploads::a_step_within_join_neither_waits_nor_uploads,
        uploads::hooks_and_statistics_over_nccl_neither_wait_nor_upload,
        memory::functions_that_run_again_never_wait,
        memory::device_memory_is_known_by_use_and_ahead,
        memory::the_caching_allocator_is_reached,
        offload::tensors_saved_on_the_host_are_never_early,
        offload::a_forgotten_wait_for_a_saved_tensor_is_found,
        offload::a_step_that_saves_on_the_host_neither_waits_nor_allocates,
        offload::saved_tensors_leave_the_device,
        offload::a_saved_tensor_that_changes_before_its_copy_is_an_error,
        offload::tensors_of_the_host_are_not_copied,
        offload::stored::tensors_saved_on_disk_are_never_early,
        offload::stored::tensors_saved_on_disk_leave_the_device,
        offload::stored::a_forgotten_wait_for_a_tensor_on_disk_is_found,
        offload::stored::nobody_but_the_writer_waits_for_a_tensor_on_disk,
        offload::stored::a_tensor_that_changes_after_it_was_saved_on_disk_is_the_one_that_was_saved,
        offload::stored::compressed_tensors_are_never_early_and_nothing_waits,
        offload::steps::steps_on_the_host_are_never_early,
        offload::steps::a_forgotten_wait_for_a_step_on_the_host_is_found,
        offload::steps::a_step_on_the_host_waits_once_and_allocates_nothing,
        offload::steps::gradients_that_are_freed_leave_the_device,
        offload::steps::what_does_not_fit_a_step_on_the_host_is_refused,
        offload::steps::weights_that_were_written_unnoticed_are_copied_when_that_is_said,
        offload::steps::a_step_whose_last_copies_fail_is_completed_by_the_next_call,
        offload::steps::a_step_with_state_on_disk_waits_once,
        offload::overlap::a_parameter_is_never_used_before_its_copy,
        offload::overlap::a_forgotten_wait_for_a_parameter_is_found,
        offload::overlap::a_layer_waits_for_its_own_parameters_alone,
        offload::overlap::copies_run_beside_the_layers,
        offload::overlap::an_access_past_the_operators_is_an_error_until_it_waits,
        offload::overlap::weights_are_saved_and_optimizers_are_built_while_copies_are_under_way,
        offload::overlap::a_step_whose_overlapping_copies_fail_is_completed_by_the_next_call,
        optimizers::an_eight_bit_step_launches_equally_often_for_more_parameters,
        failures::a_launch_that_fails_is_the_steps_error_and_the_next_step_works,
        failures::a_kernel_that_fails_is_told_by_whatever_waits_next,
        failures::a_lost_device_ends_an_epoch_with_an_error,
        failures::a_full_device_ends_an_epoch_and_the_next_one_is_whole,
        failures::a_full_device_gives_a_model_its_weights_back,
        failures::a_full_device_leaves_an_optimizer_as_it_was,
        failures::a_device_that_does_not_exist_is_named,
        poison::numbers_that_nobody_computed_fail_by_name,
        poison::what_is_written_over_numbers_that_nobody_computed_is_known,
        poison::memory_of_a_freed_tensor_is_poison,
        poison::work_under_way_still_reads_a_freed_tensor,
        poison::a_reset_keeps_what_has_read_poison,
        poison::what_the_host_decides_reads_poison,
        poison::what_the_host_decides_comes_in_its_order,
        poison::a_result_that_the_host_does_without_is_poison,
        reports::equal_waits_are_told_once_and_by_the_program,
        reports::a_context_is_told_with_what_made_it,
        reports::a_race_is_told_once,
        reports::a_failure_that_nothing_meets_fails_its_test,
        reports::what_a_test_sets_ends_with_it,
        reports::variables_of_a_gpu_do_not_reach_the_stand_ins,
        ranks::failures::an_absent_rank_is_a_rendezvous_error,
        ranks::failures::a_dead_rank_is_lost,
        ranks::failures::a_rank_that_has_lost_another_ends,
        ranks::failures::where_ranks_meet_anew_a_dead_one_times_out,
        ranks::failures::a_first_exchange_waits_for_a_stalled_rank_without_a_limit,
        ranks::failures::a_group_can_be_dropped_after_a_failure_and_in_a_panic,
        ranks::each_rank_has_a_device_of_its_own_or_is_told,
        ranks::failures::a_work_can_be_waited_for_again,
        ranks::failures::those_that_live_go_on_in_a_new_group,
        ranks::failures::a_stalled_rank_times_out_where_the_host_waits,
        ranks::failures::a_stalled_rank_ends_the_others_where_the_device_waits,
        ranks::failures::a_frozen_rank_that_serves_the_store_ends_the_others,
        ranks::failures::a_frozen_rank_that_serves_the_store_times_out_in_the_first_collective,
        ranks::failures::a_cut_link_times_out_where_the_host_waits,
        ranks::failures::a_mismatch_is_told_to_every_rank_that_verifies,
        ranks::failures::a_mismatch_without_verifying_is_found_by_the_fake,
        ranks::failures::collectives_of_two_groups_in_opposite_orders_are_found_by_the_fake,
        ranks::failures::a_model_that_differs_is_told_to_every_rank,
        ranks::failures::a_hook_that_fails_is_told_where_it_fails,
        ranks::failures::what_is_under_way_can_be_dropped,
        ranks::exchanges_are_pytorchs,
        ranks::exchanges_begin_before_backward_ends,
        ranks::full::no_step_of_full_shards_waits_or_asks_for_memory,
        ranks::full::a_step_of_full_shards_on_the_host_waits_twice,
        ranks::no_step_waits_to_read_a_timer,
        ranks::times_are_measured_where_they_are_asked_for,
        ranks::without_a_launcher_each_rank_uses_its_own_device,
        profiling::the_profiler_sees_the_device,
        profiling::the_monitor_samples_the_device,
        profiling::the_monitor_samples_a_real_device,
        profiling::phases_on_the_device_are_timed_without_waiting,
        compiled::updates_compiled_for_the_device_are_the_formulas,
        compiled::gradients_of_convolutions_that_compiled_code_asks_for_have_numbers,
        compiled::a_step_compiled_for_the_device_launches_less_and_never_waits,
        compiled::steps_are_recorded_for_this_device_and_refused_for_another,
    ];
    tests.extend(trials![
        NUMBERS;
        draws::draws_differ_and_are_those_of_the_seed,
        draws::draws_of_several_kinds_depend_on_their_order,
        draws::the_hosts_generator_does_not_move_for_the_device,
        autocast_casts_on_the_device,
        tf32_changes_products_only_while_allowed,
        memory::functions_run_again_on_the_device,
        memory::functions_of_the_host_s_tensors_draw_the_same_on_the_device,
        offload::tensors_saved_elsewhere_give_the_same_gradients,
        offload::stored::compressed_tensors_of_the_device_are_those_of_the_host,
        offload::stored::masks_of_the_device_take_a_bit_and_gradients_are_the_same,
        offload::checkpointed_functions_run_again_with_inputs_from_the_host,
        offload::steps::steps_on_the_host_equal_those_of_a_cpu,
        optimizers::fused_adamw_on_the_device_equals_the_host,
        optimizers::fused_sgd_on_the_device_equals_the_host,
        optimizers::every_optimizer_on_the_device_equals_the_host_and_never_waits,
        optimizers::eight_bit_averages_on_the_device_equal_the_hosts,
        optimizers::steps_in_backward_run_on_the_device,
        a_step_that_overflows_is_skipped_on_the_device,
        accumulation_equals_the_large_batch,
        float16_training_learns,
        loading::batches_arrive_whole_from_every_source,
        loading::lists_of_tables_arrive_whole,
        uploads::a_pinned_tensor_may_change_after_its_upload,
        ranks::ddp_of_1_over_nccl_equals_gloos,
        ranks::ddp_of_2_over_nccl_equals_gloos,
        ranks::ddp_of_4_over_nccl_equals_gloos,
        ranks::full::full_shards_of_1_over_nccl_equal_gloos,
        ranks::full::full_shards_of_2_over_nccl_equal_gloos,
        ranks::full::full_shards_of_4_over_nccl_equal_gloos,
        ranks::full::full_shards_of_2_on_the_host_equal_gloos,
        ranks::full::full_shards_of_2_on_disk_equal_gloos,
        ranks::a_ring_sends_and_receives_in_one_batch,
        ranks::groups_are_split_into_parts,
        ranks::pools::memory_of_registered_pools_is_registered_before_collectives,
        ranks::pools::pools_that_cannot_be_registered_are_errors,
        ranks::pools::pools_end_before_and_after_their_groups,
        ranks::pools::aborted_communicators_keep_their_pools,
        ranks::pools::several_groups_register_one_pool,
        ranks::pools::pools_are_used_by_one_thread_at_a_time,
        ranks::a_split_asks_nccl_for_one_and_streams_are_of_the_priority_asked_for,
        ranks::parts::hooks_over_nccl_equal_gloos,
        ranks::parts::statistics_of_uneven_batches_over_nccl_equal_gloos,
        ranks::parts::join_over_nccl_equals_gloos,
        ranks::offload::steps_on_the_host_over_nccl_equal_plain_ones_over_gloo,
        compiled::steps_compiled_for_the_device_equal_uncompiled_ones,
    ]);
    tests.extend(trials![
        CALIBRATION;
        calibration::invalid_ordinals_are_refused,
        calibration::an_error_is_kept_until_it_is_read,
        calibration::an_error_belongs_to_its_thread,
        calibration::memory_is_freed_once,
        calibration::too_much_memory_is_refused_and_the_rest_goes_on,
        calibration::addresses_tell_their_memory,
        calibration::memory_of_a_pool_is_freed_in_stream_order,
        calibration::a_device_is_no_peer_of_itself,
        calibration::only_a_used_device_has_a_context,
        calibration::an_event_that_was_never_recorded_is_done,
        calibration::time_needs_two_recorded_events_with_timing,
        calibration::a_stream_waits_for_an_event_of_another,
        calibration::the_legacy_stream_and_blocking_streams_wait_for_each_other,
        calibration::a_stream_that_was_waited_for_is_done,
        calibration::a_function_of_the_host_runs_in_stream_order,
        calibration::a_destroyed_stream_finishes_its_work,
        calibration::captured_work_runs_at_each_launch,
        calibration::a_capture_begins_once_and_not_on_the_legacy_stream,
        calibration::a_captured_stream_cannot_be_waited_for,
        calibration::a_captured_stream_cannot_be_queried,
        calibration::a_device_with_a_capture_cannot_be_waited_for,
        calibration::memory_is_not_allocated_in_a_global_capture,
        calibration::memory_is_allocated_in_a_relaxed_capture,
        calibration::a_relaxed_thread_allocates_in_a_global_capture,
        calibration::a_thread_local_capture_lets_other_threads_allocate,
        calibration::only_the_thread_that_began_a_capture_ends_it,
        calibration::any_thread_ends_a_relaxed_capture,
        calibration::a_fork_that_is_joined_is_captured,
        calibration::a_fork_that_is_not_joined_is_refused,
        calibration::a_capture_ends_where_it_began,
        calibration::a_captured_event_cannot_be_waited_for,
        calibration::a_capture_does_not_wait_for_work_outside,
        calibration::captures_are_not_merged,
        calibration::the_legacy_stream_does_not_depend_on_a_captured_one,
        calibration::an_elementwise_operator_is_one_kernel,
        calibration::a_list_of_tensors_is_one_kernel,
        calibration::copies_say_where_from_and_who_waits,
        calibration::freed_memory_is_used_again,
    ]);
    requirements::check(&tests.iter().map(|(name, ..)| *name).collect::<Vec<_>>())?;
    match Fake::get() {
        Some(_) => tests.sort_by_key(|(name, ..)| turns::order(name)),
        // Those last that may wait for long.
        None => {
            tests.retain(|(name, ..)| !limits::has_run(name));
            tests.sort_by_key(|(name, ..)| turns::has_processes_of_its_own(name));
        }
    }
    let trials = tests.into_iter().map(|(name, test, kind)| {
        let missing = requirements::missing(name);
        if let Some(reason) = missing.as_ref().filter(|_| !arguments.list) {
            println!("{name}: skipped: {reason}");
        }
        let run = move || match Fake::get() {
            Some(_) => turns::run(name, kind, test),
            None => limits::run(name, || turns::run(name, kind, test)),
        };
        let trial = Trial::test(name, move || run().map_err(|error| Failed::from(format!("{error:#}"))));
        trial.with_kind(kind).with_ignored_flag(missing.is_some())
    });
    let conclusion = libtest_mimic::run(&arguments, trials.chain(limits::examples()).collect());
    Ok(if conclusion.has_failed() || limits::was_exceeded() { ExitCode::from(101) } else { ExitCode::SUCCESS })
}

/// The fake device, for a test that is listed in `requirements::FAKE_ONLY`.
fn fake() -> Result<Fake> {
    Fake::get().context("only a fake device can show it")
}

fn the_tests_fail_where_their_stand_in_is_not_loaded() -> Result<()> {
    ensure!(overdrive_fakecuda::fails_without_stand_ins()?, "they would be skipped");
    Ok(())
}
