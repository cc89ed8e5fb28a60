//! The report of the main job: its JSON form, and how it is made from measured runs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::advice::advise;
use crate::{DeviceKind, EpochMark, Machine, Run, Spread, Technique, stats::median};

/// The version of the JSON form; a field that is added leaves it as it is.
pub const SCHEMA: u32 = 1;

/// The most that accuracy may fall, in percentage points, for a technique to have kept it.
pub const GUARD_POINTS: f64 = 0.5;

/// Names of the software that took part, each with its version.
pub type Versions = BTreeMap<String, String>;

/// Everything that a run of the main job found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What it ran on, with which software, which data and which options.
    #[serde(flatten)]
    pub setting: Setting,
    /// One row a device and technique, each device's baseline first.
    pub rows: Vec<Row>,
    /// What to use on this machine and why, and what did not help: a headline, then a sentence a line.
    pub advice: String,
}

/// What the numbers of a report depend on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// When it was measured, as [`crate::date::utc_now`] writes it.
    pub measured_at: String,
    /// The machine.
    pub machine: Machine,
    /// The software.
    pub versions: Versions,
    /// The data.
    pub dataset: Dataset,
    /// The options, resolved.
    pub config: Config,
    /// How it was measured: what the clock includes and excludes, a sentence each.
    pub method: Vec<String>,
}

/// The data that the runs trained and tested on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dataset {
    /// Its name.
    pub name: String,
    /// Training images.
    pub train: usize,
    /// Test images.
    pub test: usize,
    /// SHA-256 of the images and labels used.
    pub sha256: String,
}

/// What every run had in common.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Whether this was a quick look rather than the full size.
    pub quick: bool,
    /// Times that each run saw each training image.
    pub epochs: u32,
    /// Interleaved repetitions.
    pub repeat: u32,
    /// Seed of the initial weights and of the data order.
    pub seed: u32,
    /// Threads that computed.
    pub threads: u32,
    /// Images a step.
    pub batch_size: u32,
    /// The model, in a few words.
    pub model: String,
    /// The optimizer and its settings, in a few words.
    pub optimizer: String,
}

/// What one technique gained on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The technique.
    pub technique: Technique,
    /// The device.
    pub device: DeviceKind,
    /// Seconds of training of each repetition.
    pub seconds: Vec<f64>,
    /// Their median.
    pub seconds_median: f64,
    /// Times faster than the baseline: the median of the ratios within each repetition.
    pub speedup: f64,
    /// The lowest of these ratios.
    pub speedup_low: f64,
    /// The highest of these ratios.
    pub speedup_high: f64,
    /// Share of the test images recognised at the end, 0 to 1; the median of the repetitions.
    pub accuracy: f64,
    /// The change against the baseline, in percentage points.
    pub accuracy_delta_points: f64,
    /// Whether accuracy fell by no more than [`GUARD_POINTS`].
    pub kept_accuracy: bool,
    /// The last batch's training loss; the median of the repetitions, absent where one of them diverged.
    pub final_loss: Option<f64>,
    /// The most memory that a run's process held.
    pub peak_rss_bytes: Option<u64>,
    /// The most memory that a run allocated on the device.
    pub peak_device_bytes: Option<u64>,
    /// Seconds that the training thread spent getting data; the median of the repetitions.
    pub data_wait_seconds: f64,
    /// Share of its time that the training thread spent getting data; the median of the repetitions.
    pub data_wait_fraction: f64,
    /// Of the time that the baseline spent getting data, the share that this row saved; only for techniques that change
    /// nothing but the data's way.
    pub won_back_fraction: Option<f64>,
    /// The end of each epoch, each value the median of the repetitions.
    pub curve: Vec<EpochMark>,
}

impl Row {
    /// Whether the row is its device's baseline.
    pub fn is_baseline(&self) -> bool {
        self.technique == Technique::Baseline
    }

    /// Its median, fastest and slowest time in seconds.
    pub fn spread(&self) -> Spread {
        let median = self.seconds_median;
        Spread::of(&self.seconds).unwrap_or(Spread { median, low: median, high: median })
    }
}

/// Runs that no report can be made of.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ReportError {
    /// There are no runs.
    #[error("there is nothing to report: no run was measured")]
    NoRuns,
    /// A technique has no baseline run of the same repetition on its device.
    #[error("{technique} on {device} has no baseline run of the same repetition to be compared with")]
    NoBaseline {
        /// The technique.
        technique: Technique,
        /// Its device.
        device: DeviceKind,
    },
    /// A measured value makes no sense.
    #[error("a run of {technique} on {device} has no finite, positive time or no accuracy")]
    BadRun {
        /// The technique.
        technique: Technique,
        /// Its device.
        device: DeviceKind,
    },
}

