//! What the combined contender is made of: found by trying, as one tunes by hand.

use anyhow::Result;
use overdrive_bench_report::{Contender, DeviceKind, Workload};

use super::job::Job;

/// A part is kept that makes steps so much faster.
const MIN_GAIN: f64 = 0.01;
/// One of each is chosen at most: where batches come from, and the precision.
const GROUPS: [&[Contender]; 2] =
    [&[Contender::Prefetch, Contender::CachePrefetch, Contender::DeviceData], &[Contender::Bf16, Contender::Fp16]];

/// The techniques of a workload that may make it faster; where nothing is tried, those that usually do.
pub fn all(job: &Job) -> Vec<Contender> {
    let cuda = job.device == DeviceKind::Cuda;
    let techniques = job.workload.contenders(cuda).into_iter().filter(|it| it.is_technique());
    // It saves memory, and time never.
    let techniques = techniques.filter(|it| *it != Contender::Accumulate);
    if job.tries {
        return techniques.collect();
    }
    // Digits fit as one tensor, which no loader beats.
    let loader = [Contender::Prefetch, Contender::CachePrefetch];
    let is_usual = |it: &Contender| match it {
        Contender::Fp16 => false,
        Contender::Bf16 => job.has_bf16,
        it => job.workload != Workload::Digits || !loader.contains(it),
    };
    let usual = techniques.filter(is_usual);
    usual.fold(Vec::new(), with)
}

/// Parts with one more, in place of another of its group.
fn with(mut parts: Vec<Contender>, part: Contender) -> Vec<Contender> {
    if let Some(group) = GROUPS.iter().find(|group| group.contains(&part)) {
        parts.retain(|other| !group.contains(other));
    }
    parts.push(part);
    parts
}

/// The job with those of its parts that make it faster, each tried with the best of those before.
pub fn choose(job: &Job, mut rate: impl FnMut(&Job) -> Result<f64>) -> Result<Job> {
    let mut best = Job { parts: Vec::new(), ..job.clone() };
    let mut fastest = rate(&best)?;
    for &part in &job.parts {
        let tried = Job { parts: with(best.parts.clone(), part), ..job.clone() };
        let speed = rate(&tried)?;
        if speed > fastest * (1.0 + MIN_GAIN) {
            (best, fastest) = (tried, speed);
        }
    }
    Ok(best)
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
    fn parts_that_gain_are_kept_and_one_of_a_group_replaces_another() {
        let gains = |job: &Job| {
            let gain = |part: &Contender| match part {
                Contender::Prefetch => 2.0,
                Contender::CachePrefetch => 3.0,
                Contender::Fused => 1.005,
                Contender::Bf16 => 0.7,
                Contender::ChannelsLast => 1.1,
                _ => 1.0,
            };
            Ok(job.parts.iter().map(gain).product())
        };
        let parts =
            [Contender::Prefetch, Contender::CachePrefetch, Contender::Fused, Contender::Bf16, Contender::ChannelsLast];
        let chosen = choose(&job(parts.to_vec()), gains).unwrap();
        assert_eq!(chosen.parts, [Contender::CachePrefetch, Contender::ChannelsLast]);
        assert_eq!(choose(&job(vec![Contender::Bf16]), gains).unwrap().parts, []);
    }

    #[test]
    fn without_tries_the_usual_ones_are_taken_and_memory_savers_never() {
        for tries in [true, false] {
            let parts = all(&Job { workload: Workload::Text, tries, ..job(Vec::new()) });
            assert!(parts.contains(&Contender::Fused) && !parts.contains(&Contender::Accumulate), "{parts:?}");
        }
        let parts = |workload| all(&Job { tries: false, workload, ..job(Vec::new()) });
        assert!(!parts(Workload::Digits).contains(&Contender::CachePrefetch), "{:?}", parts(Workload::Digits));
        assert!(parts(Workload::Photos).contains(&Contender::Prefetch), "{:?}", parts(Workload::Photos));
    }
}
