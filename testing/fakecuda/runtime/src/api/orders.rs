//! What a test asks of the order of work, and of who uses which device.

use std::ffi::c_char;

use super::control::kept;
use crate::waits::lines;
use crate::world::world;

/// Whether the order in which work is issued is kept, from now on.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_keep_order(on: bool) {
    world().issued.is_kept = on;
}

/// What was issued since the last time, a line each: the name of a kernel, copy or fill; a call of NCCL as
/// `nccl AllReduce of 8 Float32`.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_issued() -> *const c_char {
    let lines = std::mem::take(&mut world().issued.lines);
    kept(&lines.iter().map(|line| format!("{line}\n")).collect::<String>())
}

/// Whether this process has a context on a device; false where there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_has_context(device: u32) -> bool {
    world().devices.get(device as usize).is_some_and(|device| device.context.is_some())
}

/// The functions that made this process's context on a device, a line each as in [`fakecuda_waits`]; empty where there is
/// none.
///
/// [`fakecuda_waits`]: super::control::fakecuda_waits
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_context_origin(device: u32) -> *const c_char {
    let text = world().devices.get(device as usize).and_then(|device| Some(lines(device.context.as_ref()?)));
    kept(&text.unwrap_or_default())
}

/// How many bytes of a device this process has allocated; 0 where there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn fakecuda_used_bytes(device: u32) -> usize {
    world().devices.get(device as usize).map_or(0, |device| device.memory.usage().0)
}

#[cfg(test)]
mod tests {
    use super::super::memory::{cudaFree, cudaMalloc, cudaMemsetAsync};
    use super::super::nccl_tests::text;
    use super::*;

    #[test]
    fn issued_work_is_told_in_order_and_once_and_memory_by_device() {
        fakecuda_keep_order(true);
        let mut block = 0;
        // SAFETY: valid for writes.
        assert_eq!(unsafe { cudaMalloc(&raw mut block, 1 << 20) }, 0);
        assert_eq!(cudaMemsetAsync(block, 0, 16, 0), 0);
        assert!(fakecuda_has_context(0) && !fakecuda_has_context(64));
        assert_eq!(text(fakecuda_context_origin(64)), "");
        assert!(fakecuda_used_bytes(0) >= 1 << 20 && fakecuda_used_bytes(64) == 0);
        // Other tests of this process may issue work meanwhile.
        assert!(text(fakecuda_issued()).lines().any(|line| line == "fill"));
        fakecuda_keep_order(false);
        drop(text(fakecuda_issued()));
        assert_eq!((cudaMemsetAsync(block, 0, 16, 0), cudaFree(block)), (0, 0));
        assert_eq!(text(fakecuda_issued()), "", "nothing is kept");
    }
}
