//! The record of a run, and its file.

use std::fs;
use std::path::Path;

use overdrive_core::MemoryForecast;
use serde::{Deserialize, Serialize};

use super::ranks::missing;
use super::{MachineInfo, ProfiledSteps, RankInfo};
use crate::error::When as _;
use crate::trace::replace;
use crate::{MonitorGap, Phase, ProfileError, Sample, StepReport};

/// The version of the file format.
const SCHEMA: u32 = 1;

/// The record of a run, stored as `profile.json`. A [`Diagnosis`](crate::Diagnosis) is made from it.
///
/// Made by [`StepTimer::finish`](crate::StepTimer::finish) if the timer [records](crate::StepTimerBuilder::record).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunProfile {
    /// The version of this format: 1.
    pub schema: u32,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The rank of this process, of `world_size`.
    pub rank: u64,
    /// How many ranks there are.
    pub world_size: u64,
    /// When it began, in seconds since 1970.
    pub unix_seconds: f64,
    /// Where it ran.
    pub machine: MachineInfo,
    /// The system's thread ID of the training thread.
    pub timer_thread: i32,
    /// The timed steps, without the profiled ones and the warm-up. None if there were none.
    pub steps: Option<StepReport>,
    /// Each step of the window, the oldest first.
    pub step_times: Vec<StepTimes>,
    /// The reports of all ranks by rank, once the records are [merged](Self::merge_ranks); empty before.
    pub ranks: Vec<StepReport>,
    /// More about these ranks, in the same order, including their numbers. Empty in older records: there a rank's index
    /// is its number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rank_info: Vec<RankInfo>,
    /// The profile of a few of the steps. None if there were too few steps.
    pub profiled: Option<ProfiledSteps>,
    /// How often the allocator ran out of GPU memory during the steps, freed its cache and tried again. None without a
    /// GPU.
    #[serde(default)]
    pub alloc_retries: Option<u64>,
    /// What the steps' memory is used for, if the program has [told](crate::RunRecorder::memory_forecast).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_forecast: Option<MemoryForecast>,
    /// The machine during the run.
    pub samples: Vec<Sample>,
    /// What the monitor could not sample.
    pub gaps: Vec<MonitorGap>,
    /// Problems in recording, and other things that the reader should know.
    pub notes: Vec<String>,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepTimes {
    /// Its number, from 0.
    pub step: u64,
    /// When it began, in seconds since the recording began, as for [`Sample::elapsed_seconds`].
    pub start_seconds: f64,
    /// Seconds on the host by phase, in the order of [`Phase::ALL`].
    pub host_seconds: Vec<f64>,
    /// Seconds on the device by phase, if they are known.
    pub device_seconds: Option<Vec<f64>>,
    /// How many samples it trained on.
    pub samples: u64,
    /// Whether the profiler, or the thread that writes its trace, slowed it down.
    pub is_profiled: bool,
}

impl StepTimes {
    /// Its whole time on the host.
    pub fn total_seconds(&self) -> f64 {
        self.host_seconds.iter().sum()
    }
}

impl RunProfile {
    pub(super) fn new() -> Self {
        Self { schema: SCHEMA, world_size: 1, ..Self::default() }
    }

    /// The share of the steps' time on the host that a phase takes, from 0 to 1.
    pub fn share(&self, phase: Phase) -> f64 {
        self.steps.as_ref().and_then(|steps| steps.phase(phase)).map_or(0.0, |phase| phase.share)
    }

    /// Seconds of the mean step.
    pub fn mean_step_seconds(&self) -> Option<f64> {
        let steps = self.steps.as_ref().filter(|steps| steps.steps > 0)?;
        Some(steps.total_seconds / steps.steps as f64)
    }

    /// Merges the records of all ranks into that of the lowest rank, with the reports of all. Ranks keep their numbers
    /// if some are missing; a note names these. The profile is that of the lowest rank that has one.
    ///
    /// # Errors
    /// `NothingToRecord` without a record; `Setting` if a rank appears twice.
    pub fn merge_ranks(mut runs: Vec<Self>) -> Result<Self, ProfileError> {
        runs.sort_by_key(|run| run.rank);
        if let Some(twice) = runs.windows(2).find(|pair| pair[0].rank == pair[1].rank) {
            let problem = "there are two records of this rank, perhaps of different runs: give one".to_owned();
            return Err(ProfileError::Setting { name: "rank", value: twice[0].rank.to_string(), problem });
        }
        let timed: Vec<&Self> = runs.iter().filter(|run| run.steps.is_some()).collect();
        let ranks = timed.iter().filter_map(|run| run.steps.clone()).collect();
        let rank_info = RankInfo::of(&timed);
        let untimed: Vec<_> = runs.iter().filter(|run| run.steps.is_none()).map(|run| run.rank).collect();
        let present: Vec<_> = runs.iter().map(|run| run.rank).collect();
        let profiled = runs.iter().position(|run| run.profiled.is_some());
        let profiled = profiled.map(|place| (runs[place].rank, runs[place].profiled.take()));
        let nothing = ProfileError::NothingToRecord("there is no record of a rank");
        let mut first = runs.into_iter().next().ok_or(nothing)?;
        if present.len() > 1 || first.world_size > 1 {
            if let Some(missing) = missing(first.world_size, &present) {
                let (count, size) = (present.len(), first.world_size);
                first.notes.push(format!("{count} of {size} ranks left a record; without one: {missing}"));
            }
            first.notes.extend(untimed.iter().map(|rank| format!("rank {rank} timed no step")));
            (first.ranks, first.rank_info) = (ranks, rank_info);
        }
        if let Some((rank, profiled)) = profiled {
            if rank != first.rank {
                first
                    .notes
                    .push(format!("no step of rank {} was profiled: operators are those of rank {rank}", first.rank));
            }
            first.profiled = profiled;
        }
        Ok(first)
    }

    /// Writes it as JSON. The file appears when it is complete.
    ///
    /// # Errors
    /// `Io` when the file cannot be written.
    pub fn write_json(&self, path: impl AsRef<Path>) -> Result<(), ProfileError> {
        replace(path.as_ref(), |out| serde_json::to_writer(out, self).map_err(std::io::Error::from))
    }

    /// Reads a file that [`write_json`](Self::write_json) has written.
    ///
    /// # Errors
    /// `Io` when the file cannot be read; `Setting` when it is not a record, or is of another version.
    pub fn read_json(path: impl AsRef<Path>) -> Result<Self, ProfileError> {
        let path = path.as_ref();
        let bytes = fs::read(path).when("read it", path)?;
        let invalid =
            |problem: String| ProfileError::Setting { name: "profile", value: path.display().to_string(), problem };
        let run: Self = serde_json::from_slice(&bytes)
            .map_err(|error| invalid(format!("is not a `profile.json` of overdrive-profile: {error}")))?;
        if run.schema != SCHEMA {
            let problem = format!("is of version {}; this program reads version {SCHEMA}", run.schema);
            return Err(invalid(problem));
        }
        Ok(run)
    }
}
