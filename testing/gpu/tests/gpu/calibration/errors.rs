//! Codes of errors, memory and devices.

use anyhow::Result;
use overdrive_fakecuda::runtime as cuda;

use super::{BYTES, Bench, INVALID_DEVICE, INVALID_VALUE, MEMORY_ALLOCATION, OK, Seen, needs};

/// More than any device has.
const TOO_MUCH: usize = 1 << 52;

pub fn invalid_ordinals_are_refused() -> Result<()> {
    let mut seen = Seen::default();
    let (count, before) = (needs("cudaGetDeviceCount", cuda::device_count())?, cuda::device());
    seen.code("cudaSetDevice(count)", cuda::set_device(count), INVALID_DEVICE);
    seen.code("cudaSetDevice(-1)", cuda::set_device(-1), INVALID_DEVICE);
    seen.value("the device after a refused one", cuda::device(), before);
    seen.end()
}

pub fn an_error_is_kept_until_it_is_read() -> Result<()> {
    let mut seen = Seen::default();
    seen.code("cudaSetDevice(-1)", cuda::set_device(-1), INVALID_DEVICE);
    seen.value("a call that succeeds", cuda::device().is_ok(), true);
    seen.code("cudaPeekAtLastError", cuda::peek_at_last_error(), INVALID_DEVICE);
    seen.code("cudaPeekAtLastError again", cuda::peek_at_last_error(), INVALID_DEVICE);
    seen.code("cudaGetLastError", cuda::last_error(), INVALID_DEVICE);
    seen.code("cudaGetLastError again", cuda::last_error(), OK);
    seen.end()
}

pub fn an_error_belongs_to_its_thread() -> Result<()> {
    let mut seen = Seen::default();
    let other = std::thread::spawn(|| cuda::set_device(-1)).join().unwrap_or_default();
    seen.code("cudaSetDevice(-1) on another thread", other, INVALID_DEVICE);
    seen.code("cudaGetLastError on this thread", cuda::last_error(), OK);
    seen.end()
}

pub fn memory_is_freed_once() -> Result<()> {
    let mut seen = Seen::default();
    seen.code("cudaFree(0)", cuda::free(0), OK);
    let address = needs("cudaMalloc", cuda::malloc(BYTES))?;
    seen.code("cudaFree", cuda::free(address), OK);
    seen.code("cudaFree again", cuda::free(address), INVALID_VALUE);
    let address = needs("cudaHostAlloc", cuda::malloc_host(BYTES))?;
    seen.code("cudaFree of pinned memory", cuda::free(address), INVALID_VALUE);
    seen.code("cudaFreeHost", cuda::free_host(address), OK);
    seen.code("cudaFreeHost again", cuda::free_host(address), INVALID_VALUE);
    seen.end()
}

pub fn too_much_memory_is_refused_and_the_rest_goes_on() -> Result<()> {
    let mut seen = Seen::default();
    seen.value("cudaMalloc of 4 PiB", cuda::malloc(TOO_MUCH), Err(MEMORY_ALLOCATION));
    seen.code("cudaGetLastError", cuda::last_error(), MEMORY_ALLOCATION);
    let address = needs("cudaMalloc of a page", cuda::malloc(BYTES))?;
    seen.code("cudaFree", cuda::free(address), OK);
    seen.end()
}

pub fn addresses_tell_their_memory() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    let device = needs("cudaGetDevice", cuda::device())?;
    let local = 0u8;
    let host = (&raw const local).expose_provenance();
    let kind = |address| cuda::kind_of_memory(address).map(|(kind, _)| kind);
    seen.value("the host's memory", kind(host), Ok(0));
    seen.value("pinned memory", kind(bench.pinned), Ok(1));
    seen.value("pinned memory, its last byte", kind(bench.pinned + BYTES - 1), Ok(1));
    seen.value("device memory", cuda::kind_of_memory(bench.device), Ok((2, device)));
    seen.value("device memory, its last byte", cuda::kind_of_memory(bench.device + BYTES - 1), Ok((2, device)));
    seen.end()
}

pub fn memory_of_a_pool_is_freed_in_stream_order() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    let address = needs("cudaMallocAsync", cuda::malloc_async(BYTES, bench.stream))?;
    seen.code("cudaMemsetAsync", cuda::fill(address, 7, BYTES, bench.stream), OK);
    let copied = cuda::copy(bench.pinned, address, BYTES, cuda::COPY_DEFAULT, bench.stream);
    seen.code("cudaMemcpyAsync", copied, OK);
    seen.code("cudaFreeAsync", cuda::free_async(address, bench.stream), OK);
    seen.code("cudaStreamSynchronize", cuda::synchronize(bench.stream), OK);
    seen.value("the copy", bench.last_byte(), 7);
    seen.end()
}

pub fn a_device_is_no_peer_of_itself() -> Result<()> {
    let mut seen = Seen::default();
    let count = needs("cudaGetDeviceCount", cuda::device_count())?;
    seen.value("cudaDeviceCanAccessPeer(0, 0)", cuda::can_access_peer(0, 0), Ok(0));
    seen.value("cudaDeviceCanAccessPeer(0, count)", cuda::can_access_peer(0, count), Err(INVALID_DEVICE));
    seen.code("cudaDeviceEnablePeerAccess(count)", cuda::enable_peer_access(count, 0), INVALID_DEVICE);
    seen.end()
}

pub fn only_a_used_device_has_a_context() -> Result<()> {
    let mut seen = Seen::default();
    let _bench = Bench::new()?;
    seen.value("device 0", cuda::has_context(0), Ok(true));
    // Other tests use device 0 alone in this process.
    for device in 1..needs("cudaGetDeviceCount", cuda::device_count())? {
        seen.value("another device", cuda::has_context(device), Ok(false));
    }
    seen.end()
}
