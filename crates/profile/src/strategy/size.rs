//! The size of a training, and the cluster that it runs on.

use serde::{Deserialize, Serialize};

use crate::ProfileError;

/// The size of a training. All bytes are those of a single GPU that trains on its share of the batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrainingSize {
    /// The number of parameters.
    pub parameters: f64,
    /// Bytes of a parameter in the forward pass: 2 for bfloat16.
    pub parameter_bytes: f64,
    /// Bytes of its gradient.
    pub gradient_bytes: f64,
    /// Bytes of its optimizer state, master copy included: 12 for Adam in mixed precision, 8 for Adam in float32.
    pub optimizer_bytes: f64,
    /// Bytes of activations that the forward pass keeps for the backward pass.
    pub activation_bytes: f64,
    /// Bytes of activations that go from one layer to the next.
    pub boundary_bytes: f64,
    /// Seconds of a forward and backward pass.
    pub compute_seconds: f64,
    /// The number of layers; a pipeline can be split between any two.
    pub layers: u32,
    /// Micro-batches of a step, for a pipeline.
    pub micro_batches: u32,
}

impl TrainingSize {
    /// bfloat16 with float32 master copies and Adam: 2 + 2 + 12 bytes a parameter.
    ///
    /// Set the other figures: the defaults are no activations, 1 second of computing, one layer, and 8 micro-batches.
    pub fn mixed_precision_adam(parameters: f64) -> Self {
        Self {
            parameters,
            parameter_bytes: 2.0,
            gradient_bytes: 2.0,
            optimizer_bytes: 12.0,
            activation_bytes: 0.0,
            boundary_bytes: 0.0,
            compute_seconds: 1.0,
            layers: 1,
            micro_batches: 8,
        }
    }

    /// float32 with Adam: 4 + 4 + 8 bytes a parameter.
    pub fn float32_adam(parameters: f64) -> Self {
        Self {
            parameter_bytes: 4.0,
            gradient_bytes: 4.0,
            optimizer_bytes: 8.0,
            ..Self::mixed_precision_adam(parameters)
        }
    }

    /// Bytes of activations that the forward pass keeps for the backward pass, on one GPU.
    pub fn activation_bytes(mut self, bytes: f64) -> Self {
        self.activation_bytes = bytes;
        self
    }

    /// Bytes of activations that go from one layer to the next in a step, for a pipeline.
    pub fn boundary_bytes(mut self, bytes: f64) -> Self {
        self.boundary_bytes = bytes;
        self
    }

    /// Seconds of a forward and backward pass on one GPU, such as those of the phases in a
    /// [`StepReport`](crate::StepReport).
    pub fn compute_seconds(mut self, seconds: f64) -> Self {
        self.compute_seconds = seconds;
        self
    }

    /// The number of layers; a pipeline can be split between any two.
    pub fn layers(mut self, layers: u32) -> Self {
        self.layers = layers;
        self
    }

    pub(super) fn check(&self) -> Result<(), ProfileError> {
        positive("parameters", self.parameters)?;
        positive("parameter_bytes", self.parameter_bytes)?;
        positive("gradient_bytes", self.gradient_bytes)?;
        positive("compute_seconds", self.compute_seconds)?;
        not_negative("optimizer_bytes", self.optimizer_bytes)?;
        not_negative("activation_bytes", self.activation_bytes)?;
        not_negative("boundary_bytes", self.boundary_bytes)?;
        positive("layers", f64::from(self.layers))?;
        positive("micro_batches", f64::from(self.micro_batches))
    }
}

/// The GPUs to train on, which are all equal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Cluster {
    /// How many GPUs.
    pub gpus: u32,
    /// Bytes of memory of each GPU.
    pub gpu_memory_bytes: f64,
    /// Bytes per second that a GPU sends to the next, over the slowest link of a ring through all.
    pub link_bytes_per_second: f64,
    /// Bytes per second between a GPU and its host's memory.
    pub host_link_bytes_per_second: f64,
    /// Bytes of its host's memory that a GPU may use.
    pub host_memory_bytes: f64,
    /// Bytes per second that a host's CPUs read and write for one GPU's optimizer.
    pub host_memory_bytes_per_second: f64,
}

impl Cluster {
    /// Equal GPUs. Unless set by [`host`](Self::host), hosts have 128 GB per GPU, PCIe at 25 GB/s and memory at 50
    /// GB/s.
    pub fn new(gpus: u32, gpu_memory_bytes: f64, link_bytes_per_second: f64) -> Self {
        Self {
            gpus,
            gpu_memory_bytes,
            link_bytes_per_second,
            host_link_bytes_per_second: 25e9,
            host_memory_bytes: 128e9,
            host_memory_bytes_per_second: 50e9,
        }
    }

    /// Per GPU: bytes of host memory, bytes per second over PCIe, and bytes per second that the host's CPUs read and
    /// write.
    pub fn host(mut self, memory_bytes: f64, link_bytes_per_second: f64, memory_bytes_per_second: f64) -> Self {
        self.host_memory_bytes = memory_bytes;
        self.host_link_bytes_per_second = link_bytes_per_second;
        self.host_memory_bytes_per_second = memory_bytes_per_second;
        self
    }

    pub(super) fn check(&self) -> Result<(), ProfileError> {
        positive("gpus", f64::from(self.gpus))?;
        positive("gpu_memory_bytes", self.gpu_memory_bytes)?;
        positive("link_bytes_per_second", self.link_bytes_per_second)?;
        positive("host_link_bytes_per_second", self.host_link_bytes_per_second)?;
        positive("host_memory_bytes_per_second", self.host_memory_bytes_per_second)?;
        not_negative("host_memory_bytes", self.host_memory_bytes)
    }
}

fn positive(name: &'static str, value: f64) -> Result<(), ProfileError> {
    check(name, value, value > 0.0, "should be a number above 0")
}

fn not_negative(name: &'static str, value: f64) -> Result<(), ProfileError> {
    check(name, value, value >= 0.0, "should be a number, 0 or more")
}

fn check(name: &'static str, value: f64, holds: bool, problem: &str) -> Result<(), ProfileError> {
    if holds && value.is_finite() {
        return Ok(());
    }
    Err(ProfileError::Setting { name, value: value.to_string(), problem: problem.to_owned() })
}
