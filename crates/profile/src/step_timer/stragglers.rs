//! Ranks that the others wait for.

use serde::{Deserialize, Serialize};

use super::statistics::{checked_seconds, low_median};
use super::{Phase, PhaseReport, StepReport};
use crate::ProfileError;

/// The ratio of the standard deviation to the median absolute deviation, for normally distributed times.
const MAD_TO_SIGMA: f64 = 1.4826;
/// Smaller differences, as a share of a step, are ignored.
const LEAST_SHARE: f64 = 0.02;

/// A rank that takes longer in a phase than the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Straggler {
    /// The index of its report.
    pub rank: usize,
    /// The phase in which it is slow.
    pub phase: Phase,
    /// Seconds of its median step in the phase.
    pub seconds: f64,
    /// The same of the median rank; of two ranks, the faster one's.
    pub typical_seconds: f64,
}

impl Straggler {
    /// Seconds per step that the others may have to wait.
    pub fn excess_seconds(&self) -> f64 {
        self.seconds - self.typical_seconds
    }
}

/// Names the ranks that are slower than the others in some phase, the slowest first, from one report of each rank.
///
/// A rank is named when its median time in a phase is more than `k` robust standard deviations (scaled median absolute
/// deviations) above the median of all ranks, and the difference is more than 2% of a step; 3 is a usual `k`. Times on
/// the device count if every report has them, else those on the host. [`Phase::Communication`] is ignored, because a
/// rank that waits there is a fast one. A slow rank cannot be found in a phase in which the others wait for it: when a
/// backward pass overlaps with all-reduces, all ranks take as long as the slowest.
///
/// Reports are sent by `serde`. The ranks of `overdrive-ddp` gather them by `group.all_gather_object(&report)?`, which
/// every rank has to call.
///
/// ```
/// use overdrive_profile::{Phase, StepReport, StepTimer, stragglers};
/// # use std::time::Duration;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let step_report = |rank: usize| -> Result<StepReport, overdrive_profile::ProfileError> {
/// #     let (forward, now) = (if rank == 2 { 9 } else { 5 }, std::sync::atomic::AtomicU64::new(0));
/// #     let now = std::sync::Arc::new(now);
/// #     let clock = now.clone();
/// #     let clock = move || Duration::from_millis(clock.load(std::sync::atomic::Ordering::Relaxed));
/// #     let timer = StepTimer::builder().warmup_steps(0).clock(clock).build()?;
/// #     let phase = timer.phase(Phase::Forward);
/// #     now.fetch_add(forward, std::sync::atomic::Ordering::Relaxed);
/// #     drop(phase);
/// #     timer.step(1);
/// #     Ok(timer.report().expect("a step"))
/// # };
/// // On each rank:
/// //     let reports = group.all_gather_object(&timer.report())?;
/// # let texts = (0..4).map(|rank| Ok(serde_json::to_string(&step_report(rank)?)?));
/// # let texts: Vec<String> = texts.collect::<Result<_, Box<dyn std::error::Error>>>()?;
/// let reports: Vec<StepReport> = texts.iter().map(|text| serde_json::from_str(text)).collect::<Result<_, _>>()?;
/// let slow = stragglers(&reports, 3.0)?;
/// assert_eq!((slow.len(), slow[0].rank, slow[0].phase), (1, 2, Phase::Forward));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Setting` for a negative or infinite `k`, and for a report with invalid times.
pub fn stragglers(reports: &[StepReport], k: f64) -> Result<Vec<Straggler>, ProfileError> {
    if !(k.is_finite() && k >= 0.0) {
        let problem = "should be a number of standard deviations, 0 or more".to_owned();
        return Err(ProfileError::Setting { name: "k", value: k.to_string(), problem });
    }
    let steps = reports.iter().map(|report| checked_seconds("median_seconds", report.median_seconds));
    let least = LEAST_SHARE * low_median(steps.collect::<Result<_, _>>()?);
    let on_device = reports.iter().all(|report| report.device.is_some());
    let mut found = Vec::new();
    for phase in Phase::ALL.into_iter().filter(|phase| *phase != Phase::Communication) {
        let mut times = Vec::with_capacity(reports.len());
        for report in reports {
            let phases = report.device.as_ref().filter(|_| on_device).map_or(&report.phases, |device| &device.phases);
            let of_phase =
                |phases: &[PhaseReport]| phases.iter().find(|it| it.phase == phase).map(|it| it.median_seconds);
            times.push(checked_seconds(phase.name(), of_phase(phases).unwrap_or(0.0))?);
        }
        let typical_seconds = low_median(times.clone());
        let deviation = low_median(times.iter().map(|time| (time - typical_seconds).abs()).collect());
        let bound = typical_seconds + (k * MAD_TO_SIGMA * deviation).max(least);
        let slow = times.iter().enumerate().filter(|(_, seconds)| **seconds > bound);
        found.extend(slow.map(|(rank, &seconds)| Straggler { rank, phase, seconds, typical_seconds }));
    }
    found.sort_by(|one, other| other.excess_seconds().total_cmp(&one.excess_seconds()));
    Ok(found)
}
