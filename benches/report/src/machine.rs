//! The machine that a benchmark ran on, and the memory that its process took.

use std::io;
use std::thread::available_parallelism;

use serde::{Deserialize, Serialize};

/// CPU flags that decide how fast mixed precision is.
const FLAGS: [&str; 6] = ["avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"];

/// What a reader needs to know of the machine to judge a measured time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name, as it calls itself.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Those of the processor's instruction sets that decide how fast mixed precision is.
    pub cpu_flags: Vec<String>,
    /// Memory of the machine.
    pub memory_bytes: Option<u64>,
    /// The system, its version and its architecture.
    pub os: String,
    /// The CUDA device's name.
    pub gpu: Option<String>,
}

impl Machine {
    /// This machine; the caller, who links libtorch, says which GPU it sees.
    pub fn detect(gpu: Option<String>) -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let present: Vec<&str> = field(&cpuinfo, "flags").unwrap_or_default().split_whitespace().collect();
        let release = read("/proc/sys/kernel/osrelease");
        Self {
            cpu: field(&cpuinfo, "model name").unwrap_or("unknown processor").to_owned(),
            cores: available_parallelism().map_or(1, usize::from),
            cpu_flags: FLAGS.iter().filter(|flag| present.contains(flag)).map(|&flag| flag.to_owned()).collect(),
            memory_bytes: kibibytes(&read("/proc/meminfo"), "MemTotal"),
            os: [std::env::consts::OS, release.trim(), std::env::consts::ARCH].map(str::to_owned).join(" "),
            gpu,
        }
    }

    /// Whether the processor multiplies bfloat16 numbers in hardware.
    pub fn has_bf16_hardware(&self) -> bool {
        self.cpu_flags.iter().any(|flag| flag == "avx512_bf16" || flag == "amx_bf16")
    }
}

/// The most memory that this process has held since it began, or since [`reset_peak_rss`]; `None` where the system does
/// not tell.
pub fn peak_rss_bytes() -> Option<u64> {
    kibibytes(&read("/proc/self/status"), "VmHWM")
}

/// Sets the peak back to what the process holds now.
///
/// Memory that an allocator keeps from earlier work still counts, so rows that are to be compared fairly run each in
/// their own process; this serves where that costs too much.
///
/// # Errors
///
/// Where the system has no `/proc/self/clear_refs` or does not let this process write to it.
pub fn reset_peak_rss() -> io::Result<()> {
    std::fs::write("/proc/self/clear_refs", "5")
}

/// A file's text; empty where it cannot be read, since a missing fact must not stop a benchmark.
fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

/// The value of a line `name: N kB`, in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let status = "VmHWMx:\t  1 kB\nVmHWM:\t   2048 kB\nThreads:\t4\n";
        assert_eq!(kibibytes(status, "VmHWM"), Some(2 << 20));
        assert_eq!(kibibytes(status, "Threads"), None);
        assert_eq!(kibibytes(status, "VmRSS"), None);
    }

    #[test]
    fn bf16_hardware_is_either_extension() {
        let machine = |flag: &str| Machine { cpu_flags: vec![flag.to_owned()], ..Machine::default() };
        assert!(machine("amx_bf16").has_bf16_hardware() && machine("avx512_bf16").has_bf16_hardware());
        assert!(!machine("avx512f").has_bf16_hardware());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_rises_with_memory_in_use_and_falls_back_after_a_reset() {
        const SIZE: usize = 256 << 20; // large enough that other tests of this process do not matter
        let before = peak_rss_bytes().unwrap();
        drop(std::hint::black_box(vec![1_u8; SIZE]));
        let after = peak_rss_bytes().unwrap();
        assert!(after >= before + SIZE as u64 / 2, "the peak did not rise: {before} to {after}");
        if reset_peak_rss().is_ok() {
            let reset = peak_rss_bytes().unwrap();
            assert!(reset <= after - SIZE as u64 / 2, "the peak did not fall: {after} to {reset}");
        }
    }
}
