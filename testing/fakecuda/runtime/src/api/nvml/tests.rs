//! NVML's functions are called as C would.

use super::figures::{MemoryV2, nvmlDeviceGetMemoryInfo_v2, nvmlDeviceGetPowerUsage, nvmlDeviceGetTemperature};
use super::identity::{nvmlDeviceGetHandleByIndex_v2, nvmlDeviceGetHandleByPciBusId_v2, nvmlDeviceGetName};
use super::*;
use crate::nvml::Figures;

#[test]
fn texts_need_room_for_their_zero_byte() {
    let mut text = [1; 4];
    // SAFETY: the text has the room that is named.
    let written = unsafe { [4, 3].map(|room| answer_text(text.as_mut_ptr(), room, Ok("abc".to_owned()))) };
    assert_eq!((written, text), ([0, INSUFFICIENT_SIZE], [97, 98, 99, 0]));
}

/// One test for what is shared by the process: whether the library is ready, and its figures.
#[test]
fn a_device_answers_between_init_and_shutdown() {
    let (mut handle, mut number) = (0, 0);
    // SAFETY: all pointers are to variables of their types, and the text has the room that is named.
    unsafe {
        assert_eq!(nvmlDeviceGetHandleByIndex_v2(0, &mut handle), UNINITIALIZED);
        assert_eq!(nvmlShutdown(), UNINITIALIZED);
        assert_eq!(fakecuda_nvml_set(-1, c"driver".as_ptr(), 0), 0);
        assert_eq!(nvmlInit_v2(), DRIVER_NOT_LOADED);
        *all() = Figures::default();
        assert_eq!((nvmlInit_v2(), nvmlInitWithFlags(0), nvmlShutdown()), (0, 0, 0));
        assert_eq!(nvmlDeviceGetHandleByIndex_v2(99, &mut handle), INVALID_ARGUMENT);
        assert_eq!(nvmlDeviceGetHandleByPciBusId_v2(c"0000:42:00.0".as_ptr(), &mut handle), NOT_FOUND);
        assert_eq!(nvmlDeviceGetHandleByPciBusId_v2(c"00000000:01:00.0".as_ptr(), &mut handle), 0);
        assert_eq!(handle, FIRST_HANDLE);
        assert_eq!(nvmlDeviceGetPowerUsage(handle, &mut number), 0);
        assert_eq!(number, 90_000);
        assert_eq!(fakecuda_nvml_set(0, c"power".as_ptr(), -3), 0);
        assert_eq!(nvmlDeviceGetPowerUsage(handle, &mut number), NOT_SUPPORTED);
        assert_eq!(fakecuda_nvml_set(0, c"steam".as_ptr(), 1), INVALID_ARGUMENT);
        assert_eq!(nvmlDeviceGetTemperature(handle, 1, &mut number), INVALID_ARGUMENT);
        assert_eq!(nvmlDeviceGetTemperature(handle, 0, std::ptr::null_mut()), INVALID_ARGUMENT);
        assert_eq!(nvmlDeviceGetTemperature(handle + 99, 0, &mut number), INVALID_ARGUMENT);
        let mut memory = std::mem::zeroed::<MemoryV2>();
        assert_eq!(nvmlDeviceGetMemoryInfo_v2(handle, &mut memory), ARGUMENT_VERSION_MISMATCH);
        assert_eq!(nvmlDeviceGetName(handle, std::ptr::null_mut(), 64), INVALID_ARGUMENT);
        assert_eq!(nvmlShutdown(), 0);
        assert_eq!(nvmlDeviceGetPowerUsage(handle, &mut number), UNINITIALIZED);
    }
}
