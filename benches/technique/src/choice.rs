//! Finds the techniques of the combined contender by trying them.

use anyhow::Result;
use overdrive_bench_report::{Contender, DeviceKind, Workload};

use super::job::Job;

/// The least gain in speed for which a technique is kept: less may be noise.
const MIN_GAIN: f64 = 0.02;
/// Techniques that exclude each other: sources of batches, and precisions.
const GROUPS: [&[Contender]; 2] =
    [&[Contender::Prefetch, Contender::CachePrefetch, Contender::DeviceData], &[Contender::Bf16, Contender::Fp16]];

/// The techniques to try. If nothing is tried, those that usually gain.
pub fn all(job: &Job) -> Vec<Contender> {
    let cuda = job.device == DeviceKind::Cuda;
    let techniques = job.workload.contenders(cuda).into_iter().filter(|it| it.is_technique());
    // It saves memory, not time.
    let techniques = techniques.filter(|it| *it != Contender::Accumulate);
    let techniques = techniques.filter(|it| *it != Contender::Compiled || job.compiles);
    if job.tries {
        return techniques.collect();
    }
    // The digits fit into one tensor, which is faster than a loader.
    let loader = [Contender::Prefetch, Contender::CachePrefetch];
    let is_usual = |it: &Contender| match it {
        Contender::Fp16 => false,
        Contender::Bf16 => job.has_bf16,
        it => job.workload != Workload::Digits || !loader.contains(it),
    };
    let usual = techniques.filter(is_usual);
    usual.fold(Vec::new(), with)
}

/// Adds a technique, in place of another one of its group.
fn with(mut parts: Vec<Contender>, part: Contender) -> Vec<Contender> {
    if let Some(group) = GROUPS.iter().find(|group| group.contains(&part)) {
        parts.retain(|other| !group.contains(other));
    }
    parts.push(part);
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

/// Tries the job's techniques one after the other, each together with those kept so far. `speed` compares a job with the
/// best one so far. A technique that fails, because two models do not fit into the memory for instance, is left out.
pub fn choose(job: &Job, mut speed: impl FnMut(&Job, &Job) -> Result<f64>) -> Choice {
    let mut best = Job { parts: Vec::new(), ..job.clone() };
    let (mut left_out, mut failures) = (Vec::new(), Vec::new());
    for &part in &job.parts {
        let tried = Job { parts: with(best.parts.clone(), part), ..job.clone() };
        match speed(&tried, &best) {
            Ok(speed) if speed > 1.0 + MIN_GAIN => best = tried,
            Ok(_) => left_out.push(part),
            Err(error) => {
                left_out.push(part);
                failures.push(format!("{part} failed in its trial: {error:#}"));
            }
        }
    }
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
                Contender::ChannelsLast => 1.1,
                _ => 1.0,
            };
            job.parts.iter().map(gain).product::<f64>()
        };
        let speed = |one: &Job, other: &Job| Ok(gains(one) / gains(other));
        let parts =
            [Contender::Prefetch, Contender::CachePrefetch, Contender::Fused, Contender::Bf16, Contender::ChannelsLast];
        let choice = choose(&job(parts.to_vec()), speed);
        assert_eq!(choice.job.parts, [Contender::CachePrefetch, Contender::ChannelsLast]);
        assert_eq!(choice.left_out, [Contender::Fused, Contender::Bf16]);
        assert_eq!(choose(&job(vec![Contender::Bf16]), speed).job.parts, []);
    }

    #[test]
    fn a_technique_that_fails_is_left_out_and_the_reason_told() {
        let speed = |one: &Job, _: &Job| match one.has(Contender::Bf16) {
            true => anyhow::bail!("out of memory"),
            false => Ok(1.5),
        };
        let choice = choose(&job(vec![Contender::Bf16, Contender::Fused]), speed);
        assert_eq!((choice.job.parts, choice.left_out), (vec![Contender::Fused], vec![Contender::Bf16]));
        assert_eq!(choice.failures, ["bf16 failed in its trial: out of memory"]);
    }

    #[test]
    fn without_tries_the_usual_techniques_are_used_and_never_those_for_memory() {
        for tries in [true, false] {
            let parts = all(&Job { workload: Workload::Text, tries, ..job(Vec::new()) });
            assert!(parts.contains(&Contender::Fused) && !parts.contains(&Contender::Accumulate), "{parts:?}");
        }
        let parts = |workload| all(&Job { tries: false, workload, ..job(Vec::new()) });
        assert!(!parts(Workload::Digits).contains(&Contender::CachePrefetch), "{:?}", parts(Workload::Digits));
        assert!(parts(Workload::Photos).contains(&Contender::Prefetch), "{:?}", parts(Workload::Photos));
    }
}
