//! What a program's environment asks for. What cannot be read is told, and the usual is taken.

use std::sync::LazyLock;

use crate::{faults, nvml};

/// The devices, and the bytes of each.
pub struct Settings {
    pub devices: usize,
    pub bytes: usize,
}

/// Each device takes addresses: so many find room.
const MOST_DEVICES: usize = 64;
const MOST_BYTES: usize = 1 << 40;

pub fn settings() -> &'static Settings {
    static SETTINGS: LazyLock<Settings> = LazyLock::new(|| Settings {
        devices: number("FAKECUDA_DEVICES", 1, MOST_DEVICES),
        bytes: number("FAKECUDA_BYTES", 16 << 30, MOST_BYTES),
    });
    &SETTINGS
}

/// Reads everything, so that whatever is wrong is told when a program begins to use CUDA.
pub fn read() -> &'static Settings {
    faults::read_environment();
    drop(nvml::all());
    settings()
}

/// A variable's text; empty if it is not set.
pub fn text(name: &str) -> String {
    std::env::var_os(name).unwrap_or_default().to_string_lossy().into_owned()
}

/// Says what is wrong with a variable.
pub fn tell(name: &str, item: &str, wrong: &str) {
    eprintln!("fakecuda: {name}: {item:?} {wrong}");
}

fn number(name: &str, usual: usize, most: usize) -> usize {
    let text = text(name);
    match text.trim().parse() {
        Ok(number) if number <= most => number,
        _ if text.is_empty() => usual,
        _ => {
            tell(name, &text, &format!("is no number up to {most}, so it is {usual}"));
            usual
        }
    }
}
