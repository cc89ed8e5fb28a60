//! Calls of the CUDA runtime that libtorch has loaded, a GPU's or the stand-in's, with the codes that they return.
//!
//! For programs that compare both. Addresses and handles are numbers; the runtime checks them, but not those of streams,
//! events and graphs that were destroyed.

use std::ffi::{c_char, c_void};

use crate::text;

/// A code of `cudaError_t`; 0 is success.
pub type Code = i32;
/// An address of a device or of pinned memory.
pub type Address = usize;
/// A stream; 0 is the legacy default stream.
pub type Stream = usize;
/// An event.
pub type Event = usize;
/// A graph, or what was instantiated from one.
pub type Graph = usize;

/// `cudaMemcpyKind`: the addresses tell the direction.
pub const COPY_DEFAULT: i32 = 4;

/// What a call writes, or the code with which it fails.
fn written<T: Default>(call: impl FnOnce(*mut T) -> Code) -> Result<T, Code> {
    let mut value = T::default();
    match call(&raw mut value) {
        0 => Ok(value),
        code => Err(code),
    }
}

/// A safe function that calls one of the runtime's and returns its code.
macro_rules! calls {
    ($($(#[$doc:meta])+ $name:ident = $symbol:literal ($($argument:ident: $kind:ty),*);)+) => {$(
        $(#[$doc])+
        pub fn $name($($argument: $kind),*) -> Code {
            call!($symbol($($argument => $kind),*) -> Code)
        }
    )+};
}

calls! {
    /// `cudaSetDevice`
    set_device = c"cudaSetDevice"(device: i32);
    /// `cudaDeviceSynchronize`
    device_synchronize = c"cudaDeviceSynchronize"();
    /// `cudaGetLastError`
    last_error = c"cudaGetLastError"();
    /// `cudaPeekAtLastError`
    peek_at_last_error = c"cudaPeekAtLastError"();
    /// `cudaFree`
    free = c"cudaFree"(address: Address);
    /// `cudaFreeHost`
    free_host = c"cudaFreeHost"(address: Address);
    /// `cudaHostRegister` without flags: give 0 for them
    pin = c"cudaHostRegister"(address: Address, bytes: usize, flags: u32);
    /// `cudaHostUnregister`
    unpin = c"cudaHostUnregister"(address: Address);
    /// `cudaFreeAsync`
    free_async = c"cudaFreeAsync"(address: Address, stream: Stream);
    /// `cudaMemsetAsync`
    fill = c"cudaMemsetAsync"(at: Address, value: i32, bytes: usize, stream: Stream);
    /// `cudaMemcpyAsync`
    copy = c"cudaMemcpyAsync"(to: Address, from: Address, bytes: usize, kind: i32, stream: Stream);
    /// `cudaStreamDestroy`
    destroy_stream = c"cudaStreamDestroy"(stream: Stream);
    /// `cudaStreamSynchronize`
    synchronize = c"cudaStreamSynchronize"(stream: Stream);
    /// `cudaStreamQuery`
    query = c"cudaStreamQuery"(stream: Stream);
    /// `cudaStreamWaitEvent`
    wait_event = c"cudaStreamWaitEvent"(stream: Stream, event: Event, flags: u32);
    /// `cudaEventDestroy`
    destroy_event = c"cudaEventDestroy"(event: Event);
    /// `cudaEventRecord`
    record = c"cudaEventRecord"(event: Event, stream: Stream);
    /// `cudaEventQuery`
    query_event = c"cudaEventQuery"(event: Event);
    /// `cudaEventSynchronize`
    synchronize_event = c"cudaEventSynchronize"(event: Event);
    /// `cudaStreamBeginCapture`, with a `cudaStreamCaptureMode`
    begin_capture = c"cudaStreamBeginCapture"(stream: Stream, mode: i32);
    /// `cudaGraphLaunch`
    launch = c"cudaGraphLaunch"(graph: Graph, stream: Stream);
    /// `cudaGraphDestroy`
    destroy_graph = c"cudaGraphDestroy"(graph: Graph);
    /// `cudaGraphExecDestroy`
    destroy_instance = c"cudaGraphExecDestroy"(graph: Graph);
    /// `cudaDeviceEnablePeerAccess`
    enable_peer_access = c"cudaDeviceEnablePeerAccess"(peer: i32, flags: u32);
}

/// `cudaGetDevice`
pub fn device() -> Result<i32, Code> {
    written(|device| call!(c"cudaGetDevice"(device => *mut i32) -> Code))
}

/// `cudaGetDeviceCount`
pub fn device_count() -> Result<i32, Code> {
    written(|count| call!(c"cudaGetDeviceCount"(count => *mut i32) -> Code))
}

/// `cudaMalloc`
pub fn malloc(bytes: usize) -> Result<Address, Code> {
    written(|address| call!(c"cudaMalloc"(address => *mut usize, bytes => usize) -> Code))
}

/// `cudaMallocAsync`
pub fn malloc_async(bytes: usize, stream: Stream) -> Result<Address, Code> {
    written(|at| call!(c"cudaMallocAsync"(at => *mut usize, bytes => usize, stream => usize) -> Code))
}

/// `cudaHostAlloc` without flags
pub fn malloc_host(bytes: usize) -> Result<Address, Code> {
    written(|address| call!(c"cudaHostAlloc"(address => *mut usize, bytes => usize, 0 => u32) -> Code))
}

/// `cudaStreamCreateWithFlags`
pub fn stream(is_non_blocking: bool) -> Result<Stream, Code> {
    let flags = u32::from(is_non_blocking);
    written(|stream| call!(c"cudaStreamCreateWithFlags"(stream => *mut usize, flags => u32) -> Code))
}

/// `cudaEventCreateWithFlags`
pub fn event(has_timing: bool) -> Result<Event, Code> {
    let flags = if has_timing { 0 } else { 2 };
    written(|event| call!(c"cudaEventCreateWithFlags"(event => *mut usize, flags => u32) -> Code))
}

/// `cudaEventElapsedTime`, in milliseconds
pub fn elapsed(begin: Event, end: Event) -> Result<f32, Code> {
    written(|time| call!(c"cudaEventElapsedTime"(time => *mut f32, begin => usize, end => usize) -> Code))
}

/// `cudaStreamEndCapture`
pub fn end_capture(stream: Stream) -> Result<Graph, Code> {
    written(|graph| call!(c"cudaStreamEndCapture"(stream => usize, graph => *mut usize) -> Code))
}

/// `cudaStreamIsCapturing`: a `cudaStreamCaptureStatus`
pub fn capture_status(stream: Stream) -> Result<i32, Code> {
    written(|status| call!(c"cudaStreamIsCapturing"(stream => usize, status => *mut i32) -> Code))
}

/// `cudaThreadExchangeStreamCaptureMode`: the mode before
pub fn exchange_capture_mode(mode: i32) -> Result<i32, Code> {
    let mut mode = mode;
    match call!(c"cudaThreadExchangeStreamCaptureMode"(&raw mut mode => *mut i32) -> Code) {
        0 => Ok(mode),
        code => Err(code),
    }
}

/// `cudaGraphGetNodes`: how many
pub fn node_count(graph: Graph) -> Result<usize, Code> {
    let nodes = std::ptr::null_mut();
    written(|count| call!(c"cudaGraphGetNodes"(graph => usize, nodes => *mut c_void, count => *mut usize) -> Code))
}

/// `cudaGraphInstantiateWithFlags` without flags
pub fn instantiate(graph: Graph) -> Result<Graph, Code> {
    written(|made| call!(c"cudaGraphInstantiateWithFlags"(made => *mut usize, graph => usize, 0 => u64) -> Code))
}

/// `cudaPointerGetAttributes`: a `cudaMemoryType`, and the device
pub fn kind_of_memory(address: Address) -> Result<(i32, i32), Code> {
    let attributes = written(
        |attributes| call!(c"cudaPointerGetAttributes"(attributes => *mut Attributes, address => usize) -> Code),
    )?;
    Ok((attributes.0[0], attributes.0[1]))
}

/// `cudaPointerAttributes` begins with the two; its length depends on CUDA's version, and is less than this.
#[repr(C, align(16))]
struct Attributes([i32; 64]);

impl Default for Attributes {
    fn default() -> Self {
        Self([0; 64])
    }
}

/// `cudaDeviceCanAccessPeer`
pub fn can_access_peer(device: i32, peer: i32) -> Result<i32, Code> {
    written(|can| call!(c"cudaDeviceCanAccessPeer"(can => *mut i32, device => i32, peer => i32) -> Code))
}

/// `cuDevicePrimaryCtxGetState`: whether a device has a context
pub fn has_context(device: i32) -> Result<bool, Code> {
    let mut flags = 0u32;
    let flags = &raw mut flags;
    let active = written(
        |active| call!(c"cuDevicePrimaryCtxGetState"(device => i32, flags => *mut u32, active => *mut i32) -> Code),
    )?;
    Ok(active != 0)
}

/// `cudaLaunchHostFunc`: the function may call nothing of CUDA
pub fn call_on_host(stream: Stream, function: impl FnOnce() + Send + 'static) -> Code {
    extern "C" fn run(data: *mut c_void) {
        // SAFETY: the box below, which the runtime gives back once.
        let function = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
        function();
    }
    let function: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(function));
    let data = Box::into_raw(function);
    let code = call!(
        c"cudaLaunchHostFunc"(stream => usize, run => extern "C" fn(*mut c_void), data.cast() => *mut c_void) -> Code
    );
    if code != 0 {
        // SAFETY: it was refused, so nobody calls it.
        drop(unsafe { Box::from_raw(data) });
    }
    code
}

/// `cudaGetErrorName`
pub fn error_name(code: Code) -> String {
    text(call!(c"cudaGetErrorName"(code => i32) -> *const c_char))
}

/// A byte of pinned memory.
///
/// # Panics
/// For any other address.
pub fn pinned_byte(address: Address) -> u8 {
    assert_eq!(kind_of_memory(address).map(|(kind, _)| kind), Ok(1), "the address is not of pinned memory");
    // SAFETY: the runtime says that it is memory of the host.
    unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() }
}
