//! Finds the techniques of the combined contender by trying them.

use anyhow::Result;
use overdrive_bench_report::{Contender, DeviceKind, Workload};

use super::job::Job;

/// The least gain in speed for which a technique is kept: less may be noise.
pub const MIN_GAIN: f64 = 0.02;
/// Techniques that exclude each other: sources of batches, and precisions.
const GROUPS: [&[Contender]; 2] =
    [&[Contender::Prefetch, Contender::CachePrefetch, Contender::DeviceData], &[Contender::Bf16, Contender::Fp16]];

/// The techniques to try.
pub fn all(job: &Job) -> Vec<Contender> {
    let cuda = job.device == DeviceKind::Cuda;
    let techniques = job.workload.contenders(cuda).into_iter().filter(|it| it.is_technique());
    // It saves memory, not time.
    let techniques = techniques.filter(|it| *it != Contender::Accumulate);
    techniques.filter(|it| *it != Contender::Compiled || job.compiles).collect()
}

/// The techniques that usually gain.
pub fn usual(job: &Job) -> Vec<Contender> {
    // The digits fit into one tensor, which is faster than a loader.
    let loader = [Contender::Prefetch, Contender::CachePrefetch];
    let is_usual = |it: &Contender| match it {
        Contender::Fp16 => false,
        Contender::Bf16 => job.has_bf16,
        it => job.workload != Workload::Digits || !loader.contains(it),
    };
    all(job).into_iter().filter(is_usual).fold(Vec::new(), with)
}

/// Adds a technique, in place of another one of its group.
fn with(mut parts: Vec<Contender>, part: Contender) -> Vec<Contender> {
    if let Some(group) = GROUPS.iter().find(|group| group.contains(&part)) {
        parts.retain(|other| !group.contains(other));
    }
    parts.push(part);
    parts
}

/// Leaves out a technique, and those that do nothing without it.
fn without(mut parts: Vec<Contender>, part: Contender) -> Vec<Contender> {
    const NEED_A_LOADER: [Contender; 2] = [Contender::TakeTurns, Contender::ScaledDecode];
    parts.retain(|other| *other != part && !(part == Contender::Prefetch && NEED_A_LOADER.contains(other)));
    parts
}

/// What was chosen by trying.
pub struct Choice {
    /// The fastest job.
    pub job: Job,
    /// The techniques that gained nothing, or failed.
    pub left_out: Vec<Contender>,
    /// Why techniques failed.
    pub failures: Vec<String>,
}

