//! What a run waits for, and what to do about it.

mod arithmetic;
mod caches;
mod data;
mod device;
mod facts;
mod finding;
mod host;
pub(crate) mod kernels;
mod memory;
mod optimizers;
mod places;
mod ranks;
mod text;
mod throttling;
mod watched;

pub use finding::{Bottleneck, Diagnosis, Finding};

use facts::Facts;

use crate::{Phase, RunProfile};

/// A finding takes at least this share of a step.
const LEAST_SHARE: f64 = 0.1;
/// If `Other` takes this share of a step or more, the program marks no phases.
const MOSTLY_UNMARKED: f64 = 0.9;

/// The share of the time in which a run's training thread waited for a CPU. None without samples of threads.
pub(crate) fn queued_share(run: &RunProfile) -> Option<f64> {
    Facts::of(run)?.compute_queued_share()
}

/// Findings about a rank's memory and clocks, from its own record.
pub(crate) fn of_machine(run: &RunProfile) -> Vec<Finding> {
    let Some(facts) = Facts::of(run) else { return Vec::new() };
    let throttling = device::findings(&facts).into_iter().filter(|it| it.bottleneck == Bottleneck::Throttling);
    memory::findings(&facts).into_iter().chain(throttling).collect()
}

/// The same for the other ranks, whose samples are not in the merged record; one finding of each kind.
fn of_other_ranks(run: &RunProfile, reported: &[Finding]) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    for info in run.rank_info.iter().filter(|info| info.rank != run.rank) {
        for finding in &info.findings {
            if reported.iter().chain(&found).all(|it| it.bottleneck != finding.bottleneck) {
                let mut finding = finding.clone();
                finding.evidence.insert(0, format!("found on rank {}", info.rank));
                found.push(finding);
            }
        }
    }
    found
}

impl Diagnosis {
    /// Finds what bounds a run, from its record.
    ///
    /// A finding is something avoidable that takes a tenth of a step or more, or that will end the run. Its
    /// [bound](Finding::speedup_bound) is the speed-up if all of its time is removed and nothing else changes; bounds
    /// of two findings do not multiply. Rules and thresholds are in `docs/profiling.md`.
    ///
    /// ```
    /// use overdrive_profile::{Diagnosis, Phase, RunRecorder, StepTimer};
    ///
    /// # fn main() -> Result<(), overdrive_profile::ProfileError> {
    /// let timer = StepTimer::builder().warmup_steps(2).record(RunRecorder::new().profiled_steps(0)).build()?;
    /// for step in 0..12 {
    ///     {
    ///         let _phase = timer.phase(Phase::DataWait);
    ///         std::thread::sleep(std::time::Duration::from_millis(5)); // a slow disk
    ///     }
    ///     let _phase = timer.phase(Phase::Forward);
    ///     // ..
    ///     timer.step(32);
    /// }
    /// let run = timer.finish()?;
    /// println!("{}", Diagnosis::of(&run));
    /// # // The same run with times that a busy machine does not change: the training thread is on no CPU.
    /// # use overdrive_profile::{Bottleneck, Sample, ThreadSample};
    /// # let mut run = run;
    /// # for report in run.steps.iter_mut().flat_map(|steps| &mut steps.phases) {
    /// #     report.share = if report.phase == Phase::DataWait { 0.9 } else { 0.0 };
    /// # }
    /// # let mut thread = ThreadSample::default();
    /// # thread.id = run.timer_thread;
    /// # run.samples = vec![Sample::default(); 2];
    /// # for (second, sample) in run.samples.iter_mut().enumerate() {
    /// #     (sample.elapsed_seconds, sample.threads) = (second as f64, vec![thread.clone()]);
    /// # }
    /// # let diagnosis = Diagnosis::of(&run);
    /// # assert_eq!(diagnosis.findings[0].bottleneck, Bottleneck::SlowRead, "{diagnosis}");
    /// # assert!(diagnosis.findings[0].share > 0.8, "{diagnosis}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn of(run: &RunProfile) -> Self {
        let mut unknown = Vec::new();
        let Some(facts) = Facts::of(run) else {
            unknown.push("no step was timed: there is nothing to diagnose".to_owned());
            return Self { bound_by: None, findings: Vec::new(), unknown };
        };
        if run.profiled.is_none() {
            unknown.push("no step was profiled: operators and the program's own code were not judged".to_owned());
        }
        if run.samples.is_empty() {
            unknown.push("there are no samples of the machine: memory, clocks and loading were not judged".to_owned());
        }
        if facts.threads.is_empty() && !run.samples.is_empty() {
            unknown.push("there are too few samples of the machine: loading was not judged".to_owned());
        }
        let queued = facts.queued_seconds() / facts.step_seconds;
        if queued >= LEAST_SHARE {
            unknown.push(format!(
                "the training thread waited for a CPU for {:.0}% of the time, because of other programs or more \
                 threads than CPUs (`tch::set_num_threads`, `.num_workers`); all figures include that",
                100.0 * queued
            ));
        }
        if run.share(Phase::Other) >= MOSTLY_UNMARKED && run.profiled.is_some() {
            unknown.push(
                "hardly any of a step is in a phase: mark some (`timer.phase(Phase::Forward)`), to learn more"
                    .to_owned(),
            );
        }
        unknown.extend(memory::note(&facts));
        unknown.extend(ranks::notes(&facts));
        unknown.extend(run.notes.iter().cloned());
        let rules = [data::findings, host::findings, device::findings, memory::findings, ranks::findings];
        let mut findings: Vec<Finding> = rules.iter().flat_map(|rule| rule(&facts)).collect();
        findings.extend(of_other_ranks(run, &findings));
        let ends_the_run = |finding: &Finding| finding.bottleneck == Bottleneck::MemoryGrowth;
        findings.sort_by(|one, other| {
            let gain = other.seconds_per_step.total_cmp(&one.seconds_per_step);
            ends_the_run(other).cmp(&ends_the_run(one)).then(gain)
        });
        let bound_by = findings.first().map(|finding| finding.bottleneck).or_else(|| host::healthy(&facts));
        Self { bound_by, findings, unknown }
    }
}
