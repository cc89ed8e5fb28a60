//! `versus compile`, and on a GPU `versus gpu-compile`: whole training steps compiled by overdrive-compile, beside uncompiled
//! ones, PyTorch's eager mode with fused AdamW, and `torch.compile`.

mod models;
pub mod start;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Result, bail};
use overdrive::ffi::cuda;
use overdrive::tch::{Cuda, Device};
use overdrive_bench_report::{Machine, Ratio, Target, Versions, VersusReport};

use self::models::{SETTLED, Step, Way, step};
use super::Options;
use super::peer::Peer;
use super::turns::{Case, Findings, Program, Turns};

const PAIRS: u32 = 9;

/// A model, steps per sample, and what its compiled step may cost, as a share.
struct Contest {
    model: &'static str,
    text: &'static str,
    steps: u32,
    gpu_steps: u32,
    /// Of PyTorch's eager mode, and of `torch.compile`.
    pytorch: [Option<f64>; 2],
    /// Of our uncompiled step.
    uncompiled: Option<f64>,
    /// Of the faster one of compiled and uncompiled, for `auto`.
    auto: Option<f64>,
}

const CONTESTS: [Contest; 4] = [
    Contest {
        model: "mlp",
        text: "AdamW step of an MLP 784-128-128-10, batch 16",
        steps: 300,
        gpu_steps: 300,
        pytorch: [Some(0.45), None],
        uncompiled: Some(0.85),
        auto: None,
    },
    Contest {
        model: "gpt",
        text: "AdamW step of a GPT of 4 blocks 128 wide, 8 x 64 tokens",
        steps: 10,
        gpu_steps: 100,
        pytorch: [Some(0.8), Some(1.0)],
        uncompiled: None,
        auto: None,
    },
    Contest {
        model: "cnn",
        text: "AdamW step of a CNN of 2 convolutions, batch 128",
        steps: 10,
        gpu_steps: 200,
        pytorch: [None, None],
        uncompiled: None,
        auto: Some(1.02),
    },
    Contest {
        model: "resnet18",
        text: "AdamW step of ResNet-18 at 64 px, batch 16",
        steps: 2,
        gpu_steps: 50,
        pytorch: [None, None],
        uncompiled: None,
        auto: Some(1.02),
    },
];

/// Where steps run, and by how many threads of the host.
#[derive(Clone, Copy)]
struct Place {
    device: Device,
    threads: i32,
}

pub fn measure(options: &Options) -> Result<VersusReport> {
    let mut versions = versions();
    let mut findings = Findings::default();
    for threads in [1, 2] {
        take(Place { device: Device::Cpu, threads }, options, &mut versions, &mut findings)?;
    }
    start::compare(options, &mut findings)?;
    Ok(findings.report(Machine::detect(None), versions))
}

/// On a GPU. The goals are for processors.
pub fn measure_on_gpu(options: &Options) -> Result<VersusReport> {
    if let Some(why) = cuda::why_unavailable() {
        bail!("gpu-compile needs a GPU: {why}; `compile` measures on a processor");
    }
    let mut versions = versions();
    let mut findings = Findings::default();
    take(Place { device: Device::Cuda(0), threads: 1 }, options, &mut versions, &mut findings)?;
    Ok(findings.report(Machine::detect(cuda::device_name(0).ok()), versions))
}

fn versions() -> Versions {
    BTreeMap::from(
        [("overdrive", env!("CARGO_PKG_VERSION")), ("libtorch", "2.11.0")]
            .map(|(name, version)| (name.to_owned(), version.to_owned())),
    )
}

fn take(place: Place, options: &Options, versions: &mut Versions, findings: &mut Findings) -> Result<()> {
    overdrive::tch::set_num_threads(place.threads);
    let models: Vec<&str> = CONTESTS.iter().map(|contest| contest.model).collect();
    let device = if place.device.is_cuda() { "cuda:0" } else { "cpu" };
    let args = [place.threads.to_string(), models.join(","), device.to_owned()];
    let peer = Peer::start(&options.python, include_str!("../../../peers/compile.py"), &args);
    let program = Program::together(peer, "a Python with torch 2.11.0 and torchvision is needed");
    versions.extend(program.version().map(|version| ("torch (Python)".to_owned(), version)));
    CONTESTS.iter().try_for_each(|contest| contest.take(place, &program, options, findings))
}

impl Contest {
    fn take(&self, place: Place, program: &Program, options: &Options, findings: &mut Findings) -> Result<()> {
        let on_gpu = place.device.is_cuda();
        let steps = if on_gpu { self.gpu_steps } else { self.steps };
        let ways = [("compiled", Way::Compiled), ("uncompiled", Way::Uncompiled), ("auto", Way::Auto)];
        let mut turns = Turns::default();
        for (name, way) in ways {
            if way == Way::Auto && self.auto.is_none() {
                continue;
            }
            let mut one = step(self.model, way, place.device)?;
            for _ in 0..SETTLED {
                one()?;
            }
            let one = RefCell::new(one);
            turns.ours(name, move || time(&mut one.borrow_mut(), steps, on_gpu));
        }
        for name in ["eager", "compiled"] {
            let request = format!("{}-{name}", self.model);
            let theirs = move |peer: &mut Peer| Ok(peer.measure(&request, steps)? * 1e6 / f64::from(steps));
            turns.peer(&peer(name), program, theirs);
        }
        turns.take(self.model, options.pairs.unwrap_or(PAIRS))?;
        let place = match (on_gpu, place.threads) {
            (true, _) => "on a GPU".to_owned(),
            (false, 1) => "1 thread".to_owned(),
            (false, threads) => format!("{threads} threads"),
        };
        let text = format!("{}, {place}", self.text);
        let case = Case { text: &text, unit: "us", ratio: Ratio::ShareOfCost };
        let at_most = |share: Option<f64>| share.filter(|_| !on_gpu).map(Target::AtMost);
        turns.compare(findings, case, ("compiled", &peer("eager")), at_most(self.pytorch[0]))?;
        turns.compare(findings, case, ("compiled", &peer("compiled")), at_most(self.pytorch[1]))?;
        turns.compare(findings, case, ("compiled", "uncompiled"), at_most(self.uncompiled))?;
        if self.auto.is_some() {
            let text = format!("{text}, by `auto`");
            let case = Case { text: &text, ..case };
            for other in ["compiled", "uncompiled"] {
                turns.compare(findings, case, ("auto", other), at_most(self.auto))?;
            }
        }
        Ok(())
    }
}

fn peer(name: &str) -> String {
    match name {
        "eager" => "PyTorch, fused AdamW".to_owned(),
        _ => "PyTorch, torch.compile".to_owned(),
    }
}

/// Microseconds a step, to the end of the GPU's work if it is for one.
fn time(step: &mut Step, steps: u32, on_gpu: bool) -> Result<f64> {
    let wait = || on_gpu.then(|| Cuda::synchronize(0));
    wait();
    let begun = Instant::now();
    for _ in 0..steps {
        step()?;
    }
    wait();
    Ok(begun.elapsed().as_secs_f64() * 1e6 / f64::from(steps))
}