/// Tries the job's techniques one after the other. Begins with the usual ones, because some gain only together with
/// others, and leaves out or adds one at a time; with none, if those together gain nothing or fail. `gains` says whether
/// a job is faster than another one. A technique that fails, because two models do not fit into the memory for
/// instance, is left out.
pub fn choose(job: &Job, mut gains: impl FnMut(&Job, &Job) -> Result<bool>) -> Choice {
    let of = |parts: Vec<Contender>| Job { parts, ..job.clone() };
    let (mut best, mut failures) = (of(Vec::new()), Vec::new());
    let usual = of(usual(job));
    match gains(&usual, &best) {
        Ok(true) => best = usual,
        Ok(false) => {}
        Err(error) => failures.push(format!("all together failed in their trial: {error:#}")),
    }
    for &part in &job.parts {
        let parts = best.parts.clone();
        let has_it = best.has(part);
        let (one, other) = match has_it {
            true => (best, of(without(parts, part))),
            false => (of(with(parts, part)), best),
        };
        best = match gains(&one, &other) {
            Ok(true) => one,
            Ok(false) => other,
            // What has run so far goes on.
            Err(error) => {
                let what = if has_it { "the trial without it failed" } else { "failed in its trial" };
                failures.push(format!("{part}: {what}: {error:#}"));
                if has_it { one } else { other }
            }
        };
    }
    let left_out = job.parts.iter().copied().filter(|part| !best.has(*part)).collect();
    Choice { job: best, left_out, failures }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(parts: Vec<Contender>) -> Job {
        Job {
            workload: Workload::Digits,
            contender: Contender::Combined,
            parts,
            device: DeviceKind::Cpu,
            seed: 0,
            threads: 2,
            batch_size: 1,
            tries: true,
            compiles: false,
            has_bf16: true,
            options: Default::default(),
            settle_seconds: 0.0,
            turn_seconds: 0.0,
            length: 1,
            train: Default::default(),
            test: None,
            test_images: 0,
        }
    }

    #[test]
    fn techniques_that_gain_are_kept_and_replace_others_of_their_group() {
        let gains = |job: &Job| {
            let gain = |part: &Contender| match part {
                Contender::Prefetch => 2.0,
                Contender::CachePrefetch => 3.0,
                Contender::Fused => 1.005,
                Contender::Bf16 => 0.7,
                Contender::HostCache => 1.1,
                _ => 1.0,
            };
            job.parts.iter().map(gain).product::<f64>()
        };
        let faster = |one: &Job, other: &Job| Ok(gains(one) / gains(other) > 1.0 + MIN_GAIN);
        let parts =
            [Contender::Prefetch, Contender::CachePrefetch, Contender::Fused, Contender::Bf16, Contender::HostCache];
        let choice = choose(&job(parts.to_vec()), faster);
        assert_eq!(choice.job.parts, [Contender::CachePrefetch, Contender::HostCache]);
        assert_eq!(choice.left_out, [Contender::Prefetch, Contender::Fused, Contender::Bf16]);
        assert_eq!(choose(&job(vec![Contender::Bf16]), |_, _| Ok(false)).job.parts, []);
    }

    #[test]
    fn techniques_that_gain_only_together_are_found() {
        let photos = Job { workload: Workload::Photos, ..job(Vec::new()) };
        let photos = Job { parts: all(&photos), ..photos };
        let turns = [Contender::Prefetch, Contender::TakeTurns, Contender::ScaledDecode];
        let speed = |job: &Job| if turns.iter().all(|part| job.has(*part)) { 2.0 } else { 1.0 };
        let choice = choose(&photos, |one, other| Ok(speed(one) > speed(other)));
        assert_eq!(choice.job.parts, turns);
        // Neither does anything without workers.
        assert_eq!(without(turns.to_vec(), Contender::Prefetch), []);
    }

    #[test]
    fn where_the_usual_techniques_fail_together_they_are_tried_one_by_one() {
        let fits = |job: &Job| job.parts.len() < 3;
        let gains = |one: &Job, other: &Job| match fits(one) && fits(other) {
            true => Ok(one.parts.len() > other.parts.len()),
            false => anyhow::bail!("out of memory"),
        };
        let choice = choose(&job(vec![Contender::Fused, Contender::HostCache, Contender::Bf16]), gains);
        assert_eq!(choice.job.parts, [Contender::Fused, Contender::HostCache]);
        assert_eq!(
            choice.failures,
            ["all together failed in their trial: out of memory", "bf16: failed in its trial: out of memory"]
        );
    }

    #[test]
    fn a_technique_that_fails_is_left_out_and_the_reason_told() {
        let gains = |one: &Job, other: &Job| match one.has(Contender::Bf16) {
            true => anyhow::bail!("out of memory"),
            false => Ok(one.parts.len() > other.parts.len()),
        };
        let choice = choose(&job(vec![Contender::Bf16, Contender::Fused]), gains);
        assert_eq!((choice.job.parts, choice.left_out), (vec![Contender::Fused], vec![Contender::Bf16]));
        assert_eq!(
            choice.failures,
            ["all together failed in their trial: out of memory", "bf16: failed in its trial: out of memory"]
        );
    }

    #[test]
    fn what_has_run_goes_on_where_the_trial_without_a_technique_fails() {
        // float32 does not fit.
        let gains = |one: &Job, other: &Job| match [one, other]
            .iter()
            .all(|job| job.has(Contender::Bf16) || job.parts.is_empty())
        {
            true => Ok(one.parts.len() > other.parts.len()),
            false => anyhow::bail!("out of memory"),
        };
        let choice = choose(&job(vec![Contender::Fused, Contender::HostCache, Contender::Bf16]), gains);
        assert!(choice.job.has(Contender::Bf16), "{:?}", choice.job.parts);
        assert_eq!(
            (choice.left_out, choice.failures),
            (vec![], vec!["bf16: the trial without it failed: out of memory".to_owned()])
        );
    }

    #[test]
    fn the_usual_techniques_are_those_of_the_workload_and_never_those_for_memory() {
        let text = Job { workload: Workload::Text, ..job(Vec::new()) };
        for parts in [all(&text), usual(&text)] {
            assert!(parts.contains(&Contender::Fused) && !parts.contains(&Contender::Accumulate), "{parts:?}");
        }
        let parts = |workload| usual(&Job { workload, ..job(Vec::new()) });
        assert!(!parts(Workload::Digits).contains(&Contender::CachePrefetch), "{:?}", parts(Workload::Digits));
        assert!(parts(Workload::Photos).contains(&Contender::Prefetch), "{:?}", parts(Workload::Photos));
    }
}
