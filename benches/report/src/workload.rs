//! The workloads of the technique benchmark.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::Contender;

/// A model with its data. The command line and the JSON use the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Workload {
    /// A small CNN on handwritten digits, one PNG file each.
    Digits,
    /// A ResNet on photographs, JPEG files.
    Photos,
    /// A small GPT on Hamlet, byte by byte.
    Text,
}

/// The least speed of the combined contender, relative to another contender.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    /// The other contender.
    pub against: Contender,
    /// The least ratio of speeds.
    pub at_least: f64,
}

impl Workload {
    /// All of them, in the order of a report.
    pub const ALL: [Self; 3] = [Self::Digits, Self::Photos, Self::Text];

    /// The name on the command line and in the JSON.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// One line about it.
    pub fn description(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|value| value.get_help().map(ToString::to_string)).unwrap_or_default()
    }

    /// The unit of its samples: images or tokens.
    pub const fn samples(self) -> &'static str {
        match self {
            Self::Digits | Self::Photos => "images",
            Self::Text => "tokens",
        }
    }

    /// Its contenders, in the order of the rows.
    pub fn contenders(self, cuda: bool) -> Vec<Contender> {
        use Contender as C;
        let own: &[Contender] = match self {
            Self::Digits => {
                &[C::Prefetch, C::CachePrefetch, C::Fused, C::HostCache, C::Bf16, C::Fp16, C::Tf32, C::DeviceData]
            }
            Self::Photos => &[
                C::Prefetch,
                C::TakeTurns,
                C::ScaledDecode,
                C::ChannelsLast,
                C::Fused,
                C::HostCache,
                C::Bf16,
                C::Fp16,
                C::Tf32,
            ],
            Self::Text => &[C::Fused, C::HostCache, C::Bf16, C::Fp16, C::Tf32, C::Accumulate, C::Compiled],
        };
        let always = [C::Pytorch, C::PytorchTuned, C::PytorchCompiled, C::Tch];
        let all = always.iter().chain(own).chain(&[C::Combined]).copied();
        let fits = |it: &Contender| if cuda { !it.needs_cpu() } else { !it.needs_cuda() };
        all.filter(fits).collect()
    }

    /// The goals of [`Contender::Combined`]. They were set for two cores; elsewhere, it has to be as fast as the others.
    pub const fn goals(self, two_cores: bool) -> [Goal; 3] {
        let (as_written, tuned) = match self {
            Self::Digits if two_cores => (2.2, 1.0),
            Self::Photos if two_cores => (1.6, 1.1),
            _ => (1.0, 1.0),
        };
        [
            Goal { against: Contender::Pytorch, at_least: as_written },
            Goal { against: Contender::PytorchTuned, at_least: tuned },
            Goal { against: Contender::Tch, at_least: 1.0 },
        ]
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}
