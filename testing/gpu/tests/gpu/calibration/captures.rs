//! What a capture records, and what it refuses.

use anyhow::Result;
use overdrive_fakecuda::runtime as cuda;

use super::{
    BYTES, Bench, CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, CAPTURED_EVENT, ILLEGAL_STATE, OK, Seen, needs,
};

const LEGACY: cuda::Stream = 0;
// `cudaStreamCaptureMode`.
const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;
// `cudaStreamCaptureStatus`.
const NONE: i32 = 0;
const ACTIVE: i32 = 1;
const INVALIDATED: i32 = 2;

/// A capture that has begun on the first stream.
struct Capture {
    seen: Seen,
    bench: Bench,
}

impl Capture {
    fn new(mode: i32) -> Result<Self> {
        let mut capture = Self { seen: Seen::default(), bench: Bench::new()? };
        capture.seen.code("cudaStreamBeginCapture", cuda::begin_capture(capture.bench.stream, mode), OK);
        Ok(capture)
    }

    /// The call was refused with this code, and has ended the capture.
    fn refuses(mut self, what: &str, found: cuda::Code, expected: cuda::Code) -> Result<()> {
        self.seen.code(what, found, expected);
        self.seen.value("the capture", cuda::capture_status(self.bench.stream), Ok(INVALIDATED));
        self.ends_with(CAPTURE_INVALIDATED)
    }

    /// The capture fails.
    fn ends_with(mut self, expected: cuda::Code) -> Result<()> {
        self.seen.value("cudaStreamEndCapture", cuda::end_capture(self.bench.stream), Err(expected));
        self.seen.value("the stream after it", cuda::capture_status(self.bench.stream), Ok(NONE));
        self.seen.end()
    }

    /// The capture makes a graph of so many nodes.
    fn ends_well(mut self, nodes: usize) -> Result<()> {
        let graph = needs("cudaStreamEndCapture", cuda::end_capture(self.bench.stream))?;
        self.seen.value("cudaGraphGetNodes", cuda::node_count(graph), Ok(nodes));
        self.seen.code("cudaGraphDestroy", cuda::destroy_graph(graph), OK);
        self.seen.end()
    }
}

pub fn captured_work_runs_at_each_launch() -> Result<()> {
    let Capture { mut seen, bench } = Capture::new(GLOBAL)?;
    seen.value("cudaStreamIsCapturing", cuda::capture_status(bench.stream), Ok(ACTIVE));
    seen.code("cudaMemsetAsync", bench.fill(21, bench.stream), OK);
    seen.code("cudaMemcpyAsync", bench.read_back(bench.stream), OK);
    let graph = needs("cudaStreamEndCapture", cuda::end_capture(bench.stream))?;
    seen.value("cudaGraphGetNodes", cuda::node_count(graph), Ok(2));
    let instance = needs("cudaGraphInstantiate", cuda::instantiate(graph))?;
    for before in [1, 2] {
        let clear = [bench.fill(before, bench.other), bench.read_back(bench.other), cuda::synchronize(bench.other)];
        seen.value("work outside of the graph", clear, [OK; 3]);
        seen.value("before the launch", bench.last_byte(), before);
        seen.code("cudaGraphLaunch", cuda::launch(instance, bench.stream), OK);
        seen.code("cudaStreamSynchronize", cuda::synchronize(bench.stream), OK);
        seen.value("after the launch", bench.last_byte(), 21);
    }
    seen.code("cudaGraphExecDestroy", cuda::destroy_instance(instance), OK);
    seen.code("cudaGraphDestroy", cuda::destroy_graph(graph), OK);
    seen.end()
}

pub fn a_capture_begins_once_and_not_on_the_legacy_stream() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    let again = cuda::begin_capture(capture.bench.stream, GLOBAL);
    capture.seen.code("cudaStreamBeginCapture again", again, ILLEGAL_STATE);
    let never_begun = cuda::end_capture(capture.bench.other);
    capture.seen.value("cudaStreamEndCapture of another stream", never_begun, Err(ILLEGAL_STATE));
    let legacy = cuda::begin_capture(LEGACY, GLOBAL);
    capture.seen.code("cudaStreamBeginCapture(0)", legacy, CAPTURE_UNSUPPORTED);
    capture.ends_well(0)
}

