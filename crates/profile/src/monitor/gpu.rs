//! GPUs, whoever asks them.

use serde::{Deserialize, Serialize};

use crate::ProfileError;

/// Where figures of GPUs come from: [NVML](super::Nvml), or something of the caller's own.
///
/// One that panics is dropped and not asked again; a gap that lasts tells of it.
pub trait GpuSource: Send {
    /// How many GPUs there are.
    ///
    /// # Errors
    /// When there is no driver, or it is gone. It is asked again at the next sample.
    fn count(&mut self) -> Result<u32, ProfileError>;

    /// One GPU; they count from 0.
    ///
    /// # Errors
    /// When it does not answer. It is asked again at the next sample. What a GPU does not have is no error but None.
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

/// A GPU at one moment. What it does not tell is None.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuSample {
    /// Its number.
    pub index: u32,
    /// Its name, "NVIDIA H200" say.
    pub name: String,
    /// What tells it from all others.
    pub uuid: Option<String>,
    /// The share of the last moments in which some kernel ran, from 0 to 1.
    pub utilization: Option<f64>,
    /// The share of the last moments in which its memory was read or written, from 0 to 1.
    pub memory_utilization: Option<f64>,
    /// The share of the time since the last sample that its tensor cores were at work, from 0 to 1.
    pub tensor_utilization: Option<f64>,
    /// Bytes of its memory in use.
    pub memory_used_bytes: Option<u64>,
    /// Bytes of its memory.
    pub memory_total_bytes: Option<u64>,
    /// Its temperature in degrees Celsius.
    pub temperature_celsius: Option<f64>,
    /// The power that it draws, in watts.
    pub power_watts: Option<f64>,
    /// The most that it may draw, in watts.
    pub power_limit_watts: Option<f64>,
    /// The clock of its multiprocessors, in hertz.
    pub sm_clock_hertz: Option<f64>,
    /// The clock of its memory, in hertz.
    pub memory_clock_hertz: Option<f64>,
    /// Why its clocks are not higher.
    pub throttle_reasons: Vec<ThrottleReason>,
    /// Bytes a second sent over PCIe.
    pub pcie_sent_bytes_per_second: Option<f64>,
    /// Bytes a second received over PCIe.
    pub pcie_received_bytes_per_second: Option<f64>,
    /// Bytes a second sent over NVLink.
    pub nvlink_sent_bytes_per_second: Option<f64>,
    /// Bytes a second received over NVLink.
    pub nvlink_received_bytes_per_second: Option<f64>,
    /// The processes that compute on it.
    pub processes: Vec<GpuProcess>,
}

impl GpuSample {
    /// Whether heat or power holds its clocks down.
    pub fn is_throttled(&self) -> bool {
        self.throttle_reasons.iter().any(|reason| reason.is_slowdown())
    }
}

/// A process that computes on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its number as the driver knows it: in a container, that of the host.
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
    /// Somebody has set the clocks of applications.
    ApplicationsClocks,
    /// It draws as much power as it may.
    PowerCap,
    /// The hardware slows down, for heat or power.
    HardwareSlowdown,
    /// Another GPU of its group is slower.
    SyncBoost,
    /// It or its memory is too hot.
    SoftwareThermal,
    /// It is far too hot.
    HardwareThermal,
    /// The machine's power supply asks for less.
    PowerBrake,
    /// Somebody has set the clocks of the display.
    DisplayClocks,
}

impl ThrottleReason {
    /// All of them.
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

    /// Whether it is heat or power, rather than idleness or a setting.
    pub fn is_slowdown(self) -> bool {
        !matches!(self, Self::Idle | Self::ApplicationsClocks | Self::SyncBoost | Self::DisplayClocks)
    }
}
