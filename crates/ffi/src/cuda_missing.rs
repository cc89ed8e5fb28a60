//! Why libtorch sees no CUDA device.

use std::ffi::{CString, c_char};
use std::fmt::{self, Display, Formatter};
use std::path::Path;
use std::sync::OnceLock;

/// Why libtorch sees no CUDA device; its text has the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoCuda {
    /// libtorch is a build without CUDA.
    CpuBuild {
        /// Whether this machine has an NVIDIA GPU, which is then not used.
        has_gpu: bool,
    },
    /// libtorch has CUDA, but the program was built against one without it.
    NotLinked,
    /// No NVIDIA driver is loaded.
    NoDriver,
    /// There is a driver, but CUDA finds no device that it can use.
    NoDevice,
}

impl NoCuda {
    fn of(has_library: bool, is_loaded: bool, has_gpu: bool) -> Self {
        match (has_library, is_loaded) {
            (false, false) => Self::CpuBuild { has_gpu },
            (true, false) => Self::NotLinked,
            (_, true) if has_gpu => Self::NoDevice,
            (_, true) => Self::NoDriver,
        }
    }
}

impl Display for NoCuda {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CpuBuild { has_gpu: false } => "libtorch is a build without CUDA",
            Self::CpuBuild { has_gpu: true } => {
                "libtorch is a build without CUDA, so the GPU of this machine is not used: install PyTorch's CUDA build \
                 (`pip install torch` from the default index), and build again"
            }
            Self::NotLinked => {
                "the program was built against a libtorch without CUDA, and runs with one that has it: build it again"
            }
            Self::NoDriver => "no NVIDIA driver is loaded on this machine",
            Self::NoDevice => {
                "the NVIDIA driver gives CUDA no device: CUDA_VISIBLE_DEVICES may hide it, or the driver is too old for \
                 this libtorch (`nvidia-smi` shows both)"
            }
        })
    }
}

/// Why libtorch sees no CUDA device; `None` where it sees one. Does not wait for a device.
///
/// # Source
/// Of this project: `torch.cuda.is_available` does not tell why.
pub fn why_unavailable() -> Option<NoCuda> {
    (!tch::Cuda::is_available()).then(look)
}

fn look() -> NoCuda {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = |name: &str| {
        let ends = |path: &&str| Path::new(path).file_name().is_some_and(|found| found == name);
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(ends)
    };
    let beside = |cpu: &str| Path::new(cpu).with_file_name("libtorch_cuda.so").exists();
    // Linux's driver, and Windows' under WSL.
    let has_gpu = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|device| Path::new(device).exists());
    NoCuda::of(path("libtorch_cpu.so").is_some_and(beside), path("libtorch_cuda.so").is_some(), has_gpu)
}

/// For the C++ side: the text of [`NoCuda`], which lives as long as the process.
#[unsafe(no_mangle)]
extern "C" fn od_cuda_why_unavailable() -> *const c_char {
    static TEXT: OnceLock<CString> = OnceLock::new();
    TEXT.get_or_init(|| CString::new(look().to_string()).unwrap_or_default()).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_remedy() {
        let text = |library, loaded, gpu| NoCuda::of(library, loaded, gpu).to_string();
        assert!(text(false, false, true).contains("the GPU of this machine is not used: install"));
        assert!(!text(false, false, false).contains("install"));
        assert!(text(true, false, true).contains("build it again"));
        assert!(text(true, true, false).contains("no NVIDIA driver"));
        assert!(text(true, true, true).contains("CUDA_VISIBLE_DEVICES"));
    }

    #[test]
    fn an_error_of_a_missing_device_says_why() {
        let Some(why) = why_unavailable() else { return };
        let error = crate::CopyStream::new(0).map(drop).unwrap_err().to_string();
        assert!(error.contains("no CUDA device was found") && error.contains(&why.to_string()), "{error}");
    }
}
