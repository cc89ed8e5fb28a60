//! Streams, events and the order of work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::Result;
use overdrive_fakecuda::runtime as cuda;

use super::{Bench, INVALID_RESOURCE_HANDLE, OK, Seen, needs};

const LEGACY: cuda::Stream = 0;

pub fn an_event_that_was_never_recorded_is_done() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    let event = needs("cudaEventCreate", cuda::event(false))?;
    seen.code("cudaEventQuery", cuda::query_event(event), OK);
    seen.code("cudaEventSynchronize", cuda::synchronize_event(event), OK);
    seen.code("cudaStreamWaitEvent", cuda::wait_event(bench.stream, event, 0), OK);
    seen.code("cudaStreamSynchronize", cuda::synchronize(bench.stream), OK);
    seen.code("cudaEventDestroy", cuda::destroy_event(event), OK);
    seen.end()
}

pub fn time_needs_two_recorded_events_with_timing() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    let [first, second] = [cuda::event(true), cuda::event(true)].map(|event| needs("cudaEventCreate", event));
    let (first, second, untimed) = (first?, second?, needs("cudaEventCreate", cuda::event(false))?);
    seen.value("of events never recorded", cuda::elapsed(first, second), Err(INVALID_RESOURCE_HANDLE));
    for event in [first, second, untimed] {
        seen.code("cudaEventRecord", cuda::record(event, bench.stream), OK);
    }
    seen.code("cudaStreamSynchronize", cuda::synchronize(bench.stream), OK);
    seen.value("of an event without timing", cuda::elapsed(first, untimed), Err(INVALID_RESOURCE_HANDLE));
    seen.value("of two events", cuda::elapsed(first, second).is_ok_and(|time| time >= 0.0), true);
    for event in [first, second, untimed] {
        seen.code("cudaEventDestroy", cuda::destroy_event(event), OK);
    }
    seen.end()
}

pub fn a_stream_waits_for_an_event_of_another() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    let event = needs("cudaEventCreate", cuda::event(false))?;
    for value in [3, 5] {
        seen.code("cudaMemsetAsync", bench.fill(value, bench.stream), OK);
        seen.code("cudaEventRecord", cuda::record(event, bench.stream), OK);
        seen.code("cudaStreamWaitEvent", cuda::wait_event(bench.other, event, 0), OK);
        seen.code("cudaMemcpyAsync", bench.read_back(bench.other), OK);
        seen.code("cudaStreamSynchronize", cuda::synchronize(bench.other), OK);
        seen.value("the copy", bench.last_byte(), value);
        seen.code("cudaEventQuery", cuda::query_event(event), OK);
    }
    seen.code("cudaEventDestroy", cuda::destroy_event(event), OK);
    seen.end()
}

pub fn the_legacy_stream_and_blocking_streams_wait_for_each_other() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    let blocking = needs("cudaStreamCreate", cuda::stream(false))?;
    seen.code("cudaMemsetAsync", bench.fill(9, blocking), OK);
    seen.code("cudaMemcpyAsync", bench.read_back(LEGACY), OK);
    seen.code("cudaStreamSynchronize(0)", cuda::synchronize(LEGACY), OK);
    seen.value("what the legacy stream read", bench.last_byte(), 9);
    seen.code("cudaMemsetAsync", bench.fill(11, LEGACY), OK);
    seen.code("cudaMemcpyAsync", bench.read_back(blocking), OK);
    seen.code("cudaStreamSynchronize", cuda::synchronize(blocking), OK);
    seen.value("what the blocking stream read", bench.last_byte(), 11);
    seen.code("cudaStreamDestroy", cuda::destroy_stream(blocking), OK);
    seen.end()
}

pub fn a_stream_that_was_waited_for_is_done() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    seen.code("cudaStreamQuery of a new stream", cuda::query(bench.stream), OK);
    seen.code("cudaMemsetAsync", bench.fill(1, bench.stream), OK);
    seen.code("cudaStreamSynchronize", cuda::synchronize(bench.stream), OK);
    seen.code("cudaStreamQuery", cuda::query(bench.stream), OK);
    seen.code("cudaMemsetAsync", bench.fill(2, bench.stream), OK);
    seen.code("cudaDeviceSynchronize", cuda::device_synchronize(), OK);
    seen.code("cudaStreamQuery after the device", cuda::query(bench.stream), OK);
    seen.end()
}

pub fn a_function_of_the_host_runs_in_stream_order() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    let value = Arc::new(AtomicU8::new(0));
    let written = value.clone();
    seen.code("cudaMemsetAsync", bench.fill(13, bench.stream), OK);
    seen.code("cudaMemcpyAsync", bench.read_back(bench.stream), OK);
    let read = cuda::call_on_host(bench.stream, move || written.store(1, Ordering::SeqCst));
    seen.code("cudaLaunchHostFunc", read, OK);
    seen.code("cudaStreamSynchronize", cuda::synchronize(bench.stream), OK);
    seen.value("the function", value.load(Ordering::SeqCst), 1);
    seen.value("the copy before it", bench.last_byte(), 13);
    seen.end()
}

pub fn a_destroyed_stream_finishes_its_work() -> Result<()> {
    let mut seen = Seen::default();
    let bench = Bench::new()?;
    let stream = needs("cudaStreamCreate", cuda::stream(true))?;
    seen.code("cudaMemsetAsync", bench.fill(17, stream), OK);
    seen.code("cudaMemcpyAsync", bench.read_back(stream), OK);
    seen.code("cudaStreamDestroy", cuda::destroy_stream(stream), OK);
    seen.code("cudaDeviceSynchronize", cuda::device_synchronize(), OK);
    seen.value("the copy", bench.last_byte(), 17);
    seen.end()
}