pub fn a_captured_stream_cannot_be_waited_for() -> Result<()> {
    let capture = Capture::new(GLOBAL)?;
    let refused = cuda::synchronize(capture.bench.stream);
    capture.refuses("cudaStreamSynchronize", refused, CAPTURE_UNSUPPORTED)
}

pub fn a_captured_stream_cannot_be_queried() -> Result<()> {
    let capture = Capture::new(GLOBAL)?;
    let refused = cuda::query(capture.bench.stream);
    capture.refuses("cudaStreamQuery", refused, CAPTURE_UNSUPPORTED)
}

pub fn a_device_with_a_capture_cannot_be_waited_for() -> Result<()> {
    let capture = Capture::new(GLOBAL)?;
    let refused = cuda::device_synchronize();
    capture.refuses("cudaDeviceSynchronize", refused, CAPTURE_UNSUPPORTED)
}

pub fn memory_is_not_allocated_in_a_global_capture() -> Result<()> {
    let capture = Capture::new(GLOBAL)?;
    let refused = cuda::malloc(BYTES).err().unwrap_or_default();
    capture.refuses("cudaMalloc", refused, CAPTURE_UNSUPPORTED)
}

pub fn memory_is_allocated_in_a_relaxed_capture() -> Result<()> {
    let mut capture = Capture::new(RELAXED)?;
    let address = needs("cudaMalloc", cuda::malloc(BYTES))?;
    capture.seen.code("cudaFree", cuda::free(address), OK);
    capture.ends_well(0)
}

pub fn a_relaxed_thread_allocates_in_a_global_capture() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    capture.seen.value("the thread's mode", cuda::exchange_capture_mode(RELAXED), Ok(GLOBAL));
    let address = needs("cudaMalloc", cuda::malloc(BYTES));
    capture.seen.value("the mode again", cuda::exchange_capture_mode(GLOBAL), Ok(RELAXED));
    capture.seen.code("cudaFree in a relaxed thread", freed_by_a_relaxed_thread(address?), OK);
    capture.ends_well(0)
}

fn freed_by_a_relaxed_thread(address: cuda::Address) -> cuda::Code {
    let freed = std::thread::spawn(move || {
        let relaxed = cuda::exchange_capture_mode(RELAXED);
        relaxed.err().unwrap_or_else(|| cuda::free(address))
    });
    freed.join().unwrap_or(-1)
}

pub fn a_thread_local_capture_lets_other_threads_allocate() -> Result<()> {
    let mut capture = Capture::new(THREAD_LOCAL)?;
    let other = std::thread::spawn(|| {
        // The thread's own mode is global, which a capture of a thread alone does not mind.
        cuda::malloc(BYTES).map_or_else(|code| code, cuda::free)
    });
    capture.seen.code("cudaMalloc on another thread", other.join().unwrap_or(-1), OK);
    capture.ends_well(0)
}

pub fn only_the_thread_that_began_a_capture_ends_it() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    let stream = capture.bench.stream;
    let ended = std::thread::spawn(move || cuda::end_capture(stream)).join().unwrap_or(Err(-1));
    capture.seen.value("cudaStreamEndCapture on another thread", ended, Err(CAPTURE_WRONG_THREAD));
    // By the documentation it would be invalid now. A device (an H100 with driver 580) has ended it.
    capture.ends_with(ILLEGAL_STATE)
}

pub fn any_thread_ends_a_relaxed_capture() -> Result<()> {
    let mut capture = Capture::new(RELAXED)?;
    let stream = capture.bench.stream;
    capture.seen.code("cudaMemsetAsync", capture.bench.fill(1, stream), OK);
    let ended = std::thread::spawn(move || cuda::end_capture(stream)).join().unwrap_or(Err(-1));
    capture.seen.value("cudaStreamEndCapture on another thread", ended.map(cuda::destroy_graph), Ok(OK));
    capture.seen.end()
}

