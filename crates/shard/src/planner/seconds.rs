//! The seconds of a step.

use super::workload::ELEMENT;
use super::{Cluster, Place, Workload};
use crate::deepspeed::ZeroStage;

pub(super) struct Seconds {
    pub(super) sent: f64,
    pub(super) seconds: f64,
    pub(super) arithmetic: String,
}

pub(super) fn of(workload: &Workload, cluster: &Cluster, stage: ZeroStage, place: Place, recomputes: bool) -> Seconds {
    let (ranks, passes) = (cluster.ranks as f64, workload.micro_batches as f64);
    // What a rank sends of each byte that all have to get, in a ring.
    let ring = (ranks - 1.0) / ranks;
    let parameters = ELEMENT * workload.elements();
    let wholes = workload.whole() * workload.elements();
    let state = workload.state_bytes * workload.elements();
    let share = if stage == ZeroStage::Disabled { 1.0 } else { 1.0 / ranks };

    let backward = workload.backward + if recomputes { workload.forward } else { 0.0 };
    let computes = passes * (workload.forward + backward);
    // Sent while something computes, and after the step.
    let (beside, after, hides, volume) = match stage {
        ZeroStage::Disabled => (2.0 * ring * parameters, 0.0, backward, "2 (N-1)/N gradients"),
        ZeroStage::OptimizerStates => {
            (2.0 * ring * parameters, ring * parameters, backward, "(N-1)/N (2 gradients + parameters)")
        }
        ZeroStage::Gradients => (ring * parameters, ring * parameters, backward, "(N-1)/N (gradients + parameters)"),
        ZeroStage::Parameters => {
            let gathers = 2.0 * passes * ring * wholes;
            (gathers + ring * parameters, 0.0, computes, "(N-1)/N (gradients + 2 parameters a pass)")
        }
    };
    let link = |bytes: f64| if bytes == 0.0 { 0.0 } else { bytes / cluster.link_bytes_per_second };
    // A step reads parameters, gradients and state, and writes parameters and state.
    let updated = share * (3.0 * parameters + 2.0 * state);
    let (copies, update) = match place {
        Place::Device => (0.0, updated / cluster.update_bytes_per_second),
        _ => {
            let (over, on_host) = match cluster.host {
                Some(host) => (host.link_bytes_per_second, host.update_bytes_per_second),
                None => (f64::INFINITY, cluster.update_bytes_per_second),
            };
            let disk = cluster.disk.filter(|_| place == Place::Disk).map_or(f64::INFINITY, |it| it.bytes_per_second);
            let stepped = updated / on_host + share * 2.0 * state / disk;
            match stage {
                // Rows go to the device in each pass, and come back as means of gradients.
                ZeroStage::Parameters => {
                    let moved = share * (2.0 * passes * wholes + parameters);
                    (moved / over.min(disk), stepped + share * 2.0 * parameters / disk)
                }
                _ => (0.0, stepped + 2.0 * share * parameters / over),
            }
        }
    };
    let exposed = (link(beside) + copies - hides).max(0.0);
    let seconds = computes + exposed + link(after) + update;
    let arithmetic = format!(
        "seconds: {computes:.3} computing + {exposed:.3} sending what computing does not hide + {:.3} sending after the \
         step + {update:.3} stepping; sends {volume}",
        link(after)
    );
    Seconds { sent: beside + after, seconds, arithmetic }
}
