//! Training loops with a known bottleneck, each beside the same loop without it, and healthy ones: what a diagnosis has to
//! tell apart, and where its bounds can be compared with what is gained.
//!
//! `training` is what the loops share, `data`, `host`, `optimizer`, `gpu`, `ranks` and `healthy` hold them, `process` runs
//! each in processes of its own, `judge` judges the records.

mod data;
mod gpu;
mod healthy;
mod host;
mod judge;
mod optimizer;
mod process;
mod ranks;
mod training;

use anyhow::Result;
use overdrive_profile::{Bottleneck, RunProfile};
use serde::{Deserialize, Serialize};

pub use judge::timeless;
pub use process::main_if_told;

/// A training loop.
#[derive(Clone, Copy, Debug)]
pub struct Plant {
    /// Its name.
    pub name: &'static str,
    /// What it waits for; arithmetic or memory bandwidth for a healthy loop, whose two forms are the same.
    pub bottleneck: Bottleneck,
    /// What may be named as well, because the loop lies near the line between the two.
    pub or: Option<Bottleneck>,
    /// The scope of its own in which the bottleneck lies, if it has one.
    pub scope: Option<&'static str>,
    /// What it can run on.
    pub needs: Needs,
    /// How many steps are timed, so that a run takes a second or two.
    pub steps: u64,
    /// One process's part of a run. The ranks of a run call it all together.
    pub run: fn(Form, &Plan) -> Result<RunProfile>,
}

/// With its bottleneck, or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// The bottleneck is there.
    Planted,
    /// It is removed as the diagnosis says; model, batches and number of samples are the same.
    Remedied,
}

/// What a loop can run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Any machine.
    Cpu,
    /// A CUDA device.
    Gpu,
    /// Any machine, on so many processes.
    Ranks(usize),
}

/// The steps of a run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// At the beginning, left out.
    pub warmup_steps: u64,
    /// Timed.
    pub steps: u64,
    /// Under the profiler, at the end: nothing that it does is among the timed ones.
    pub profiled_steps: u64,
}

/// A loop for each bottleneck.
pub static PLANTS: [Plant; 14] = [
    Plant::new("slow_read", Bottleneck::SlowRead, 40, data::slow_read).within("read"),
    Plant::new("slow_decode", Bottleneck::SlowDecode, 40, data::slow_decode).within("decode"),
    Plant::new("too_few_workers", Bottleneck::TooFewWorkers, 40, data::too_few_workers).within("decode"),
    Plant::new("no_pinning", Bottleneck::HostToDevice, 150, gpu::no_pinning).on(Needs::Gpu).within("copy"),
    Plant::new("item_each_step", Bottleneck::HostSync, 150, gpu::item_each_step).on(Needs::Gpu).within("metrics"),
    Plant::new("tiny_kernels", Bottleneck::KernelLaunches, 100, host::tiny_kernels).within("head"),
    Plant::new("optimizer_loop", Bottleneck::OptimizerLoop, 60, optimizer::tensor_by_tensor).within("update"),
    Plant::new("float32_products", Bottleneck::Float32Matmul, 100, gpu::float32_products).on(Needs::Gpu),
    Plant::new("swapping_to_host", Bottleneck::Offload, 100, gpu::swapping_to_host).on(Needs::Gpu),
    Plant::new("memory_leak", Bottleneck::MemoryGrowth, 150, host::memory_leak),
    Plant::new("straggler", Bottleneck::Straggler, 100, ranks::straggler).on(Needs::Ranks(2)).within("more passes"),
    Plant::new("large_all_reduce", Bottleneck::Communication, 100, ranks::large_all_reduce).on(Needs::Ranks(2)),
    Plant::new("slow_logging", Bottleneck::HostCode, 120, host::slow_logging).within("logging"),
    Plant::new("loss_in_a_loop", Bottleneck::HostLoop, 120, host::loss_in_a_loop).within("loss"),
];

/// Loops in which nothing is to be found, and what each is made of: with small batches, a CNN is mostly pooling. Two of them
/// spend about half of their time on products.
pub static HEALTHY: [Plant; 4] = [
    Plant::new("healthy_mlp", Bottleneck::Compute, 100, healthy::mlp),
    Plant::new("healthy_cnn", Bottleneck::MemoryBandwidth, 100, healthy::cnn),
    Plant::new("healthy_transformer", Bottleneck::Compute, 80, healthy::transformer).or(Bottleneck::MemoryBandwidth),
    Plant::new("healthy_ddp_cnn", Bottleneck::Compute, 80, ranks::healthy_cnn)
        .or(Bottleneck::MemoryBandwidth)
        .on(Needs::Ranks(2)),
];

impl Plant {
    const fn new(
        name: &'static str,
        bottleneck: Bottleneck,
        steps: u64,
        run: fn(Form, &Plan) -> Result<RunProfile>,
    ) -> Self {
        Self { name, bottleneck, or: None, scope: None, needs: Needs::Cpu, steps, run }
    }

    const fn or(mut self, bottleneck: Bottleneck) -> Self {
        self.or = Some(bottleneck);
        self
    }

    const fn on(mut self, needs: Needs) -> Self {
        self.needs = needs;
        self
    }

    const fn within(mut self, scope: &'static str) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Whether nothing is to be found in it.
    pub fn is_healthy(&self) -> bool {
        matches!(self.bottleneck, Bottleneck::Compute | Bottleneck::MemoryBandwidth)
    }

    /// The steps of a run of it.
    pub fn plan(&self) -> Plan {
        Plan { warmup_steps: 10, steps: self.steps, profiled_steps: 5 }
    }
}

impl Needs {
    /// Why this machine is not enough, if it is not.
    pub fn unmet(self) -> Option<&'static str> {
        (self == Self::Gpu && !tch::Cuda::is_available()).then_some("no CUDA device")
    }

    /// How many processes a run has.
    pub fn processes(self) -> usize {
        match self {
            Self::Cpu | Self::Gpu => 1,
            Self::Ranks(ranks) => ranks,
        }
    }
}

impl Plan {
    /// How often the loop goes round; a step before the profiled ones warms the profiler up.
    pub fn all_steps(&self) -> u64 {
        self.warmup_steps + self.steps + 1 + self.profiled_steps
    }
}
