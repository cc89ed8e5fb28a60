//! What to partition, offload and compute again, worked out before anything is run.

mod cluster;
mod memory;
mod seconds;
#[cfg(test)]
mod tests;
mod text;
mod workload;

use crate::deepspeed::ZeroStage;
use crate::error::ShardError;

pub use cluster::Cluster;
pub use workload::Workload;

/// A few percent in a model do not justify a way that is harder to run.
const FASTER: f64 = 0.95;

/// Where the optimizer's state is, with stage 3 also this rank's rows of parameters and their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// On the device that computes.
    Device,
    /// In the memory of its host.
    Host,
    /// In files.
    Disk,
}

/// A way to train, with a rank's figures.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Candidate {
    /// What is partitioned over ranks.
    pub stage: ZeroStage,
    /// Where what is partitioned is.
    pub place: Place,
    /// Whether each unit's forward runs again in the backward pass.
    pub recomputes: bool,
    /// Bytes on the device at the peak of a step.
    pub device_bytes: f64,
    /// Bytes of the host's memory, if that is not the device's.
    pub host_bytes: f64,
    /// Bytes in files.
    pub disk_bytes: f64,
    /// Whether these fit.
    pub fits: bool,
    /// Bytes that a rank sends in a step.
    pub sent_bytes: f64,
    /// Seconds of a step.
    pub seconds: f64,
    /// What the figures are sums of.
    pub arithmetic: String,
    is_mixed: bool,
    micro_batches: usize,
}

/// All ways to train, with the recommended one. Made by [`Plan::new`].
///
/// The figures follow from what was given or measured, by the formulas that [`arithmetic`](Candidate::arithmetic) shows.
/// They are a model: fragmentation, stragglers and the network's topology are not in it.
///
/// ```
/// use overdrive_shard::planner::{Cluster, Place, Plan, Workload};
/// use overdrive_shard::deepspeed::ZeroStage;
///
/// # fn main() -> Result<(), overdrive_shard::ShardError> {
/// // 32 blocks of 400 million parameters in bfloat16 with AdamW, 20 GB of activations, 2 if blocks run again.
/// let model = Workload::new([400_000_000; 32]).mixed_precision().activations(20e9, 2e9).seconds(0.5, 1.0);
/// // 8 GPUs of 80 GB, 400 GB/s between them.
/// let plan = Plan::new(&model, &Cluster::new(8, 80e9, 400e9))?;
/// println!("{plan}");
/// let chosen = plan.chosen().expect("something fits");
/// assert_eq!((chosen.stage, chosen.place, chosen.recomputes), (ZeroStage::Parameters, Place::Device, false));
/// println!("{}", chosen.to_json());       // for `DeepSpeedConfig`, which builds it
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054; Ren et al., "ZeRO-Offload", 2021, arXiv:2101.06840; the memory of
/// buffers is that of this crate
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    workload: Workload,
    cluster: Cluster,
    candidates: Vec<Candidate>,
    chosen: Option<usize>,
}

impl Plan {
    /// Works out all ways, and recommends one that fits: a way is preferred to a simpler one if it is more than 5% faster.
    ///
    /// # Errors
    /// [`ShardError::Figure`] for a figure that is no number, negative, or 0 where it must not be.
    pub fn new(workload: &Workload, cluster: &Cluster) -> Result<Self, ShardError> {
        workload.check()?;
        cluster.check()?;
        let mut candidates = Vec::new();
        for (stage, place) in ways(cluster) {
            candidates.extend([false, true].map(|recomputes| candidate(workload, cluster, (stage, place), recomputes)));
        }
        let mut chosen: Option<usize> = None;
        for at in (0..candidates.len()).filter(|&at| candidates[at].fits) {
            if chosen.is_none_or(|best| candidates[at].seconds < FASTER * candidates[best].seconds) {
                chosen = Some(at);
            }
        }
        Ok(Self { workload: workload.clone(), cluster: cluster.clone(), candidates, chosen })
    }

    /// The recommended way; `None` if none fits.
    pub fn chosen(&self) -> Option<&Candidate> {
        self.chosen.map(|at| &self.candidates[at])
    }

    /// All ways, the simplest first.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }
}

/// The simplest first.
fn ways(cluster: &Cluster) -> Vec<(ZeroStage, Place)> {
    use ZeroStage::{Disabled, Gradients, OptimizerStates, Parameters};
    let stages: &[ZeroStage] =
        if cluster.ranks == 1 { &[Disabled] } else { &[Disabled, OptimizerStates, Gradients, Parameters] };
    let mut all: Vec<_> = stages.iter().map(|&stage| (stage, Place::Device)).collect();
    // One rank offloads by a stage, too, as a file of DeepSpeed's has to say it.
    let stages: &[ZeroStage] =
        if cluster.ranks == 1 { &[OptimizerStates, Parameters] } else { &[OptimizerStates, Gradients, Parameters] };
    if cluster.host.is_some() {
        all.extend(stages.iter().map(|&stage| (stage, Place::Host)));
    }
    if cluster.disk.is_some() {
        all.extend(stages.iter().map(|&stage| (stage, Place::Disk)));
    }
    all
}

fn candidate(
    workload: &Workload,
    cluster: &Cluster,
    (stage, place): (ZeroStage, Place),
    recomputes: bool,
) -> Candidate {
    let memory = memory::of(workload, cluster, stage, place, recomputes);
    let time = seconds::of(workload, cluster, stage, place, recomputes);
    let fits = memory.device <= cluster.usable()
        && memory.host <= cluster.host.map_or(0.0, |host| host.memory_bytes)
        && memory.disk <= cluster.disk.map_or(0.0, |disk| disk.free_bytes);
    Candidate {
        stage,
        place,
        recomputes,
        device_bytes: memory.device,
        host_bytes: memory.host,
        disk_bytes: memory.disk,
        fits,
        sent_bytes: time.sent,
        seconds: time.seconds,
        arithmetic: format!("{}; {}", memory.arithmetic, time.arithmetic),
        is_mixed: workload.is_mixed,
        micro_batches: workload.micro_batches,
    }
}

impl Candidate {
    /// What DeepSpeed's JSON says of it, from which a [`DeepSpeedConfig`](crate::deepspeed::DeepSpeedConfig) builds it:
    /// `zero_optimization`, `activation_checkpointing`, `gradient_accumulation_steps`, and for 16 bits `bf16`. Add the rest,
    /// and where something is on disk `nvme_path`. DeepSpeed reads it too.
    pub fn to_json(&self) -> serde_json::Value {
        use serde_json::json;
        let device = match self.place {
            Place::Device => None,
            Place::Host => Some("cpu"),
            Place::Disk => Some("nvme"),
        };
        let mut zero = serde_json::Map::from_iter([("stage".to_owned(), json!(self.stage.number()))]);
        if let Some(device) = device {
            zero.insert("offload_optimizer".to_owned(), json!({ "device": device }));
            if self.stage == ZeroStage::Parameters {
                zero.insert("offload_param".to_owned(), json!({ "device": device }));
            }
        }
        let mut all = serde_json::Map::from_iter([("zero_optimization".to_owned(), zero.into())]);
        if self.recomputes {
            all.insert("activation_checkpointing".to_owned(), json!({}));
        }
        if self.is_mixed {
            all.insert("bf16".to_owned(), json!({"enabled": true}));
        }
        if self.micro_batches > 1 {
            all.insert("gradient_accumulation_steps".to_owned(), json!(self.micro_batches));
        }
        all.into()
    }
}
