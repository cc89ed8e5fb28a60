//! The upper bound of a remedy's gain, as the diagnosis gives it, against the measured gain.

use anyhow::{Context, Result, bail};
use overdrive_bench_report::{MissingPeer, Ratio, Target, VersusRow};
use overdrive_profile::{Bottleneck, Diagnosis, RunProfile};

use crate::planted::{Form, PLANTS, Plant};
use crate::versus::turns::Findings;

const PAIRS: u32 = 5;
const BOUND: &str = "the diagnosis' bound";
const GROWTH: &str = "the growth that the diagnosis names";

pub fn compare(pairs: Option<u32>, findings: &mut Findings) -> Result<()> {
    let pairs = pairs.unwrap_or(PAIRS);
    for plant in &PLANTS {
        match row(plant, pairs)? {
            Ok(row) => findings.rows.push(row),
            Err(reason) => findings.missing.push(MissingPeer {
                case: format!("loop with {}", plant.name),
                peer_name: BOUND.to_owned(),
                reason,
            }),
        }
    }
    Ok(())
}

/// The row of a loop, or the reason why there is none.
fn row(plant: &Plant, pairs: u32) -> Result<Result<VersusRow, String>> {
    if let Some(reason) = plant.needs.unmet() {
        return Ok(Err(reason.to_owned()));
    }
    let (mut gains, mut bounds) = (Vec::new(), Vec::new());
    for pair in 1..=pairs {
        eprintln!("profile, {}: {pair} of {pairs}", plant.name);
        let (planted, remedied) = (plant.record(Form::Planted)?, plant.record(Form::Remedied)?);
        match gain_and_bound(plant, &planted, &remedied) {
            Ok((gain, bound)) => {
                gains.push(gain);
                bounds.push(bound);
            }
            Err(error) => return Ok(Err(format!("{error:#}"))),
        }
    }
    let (what, peer, unit) = match plant.bottleneck {
        Bottleneck::MemoryGrowth => {
            ("no bound of speed, but memory that a step leaves behind, taken away by the remedy", GROWTH, "MB")
        }
        _ => ("times faster with the remedy", BOUND, "times"),
    };
    let case = format!("loop with {}: {what}", plant.name);
    let target = Some(Target::Within(0.15));
    let row = VersusRow::of_pairs(&case, peer, unit, (&gains, &bounds), Ratio::ShareOfCost, target);
    Ok(row.map(VersusRow::limit).map_err(|error| error.to_string()))
}

/// The measured speed-up by the remedy, and the diagnosis' bound of it. A loop that leaks memory does not get faster:
/// there it is the memory growth that the remedy removes, in MB per step, as measured and as the diagnosis names it.
fn gain_and_bound(plant: &Plant, planted: &RunProfile, remedied: &RunProfile) -> Result<(f64, f64)> {
    let diagnosis = Diagnosis::of(planted);
    let Some(finding) = diagnosis.findings.first().filter(|finding| finding.bottleneck == plant.bottleneck) else {
        bail!("the diagnosis does not name it first, but {:?}", diagnosis.findings.first().map(|it| it.bottleneck));
    };
    if finding.bottleneck == Bottleneck::MemoryGrowth {
        return Ok((growth(planted)? - growth(remedied)?, finding.bytes_per_step / 1e6));
    }
    Ok((step_seconds(planted)? / step_seconds(remedied)?, finding.speedup_bound()))
}

fn step_seconds(run: &RunProfile) -> Result<f64> {
    run.mean_step_seconds().context("no step was timed")
}

/// Growth of resident memory in MB per timed step.
fn growth(run: &RunProfile) -> Result<f64> {
    let timed = run.step_times.iter().filter(|step| !step.is_profiled).map(|step| step.start_seconds);
    let (begin, end) = timed.fold((f64::INFINITY, 0.0f64), |(first, last), time| (first.min(time), last.max(time)));
    let samples = run.samples.iter().filter(|sample| (begin..=end).contains(&sample.elapsed_seconds));
    let resident: Vec<(f64, f64)> = samples
        .filter_map(|sample| Some((sample.elapsed_seconds, sample.process?.resident_memory_bytes as f64)))
        .collect();
    let [(first_time, first_bytes), .., (last_time, last_bytes)] = resident[..] else {
        bail!("there are too few samples of memory");
    };
    Ok((last_bytes - first_bytes) / 1e6 / (last_time - first_time) * step_seconds(run)?)
}
