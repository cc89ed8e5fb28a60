//! The bytes of a rank, as this crate and `overdrive-ddp` allocate them.

use super::workload::ELEMENT;
use super::{Cluster, Place, Workload};
use crate::deepspeed::ZeroStage;
use crate::zero::BUCKET_BYTES;

/// What a unit takes in the backward pass of stage 3, counted over Gloo: its parameters, and those of the next one;
const GATHERED: f64 = 2.0;
/// its gradients as they are computed, those of the unit before as they are sent, and those of activations: 3.4 to 4.4 units, by
/// when the other threads free what they have.
const REDUCED: f64 = 3.9;
/// The same on one rank, where nothing is sent.
const ALONE: [f64; 2] = [2.0, 2.9];

pub(super) struct Memory {
    pub(super) device: f64,
    pub(super) host: f64,
    pub(super) disk: f64,
    pub(super) arithmetic: String,
}

/// The bytes of a stage with all of it on the device.
struct Stage {
    /// There at all times.
    always: f64,
    /// Gradients that a pass leaves.
    gradients: f64,
    /// Besides, at the end of the forward pass and within the backward pass.
    forward: f64,
    backward: f64,
    names: &'static str,
}

impl Stage {
    fn of(stage: ZeroStage, workload: &Workload, cluster: &Cluster) -> Self {
        let (ranks, is_alone) = (cluster.ranks as f64, cluster.ranks == 1);
        let parameters = ELEMENT * workload.elements();
        let state = workload.state_bytes * workload.elements();
        // Gradients have as many bytes as parameters.
        let buckets = if is_alone { 0.0 } else { parameters };
        let nothing = Self { always: 0.0, gradients: parameters, forward: 0.0, backward: 0.0, names: "" };
        match stage {
            ZeroStage::Disabled => {
                let names = if is_alone { "parameters + state" } else { "parameters + state + buckets" };
                Self { always: parameters + state + buckets, names, ..nothing }
            }
            ZeroStage::OptimizerStates => {
                let always = parameters + state / ranks + buckets;
                Self { always, names: "parameters + state / N + buckets", ..nothing }
            }
            ZeroStage::Gradients => Self {
                always: parameters + state / ranks,
                gradients: parameters / ranks,
                backward: on_their_way(workload.largest_gradient()) + workload.largest_gradient(),
                names: "parameters + state / N",
                ..nothing
            },
            ZeroStage::Parameters => {
                let part = if is_alone { 0.0 } else { 1.0 / ranks };
                let [gathers, reduces] = if is_alone { ALONE } else { [GATHERED, REDUCED] };
                let forward = (gathers + part) * workload.whole() * workload.largest();
                Self {
                    always: (parameters + state) / ranks,
                    gradients: parameters / ranks,
                    forward,
                    backward: forward + (reduces + part) * ELEMENT * workload.largest(),
                    names: "(parameters + state) / N + units",
                }
            }
        }
    }
}

/// Gradients of stage 2 on their way: two, or four that are smaller than a bucket together.
fn on_their_way(gradient: f64) -> f64 {
    (2.0 * gradient).max((4.0 * gradient).min(BUCKET_BYTES as f64))
}

pub(super) fn of(workload: &Workload, cluster: &Cluster, stage: ZeroStage, place: Place, recomputes: bool) -> Memory {
    let ranks = cluster.ranks as f64;
    let own_state = workload.state_bytes * workload.elements() / ranks;
    let own_rows = ELEMENT * workload.elements() / ranks;
    let activations = if recomputes { workload.recomputed } else { workload.kept };
    let (is_stage_3, bytes) = (stage == ZeroStage::Parameters, Stage::of(stage, workload, cluster));
    let Stage { always, gradients, forward, backward, names } = bytes;
    // An accumulator keeps whole gradients from one micro-batch to the next.
    let carried = if workload.micro_batches > 1 { ELEMENT * workload.elements() } else { 0.0 };
    // The backward pass begins with nearly all activations, and ends with all gradients.
    let done = (2.0 / workload.units.len() as f64).min(1.0);
    let held = carried.max(gradients);
    let begins = carried.max(done * held) + (1.0 - done) * activations + backward;
    let peak = (carried + activations + forward).max(begins).max(held + backward);
    // With a device that has a host: means of gradients on their way there, and pinned until the pass ends.
    let has_host = cluster.host.is_some();
    let means = if has_host { 2.0 * ELEMENT * workload.largest() / ranks } else { 0.0 };
    let only_if = |holds: bool, bytes: f64| if holds { bytes } else { 0.0 };
    let (device, host, disk) = match place {
        Place::Device => (always + peak, 0.0, 0.0),
        // Rows, means of gradients and state are there, all of them.
        Place::Host | Place::Disk if is_stage_3 => {
            let away = own_rows + own_state + gradients;
            let backward = (1.0 - done) * activations + backward + means;
            let device = carried + (activations + forward).max(backward);
            match place {
                Place::Disk => (device, only_if(has_host, gradients), away),
                _ => (device, away, 0.0),
            }
        }
        // The copies of parameters and gradients that the host steps with.
        Place::Host => (always - own_state + peak, own_state + 2.0 * own_rows, 0.0),
        Place::Disk => (always - own_state + peak, only_if(has_host, 2.0 * own_rows), own_state),
    };
    let place = match place {
        Place::Device => "",
        Place::Host => ", less what is on the host",
        Place::Disk => ", less what is in files",
    };
    let arithmetic = format!("memory: {names} + the largest of activations, gradients and what is sent{place}");
    Memory { device, host, disk, arithmetic }
}
