//! What captures change about the calls of a program: each asks here whether it is allowed.

use std::cell::Cell;

use crate::capture::{Mode, Thread, Wait};
use crate::error::CudaError;
use crate::graph::{Graph, Step};
use crate::progress::Order;
use crate::world::World;

thread_local! {
    /// The thread's mode, which `cudaThreadExchangeStreamCaptureMode` sets.
    pub static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

impl Thread {
    /// The thread that calls.
    pub fn this() -> Self {
        // SAFETY: a system call without arguments.
        Self { number: unsafe { libc::gettid() }, mode: MODE.get() }
    }
}

fn found(is_there: bool) -> Result<(), CudaError> {
    if is_there { Ok(()) } else { Err(CudaError::INVALID_RESOURCE_HANDLE) }
}

impl World {
    /// Notes what a capture has refused, whoever it was.
    pub fn judged<T>(&mut self, what: &str, result: Result<T, CudaError>) -> Result<T, CudaError> {
        if let Err(error) = &result
            && error.is_of_captures()
        {
            self.count("refused by captures", 1);
            self.notes.push(format!("{what} is refused: {}", error.words().1.trim_end_matches('\0')));
        }
        result
    }

    /// Whether a stream is the legacy one, and a blocking stream of its device is captured.
    pub fn legacy_is_unusable(&self, stream: u64) -> bool {
        let (progress, device) = (&self.progress, self.progress.device_of(stream));
        let waits = |other| progress.order_of(other) == Some(Order::Blocking) && progress.device_of(other) == device;
        progress.order_of(stream) == Some(Order::Legacy) && self.captures.has(waits)
    }

    /// Refuses the legacy stream while a blocking stream of its device is captured: they would wait for each other.
    pub fn use_legacy(&mut self, what: &str, stream: u64) -> Result<(), CudaError> {
        if !self.legacy_is_unusable(stream) {
            return Ok(());
        }
        let (progress, device) = (&self.progress, self.progress.device_of(stream));
        let waits = |other| progress.order_of(other) == Some(Order::Blocking) && progress.device_of(other) == device;
        let refused = self.captures.refuse_all(CudaError::CAPTURE_IMPLICIT, waits);
        self.judged(what, refused)
    }

    /// Refuses a call that captures cannot see, if the thread's mode and that of a capture ask for it.
    pub fn use_unsafe(&mut self, what: &str) -> Result<(), CudaError> {
        let refused = self.captures.refuse_unsafe(Thread::this());
        self.judged(what, refused)
    }

    /// Refuses to wait for a stream that is captured, or to ask whether it is done.
    pub fn use_stream(&mut self, what: &str, stream: u64) -> Result<(), CudaError> {
        let refused = self.captures.refuse(stream, CudaError::CAPTURE_UNSUPPORTED);
        self.judged(what, refused)?;
        self.use_legacy(what, stream)
    }

    /// Refuses to wait for a device, or to ask for all of its work, while a stream of it is captured.
    pub fn use_device_as_a_whole(&mut self, what: &str, device: usize) -> Result<(), CudaError> {
        let progress = &self.progress;
        let is_of_device = |stream| progress.device_of(stream) == Some(device);
        let refused = self.captures.refuse_all(CudaError::CAPTURE_UNSUPPORTED, is_of_device);
        self.judged(what, refused)
    }

    /// Refuses to wait for an event that was captured, or to ask for it. Asking for any event is unsafe by the modes of
    /// captures, as PyTorch found (`c10/cuda/CUDACachingAllocator.cpp` asks in a relaxed mode); waiting is taken for
    /// the same.
    pub fn use_event(&mut self, what: &str, event: u64) -> Result<(), CudaError> {
        let refused = self.captures.refuse_event(event);
        self.judged(what, refused)?;
        self.use_unsafe(what)
    }

    /// Begins a capture.
    pub fn begin_capture(&mut self, stream: u64, mode: Mode) -> Result<(), CudaError> {
        // "Capture may not be initiated if stream is cudaStreamLegacy."
        if self.progress.order_of(stream) == Some(Order::Legacy) {
            return Err(CudaError::CAPTURE_UNSUPPORTED);
        }
        let handle = self.graphs.number();
        self.captures.begin(stream, mode, Thread::this().number, handle)?;
        self.count("captures begun", 1);
        Ok(())
    }

    /// Ends a capture. Returns the handle of its graph.
    pub fn end_capture(&mut self, stream: u64) -> Result<usize, CudaError> {
        let ended = self.captures.end(stream, Thread::this().number);
        let (handle, graph) = self.judged("cudaStreamEndCapture", ended)?;
        self.count("captures ended", 1);
        if self.finds_races {
            for race in graph.races() {
                self.count("races", 1);
                self.notes.push(format!("in a graph, {race}"));
            }
        }
        self.graphs.graphs.insert(handle, graph);
        Ok(handle)
    }

    /// Makes a graph one that can be launched. Returns its handle.
    pub fn instantiate(&mut self, graph: Graph) -> usize {
        let launched = self.progress.add_event(false);
        let handle = self.graphs.number();
        self.graphs.executables.insert(handle, crate::graph::Executable { graph: graph.into(), launched });
        handle
    }

    /// Records an event in a stream. `is_external`: a capture makes a node of it, which records at each launch.
    pub fn record_event(&mut self, event: u64, stream: u64, is_external: bool) -> Result<(), CudaError> {
        found(self.progress.is_recorded(event).is_some())?;
        if is_external && self.captures.of(stream).is_some() {
            return self.add_step("cudaEventRecordWithFlags", stream, Step::Record(event));
        }
        self.use_legacy("cudaEventRecord", stream)?;
        let captured = self.captures.record(event, stream);
        match self.judged("cudaEventRecord", captured)? {
            true => Ok(()),
            false => {
                self.count("events recorded", 1);
                found(self.progress.record(event, stream))
            }
        }
    }

    /// Makes a stream wait for an event. `is_external`: a capture makes a node of it, which waits at each launch.
    pub fn wait_for_event(&mut self, stream: u64, event: u64, is_external: bool) -> Result<(), CudaError> {
        let is_recorded = self.progress.is_recorded(event).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        if is_external && self.captures.of(stream).is_some() {
            return self.add_step("cudaStreamWaitEvent", stream, Step::Wait(event));
        }
        self.use_legacy("cudaStreamWaitEvent", stream)?;
        let is_legacy = self.progress.order_of(stream) == Some(Order::Legacy);
        let waits = self.captures.wait(stream, event, is_recorded, is_legacy);
        match self.judged("cudaStreamWaitEvent", waits)? {
            Wait::Captured => Ok(()),
            Wait::Uncaptured => {
                self.count("waits of streams for events", 1);
                found(self.progress.wait_for_event(stream, event))
            }
        }
    }

    /// The nanoseconds between two events, of which none was last recorded in a capture.
    pub fn elapsed(&mut self, begin: u64, end: u64) -> Result<i64, CudaError> {
        let captured = [begin, end].iter().try_for_each(|event| self.captures.refuse_event(*event));
        self.judged("cudaEventElapsedTime", captured)?;
        self.progress.elapsed(begin, end)
    }

    fn add_step(&mut self, what: &str, stream: u64, step: Step) -> Result<(), CudaError> {
        let number = self.graphs.number();
        let captured = self.captures.add(stream, number, step).unwrap_or(Ok(()));
        self.judged(what, captured)?;
        self.count("captured nodes", 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
