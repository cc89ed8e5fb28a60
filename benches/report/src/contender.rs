//! The contenders of the technique benchmark: Python's PyTorch, plain tch, and Overdrive's techniques.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A way to train a workload. The command line and the JSON use the same name.
///
/// The doc comment of each variant is also its text in `--help` and on the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Contender {
    /// Python's PyTorch as most people write it.
    Pytorch,
    /// Python's PyTorch tuned by hand.
    PytorchTuned,
    /// Python's PyTorch tuned, with `torch.compile`.
    PytorchCompiled,
    /// tch alone: its image reading, models and optimizers.
    Tch,
    /// `DataLoader`: worker threads decode batches.
    Prefetch,
    /// `DataLoader` over `Cached`: each file is decoded once.
    CachePrefetch,
    /// `DataLoader` whose workers rest between turns, while all threads compute.
    TakeTurns,
    /// `DataLoader` that decodes JPEG files at a fraction of their size.
    ScaledDecode,
    /// The channels-last memory format.
    ChannelsLast,
    /// The fused AdamW kernel.
    Fused,
    /// A cache of freed host memory, which avoids page faults.
    HostCache,
    /// Mixed precision in bfloat16.
    Bf16,
    /// Mixed precision in float16, with a `GradScaler`.
    Fp16,
    /// float32 with TensorFloat-32 matrix products.
    Tf32,
    /// The whole dataset in the device's memory.
    DeviceData,
    /// Two micro-batches per step, to save memory.
    Accumulate,
    /// The loss and its gradients compiled by Inductor.
    Compiled,
    /// Overdrive: several techniques together, without --quick those that make steps faster in a trial.
    Combined,
}

impl Contender {
    /// All of them, in the order of a report's rows.
    pub const ALL: [Self; 18] = [
        Self::Pytorch,
        Self::PytorchTuned,
        Self::PytorchCompiled,
        Self::Tch,
        Self::Prefetch,
        Self::CachePrefetch,
        Self::TakeTurns,
        Self::ScaledDecode,
        Self::ChannelsLast,
        Self::Fused,
        Self::HostCache,
        Self::Bf16,
        Self::Fp16,
        Self::Tf32,
        Self::DeviceData,
        Self::Accumulate,
        Self::Compiled,
        Self::Combined,
    ];

    /// The name on the command line and in the JSON.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The name for readers, the same as in README's table. Techniques have that of the command line.
    pub fn title(self) -> String {
        match self {
            Self::Pytorch => "PyTorch as written".to_owned(),
            Self::PytorchTuned => "PyTorch tuned by hand".to_owned(),
            Self::PytorchCompiled => "PyTorch compiled".to_owned(),
            Self::Tch => "plain tch".to_owned(),
            Self::Combined => "Overdrive".to_owned(),
            technique => technique.name(),
        }
    }

    /// What it does, in one line.
    pub fn description(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|value| value.get_help().map(ToString::to_string)).unwrap_or_default()
    }

    /// Whether Python runs it.
    pub const fn is_python(self) -> bool {
        matches!(self, Self::Pytorch | Self::PytorchTuned | Self::PytorchCompiled)
    }

    /// Whether it is plain tch with one change.
    pub const fn is_technique(self) -> bool {
        !self.is_python() && !matches!(self, Self::Tch | Self::Combined)
    }

    /// Whether it only helps training on a CPU.
    pub const fn needs_cpu(self) -> bool {
        matches!(self, Self::HostCache | Self::TakeTurns)
    }

    /// Whether it needs a CUDA device.
    pub const fn needs_cuda(self) -> bool {
        matches!(self, Self::Fp16 | Self::Tf32 | Self::DeviceData)
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}
