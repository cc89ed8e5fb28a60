//! Made-up runs, labelled as such: for tests, and for looking at the layout of the page. Nothing here was measured.

use crate::{Config, Dataset, DeviceKind, EpochMark, Machine, Report, Run, Setting, Technique};

/// Technique, seconds, share of them spent on data, final accuracy, peak memory in MiB.
type Sketch = (Technique, f64, f64, f64, u64);

const CPU: [Sketch; 7] = [
    (Technique::Baseline, 31.2, 0.61, 0.9861, 412),
    (Technique::InMemory, 12.3, 0.004, 0.9861, 455),
    (Technique::Cache, 13.4, 0.07, 0.9861, 438),
    (Technique::CachePrefetch, 12.5, 0.006, 0.9861, 447),
    (Technique::AmpBf16, 38.9, 0.49, 0.9858, 430),
    (Technique::Accumulate, 33.0, 0.58, 0.9861, 371),
    (Technique::Combined, 19.8, 0.005, 0.9857, 402),
];

const CUDA: [Sketch; 10] = [
    (Technique::Baseline, 20.4, 0.72, 0.9863, 1_402),
    (Technique::InMemory, 6.1, 0.03, 0.9863, 1_455),
    (Technique::Cache, 8.2, 0.21, 0.9863, 1_438),
    (Technique::CachePrefetch, 6.6, 0.012, 0.9863, 1_447),
    (Technique::AmpBf16, 20.1, 0.72, 0.9859, 1_430),
    (Technique::AmpFp16, 20.6, 0.71, 0.9791, 1_431),
    (Technique::Accumulate, 22.3, 0.66, 0.9863, 1_371),
    (Technique::Combined, 5.9, 0.013, 0.9858, 1_402),
    (Technique::Tf32, 20.3, 0.72, 0.9862, 1_402),
    (Technique::DeviceData, 4.8, 0.002, 0.9863, 1_398),
];

/// A report of made-up runs on a processor, or on a GPU.
pub fn report(cuda: bool) -> Report {
    let runs = if cuda { runs(DeviceKind::Cuda, &CUDA) } else { runs(DeviceKind::Cpu, &CPU) };
    Report::from_runs(setting(cuda), &runs).expect("the sample has baselines")
}

/// Made-up runs: three repetitions.
fn runs(device: DeviceKind, sketches: &[Sketch]) -> Vec<Run> {
    let repetitions = (0..3).flat_map(|repetition| sketches.iter().map(move |sketch| (repetition, sketch)));
    repetitions.map(|(repetition, sketch)| run(device, repetition, sketch)).collect()
}

fn run(device: DeviceKind, repetition: u32, &(technique, seconds, wait, accuracy, mebibytes): &Sketch) -> Run {
    let jitter = (7 * repetition + 5 * technique as u32) % 4; // a machine that is not alone
    let seconds = seconds * (1.0 + 0.015 * f64::from(jitter));
    let epochs = [0.052, 0.021, 0.009, 0.003, 0.0].iter().zip(1_u32..);
    let mark = |(below, epoch): (&f64, u32)| EpochMark {
        seconds: seconds * f64::from(epoch) / 5.0,
        accuracy: accuracy - below,
        loss: Some(0.4 / f64::from(epoch)),
    };
    Run {
        technique,
        device,
        repetition,
        seconds,
        data_wait_seconds: seconds * wait,
        epochs: epochs.map(mark).collect(),
        final_loss: 0.05,
        peak_rss_bytes: Some(mebibytes << 20),
        peak_device_bytes: (device == DeviceKind::Cuda).then_some((mebibytes / 3) << 20),
    }
}

fn setting(cuda: bool) -> Setting {
    let versions = [("overdrive", "0.0.0-sample"), ("tch", "0.24.0"), ("libtorch", "2.11.0"), ("rustc", "1.95.0")];
    Setting {
        measured_at: "sample data, never measured".to_owned(),
        machine: Machine {
            cpu: "Sample processor, made up, 2.5 GHz".to_owned(),
            cores: 2,
            cpu_flags: vec!["avx2".to_owned(), "avx512f".to_owned()],
            memory_bytes: Some(24 << 30),
            os: "linux 6.1 x86_64".to_owned(),
            gpu: cuda.then(|| "Sample GPU, made up".to_owned()),
        },
        versions: versions.map(|(name, version)| (name.to_owned(), version.to_owned())).into(),
        dataset: Dataset {
            name: "MNIST (sample, not trained on)".to_owned(),
            train: 20_000,
            test: 5_000,
            sha256: "0".repeat(64),
        },
        config: Config {
            quick: false,
            epochs: 5,
            repeat: 3,
            seed: 0,
            threads: 2,
            batch_size: 128,
            model: "two convolutions and two linear layers, 206,922 parameters".to_owned(),
            optimizer: "AdamW, lr 0.001, fused".to_owned(),
        },
        method: vec![
            "The numbers on this page are made up: it shows the layout only.".to_owned(),
            "The clock covers training from the first batch to the last, caches being filled included; building the \
             model and testing are not on it."
                .to_owned(),
        ],
    }
}
