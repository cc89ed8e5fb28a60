//! What is compiled, as it is kept beside the package.

use std::fs;

use serde_json::{Value, json};

use crate::python;

/// A request to compile.py, and the processor that it is for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    pub(crate) processor: String,
    pub(crate) request: Value,
}

impl Record {
    /// Of a request of this process.
    pub(crate) fn new(request: Value) -> Self {
        Self { processor: processor(), request }
    }

    pub(crate) fn to_json(&self) -> String {
        json!({ "torch": python::TORCH, "processor": self.processor, "request": self.request }).to_string()
    }

    /// Reads one; `None` if it is none.
    pub(crate) fn of_json(text: &str) -> Option<Self> {
        let mut value: Value = serde_json::from_str(text).ok()?;
        let processor = value.get("processor")?.as_str()?.to_owned();
        Some(Self { processor, request: value.get_mut("request")?.take() })
    }
}

/// The processor's model and abilities: packages use all of them.
pub(crate) fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let wanted = |line: &&str| ["model name", "flags", "Features"].iter().any(|name| line.starts_with(name));
    let lines: Vec<&str> = info.lines().filter(wanted).take(2).collect();
    format!("{} {}", std::env::consts::ARCH, lines.join(" "))
}
