//! Memory in use over time.

use std::collections::BTreeMap;
use std::io;
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::file::replace;
use crate::ProfileError;
use crate::events::DeviceType;

/// Memory in use on one device over time, relative to the profile's start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryTimeline {
    /// `cpu` or `cuda:0`.
    pub device: String,
    /// When memory was allocated or freed, in nanoseconds since the profile began.
    pub times_ns: Vec<i64>,
    /// The bytes that were allocated; negative when they were freed.
    pub changes: Vec<i64>,
    /// The bytes in use then, relative to the profile's start.
    pub in_use: Vec<i64>,
}

impl MemoryTimeline {
    /// The most bytes in use at once, relative to the profile's start; at least 0.
    pub fn peak(&self) -> i64 {
        self.in_use.iter().copied().max().unwrap_or(0).max(0)
    }
}

/// `changes` are device type, index, time and bytes, sorted by time.
pub(crate) fn timelines(changes: Vec<(DeviceType, i32, i64, i64)>) -> Vec<MemoryTimeline> {
    let mut devices: BTreeMap<String, MemoryTimeline> = BTreeMap::new();
    for (device_type, index, time, bytes) in changes {
        let device = match device_type {
            DeviceType::Cpu => "cpu".to_owned(),
            DeviceType::Cuda => format!("cuda:{index}"),
            DeviceType::Other(number) => format!("device type {number}:{index}"),
        };
        let line = devices.entry(device).or_insert_with_key(|device| MemoryTimeline {
            device: device.clone(),
            times_ns: Vec::new(),
            changes: Vec::new(),
            in_use: Vec::new(),
        });
        let before = line.in_use.last().copied().unwrap_or(0);
        line.times_ns.push(time);
        line.changes.push(bytes);
        line.in_use.push(before + bytes);
    }
    devices.into_values().collect()
}

/// Writes CSV if the name ends in `.csv` or `.csv.gz`, else JSON.
pub(crate) fn export(lines: &[MemoryTimeline], path: &Path) -> Result<(), ProfileError> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let csv = name.trim_end_matches(".gz").ends_with(".csv");
    replace(path, |out| if csv { write_csv(lines, out) } else { write_json(lines, out) })
}

fn write_csv(lines: &[MemoryTimeline], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "device,time_us,change_bytes,in_use_bytes")?;
    for line in lines {
        for ((time, change), in_use) in line.times_ns.iter().zip(&line.changes).zip(&line.in_use) {
            writeln!(out, "{},{}.{:03},{change},{in_use}", line.device, time / 1000, (time % 1000).abs())?;
        }
    }
    Ok(())
}

fn write_json(lines: &[MemoryTimeline], out: &mut dyn Write) -> io::Result<()> {
    let devices: Vec<_> = lines
        .iter()
        .map(|line| {
            serde_json::json!({
                "device": line.device,
                "times_us": line.times_ns.iter().map(|&ns| ns as f64 / 1e3).collect::<Vec<_>>(),
                "change_bytes": line.changes,
                "in_use_bytes": line.in_use,
            })
        })
        .collect();
    serde_json::to_writer(out, &serde_json::json!({ "schema": 1, "devices": devices })).map_err(io::Error::from)
}
