//! What NVML says of a device: usual figures, and what a test sets.

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::environment::{tell, text};

macro_rules! figures {
    ($($figure:ident = $name:literal, $usual:literal;)+) => {
        /// A figure of a device.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Figure {
            $(#[doc = $name] $figure,)+
        }

        impl Figure {
            fn of(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$figure),)+
                    _ => None,
                }
            }

            /// What it is if no test says otherwise.
            fn usual(self) -> i64 {
                match self {
                    $(Self::$figure => $usual,)+
                }
            }
        }
    };
}

// Degrees Celsius, milliwatts, percent, megahertz, KB/s (PCIe), MiB/s (NVLink), millijoules.
figures! {
    Temperature = "temperature", 35;
    Power = "power", 90_000;
    PowerLimit = "power_limit", 700_000;
    MinPowerLimit = "min_power_limit", 200_000;
    MaxPowerLimit = "max_power_limit", 700_000;
    Energy = "energy", 1_000_000;
    Utilization = "utilization", 0;
    MemoryUtilization = "memory_utilization", 0;
    GraphicsClock = "graphics_clock", 1_980;
    SmClock = "sm_clock", 1_980;
    MemoryClock = "memory_clock", 2_619;
    VideoClock = "video_clock", 1_545;
    MaxGraphicsClock = "max_graphics_clock", 1_980;
    MaxSmClock = "max_sm_clock", 1_980;
    MaxMemoryClock = "max_memory_clock", 2_619;
    MaxVideoClock = "max_video_clock", 1_545;
    ThrottleReasons = "throttle_reasons", 1;
    PerformanceState = "performance_state", 0;
    PcieSent = "pcie_sent", 0;
    PcieReceived = "pcie_received", 0;
    TensorUtilization = "tensor_utilization", 0;
    NvlinkSent = "nvlink_sent", 0;
    NvlinkReceived = "nvlink_received", 0;
    // Bytes: what the memory of the device says, plus this.
    OtherMemory = "other_memory", 0;
    // Whether the device has Hopper's counters (GPM).
    Gpm = "gpm", 1;
    Memory = "memory", 0;
    Name = "name", 0;
    Uuid = "uuid", 0;
    Processes = "processes", 0;
}

/// The figures that are set, and whether the driver is there.
#[derive(Debug, Default)]
pub struct Figures {
    /// By device; those of none are for all.
    set: BTreeMap<(Option<u32>, Figure), i64>,
    pub is_driver_missing: bool,
    /// How often the library was initialized, less how often it was shut down.
    pub initialized: u64,
}

impl Figures {
    /// Sets a figure; -n lets its functions return NVML's error n. Returns false if there is no such name.
    pub fn set(&mut self, device: Option<u32>, name: &str, value: i64) -> bool {
        if name == "driver" {
            self.is_driver_missing = value == 0;
            return true;
        }
        let Some(figure) = Figure::of(name) else { return false };
        self.set.insert((device, figure), value);
        true
    }

    /// Forgets what was set.
    pub fn forget(&mut self) {
        (self.set, self.is_driver_missing) = (BTreeMap::new(), false);
    }

    /// From the environment: figures apart by commas, each `NAME=VALUE` or `DEVICE:NAME=VALUE`. Returns what could
    /// not be read.
    fn read<'a>(&mut self, text: &'a str) -> Vec<&'a str> {
        let mut unread = Vec::new();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let read = item.split_once('=').and_then(|(name, value)| {
                let (device, name) = match name.split_once(':') {
                    Some((device, name)) => (Some(device.parse().ok()?), name),
                    None => (None, name),
                };
                self.set(device, name, value.parse().ok()?).then_some(())
            });
            if read.is_none() {
                unread.push(item);
            }
        }
        unread
    }

    /// A figure, or NVML's error.
    pub fn get(&self, device: u32, figure: Figure) -> Result<u64, i32> {
        let set = self.set.get(&(Some(device), figure)).or_else(|| self.set.get(&(None, figure)));
        let value = set.copied().unwrap_or_else(|| figure.usual());
        u64::try_from(value).map_err(|_| i32::try_from(value.saturating_neg()).unwrap_or(999))
    }
}

static ALL: LazyLock<Mutex<Figures>> = LazyLock::new(|| {
    let mut figures = Figures::default();
    for item in figures.read(&text("FAKECUDA_NVML")) {
        tell("FAKECUDA_NVML", item, "is not NAME=VALUE or DEVICE:NAME=VALUE of a known name");
    }
    Mutex::new(figures)
});

pub fn all() -> MutexGuard<'static, Figures> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_devices_own_figure_comes_before_that_of_all_and_negative_ones_are_errors() {
        let mut figures = Figures::default();
        assert_eq!(figures.get(1, Figure::Temperature), Ok(35));
        assert!(figures.read("temperature=50, 1:temperature=85,power=-3,0:power=120000").is_empty());
        assert_eq!([0, 1].map(|device| figures.get(device, Figure::Temperature)), [Ok(50), Ok(85)]);
        assert_eq!([0, 1].map(|device| figures.get(device, Figure::Power)), [Ok(120_000), Err(3)]);
        assert!(figures.set(None, "driver", 0) && figures.is_driver_missing);
    }

    #[test]
    fn what_is_no_figure_is_told() {
        let mut figures = Figures::default();
        assert_eq!(figures.read("heat=1,power,x:power=1,power=much"), ["heat=1", "power", "x:power=1", "power=much"]);
        assert!(figures.set.is_empty());
    }
}
