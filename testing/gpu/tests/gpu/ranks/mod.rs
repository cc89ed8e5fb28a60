//! Ranks over NCCL: processes, this program again with a variable that tells it so, each on a device of its own.

mod buckets;
mod devices;
pub mod failures;
pub mod full;
pub mod offload;
pub mod parts;
pub mod pools;
#[path = "../../../../../crates/launch/tests/launch/port.rs"]
mod port;
mod processes;
mod ring;
mod splits;
mod steps;
mod training;

use std::time::Duration;

use anyhow::Result;
use overdrive::prelude::*;
use overdrive_ddp::{Backend, InitMethod};
use overdrive_fakecuda::{Fake, Pace};

pub use buckets::{exchanges_are_pytorchs, exchanges_begin_before_backward_ends, python};
pub use devices::{each_rank_has_a_device_of_its_own_or_is_told, without_a_launcher_each_rank_uses_its_own_device};
pub use processes::{Meeting, main_if_told, run_alone};
pub use ring::a_ring_sends_and_receives_in_one_batch;
pub use splits::{a_split_asks_nccl_for_one_and_streams_are_of_the_priority_asked_for, groups_are_split_into_parts};
pub use steps::{no_step_waits_to_read_a_timer, times_are_measured_where_they_are_asked_for};
pub use training::{ddp_of_1_over_nccl_equals_gloos, ddp_of_2_over_nccl_equals_gloos, ddp_of_4_over_nccl_equals_gloos};

/// What a rank can run. One that is alone has no group.
type Scenario = fn(&Meeting) -> Result<()>;
const SCENARIOS: &[(&str, Scenario)] = &[
    ("training", training::scenario),
    ("buckets", buckets::scenario),
    ("devices", devices::scenario),
    ("shared device", devices::shared),
    ("ring", ring::scenario),
    ("splits", splits::scenario),
    ("asked", splits::asked),
    ("failures", failures::scenario),
    ("parts", parts::scenario),
    ("pools", pools::scenario),
    ("full", full::scenario),
    ("steps", steps::scenario),
    ("offload", offload::scenario),
    ("loading", crate::loading::scenario),
    ("first loading", crate::loading::begins),
];

/// Longer than any test takes: no result depends on it.
const PATIENCE: Duration = Duration::from_secs(300);

/// The group of all ranks.
fn group(meeting: &Meeting, backend: Backend) -> Result<ProcessGroup> {
    let builder = ProcessGroup::builder(backend).timeout(PATIENCE);
    let builder = if backend == Backend::Nccl { builder.cuda_device(meeting.rank) } else { builder };
    let (rank, world_size) = (meeting.rank, meeting.size);
    Ok(builder.init(&InitMethod::File { path: meeting.file.clone(), rank, world_size })?)
}

/// The paces of a device by number: eager, lazy, and then by each seed from 1.
fn pace(number: u64) -> Pace {
    match number {
        0 => Pace::Eager,
        1 => Pace::Lazy,
        _ => Pace::Random(number - 1),
    }
}

/// Fails if this process has used another fake device than its own, or not that one.
pub fn uses_only(own: usize, devices: usize) -> Result<()> {
    let Some(fake) = Fake::get() else { return Ok(()) };
    for device in 0..devices {
        let (has_context, bytes) = (fake.has_context(device), fake.used_bytes(device));
        let is_used = has_context && bytes > 0;
        let is_untouched = !has_context && bytes == 0;
        anyhow::ensure!(
            if device == own { is_used } else { is_untouched },
            "the process of device {own} has {bytes} bytes on device {device}, and {} context there\n{}",
            if has_context { "a" } else { "no" },
            fake.context_origin(device)
        );
    }
    Ok(())
}
