//! NVIDIA's management library.

use std::sync::OnceLock;

use nvml_wrapper::GpmSample;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;

use super::{GpuProcess, GpuSample, GpuSource, ThrottleReason};
use crate::ProfileError;

/// Opened once and never closed, because samples of Hopper's counters (GPM) borrow from it.
static LIBRARY: OnceLock<nvml_wrapper::Nvml> = OnceLock::new();

const MIB: f64 = 1_048_576.0;

/// Metrics that are computed from two GPM samples, on Hopper and later.
const GPM_METRICS: [GpmMetricId; 3] =
    [GpmMetricId::AnyTensorUtil, GpmMetricId::NvlinkTotalTxPerSec, GpmMetricId::NvlinkTotalRxPerSec];

/// GPU samples from NVIDIA's management library (NVML), which is opened at the first sample.
///
/// PCIe's figures are measured over 20 ms, and each of them takes NVML that long. Those of NVLink and the tensor cores
/// exist on Hopper and later.
#[derive(Debug, Default)]
pub struct Nvml {
    /// Each GPU's last GPM sample, to compare the next one with.
    before: Vec<Option<GpmSample<'static>>>,
}

impl Nvml {
    /// The library, which is not opened yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// None if the GPU has no such counters, or at its first sample.
    fn gpm(&mut self, device: &nvml_wrapper::Device<'static>, index: u32) -> Option<[Option<f64>; GPM_METRICS.len()]> {
        if !device.gpm_support().unwrap_or(false) {
            return None;
        }
        let now = device.gpm_sample().ok()?;
        let index = usize::try_from(index).ok()?;
        if self.before.len() <= index {
            self.before.resize_with(index + 1, || None);
        }
        let metrics = match &self.before[index] {
            Some(before) => gpm_metrics_get(device.nvml(), before, &now, &GPM_METRICS).ok(),
            None => None,
        };
        self.before[index] = Some(now);
        let mut values = metrics?.into_iter().map(|metric| metric.ok().map(|metric| metric.value));
        Some(std::array::from_fn(|_| values.next().flatten().filter(|value| value.is_finite())))
    }

    fn query(&mut self, index: u32) -> Result<GpuSample, NvmlError> {
        let device = library()?.device_by_index(index)?;
        let utilization = known(device.utilization_rates())?;
        let memory = known(device.memory_info())?;
        let clock = |clock| Ok::<_, NvmlError>(known(device.clock_info(clock))?.map(|mhz| 1e6 * f64::from(mhz)));
        // Kilobytes per second.
        let pcie = |counter| Ok::<_, NvmlError>(known(device.pcie_throughput(counter))?.map(|kb| 1e3 * f64::from(kb)));
        let milliwatts = |power: u32| f64::from(power) / 1e3;
        let [tensor, nvlink_sent, nvlink_received] = self.gpm(&device, index).unwrap_or_default();
        Ok(GpuSample {
            index,
            name: device.name()?,
            uuid: known(device.uuid())?,
            utilization: utilization.as_ref().map(|it| f64::from(it.gpu) / 100.0),
            memory_utilization: utilization.as_ref().map(|it| f64::from(it.memory) / 100.0),
            tensor_utilization: tensor.map(|percent| percent / 100.0),
            memory_used_bytes: memory.as_ref().map(|it| it.used),
            memory_total_bytes: memory.as_ref().map(|it| it.total),
            temperature_celsius: known(device.temperature(TemperatureSensor::Gpu))?.map(f64::from),
            power_watts: known(device.power_usage())?.map(milliwatts),
            power_limit_watts: known(device.enforced_power_limit())?.map(milliwatts),
            sm_clock_hertz: clock(Clock::SM)?,
            memory_clock_hertz: clock(Clock::Memory)?,
            throttle_reasons: known(device.current_throttle_reasons())?.map(reasons).unwrap_or_default(),
            pcie_sent_bytes_per_second: pcie(PcieUtilCounter::Send)?,
            pcie_received_bytes_per_second: pcie(PcieUtilCounter::Receive)?,
            nvlink_sent_bytes_per_second: nvlink_sent.map(|mib| mib * MIB),
            nvlink_received_bytes_per_second: nvlink_received.map(|mib| mib * MIB),
            processes: known(device.running_compute_processes())?.unwrap_or_default().iter().map(process).collect(),
        })
    }
}

impl GpuSource for Nvml {
    fn count(&mut self) -> Result<u32, ProfileError> {
        library().and_then(nvml_wrapper::Nvml::device_count).map_err(refused)
    }

    fn sample(&mut self, index: u32) -> Result<GpuSample, ProfileError> {
        self.query(index).map_err(refused)
    }
}

fn library() -> Result<&'static nvml_wrapper::Nvml, NvmlError> {
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let opened = nvml_wrapper::Nvml::init()?;
    Ok(LIBRARY.get_or_init(|| opened))
}

/// None if this GPU or driver does not have the figure; an error if the GPU is lost.
fn known<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(
            NvmlError::NotSupported
            | NvmlError::NoPermission
            | NvmlError::InvalidArg
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::UnexpectedVariant(_),
        ) => Ok(None),
        Err(error) => Err(error),
    }
}

fn refused(error: NvmlError) -> ProfileError {
    ProfileError::Gpu(format!("NVML: {error}"))
}

fn process(process: &nvml_wrapper::struct_wrappers::device::ProcessInfo) -> GpuProcess {
    let memory_used_bytes = match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    };
    GpuProcess { pid: process.pid, memory_used_bytes }
}

fn reasons(bits: ThrottleReasons) -> Vec<ThrottleReason> {
    let flags = [
        (ThrottleReasons::GPU_IDLE, ThrottleReason::Idle),
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, ThrottleReason::ApplicationsClocks),
        (ThrottleReasons::SW_POWER_CAP, ThrottleReason::PowerCap),
        (ThrottleReasons::HW_SLOWDOWN, ThrottleReason::HardwareSlowdown),
        (ThrottleReasons::SYNC_BOOST, ThrottleReason::SyncBoost),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, ThrottleReason::SoftwareThermal),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, ThrottleReason::HardwareThermal),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, ThrottleReason::PowerBrake),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, ThrottleReason::DisplayClocks),
    ];
    flags.into_iter().filter(|(flag, _)| bits.contains(*flag)).map(|(_, reason)| reason).collect()
}
