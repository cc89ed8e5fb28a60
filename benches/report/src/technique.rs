//! The ways of training that the main job compares.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One way of training the same model on the same data; its name is the same on the command line and in the JSON.
///
/// The line above each variant is what `--help` and the page say about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Technique {
    /// Reads and decodes one file an image, every epoch.
    Baseline,
    /// The whole set in one tensor, as tch gives it.
    InMemory,
    /// Each image decoded once, then kept in memory.
    Cache,
    /// The cache, and batches prepared in the background.
    CachePrefetch,
    /// Mixed precision in bfloat16.
    AmpBf16,
    /// Mixed precision in float16, with a GradScaler.
    AmpFp16,
    /// Small batches summed to the large one, for memory.
    Accumulate,
    /// Everything together.
    Combined,
    /// float32 with TensorFloat-32 products.
    Tf32,
    /// The whole set in the device's memory.
    DeviceData,
}

impl Technique {
    /// Every technique, in the order of the report's rows.
    pub const ALL: [Self; 10] = [
        Self::Baseline,
        Self::InMemory,
        Self::Cache,
        Self::CachePrefetch,
        Self::AmpBf16,
        Self::AmpFp16,
        Self::Accumulate,
        Self::Combined,
        Self::Tf32,
        Self::DeviceData,
    ];

    /// The name on the command line and in the JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::InMemory => "in_memory",
            Self::Cache => "cache",
            Self::CachePrefetch => "cache_prefetch",
            Self::AmpBf16 => "amp_bf16",
            Self::AmpFp16 => "amp_fp16",
            Self::Accumulate => "accumulate",
            Self::Combined => "combined",
            Self::Tf32 => "tf32",
            Self::DeviceData => "device_data",
        }
    }

    /// What it does, in one line.
    pub fn description(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|value| value.get_help().map(ToString::to_string)).unwrap_or_default()
    }

    /// Whether it is run only where there is a CUDA device.
    pub const fn needs_cuda(self) -> bool {
        matches!(self, Self::AmpFp16 | Self::Tf32 | Self::DeviceData)
    }

    /// Whether it changes only how the data arrives, so that the time it saves is time that the baseline spent on data.
    pub const fn changes_only_data(self) -> bool {
        matches!(self, Self::InMemory | Self::Cache | Self::CachePrefetch | Self::DeviceData)
    }

    /// Whether it needs the whole set in memory as one tensor.
    pub const fn needs_one_tensor(self) -> bool {
        matches!(self, Self::InMemory | Self::DeviceData)
    }
}

impl fmt::Display for Technique {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_serves_the_code_the_command_line_and_the_json() {
        assert_eq!(Technique::value_variants(), Technique::ALL);
        for technique in Technique::ALL {
            let name = technique.name();
            assert_eq!(serde_json::to_value(technique).unwrap(), name);
            assert_eq!(Technique::from_str(name, false), Ok(technique));
            assert!(!technique.description().is_empty(), "{name} has no description");
        }
    }
}
