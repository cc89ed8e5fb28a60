//! Samples of GPUs, from any source.

use serde::{Deserialize, Serialize};

use crate::ProfileError;

/// A source of GPU samples: [NVML](super::Nvml), or the caller's own.
///
/// A source that panics is dropped and not asked again; an open gap records that.
pub trait GpuSource: Send {
    /// How many GPUs there are.
    ///
    /// # Errors
    /// When there is no driver, or it is gone. It is asked again at the next sample.
    fn count(&mut self) -> Result<u32, ProfileError>;

    /// Samples one GPU; they count from 0.
    ///
    /// # Errors
    /// When it does not answer. It is asked again at the next sample. A figure that a GPU does not have is None, not an
    /// error.
    fn sample(&mut self, index: u32) -> Result<GpuSample, ProfileError>;
}

impl<S: GpuSource + ?Sized> GpuSource for Box<S> {
    fn count(&mut self) -> Result<u32, ProfileError> {
        (**self).count()
    }

    fn sample(&mut self, index: u32) -> Result<GpuSample, ProfileError> {
        (**self).sample(index)
    }
}

/// A GPU at one moment. Figures that it does not report are None.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuSample {
    /// Its number.
    pub index: u32,
    /// Its name, such as "NVIDIA H200".
    pub name: String,
    /// Its unique ID.
    pub uuid: Option<String>,
    /// The share of the driver's last sample period in which a kernel ran, from 0 to 1.
    pub utilization: Option<f64>,
    /// The share of the driver's last sample period in which its memory was read or written, from 0 to 1.
    pub memory_utilization: Option<f64>,
    /// The share of the time since the last sample in which its tensor cores were busy, from 0 to 1.
    pub tensor_utilization: Option<f64>,
    /// Bytes of its memory in use.
    pub memory_used_bytes: Option<u64>,
    /// Bytes of its memory.
    pub memory_total_bytes: Option<u64>,
    /// Its temperature in degrees Celsius.
    pub temperature_celsius: Option<f64>,
    /// The power that it draws, in watts.
    pub power_watts: Option<f64>,
    /// Its power limit, in watts.
    pub power_limit_watts: Option<f64>,
    /// The clock of its multiprocessors, in hertz.
    pub sm_clock_hertz: Option<f64>,
    /// The clock of its memory, in hertz.
    pub memory_clock_hertz: Option<f64>,
    /// Why its clocks are not higher.
    pub throttle_reasons: Vec<ThrottleReason>,
    /// Bytes per second sent over PCIe.
    pub pcie_sent_bytes_per_second: Option<f64>,
    /// Bytes per second received over PCIe.
    pub pcie_received_bytes_per_second: Option<f64>,
    /// Bytes per second sent over NVLink.
    pub nvlink_sent_bytes_per_second: Option<f64>,
    /// Bytes per second received over NVLink.
    pub nvlink_received_bytes_per_second: Option<f64>,
    /// The processes that compute on it.
    pub processes: Vec<GpuProcess>,
}

impl GpuSample {
    /// Whether heat or power lowers its clocks.
    pub fn is_throttled(&self) -> bool {
        self.throttle_reasons.iter().any(|reason| reason.is_slowdown())
    }
}

/// A process that computes on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its process ID as the driver knows it: in a container, the host's.
    pub pid: u32,
    /// Bytes of the GPU's memory that it uses.
    pub memory_used_bytes: Option<u64>,
}

/// Why a GPU's clocks are not higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum ThrottleReason {
    /// Nothing runs.
    Idle,
    /// The clocks of applications are set to a fixed value.
    ApplicationsClocks,
    /// It has reached its power limit.
    PowerCap,
    /// The hardware slows down because of heat or power.
    HardwareSlowdown,
    /// Another GPU of its sync boost group is slower.
    SyncBoost,
    /// The driver slows it down because it or its memory is too hot.
    SoftwareThermal,
    /// The hardware slows it down because it is far too hot.
    HardwareThermal,
    /// The machine's power supply asks for less power.
    PowerBrake,
    /// The clocks of the display are set to a fixed value.
    DisplayClocks,
}

impl ThrottleReason {
    /// All reasons.
    pub const ALL: [Self; 9] = [
        Self::Idle,
        Self::ApplicationsClocks,
        Self::PowerCap,
        Self::HardwareSlowdown,
        Self::SyncBoost,
        Self::SoftwareThermal,
        Self::HardwareThermal,
        Self::PowerBrake,
        Self::DisplayClocks,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::ApplicationsClocks => "applications_clocks",
            Self::PowerCap => "power_cap",
            Self::HardwareSlowdown => "hardware_slowdown",
            Self::SyncBoost => "sync_boost",
            Self::SoftwareThermal => "software_thermal",
            Self::HardwareThermal => "hardware_thermal",
            Self::PowerBrake => "power_brake",
            Self::DisplayClocks => "display_clocks",
        }
    }

    /// Whether the reason is heat or power, rather than idleness or a setting.
    pub fn is_slowdown(self) -> bool {
        !matches!(self, Self::Idle | Self::ApplicationsClocks | Self::SyncBoost | Self::DisplayClocks)
    }
}
