//! How to distribute a training over GPUs, computed before anything is run.

mod candidate;
mod size;
mod text;

pub use candidate::{Candidate, Strategy};
pub use size::{Cluster, TrainingSize};

use serde::{Deserialize, Serialize};

use crate::ProfileError;

/// All strategies with their figures, and the recommended one. Made by [`choose_strategy`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StrategyChoice {
    /// The recommended strategy: it fits, and is chosen over a simpler one only if it is more than 5% faster. None if
    /// nothing fits.
    pub chosen: Option<Strategy>,
    /// All strategies that were considered, the simplest first.
    pub candidates: Vec<Candidate>,
    /// The training.
    pub size: TrainingSize,
    /// The cluster.
    pub cluster: Cluster,
}

/// Chooses how to distribute a training: data parallel, ZeRO stages, offload, or pipeline. It uses the stated formulas,
/// which ignore fragmentation, stragglers and the topology of the network. It is a model: measure what it recommends.
///
/// ```
/// use overdrive_profile::{Cluster, Strategy, TrainingSize, choose_strategy};
///
/// # fn main() -> Result<(), overdrive_profile::ProfileError> {
/// // 7 billion parameters in mixed precision with Adam: 16 bytes each, 112 GB in all.
/// let size = TrainingSize::mixed_precision_adam(7e9).activation_bytes(20e9).compute_seconds(1.5).layers(32);
/// // 8 GPUs of 80 GB, 400 GB/s between them.
/// let choice = choose_strategy(&size, &Cluster::new(8, 80e9, 400e9))?;
/// println!("{choice}");
/// assert_eq!(choice.chosen, Some(Strategy::Zero1));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Setting` for a figure that is negative, not a number, or 0 where it must not be, and for 0 GPUs.
///
/// # Source
/// Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054 (memory and volumes of the stages); Ren et al. 2021, ZeRO-Offload,
/// arXiv:2101.06840; Huang et al. 2019, GPipe, arXiv:1811.06965 (the bubble)
pub fn choose_strategy(size: &TrainingSize, cluster: &Cluster) -> Result<StrategyChoice, ProfileError> {
    size.check()?;
    cluster.check()?;
    let candidates = candidate::all(size, cluster);
    let mut chosen: Option<&Candidate> = None;
    for candidate in candidates.iter().filter(|it| it.fits) {
        // A few percent in a model do not justify a strategy that is harder to run.
        if chosen.is_none_or(|best| candidate.step_seconds < 0.95 * best.step_seconds) {
            chosen = Some(candidate);
        }
    }
    let chosen = chosen.map(|it| it.strategy);
    Ok(StrategyChoice { chosen, candidates, size: size.clone(), cluster: cluster.clone() })
}
