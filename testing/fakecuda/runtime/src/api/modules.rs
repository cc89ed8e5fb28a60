//! Modules that a program loads while it runs, as Triton's kernels are: launches are counted under their names, and none
//! runs. Their arguments are not checked.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::code;
use super::launch::{Dim3, cudaLaunchKernel, register};
use crate::error::CudaError;
use crate::world::{CURRENT, world};

/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK` and `CU_FUNC_ATTRIBUTE_NUM_REGS`.
const MOST_THREADS: i32 = 0;
const REGISTERS: i32 = 4;

/// The most shared memory that a block of an H100 can ask for.
const MOST_SHARED: i32 = 227 << 10;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const SHARED: i32 = 8;

/// Those that are loaded.
static MODULES: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

fn modules() -> MutexGuard<'static, BTreeSet<usize>> {
    MODULES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that no other handle has.
fn handle() -> usize {
    std::ptr::from_mut(Box::leak(Box::new(0_u8))) as usize
}

/// A module, if the thread has a context.
///
/// # Safety
/// `module` has to be valid for writes.
unsafe fn load(module: *mut usize) -> i32 {
    if world().devices.get(CURRENT.get()).is_none_or(|device| device.context.is_none()) {
        return CudaError::DEVICE_UNINITIALIZED.0;
    }
    let own = handle();
    modules().insert(own);
    // SAFETY: as the caller says.
    unsafe { *module = own };
    0
}

/// # Safety
/// `module` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut usize, _image: *const c_void) -> i32 {
    // SAFETY: as the caller says.
    unsafe { load(module) }
}

/// # Safety
/// `module` has to be valid for writes, and `path` a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoad(module: *mut usize, path: *const c_char) -> i32 {
    // SAFETY: as the caller says.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned();
    if !std::path::Path::new(&path).is_file() {
        return CudaError::FILE_NOT_FOUND.0;
    }
    // SAFETY: as the caller says.
    unsafe { load(module) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: usize) -> i32 {
    if modules().remove(&module) { 0 } else { CudaError::INVALID_RESOURCE_HANDLE.0 }
}

/// # Safety
/// `function` has to be valid for writes, and `name` a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) -> i32 {
    if !modules().contains(&module) {
        return CudaError::INVALID_RESOURCE_HANDLE.0;
    }
    let own = handle();
    // SAFETY: as the caller says.
    unsafe {
        register(own, CStr::from_ptr(name));
        *function = own;
    }
    0
}

/// # Safety
/// `value` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut i32, attribute: i32, _function: usize) -> i32 {
    let own = match attribute {
        MOST_THREADS => 1024,
        REGISTERS => 32,
        _ => 0,
    };
    // SAFETY: as the caller says.
    unsafe { *value = own };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(_function: usize, attribute: i32, value: i32) -> i32 {
    if attribute == SHARED && value > MOST_SHARED { CudaError::INVALID_VALUE.0 } else { 0 }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetCacheConfig(_function: usize, _config: i32) -> i32 {
    0
}

/// Only `CU_POINTER_ATTRIBUTE_DEVICE_POINTER`: memory of a device and pinned memory have one address each.
///
/// # Safety
/// `value` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(value: *mut usize, attribute: i32, address: usize) -> i32 {
    const DEVICE_POINTER: i32 = 3;
    if attribute != DEVICE_POINTER {
        return CudaError::NOT_SUPPORTED.0;
    }
    let world = world();
    if world.device_at(address).is_none() && !world.is_pinned(address) {
        return CudaError::INVALID_VALUE.0;
    }
    // SAFETY: as the caller says.
    unsafe { *value = address };
    0
}

/// # Safety
/// `value` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetLimit(value: *mut usize, _limit: i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { *value = 1 << 20 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetLimit(_limit: i32, _value: usize) -> i32 {
    0
}

/// Each size of grid and block is an argument of its own.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: usize,
    arguments: *const *const c_void,
    _extra: *const *const c_void,
) -> i32 {
    let (grid, block) = (Dim3([grid_x, grid_y, grid_z]), Dim3([block_x, block_y, block_z]));
    cudaLaunchKernel(function, grid, block, arguments, shared as usize, stream)
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared: u32,
    stream: usize,
    attributes: *const c_void,
    count: u32,
}

/// # Safety
/// `configuration` has to be null or valid for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    configuration: *const Configuration,
    function: usize,
    arguments: *const *const c_void,
    _extra: *const *const c_void,
) -> i32 {
    // SAFETY: as the caller says.
    let Some(own) = (unsafe { configuration.as_ref() }) else { return code(Err(CudaError::INVALID_VALUE)) };
    cudaLaunchKernel(function, own.grid, own.block, arguments, own.shared as usize, own.stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_of_a_module_is_launched_and_a_module_is_not() {
        assert_eq!(world().use_device(0), Ok(()));
        let (mut module, mut function) = (0, 0);
        // SAFETY: all are valid for writes, and the texts end with a zero byte.
        unsafe {
            assert_eq!(cuModuleLoad(&raw mut module, c"/no/such/file".as_ptr()), CudaError::FILE_NOT_FOUND.0);
            assert_eq!(cuModuleLoadData(&raw mut module, std::ptr::null()), 0);
            assert_eq!(cuModuleGetFunction(&raw mut function, module, c"triton_poi_fused_add_0".as_ptr()), 0);
        }
        let launch = |function| cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, std::ptr::null(), std::ptr::null());
        assert_eq!((launch(function), launch(module)), (0, CudaError::INVALID_DEVICE_FUNCTION.0));
        assert_eq!((cuModuleUnload(module), cuModuleUnload(module)), (0, CudaError::INVALID_RESOURCE_HANDLE.0));
        // SAFETY: as above.
        let found = unsafe { cuModuleGetFunction(&raw mut function, module, c"triton_poi_fused_add_0".as_ptr()) };
        assert_eq!(found, CudaError::INVALID_RESOURCE_HANDLE.0);
        assert_ne!(cuFuncSetAttribute(function, SHARED, MOST_SHARED + 1), 0);
    }
}
