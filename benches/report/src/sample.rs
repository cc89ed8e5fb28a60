//! Made-up measurements, labelled as such: for tests, and for looking at the layout of the page. Nothing here was
//! measured.

use crate::{
    Contender, Disturbance, Machine, Mark, Measured, Measurements, Report, Setting, Span, Turn, Whole, Workload,
};

/// Contender, samples per second, share of the time spent waiting for data, MiB of memory, and for a whole training its
/// seconds and the accuracy at its end.
pub type Sketch = (Contender, f64, f64, u64, Option<(f64, f64)>);

const DIGITS: [Sketch; 8] = [
    (Contender::Pytorch, 1_310.0, 0.62, 610, Some((79.0, 0.9861))),
    (Contender::PytorchTuned, 4_100.0, 0.004, 720, Some((27.5, 0.9858))),
    (Contender::PytorchCompiled, 4_400.0, 0.004, 1_310, None),
    (Contender::Tch, 4_050.0, 0.006, 455, Some((26.0, 0.9861))),
    (Contender::CachePrefetch, 4_210.0, 0.008, 447, None),
    (Contender::Fused, 4_300.0, 0.006, 455, None),
    (Contender::Bf16, 3_010.0, 0.005, 430, None),
    (Contender::Combined, 4_460.0, 0.008, 447, Some((23.9, 0.9860))),
];

/// A made-up report of a full run with all workloads.
pub fn report() -> Report {
    let measurements = Workload::ALL.map(|workload| measurements(workload, &DIGITS, 3));
    Report::new(setting("full", 3), measurements.to_vec())
}

/// A made-up report of a quick run without Python, in which one timing was disturbed.
pub fn quick() -> Report {
    let mut digits = measurements(Workload::Digits, &DIGITS[3..], 2);
    digits.absent = vec![(Contender::Pytorch, "no torch in python3".to_owned())];
    for measured in &mut digits.measured {
        measured.wholes.clear();
        measured.timeline.clear();
    }
    digits.measured[1].turns[0].disturbance = Disturbance { other_cpus: 0.9, ..Disturbance::default() };
    Report::new(setting("quick", 2), vec![digits])
}

/// Made-up measurements of one workload in `rounds` rounds.
pub fn measurements(workload: Workload, sketches: &[Sketch], rounds: u32) -> Measurements {
    Measurements {
        workload,
        facts: vec!["Made up: nothing here was measured.".to_owned()],
        measured: sketches.iter().map(|sketch| measured(sketch, rounds)).collect(),
        absent: Vec::new(),
        parts: vec![Contender::CachePrefetch, Contender::Fused],
        left_out: vec![Contender::Bf16],
        next: vec!["nothing that takes a tenth of a step: it is bound by compute".to_owned()],
    }
}

fn measured(&(contender, rate, wait, mebibytes, whole): &Sketch, rounds: u32) -> Measured {
    let turn = |round: u32| {
        let seconds = 10_000.0 / rate * (1.0 + 0.02 * f64::from(round % 3));
        Turn { seconds, wait_seconds: seconds * wait, samples: 10_000, ..Turn::default() }
    };
    let of_seed = |seed: u32, (seconds, accuracy): (f64, f64)| Whole {
        seed,
        seconds: seconds * (1.0 + 0.01 * f64::from(seed)),
        wait_seconds: seconds * wait,
        marks: (1..=5)
            .map(|epoch| {
                let share = f64::from(epoch) / 5.0;
                let error = (1.0 - accuracy) * 3f64.powf(4.0 * (1.0 - share));
                Mark { seconds: seconds * share, loss: Some(3.0 * error), accuracy: Some(1.0 - error) }
            })
            .collect(),
        ..Whole::default()
    };
    Measured {
        contender,
        choices: if contender.is_python() { vec!["2 workers".to_owned()] } else { Vec::new() },
        turns: (0..rounds).map(turn).collect(),
        wholes: whole.into_iter().flat_map(|whole| (0..3).map(move |seed| of_seed(seed, whole))).collect(),
        peak_bytes: Some(mebibytes << 20),
        peak_device_bytes: None,
        timeline: timeline(128.0 / rate, wait),
        failure: None,
    }
}

fn timeline(step: f64, wait: f64) -> Vec<Span> {
    let parts = [
        ("data wait", wait),
        ("forward", 0.4 * (1.0 - wait)),
        ("backward", 0.5 * (1.0 - wait)),
        ("optimizer", 0.1 * (1.0 - wait)),
    ];
    let mut at = 0.0;
    let mut spans = Vec::new();
    for (phase, share) in (0..4).flat_map(|_| parts) {
        spans.push(Span { phase: phase.to_owned(), start: at, seconds: share * step });
        at += share * step;
    }
    spans
}

fn setting(size: &str, rounds: u32) -> Setting {
    Setting {
        measured_at: "2026-01-01T00:00:00Z".to_owned(),
        machine: Machine {
            cpu: "Made-up Processor 9000".to_owned(),
            cores: 2,
            cpu_flags: vec!["avx2".to_owned()],
            memory_bytes: Some(24 << 30),
            os: "linux 6.1 x86_64".to_owned(),
            gpu: None,
        },
        versions: [("tch".to_owned(), "0.24.0".to_owned())].into(),
        size: size.to_owned(),
        rounds,
        seeds: vec![0, 1, 2],
        threads: 2,
        method: vec!["Nothing was measured.".to_owned()],
        failures: Vec::new(),
        ..Setting::default()
    }
}
