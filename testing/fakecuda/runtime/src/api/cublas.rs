//! cuBLAS and cuBLASLt: each product is a launch. Its numbers come from [`crate::api::operators`].

use std::ffi::c_void;

use super::code;
use super::operators::note_launch;
use crate::operation::Operation;
use crate::world::world;

/// What a handle or a description holds.
#[derive(Default)]
struct Handle {
    stream: usize,
    math_mode: i32,
    pointer_mode: i32,
}

/// Only now and then is a number asked for.
const VERSION: i32 = 130_100;

/// Counts a kernel of a library, and puts it into a stream.
pub fn launch_of_library(name: &str, stream: usize) -> i32 {
    let mut world = world();
    let is_outside = note_launch(&world, stream);
    if is_outside {
        world.note(format!("launched outside of all operators, its numbers are not known: {name}"));
    }
    code(world.stream_to_launch(stream).and_then(|stream| world.issue(stream, Operation::kernel(name))))
}

/// # Safety
/// `handle` has to be one of `cublasCreate_v2`, which is not destroyed yet.
unsafe fn of<'a>(handle: *mut c_void) -> &'a mut Handle {
    // SAFETY: as the caller says; cuBLAS too lets only one thread at a time use a handle.
    unsafe { &mut *handle.cast::<Handle>() }
}

/// # Safety
/// `handle` has to be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasCreate_v2(handle: *mut *mut c_void) -> i32 {
    // SAFETY: as the caller says.
    unsafe { *handle = Box::into_raw(Box::<Handle>::default()).cast() };
    0
}

/// # Safety
/// `handle` has to be one of `cublasCreate_v2`, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasDestroy_v2(handle: *mut c_void) -> i32 {
    // SAFETY: as the caller says.
    drop(unsafe { Box::from_raw(handle.cast::<Handle>()) });
    0
}

/// # Safety
/// As `cublasDestroy_v2`, but it stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasSetStream_v2(handle: *mut c_void, stream: usize) -> i32 {
    // SAFETY: as the caller says.
    unsafe { of(handle) }.stream = stream;
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasSetWorkspace_v2(_handle: *mut c_void, _at: usize, _bytes: usize) -> i32 {
    0
}

macro_rules! settings {
    ($($set:ident, $get:ident: $field:ident;)+) => {$(
        /// # Safety
        /// As `cublasSetStream_v2`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $set(handle: *mut c_void, value: i32) -> i32 {
            // SAFETY: as the caller says.
            unsafe { of(handle) }.$field = value;
            0
        }

        /// # Safety
        /// As `cublasSetStream_v2`; `value` has to be valid for writes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(handle: *mut c_void, value: *mut i32) -> i32 {
            // SAFETY: as the caller says.
            unsafe { *value = of(handle).$field };
            0
        }
    )+};
}

settings! {
    cublasSetMathMode, cublasGetMathMode: math_mode;
    cublasSetPointerMode_v2, cublasGetPointerMode_v2: pointer_mode;
}

macro_rules! products {
    ($($name:ident),+ $(,)?) => {$(
        /// # Safety
        /// As `cublasSetStream_v2`. The other arguments are not looked at.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(handle: *mut c_void) -> i32 {
            // SAFETY: as the caller says.
            let stream = unsafe { of(handle) }.stream;
            launch_of_library(stringify!($name), stream)
        }
    )+};
}

products! {
    cublasCdotc_v2, cublasCdotu_v2, cublasCgelsBatched, cublasCgemmStridedBatched, cublasCgemm_v2, cublasCgemv_v2,
    cublasCgeqrfBatched, cublasCgetrfBatched, cublasCgetrsBatched, cublasCtrsmBatched, cublasCtrsm_v2, cublasDdot_v2,
    cublasDgelsBatched, cublasDgemmStridedBatched, cublasDgemm_v2, cublasDgemv_v2, cublasDgeqrfBatched,
    cublasDgetrfBatched, cublasDgetrsBatched, cublasDotEx, cublasDtrsmBatched, cublasDtrsm_v2, cublasGemmEx,
    cublasGemmStridedBatchedEx, cublasSdot_v2, cublasSgelsBatched, cublasSgemmEx, cublasSgemmStridedBatched,
    cublasSgemm_v2, cublasSgemv_v2, cublasSgeqrfBatched, cublasSgetrfBatched, cublasSgetrsBatched, cublasStrsmBatched,
    cublasStrsm_v2, cublasZdotc_v2, cublasZdotu_v2, cublasZgelsBatched, cublasZgemmStridedBatched, cublasZgemm_v2,
    cublasZgemv_v2, cublasZgeqrfBatched, cublasZgetrfBatched, cublasZgetrsBatched, cublasZtrsmBatched, cublasZtrsm_v2,
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    VERSION as usize
}

macro_rules! descriptions {
    ($($create:ident, $destroy:ident, $set:ident;)+) => {$(
        /// # Safety
        /// `description` has to be valid for writes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $create(description: *mut *mut c_void) -> i32 {
            // SAFETY: as the caller says.
            unsafe { *description = Box::into_raw(Box::<Handle>::default()).cast() };
            0
        }

        /// # Safety
        /// `description` has to be one of the function that makes it, and is not used after this.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $destroy(description: *mut c_void) -> i32 {
            // SAFETY: as the caller says.
            drop(unsafe { Box::from_raw(description.cast::<Handle>()) });
            0
        }

        #[unsafe(no_mangle)]
        pub extern "C" fn $set(_description: *mut c_void, _attribute: i32, _value: usize, _bytes: usize) -> i32 {
            0
        }
    )+};
}

descriptions! {
    cublasLtMatmulDescCreate, cublasLtMatmulDescDestroy, cublasLtMatmulDescSetAttribute;
    cublasLtMatrixLayoutCreate, cublasLtMatrixLayoutDestroy, cublasLtMatrixLayoutSetAttribute;
    cublasLtMatmulPreferenceCreate, cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreferenceSetAttribute;
}

/// `cublasLtMatmulHeuristicResult_t`: an algorithm, its workspace, its state and its waves; 0 is success.
#[repr(C)]
pub struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

/// Finds one algorithm.
///
/// # Safety
/// `results` has to be valid for writes of `wanted` results, `found` for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: usize,
    _description: usize,
    _a: usize,
    _b: usize,
    _c: usize,
    _d: usize,
    _preference: usize,
    wanted: i32,
    results: *mut Heuristic,
    found: *mut i32,
) -> i32 {
    // SAFETY: as the caller says; zeros are a value of each field.
    unsafe {
        results.write_bytes(0, usize::try_from(wanted).unwrap_or(0));
        *found = wanted.min(1);
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmul(
    _handle: usize,
    _description: usize,
    _alpha: usize,
    _a: usize,
    _a_layout: usize,
    _b: usize,
    _b_layout: usize,
    _beta: usize,
    _c: usize,
    _c_layout: usize,
    _d: usize,
    _d_layout: usize,
    _algorithm: usize,
    _workspace: usize,
    _workspace_bytes: usize,
    stream: usize,
) -> i32 {
    launch_of_library("cublasLtMatmul", stream)
}
