//! Tests of the profiler from outside. A process can have only one profiler, so most tests wait for each other.

mod averages;
mod diagnosis;
mod diagnosis_gpu;
mod diagnosis_ranks;
mod diagnosis_scopes;
mod lifecycle;
mod made_up;
mod monitor;
mod run;
mod sampler;
mod schedule;
mod scopes;
mod step_timer;
mod stragglers;
mod table;
mod timeline;
mod trace;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_profile::{Profile, Profiler, ProfilerBuilder};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Held by tests that have a profiler on, or open scopes that a profiler might record.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // On busy cores, small operators take long if their threads wait for each other.
    tch::set_num_threads(1);
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Model {
    _vs: nn::VarStore,
    layers: nn::Sequential,
    inputs: Tensor,
}

impl Model {
    fn new() -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        let layers = nn::seq()
            .add(nn::linear(vs.root() / "in", 16, 32, Default::default()))
            .add_fn(Tensor::relu)
            .add(nn::linear(vs.root() / "out", 32, 4, Default::default()));
        Self { _vs: vs, layers, inputs: Tensor::randn([8, 16], FLOAT) }
    }

    fn step(&self) {
        self.layers.forward(&self.inputs).square().mean(Kind::Float).backward();
    }
}

/// Everything on.
fn full() -> ProfilerBuilder {
    Profiler::builder().record_shapes(true).profile_memory(true).with_flops(true)
}

/// The profile of some work.
fn profile_of(builder: ProfilerBuilder, work: impl FnOnce()) -> Arc<Profile> {
    let mut profiler = builder.start().unwrap();
    work();
    profiler.stop().unwrap();
    profiler.profile().expect("a window was recorded").clone()
}
