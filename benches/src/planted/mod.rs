//! Training loops that test the profiler's diagnosis: loops with a known ("planted") bottleneck, and healthy loops.
//!
//! Each planted loop can also run without its bottleneck. This shows what removing it gains, to compare with the bound
//! that the diagnosis gives.
//!
//! The loops are in `data`, `host`, `optimizer`, `gpu`, `ranks` and `healthy`; `training` has what they share.
//! `process` runs a loop in its own processes, and `judge` checks the diagnosis of its record.

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
    /// What limits it. For a healthy loop this is arithmetic or memory bandwidth, and its two forms are the same.
    pub bottleneck: Bottleneck,
    /// Another answer that is also right, because the loop is close to the boundary between the two.
    pub or: Option<Bottleneck>,
    /// The `record_function` scope around the bottleneck, if there is one.
    pub scope: Option<&'static str>,
    /// What it needs to run.
    pub needs: Needs,
    /// How many steps are timed, chosen so that a run takes one or two seconds.
    pub steps: u64,
    /// Runs the loop in one process. In a run with several ranks, each rank calls it.
    pub run: fn(Form, &Plan) -> Result<RunProfile>,
}

/// Whether a loop has its bottleneck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// With the bottleneck.
    Planted,
    /// Without it: changed as the diagnosis advises, with the same model, batches and number of samples.
    Remedied,
}

/// What a loop needs to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Any machine.
    Cpu,
    /// A CUDA device.
    Gpu,
    /// Any machine, with this many processes.
    Ranks(usize),
}

/// How many steps a run takes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Steps at the beginning that are not timed.
    pub warmup_steps: u64,
    /// Timed steps.
    pub steps: u64,
    /// Steps under the profiler, at the end, so that its overhead is not in the timed steps.
    pub profiled_steps: u64,
}

/// The loops with a planted bottleneck.
pub static PLANTS: [Plant; 15] = [
    Plant::new("slow_read", Bottleneck::SlowRead, 40, data::slow_read).within("read"),
    Plant::new("slow_decode", Bottleneck::SlowDecode, 40, data::slow_decode).within("decode"),
    Plant::new("too_few_workers", Bottleneck::TooFewWorkers, 40, data::too_few_workers).within("decode"),
    Plant::new("no_pinning", Bottleneck::HostToDevice, 150, gpu::no_pinning).on(Needs::Gpu).within("copy"),
    Plant::new("item_each_step", Bottleneck::HostSync, 150, gpu::item_each_step).on(Needs::Gpu).within("metrics"),
    Plant::new("copy_each_step", Bottleneck::HostSync, 150, gpu::copy_each_step).on(Needs::Gpu).within("metrics"),
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

/// The healthy loops, in which the diagnosis must find nothing, and what limits each. The CNN with small batches spends
/// most of its time on pooling. The two with a second right answer spend about half of their time on matrix products
/// and convolutions.
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

    /// Whether it has no bottleneck to find.
    pub fn is_healthy(&self) -> bool {
        matches!(self.bottleneck, Bottleneck::Compute | Bottleneck::MemoryBandwidth)
    }

    /// How many steps a run takes.
    pub fn plan(&self) -> Plan {
        Plan { warmup_steps: 10, steps: self.steps, profiled_steps: 5 }
    }
}

impl Needs {
    /// What this machine lacks, if anything.
    pub fn unmet(self) -> Option<&'static str> {
        (self == Self::Gpu && !tch::Cuda::is_available()).then_some("no CUDA device")
    }

    /// The number of processes of a run.
    pub fn processes(self) -> usize {
        match self {
            Self::Cpu | Self::Gpu => 1,
            Self::Ranks(ranks) => ranks,
        }
    }
}

impl Plan {
    /// The number of iterations of the loop. One iteration before the profiled ones warms up the profiler.
    pub fn all_steps(&self) -> u64 {
        self.warmup_steps + self.steps + 1 + self.profiled_steps
    }
}
