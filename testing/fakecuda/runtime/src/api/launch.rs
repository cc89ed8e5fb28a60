//! Kernels: their registration and launches. None runs yet.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{LazyLock, Mutex, PoisonError};

use super::code;
use super::operators::note_launch;
use crate::error::CudaError;
use crate::operation::Operation;
use crate::trace;
use crate::world::world;

/// The kernels' names by the functions that libtorch launches them by.
static KERNELS: LazyLock<Mutex<HashMap<usize, String>>> = LazyLock::new(Mutex::default);

/// Sizes of a grid or block.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dim3(pub [u32; 3]);

thread_local! {
    static CONFIGURATIONS: RefCell<Vec<(Dim3, Dim3, usize, usize)>> = const { RefCell::new(Vec::new()) };
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(_binary: *const c_void) -> *const c_void {
    static HANDLE: usize = 0;
    std::ptr::from_ref(&HANDLE).cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_handle: *const c_void) {}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(_handle: *const c_void) {}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaInitModule(_handle: *const c_void) -> i8 {
    0
}

/// # Safety
/// `name` has to be a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaRegisterFunction(
    _handle: *const c_void,
    function: usize,
    _device_function: *const c_char,
    name: *const c_char,
) {
    // SAFETY: as the caller says.
    register(function, unsafe { CStr::from_ptr(name) });
}

/// The function launches the kernel of this name.
pub fn register(function: usize, name: &CStr) {
    let name = name.to_string_lossy().into_owned();
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner).insert(function, name);
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, stream: usize) -> u32 {
    CONFIGURATIONS.with_borrow_mut(|all| all.push((grid, block, shared, stream)));
    0
}

/// # Safety
/// All have to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaPopCallConfiguration(
    grid: *mut Dim3,
    block: *mut Dim3,
    shared: *mut usize,
    stream: *mut usize,
) -> i32 {
    let last = CONFIGURATIONS.with_borrow_mut(Vec::pop);
    // SAFETY: as the caller says.
    code(last.ok_or(CudaError::MISSING_CONFIGURATION).map(|it| unsafe { (*grid, *block, *shared, *stream) = it }))
}

/// # Safety
/// `kernel` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __cudaGetKernel(kernel: *mut usize, function: usize) -> i32 {
    // SAFETY: as the caller says.
    unsafe { *kernel = function };
    0
}

fn launch(function: usize, stream: usize) -> i32 {
    let name = KERNELS.lock().unwrap_or_else(PoisonError::into_inner).get(&function).cloned();
    let Some(name) = name else { return code(Err(CudaError::INVALID_DEVICE_FUNCTION)) };
    let mut world = world();
    let is_outside = note_launch(&world, stream);
    if is_outside {
        world.note(format!("launched outside of all operators, its numbers are not known: {name}"));
    }
    code(world.stream_to_launch(stream).and_then(|stream| world.issue(stream, Operation::kernel(&name))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchKernel(
    function: usize,
    grid: Dim3,
    block: Dim3,
    _arguments: *const *const c_void,
    shared: usize,
    stream: usize,
) -> i32 {
    trace::shaped((grid.0, block.0, shared), || launch(function, stream))
}

macro_rules! launches {
    ($($name:ident),+) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            function: usize,
            grid: Dim3,
            block: Dim3,
            arguments: *const *const c_void,
            shared: usize,
            stream: usize,
        ) -> i32 {
            cudaLaunchKernel(function, grid, block, arguments, shared, stream)
        }
    )+};
}

// All blocks of a cooperative kernel run at once; nothing here depends on that.
launches!(__cudaLaunchKernel, cudaLaunchCooperativeKernel);

/// `cudaLaunchConfig_t`.
#[repr(C)]
pub struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: usize,
    attributes: *const c_void,
    count: u32,
}

/// # Safety
/// `configuration` has to be null or valid for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaLaunchKernelExC(
    configuration: *const Configuration,
    function: usize,
    arguments: *const *const c_void,
) -> i32 {
    // SAFETY: as the caller says.
    let Some(own) = (unsafe { configuration.as_ref() }) else { return code(Err(CudaError::INVALID_VALUE)) };
    cudaLaunchKernel(function, own.grid, own.block, arguments, own.shared, own.stream)
}