/// The second stream joins the capture of the first.
fn fork(capture: &mut Capture) -> Result<cuda::Event> {
    let (event, bench) = (needs("cudaEventCreate", cuda::event(false))?, &capture.bench);
    let forked = [cuda::record(event, bench.stream), cuda::wait_event(bench.other, event, 0)];
    let filled = bench.fill(1, bench.other);
    capture.seen.value("the fork", forked, [OK; 2]);
    capture.seen.code("cudaMemsetAsync", filled, OK);
    capture.seen.value("the second stream", cuda::capture_status(capture.bench.other), Ok(ACTIVE));
    Ok(event)
}

pub fn a_fork_that_is_joined_is_captured() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    let event = fork(&mut capture)?;
    let (stream, other) = (capture.bench.stream, capture.bench.other);
    let joined = [cuda::record(event, other), cuda::wait_event(stream, event, 0)];
    capture.seen.value("the join", joined, [OK; 2]);
    capture.seen.code("cudaMemcpyAsync", capture.bench.read_back(stream), OK);
    capture.ends_well(2)
}

pub fn a_fork_that_is_not_joined_is_refused() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    fork(&mut capture)?;
    capture.ends_with(CAPTURE_UNJOINED)
}

pub fn a_capture_ends_where_it_began() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    fork(&mut capture)?;
    let ended = cuda::end_capture(capture.bench.other);
    capture.seen.value("cudaStreamEndCapture of the second stream", ended, Err(CAPTURE_UNMATCHED));
    capture.ends_with(CAPTURE_INVALIDATED)
}

pub fn a_captured_event_cannot_be_waited_for() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    let event = needs("cudaEventCreate", cuda::event(false))?;
    capture.seen.code("cudaEventRecord", cuda::record(event, capture.bench.stream), OK);
    let refused = cuda::synchronize_event(event);
    capture.refuses("cudaEventSynchronize", refused, CAPTURED_EVENT)
}

pub fn a_capture_does_not_wait_for_work_outside() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    let event = needs("cudaEventCreate", cuda::event(false))?;
    capture.seen.code("cudaEventRecord outside", cuda::record(event, capture.bench.other), OK);
    let refused = cuda::wait_event(capture.bench.stream, event, 0);
    capture.refuses("cudaStreamWaitEvent", refused, CAPTURE_ISOLATION)
}

pub fn captures_are_not_merged() -> Result<()> {
    let mut capture = Capture::new(GLOBAL)?;
    let (event, other) = (needs("cudaEventCreate", cuda::event(false))?, capture.bench.other);
    capture.seen.code("a second capture", cuda::begin_capture(other, GLOBAL), OK);
    capture.seen.code("cudaEventRecord", cuda::record(event, other), OK);
    capture.seen.code("cudaStreamWaitEvent", cuda::wait_event(capture.bench.stream, event, 0), CAPTURE_MERGE);
    capture.seen.value("the second capture", cuda::end_capture(other), Err(CAPTURE_INVALIDATED));
    capture.ends_with(CAPTURE_INVALIDATED)
}

pub fn the_legacy_stream_does_not_depend_on_a_captured_one() -> Result<()> {
    let (mut seen, bench) = (Seen::default(), Bench::new()?);
    let blocking = needs("cudaStreamCreate", cuda::stream(false))?;
    seen.code("cudaStreamBeginCapture", cuda::begin_capture(blocking, GLOBAL), OK);
    seen.code("cudaMemsetAsync on the legacy stream", bench.fill(1, LEGACY), CAPTURE_IMPLICIT);
    seen.value("cudaStreamEndCapture", cuda::end_capture(blocking), Err(CAPTURE_INVALIDATED));
    seen.code("cudaStreamDestroy", cuda::destroy_stream(blocking), OK);
    seen.end()
}
