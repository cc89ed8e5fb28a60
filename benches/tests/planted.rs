//! The diagnosis of loops with a planted bottleneck: it has to be named, and named first. In healthy ones nothing is to be
//! found. They run one after the other, because they are timed; no test asserts a time.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive_benches::planted::{self, Form, HEALTHY, PLANTS, Plant};
use overdrive_profile::{Bottleneck, Diagnosis};

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
    let run = plant.record(Form::Planted)?;
    let diagnosis = Diagnosis::of(&run);
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
