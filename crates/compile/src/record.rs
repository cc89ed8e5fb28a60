//! What is compiled, as it is kept beside the package.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;

use overdrive_ffi::cuda;
use serde_json::{Value, json};

use crate::python;

/// A request to compile.py, and the machine that it is for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    pub(crate) machine: String,
    pub(crate) request: Value,
}

impl Record {
    /// Of a request of this process.
    pub(crate) fn new(request: Value) -> Self {
        Self { machine: machine(&request), request }
    }

    pub(crate) fn to_json(&self) -> String {
        json!({ "torch": python::TORCH, "machine": self.machine, "request": self.request }).to_string()
    }

    /// Reads one; `None` if it is none.
    pub(crate) fn of_json(text: &str) -> Option<Self> {
        let mut value: Value = serde_json::from_str(text).ok()?;
        let machine = value.get("machine")?.as_str()?.to_owned();
        Some(Self { machine, request: value.get_mut("request")?.take() })
    }
}

/// What a package for this request is made for here: the models and abilities of the processor, and of the GPUs that the
/// request is for. Packages use all of them.
pub(crate) fn machine(request: &Value) -> String {
    let mut text = processor();
    let inputs = request["inputs"].as_array().into_iter().flatten();
    let devices: BTreeSet<&str> = inputs.filter_map(|input| input["device"].as_str()).collect();
    for gpu in devices.into_iter().filter_map(|device| device.strip_prefix("cuda:")?.parse().ok()) {
        // Writing to a string does not fail.
        let _ = match (cuda::device_name(gpu), cuda::device_capability(gpu)) {
            (Ok(name), Ok((major, minor))) => write!(text, "; GPU {gpu}: {name}, capability {major}.{minor}"),
            _ => write!(text, "; no GPU {gpu}"),
        };
    }
    text
}

fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let wanted = |line: &&str| ["model name", "flags", "Features"].iter().any(|name| line.starts_with(name));
    let lines: Vec<&str> = info.lines().filter(wanted).take(2).collect();
    format!("{} {}", std::env::consts::ARCH, lines.join(" "))
}
