//! NVML's stand-in, through the crate that the monitor opens it with.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::process::Command;

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use overdrive_fakecuda::LIBRARIES;

const CHILD: &str = "FAKECUDA_NVML_TEST";

/// Runs a test of this file in a process of its own, because the stand-in reads the environment once.
fn alone(name: &str, variables: &[(&str, &str)], test: fn()) {
    if std::env::var_os(CHILD).is_some() {
        return test();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CHILD, "1").envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn open() -> Result<Nvml, NvmlError> {
    Nvml::builder().lib_path(Path::new(LIBRARIES).join("libnvidia-ml.so.1").as_os_str()).init()
}

/// The address of a function of the stand-in.
fn function(name: &CStr) -> *mut libc::c_void {
    let library = CString::new(format!("{LIBRARIES}/libcudart.so.13")).unwrap();
    // SAFETY: both texts end with a zero byte, and the library stays loaded.
    let found = unsafe { libc::dlsym(libc::dlopen(library.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

#[test]
#[cfg_attr(not(has_stand_ins), ignore = "skipped: libtorch has no code for CUDA 13")]
fn the_monitors_figures_are_what_was_set() {
    let figures = "1:temperature=85,utilization=70,power=-3,throttle_reasons=72,pcie_sent=5,tensor_utilization=40";
    let variables = [("FAKECUDA_DEVICES", "2"), ("FAKECUDA_NVML", figures)];
    alone("the_monitors_figures_are_what_was_set", &variables, || {
        let nvml = open().unwrap();
        assert_eq!((nvml.device_count().unwrap(), nvml.sys_cuda_driver_version().unwrap()), (2, 13_000));
        let [first, second] = [0, 1].map(|index| nvml.device_by_index(index).unwrap());
        assert_eq!([&first, &second].map(|it| it.temperature(TemperatureSensor::Gpu).unwrap()), [35, 85]);
        assert_eq!(first.utilization_rates().unwrap().gpu, 70);
        assert!(matches!(first.power_usage(), Err(NvmlError::NotSupported)));
        assert_eq!(first.enforced_power_limit().unwrap(), 700_000);
        let reasons = first.current_throttle_reasons().unwrap();
        assert_eq!(reasons, ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN);
        assert_eq!([Clock::SM, Clock::Memory].map(|it| first.clock_info(it).unwrap()), [1980, 2619]);
        let counters = [PcieUtilCounter::Send, PcieUtilCounter::Receive];
        assert_eq!(counters.map(|it| first.pcie_throughput(it).unwrap()), [5, 0]);
        assert_eq!(
            (first.name().unwrap(), first.memory_info().unwrap().total),
            ("fake H100 (no GPU)".to_owned(), 16 << 30)
        );
        assert_eq!(nvml.device_by_uuid(second.uuid().unwrap()).unwrap().index().unwrap(), 1);
        assert_eq!(nvml.device_by_pci_bus_id(second.pci_info().unwrap().bus_id).unwrap().index().unwrap(), 1);
        assert!(first.gpm_support().unwrap());
        let [before, after] = [0, 1].map(|_| first.gpm_sample().unwrap());
        let metrics =
            gpm_metrics_get(&nvml, &before, &after, &[GpmMetricId::AnyTensorUtil, GpmMetricId::SmUtil]).unwrap();
        assert!(metrics[0].as_ref().is_ok_and(|metric| metric.value == 40.0) && metrics[1].is_err());
    });
}

#[test]
#[cfg_attr(not(has_stand_ins), ignore = "skipped: libtorch has no code for CUDA 13")]
fn memory_and_processes_are_those_of_the_stand_in() {
    alone("memory_and_processes_are_those_of_the_stand_in", &[("FAKECUDA_DEVICES", "2")], || {
        let nvml = open().unwrap();
        let [first, second] = [0, 1].map(|index| nvml.device_by_index(index).unwrap());
        assert!(first.running_compute_processes().unwrap().is_empty());
        // SAFETY: this is `cudaMalloc`.
        let malloc: extern "C" fn(*mut usize, usize) -> i32 = unsafe { std::mem::transmute(function(c"cudaMalloc")) };
        assert_eq!(malloc(&mut 0, 3 << 20), 0);
        let processes = first.running_compute_processes().unwrap();
        assert_eq!(processes.iter().map(|it| it.pid).collect::<Vec<_>>(), [std::process::id()]);
        assert_eq!([&first, &second].map(|it| it.memory_info().unwrap().used), [3 << 20, 0]);
        assert!(second.running_compute_processes().unwrap().is_empty());
    });
}

#[test]
#[cfg_attr(not(has_stand_ins), ignore = "skipped: libtorch has no code for CUDA 13")]
fn a_lost_device_answers_nothing_and_the_other_one_goes_on() {
    alone("a_lost_device_answers_nothing_and_the_other_one_goes_on", &[("FAKECUDA_DEVICES", "2")], || {
        let nvml = open().unwrap();
        let [first, second] = [0, 1].map(|index| nvml.device_by_index(index).unwrap());
        // SAFETY: this is `fakecuda_lose`.
        let lose: extern "C" fn(u32, i32) = unsafe { std::mem::transmute(function(c"fakecuda_lose")) };
        lose(1, 0);
        assert!(matches!(second.temperature(TemperatureSensor::Gpu), Err(NvmlError::GpuLost)));
        assert!(matches!(second.name(), Err(NvmlError::GpuLost)));
        assert!(matches!(nvml.device_by_index(1), Err(NvmlError::GpuLost)));
        assert_eq!((nvml.device_count().unwrap(), first.temperature(TemperatureSensor::Gpu).unwrap()), (2, 35));
    });
}

#[test]
#[cfg_attr(not(has_stand_ins), ignore = "skipped: libtorch has no code for CUDA 13")]
fn without_a_driver_nothing_initializes() {
    alone("without_a_driver_nothing_initializes", &[("FAKECUDA_NVML", "driver=0")], || {
        assert!(matches!(open(), Err(NvmlError::DriverNotLoaded)));
    });
}

#[test]
#[cfg_attr(not(has_stand_ins), ignore = "skipped: libtorch has no code for CUDA 13")]
fn the_nth_call_of_a_function_fails() {
    alone("the_nth_call_of_a_function_fails", &[("FAKECUDA_FAIL", "nvmlDeviceGetName:2:999")], || {
        let nvml = open().unwrap();
        let device = nvml.device_by_index(0).unwrap();
        let names = [0, 1, 2].map(|_| device.name());
        assert!(names[0].is_ok() && matches!(names[1], Err(NvmlError::Unknown)) && names[2].is_ok());
    });
}
