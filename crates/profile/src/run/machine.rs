//! The machine that a run took place on.

use serde::{Deserialize, Serialize};
use tch::Device;

/// The machine and the versions of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MachineInfo {
    /// Its name in the network.
    pub host: String,
    /// The kernel's name and version.
    pub system: String,
    /// CPUs that this process may use.
    pub cpus: u32,
    /// Threads of one libtorch operator.
    pub torch_threads: u32,
    /// `cpu` or `cuda:0`: the device that the steps were timed on.
    pub device: String,
    /// The GPU's name, if the device is a GPU.
    pub gpu: Option<String>,
    /// The GPU's compute capability, major and minor, if the device is a GPU. None in older records.
    #[serde(default)]
    pub gpu_capability: Option<(i32, i32)>,
}

impl MachineInfo {
    pub(super) fn of(device: Device) -> Self {
        let name = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        Self {
            host: text(name.nodename()),
            system: format!("{} {}", text(name.sysname()), text(name.release())),
            cpus: std::thread::available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX)),
            torch_threads: u32::try_from(tch::get_num_threads()).unwrap_or(1),
            device: match device {
                Device::Cuda(index) => format!("cuda:{index}"),
                _ => "cpu".to_owned(),
            },
            gpu: match device {
                Device::Cuda(index) => overdrive_ffi::cuda::device_name(index).ok(),
                _ => None,
            },
            gpu_capability: match device {
                Device::Cuda(index) => overdrive_ffi::cuda::device_capability(index).ok(),
                _ => None,
            },
        }
    }

    /// Whether the steps ran on a GPU.
    pub fn has_gpu(&self) -> bool {
        self.device.starts_with("cuda")
    }
}