impl Report {
    /// The report of `runs`, which may come in any order.
    ///
    /// # Errors
    ///
    /// [`ReportError`] where there is nothing to compare, or nothing to compare with.
    pub fn from_runs(setting: Setting, runs: &[Run]) -> Result<Self, ReportError> {
        if runs.is_empty() {
            return Err(ReportError::NoRuns);
        }
        let mut groups: BTreeMap<(DeviceKind, Technique), BTreeMap<u32, &Run>> = BTreeMap::new();
        for run in runs {
            groups.entry((run.device, run.technique)).or_default().insert(run.repetition, run);
        }
        let rows = groups
            .iter()
            .map(|(&(device, technique), runs)| {
                let baseline = groups.get(&(device, Technique::Baseline));
                let pairs = pair(runs, baseline).ok_or(ReportError::NoBaseline { technique, device })?;
                row(technique, device, &pairs).ok_or(ReportError::BadRun { technique, device })
            })
            .collect::<Result<Vec<Row>, _>>()?;
        let advice = advise(&rows, &setting.machine).join("\n");
        Ok(Self { schema: SCHEMA, setting, rows, advice })
    }

    /// The devices that were measured, in the order of the rows.
    pub fn devices(&self) -> Vec<DeviceKind> {
        let mut devices: Vec<DeviceKind> = self.rows.iter().map(|row| row.device).collect();
        devices.dedup();
        devices
    }

    /// The rows of one device.
    pub fn rows_on(&self, device: DeviceKind) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.device == device)
    }

    /// The JSON form, indented.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|json| json + "\n")
    }
}

/// Each run with the baseline's run of the same repetition; `None` where one is missing.
fn pair<'a>(
    runs: &BTreeMap<u32, &'a Run>,
    baseline: Option<&BTreeMap<u32, &'a Run>>,
) -> Option<Vec<(&'a Run, &'a Run)>> {
    runs.iter().map(|(repetition, run)| Some((*run, *baseline?.get(repetition)?))).collect()
}

/// The row of one technique; `None` where a value that every row needs cannot be made.
fn row(technique: Technique, device: DeviceKind, pairs: &[(&Run, &Run)]) -> Option<Row> {
    let of = |value: fn(&Run) -> f64| -> Vec<f64> { pairs.iter().map(|(run, _)| value(run)).collect() };
    let baseline = |value: fn(&Run) -> f64| -> Vec<f64> { pairs.iter().map(|(_, base)| value(base)).collect() };

    let seconds = of(|run| run.seconds);
    if seconds.iter().any(|seconds| *seconds <= 0.0) {
        return None;
    }
    let speedup = Spread::of_ratios(&baseline(|run| run.seconds), &seconds)?;
    let accuracy = median(&of(accuracy))?;
    // Rounded to what counting images can tell apart, so that a change of exactly the guard is not lost in the binary.
    let accuracy_delta_points = ((accuracy - median(&baseline(self::accuracy))?) * 1e8).round() / 1e6;
    let saved = pairs.iter().map(|(run, base)| (base.seconds - run.seconds) / base.data_wait_seconds);
    let won_back_fraction = technique.changes_only_data().then(|| median(&saved.collect::<Vec<f64>>())).flatten();
    Some(Row {
        technique,
        device,
        seconds_median: median(&seconds)?,
        speedup: speedup.median,
        speedup_low: speedup.low,
        speedup_high: speedup.high,
        accuracy,
        accuracy_delta_points,
        kept_accuracy: accuracy_delta_points >= -GUARD_POINTS,
        final_loss: median(&of(|run| run.final_loss)),
        peak_rss_bytes: pairs.iter().filter_map(|(run, _)| run.peak_rss_bytes).max(),
        peak_device_bytes: pairs.iter().filter_map(|(run, _)| run.peak_device_bytes).max(),
        data_wait_seconds: median(&of(|run| run.data_wait_seconds))?,
        data_wait_fraction: median(&of(|run| run.data_wait_seconds / run.seconds))?,
        won_back_fraction,
        curve: curve(pairs),
        seconds,
    })
}

/// The accuracy after the last epoch.
fn accuracy(run: &Run) -> f64 {
    run.epochs.last().map_or(f64::NAN, |mark| mark.accuracy)
}

/// The medians of each epoch's end, as far as all repetitions got.
fn curve(pairs: &[(&Run, &Run)]) -> Vec<EpochMark> {
    let epochs = pairs.iter().map(|(run, _)| run.epochs.len()).min().unwrap_or(0);
    let middle = |epoch: usize, value: fn(&EpochMark) -> f64| {
        median(&pairs.iter().map(|(run, _)| value(&run.epochs[epoch])).collect::<Vec<f64>>())
    };
    let mark = |epoch| {
        Some(EpochMark {
            seconds: middle(epoch, |mark| mark.seconds)?,
            accuracy: middle(epoch, |mark| mark.accuracy)?,
            loss: middle(epoch, |mark| mark.loss.unwrap_or(f64::NAN)), // NaN in one repetition leaves it out
        })
    };
    (0..epochs).filter_map(mark).collect()
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
