//! The diagnosis of loops with a planted bottleneck: it has to be named, and named first. In healthy ones nothing is to be
//! found. They run one after the other, because they are timed; no test asserts a time.
//!
//! A machine that is busy with something else makes a loop wait that would not wait by itself. Where the record of a run
//! shows that it was, and the run is judged wrong, the loop is run again; but one run in [`MOST_RUNS`] has to be judged
//! right in every respect.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive_benches::planted::{self, Form, HEALTHY, PLANTS, Plant};
use overdrive_profile::{Bottleneck, Diagnosis, RunProfile};

/// How often a loop is run while the machine is busy with something else.
const MOST_RUNS: usize = 6;
/// CPUs that others use, and the share of the time in which a thread of the run waits for one, that spoil a run: a finding
/// takes twice that share.
const SPOILT: (f64, f64) = (0.1, 0.05);

fn main() -> Result<()> {
    if let Some(ended) = planted::main_if_told() {
        return ended;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials = PLANTS.iter().chain(&HEALTHY).map(|&plant| {
        let unmet = plant.needs.unmet();
        if let Some(reason) = unmet
            && !arguments.list
        {
            println!("{}: skipped: {reason}", plant.name);
        }
        let test = move || diagnose(&plant).map_err(|error| Failed::from(format!("{error:#}")));
        Trial::test(plant.name, test).with_ignored_flag(unmet.is_some())
    });
    libtest_mimic::run(&arguments, trials.collect()).exit()
}

fn diagnose(plant: &Plant) -> Result<()> {
    let mut runs = 0;
    loop {
        runs += 1;
        let run = plant.record(Form::Planted)?;
        let (judged, disturbed) = (judge(plant, &run), disturbance(plant, &run));
        let (Err(error), Some(disturbed)) = (&judged, disturbed) else { return judged };
        if runs == MOST_RUNS {
            return judged
                .context(format!("the machine was busy in all of {MOST_RUNS} runs, in the last one {disturbed}"));
        }
        let said = error.to_string();
        println!("{}, run {runs}: {disturbed}: {}", plant.name, said.lines().next().unwrap_or_default());
    }
}

/// What others have used of the machine, by the record itself, if threads of the run waited for CPUs meanwhile.
fn disturbance(plant: &Plant, run: &RunProfile) -> Option<String> {
    let (first, last) = run.samples.first().zip(run.samples.last())?;
    let seconds = last.elapsed_seconds - first.elapsed_seconds;
    let machine = last.system?.counters.cpu_seconds - first.system?.counters.cpu_seconds;
    let own = last.process?.counters.cpu_seconds - first.process?.counters.cpu_seconds;
    // The samples are of one rank; the others do as much.
    let others = (machine - plant.needs.processes() as f64 * own) / seconds;
    let queued = last.threads.iter().filter_map(|now| {
        let before = first.threads.iter().find(|it| it.id == now.id)?;
        Some((now.queued_seconds - before.queued_seconds) / seconds)
    });
    // Ranks wait for each other.
    let of_ranks = run.rank_info.iter().filter_map(|info| info.queued_share).sum();
    let queued = queued.fold(of_ranks, f64::max);
    // NaN, of no time at all, is no disturbance.
    (others >= SPOILT.0 && queued >= SPOILT.1).then(|| {
        format!("others used {others:.1} CPUs, a thread waited for one for {:.0}% of the time", 100.0 * queued)
    })
}

fn judge(plant: &Plant, run: &RunProfile) -> Result<()> {
    let diagnosis = Diagnosis::of(run);
    let report = || format!("{}\n{diagnosis:#?}", run.steps.as_ref().map_or(String::new(), ToString::to_string));
    let (expected, bound) = (plant.bottleneck, diagnosis.bound_by);
    if plant.is_healthy() {
        ensure!(diagnosis.findings.is_empty(), "a false alarm:\n{}", report());
        let is_right = bound == Some(expected) || bound.is_some() && bound == plant.or;
        ensure!(is_right, "not {expected:?} but {bound:?}:\n{}", report());
        return Ok(());
    }
    let first = diagnosis.findings.first().with_context(|| format!("nothing was found:\n{}", report()))?;
    ensure!(
        first.bottleneck == expected && bound == Some(expected),
        "{:?} comes first:\n{}",
        first.bottleneck,
        report()
    );
    let is_right_rank = expected != Bottleneck::Straggler || first.evidence[0].contains("rank 1");
    ensure!(is_right_rank, "not the slow rank:\n{}", report());
    ensure!(plant.scope.is_none() || first.scope.as_deref() == plant.scope, "not in its scope:\n{}", report());
    Ok(())
}
