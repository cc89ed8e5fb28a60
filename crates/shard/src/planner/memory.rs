//! The bytes of a rank, as this crate and `overdrive-ddp` allocate them.

use super::workload::ELEMENT;
use super::{Cluster, Place, Workload};
use crate::deepspeed::ZeroStage;

/// Buckets of gradients and of new parameters.
const BUCKET: f64 = 25.0 * 1024.0 * 1024.0;
/// How many broadcasts of new parameters are under way.
const BROADCASTS: f64 = 4.0;
/// What a unit takes in the backward pass of stage 3, counted over Gloo: its parameters as they were received and as they are
/// used, and those of the next one;
const GATHERED: f64 = 3.0;
/// its gradients as they are computed, collected and sent, and those of the unit before.
const REDUCED: f64 = 4.6;
/// The same on one rank, where nothing is sent.
const ALONE: [f64; 2] = [2.0, 2.9];

pub(super) struct Memory {
    pub(super) device: f64,
    pub(super) host: f64,
    pub(super) disk: f64,
    pub(super) arithmetic: String,
}

pub(super) fn of(workload: &Workload, cluster: &Cluster, stage: ZeroStage, place: Place, recomputes: bool) -> Memory {
    let ranks = cluster.ranks as f64;
    let is_alone = cluster.ranks == 1;
    let parameters = ELEMENT * workload.elements();
    let gradients = parameters;
    let state = workload.state_bytes * workload.elements();
    let activations = if recomputes { workload.recomputed } else { workload.kept };
    let unit = workload.whole() * workload.largest();
    let (own_state, own_rows) = (state / ranks, parameters / ranks);
    let accumulates = workload.micro_batches > 1;
    // With a device that has a host: means of gradients on their way there, and pinned until the pass ends.
    let has_host = cluster.host.is_some();
    let copied = if has_host { 2.0 * ELEMENT * workload.largest() / ranks } else { 0.0 };

    // What is there at all times, what gradients a pass leaves, and what is on its way in between.
    let (always, left, (forward, backward, step), names) = match stage {
        ZeroStage::Disabled => {
            let buckets = if is_alone { 0.0 } else { gradients };
            let names = if is_alone { "parameters + state" } else { "parameters + state + buckets" };
            (parameters + state + buckets, gradients, (0.0, 0.0, 0.0), names)
        }
        ZeroStage::OptimizerStates => {
            let (buckets, sent) = if is_alone { (0.0, 0.0) } else { (gradients, BROADCASTS * BUCKET) };
            (
                parameters + own_state + buckets,
                gradients,
                (0.0, 0.0, sent.min(parameters)),
                "parameters + state / N + buckets",
            )
        }
        ZeroStage::Gradients => {
            let under_way = (2.0 * BUCKET).min(gradients);
            let sent = if is_alone { 0.0 } else { (BROADCASTS * BUCKET).min(parameters) };
            (parameters + own_state, gradients / ranks, (0.0, under_way, sent), "parameters + state / N")
        }
        ZeroStage::Parameters => {
            let part = if is_alone { 0.0 } else { 1.0 / ranks };
            let [gathers, reduces] = if is_alone { ALONE } else { [GATHERED, REDUCED] };
            let gathered = (gathers + part) * unit;
            let backward = gathered + (reduces + part) * ELEMENT * workload.largest();
            (own_rows + own_state, gradients / ranks, (gathered, backward, 0.0), "(parameters + state) / N + units")
        }
    };
    let held = if accumulates && stage != ZeroStage::Disabled { gradients } else { left };
    let carried = if accumulates { held } else { 0.0 };
    // The backward pass begins with nearly all activations, and ends with all gradients.
    let done = (2.0 / workload.units.len() as f64).min(1.0);
    let begins = carried.max(done * held) + (1.0 - done) * activations + backward;
    let peak = (carried + activations + forward).max(begins).max(held + backward).max(left + step);
    let (device, host, disk) = match (place, stage) {
        (Place::Device, _) => (always + peak, 0.0, 0.0),
        // Rows, means of gradients and state are there, all of them.
        (_, ZeroStage::Parameters) => {
            let away = own_rows + own_state + left;
            let device = carried + (activations + forward).max((1.0 - done) * activations + backward + copied);
            let pinned = if has_host { left } else { 0.0 };
            if place == Place::Host { (device, away, 0.0) } else { (device, pinned, away) }
        }
        // The copies of parameters and gradients that the host steps with.
        (Place::Host, _) => (always - own_state + peak, own_state + 2.0 * own_rows, 0.0),
        (Place::Disk, _) => {
            let copies = if has_host { 2.0 * own_rows } else { 0.0 };
            (always - own_state + peak, copies, own_state)
        }
    };
    let peaks = "the largest of activations, gradients and what is sent";
    let place = match place {
        Place::Device => "",
        Place::Host => ", less what is on the host",
        Place::Disk => ", less what is in files",
    };
    Memory { device, host, disk, arithmetic: format!("memory: {names} + {peaks}{place}") }
}
