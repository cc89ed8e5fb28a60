//! Which of a rank's outputs go to files.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::LaunchError;

/// A choice of a rank's outputs.
///
/// # Source
/// `torch.distributed.elastic.multiprocessing.Std`.
#[doc(alias = "Std")]
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub enum Streams {
    /// Neither: `0`.
    #[default]
    None,
    /// Standard output: `1`.
    Out,
    /// Standard error: `2`.
    Err,
    /// Both: `3`.
    All,
}

impl Streams {
    pub(crate) fn out(self) -> bool {
        matches!(self, Self::Out | Self::All)
    }

    pub(crate) fn err(self) -> bool {
        matches!(self, Self::Err | Self::All)
    }

    fn parse(text: &str) -> Option<Self> {
        Some(match text.trim() {
            "0" => Self::None,
            "1" => Self::Out,
            "2" => Self::Err,
            "3" => Self::All,
            _ => return None,
        })
    }
}

/// A choice of outputs for each rank of a host, parsed from torchrun's form: `3` for all ranks, or `0:1,1:3` by local
/// rank.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct StreamsByRank {
    every: Streams,
    by_local_rank: BTreeMap<usize, Streams>,
}

impl StreamsByRank {
    pub(crate) fn of(&self, local_rank: usize) -> Streams {
        self.by_local_rank.get(&local_rank).copied().unwrap_or(self.every)
    }

    pub(crate) fn highest_local_rank(&self) -> Option<usize> {
        self.by_local_rank.keys().next_back().copied()
    }

    pub(crate) fn any(&self) -> bool {
        self.every != Streams::None || self.by_local_rank.values().any(|streams| *streams != Streams::None)
    }
}

impl From<Streams> for StreamsByRank {
    fn from(every: Streams) -> Self {
        Self { every, by_local_rank: BTreeMap::new() }
    }
}

impl FromStr for StreamsByRank {
    type Err = LaunchError;

    fn from_str(text: &str) -> Result<Self, LaunchError> {
        let wrong = || {
            LaunchError::Options(format!(
                "`{text}` is not a choice of outputs: give 0 (neither), 1 (standard output), 2 (standard error) or 3 \
                 (both), or a list by local rank like 0:3,1:2"
            ))
        };
        if let Some(every) = Streams::parse(text) {
            return Ok(every.into());
        }
        let mut by_local_rank = BTreeMap::new();
        for part in text.split(',') {
            let (rank, streams) = part.split_once(':').ok_or_else(wrong)?;
            let rank = rank.trim().parse().map_err(|_| wrong())?;
            if by_local_rank.insert(rank, Streams::parse(streams).ok_or_else(wrong)?).is_some() {
                return Err(LaunchError::Options(format!("`{text}` names local rank {rank} twice")));
            }
        }
        Ok(Self { every: Streams::None, by_local_rank })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torchruns_forms_are_read() {
        let all: StreamsByRank = "3".parse().unwrap();
        assert!(all.of(7).out() && all.of(7).err());
        let some: StreamsByRank = "0:1,2:3".parse().unwrap();
        assert_eq!([0, 1, 2].map(|rank| some.of(rank)), [Streams::Out, Streams::None, Streams::All]);
        assert_eq!(some.highest_local_rank(), Some(2));
    }

    #[test]
    fn invalid_choices_are_refused() {
        for text in ["", "4", "-1", "0:", ":1", "0:1,", "a:1", "0:9", "0:1,0:2"] {
            assert!(text.parse::<StreamsByRank>().is_err(), "{text}");
        }
    }
}
