//! Captures: which streams are in one, what their next nodes depend on, and what a capture refuses.
//!
//! The rules are those of "Creating a Graph Using Stream Capture" in the CUDA C++ programming guide, of
//! `cudaStreamBeginCapture` to `cudaStreamGetCaptureInfo` in `cuda_runtime_api.h`, and of the codes 900 to 908 in
//! `driver_types.h`. An operation that is refused invalidates each capture that it has to do with; only the end of the
//! capture is possible then.

use std::collections::{BTreeMap, HashMap};

use crate::error::CudaError;
use crate::graph::{Graph, Node, Step};

/// How a capture, or a thread, takes calls that a capture cannot see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    /// The mode of a number in `cudaStreamCaptureMode`.
    pub fn of(number: i32) -> Result<Self, CudaError> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(CudaError::INVALID_VALUE),
        }
    }
}

/// A thread, and its mode.
#[derive(Clone, Copy)]
pub struct Thread {
    pub number: i32,
    pub mode: Mode,
}

/// A capture that has begun.
pub struct Capture {
    pub id: u64,
    /// The handle of the graph that it makes.
    pub handle: usize,
    pub is_invalid: bool,
    origin: u64,
    thread: i32,
    mode: Mode,
    graph: Graph,
    /// For each stream in it, the nodes that the next one depends on.
    tips: BTreeMap<u64, Vec<usize>>,
    /// How many nodes each stream has had.
    counts: BTreeMap<u64, u64>,
}

impl Capture {
    /// The nodes that the next one of a stream depends on.
    pub fn tips(&self, stream: u64) -> &[usize] {
        self.tips.get(&stream).map_or(&[], Vec::as_slice)
    }

    fn invalidate(&mut self, error: CudaError) -> CudaError {
        if std::mem::replace(&mut self.is_invalid, true) { CudaError::CAPTURE_INVALIDATED } else { error }
    }
}

/// What a wait for an event is to a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Wait {
    /// Part of a capture, and noted there.
    Captured,
    /// Work for the device, outside of all captures.
    Uncaptured,
}

/// All captures that have begun, and the events that were last recorded in one.
#[derive(Default)]
pub struct Captures {
    active: Vec<Capture>,
    /// The capture of an event, and the nodes that it stands for.
    events: HashMap<u64, (u64, Vec<usize>)>,
    last: u64,
}

impl Captures {
    /// The capture that a stream is in.
    pub fn of(&self, stream: u64) -> Option<&Capture> {
        self.active.iter().find(|capture| capture.tips.contains_key(&stream))
    }

    fn of_mut(&mut self, stream: u64) -> Option<&mut Capture> {
        self.active.iter_mut().find(|capture| capture.tips.contains_key(&stream))
    }

    /// Begins one. The legacy stream is left to the caller, which knows it.
    pub fn begin(&mut self, stream: u64, mode: Mode, thread: i32, handle: usize) -> Result<(), CudaError> {
        if self.of(stream).is_some() {
            return Err(CudaError::ILLEGAL_STATE);
        }
        self.last += 1;
        self.active.push(Capture {
            id: self.last,
            handle,
            is_invalid: false,
            origin: stream,
            thread,
            mode,
            graph: Graph::default(),
            tips: BTreeMap::from([(stream, Vec::new())]),
            counts: BTreeMap::new(),
        });
        Ok(())
    }

    /// Ends the capture of a stream. It is over, also when it fails, unless another stream has to end it.
    pub fn end(&mut self, stream: u64, thread: i32) -> Result<(usize, Graph), CudaError> {
        let capture = self.of_mut(stream).ok_or(CudaError::ILLEGAL_STATE)?;
        if capture.origin != stream {
            return Err(capture.invalidate(CudaError::CAPTURE_UNMATCHED));
        }
        let is_wrong_thread = capture.mode != Mode::Relaxed && capture.thread != thread;
        let id = capture.id;
        let at = self.active.iter().position(|capture| capture.id == id).ok_or(CudaError::ILLEGAL_STATE)?;
        let capture = self.active.remove(at);
        // Before a capture that is invalid is told: a device was asked about a valid one alone.
        if is_wrong_thread {
            return Err(CudaError::CAPTURE_WRONG_THREAD);
        }
        if capture.is_invalid {
            return Err(CudaError::CAPTURE_INVALIDATED);
        }
        let joined = capture.graph.reaches(capture.tips(stream));
        if joined.len() < capture.graph.nodes.len() {
            return Err(CudaError::CAPTURE_UNJOINED);
        }
        Ok((capture.handle, capture.graph))
    }

    /// Adds a node to the capture of a stream, if it is in one.
    pub fn add(&mut self, stream: u64, number: usize, step: Step) -> Option<Result<(), CudaError>> {
        let capture = self.of_mut(stream)?;
        if capture.is_invalid {
            return Some(Err(CudaError::CAPTURE_INVALIDATED));
        }
        let place = capture.counts.entry(stream).or_default();
        *place += 1;
        let from = (stream, *place);
        let dependencies = capture.tips.insert(stream, vec![number]).unwrap_or_default();
        capture.graph.nodes.push(Node { number, from, dependencies, step });
        Some(Ok(()))
    }

    /// Adds the nodes of a graph that is launched into a capture. CUDA makes one node of them, which holds the graph.
    pub fn add_graph(
        &mut self,
        stream: u64,
        graph: &Graph,
        mut number: impl FnMut() -> usize,
    ) -> Option<Result<(), CudaError>> {
        let capture = self.of_mut(stream)?;
        if capture.is_invalid {
            return Some(Err(CudaError::CAPTURE_INVALIDATED));
        }
        let before = capture.tips(stream).to_vec();
        let numbers: BTreeMap<usize, usize> = graph.nodes.iter().map(|node| (node.number, number())).collect();
        let mut ends: Vec<usize> = Vec::new();
        for node in &graph.nodes {
            let mut dependencies: Vec<usize> =
                node.dependencies.iter().filter_map(|it| numbers.get(it)).copied().collect();
            ends.retain(|end| !dependencies.contains(end));
            if dependencies.is_empty() {
                dependencies.clone_from(&before);
            }
            let own = numbers[&node.number];
            ends.push(own);
            // Its branches are not those of the stream: each node is a branch of its own.
            let from = (u64::MAX - own as u64, 1);
            capture.graph.nodes.push(Node { number: own, from, dependencies, step: node.step.clone() });
        }
        if !ends.is_empty() {
            capture.tips.insert(stream, ends);
        }
        Some(Ok(()))
    }

    /// Refuses an operation on a stream that is in a capture.
    pub fn refuse(&mut self, stream: u64, error: CudaError) -> Result<(), CudaError> {
        self.of_mut(stream).map_or(Ok(()), |capture| Err(capture.invalidate(error)))
    }

    /// Refuses an operation that has to do with each capture that has one of these streams.
    pub fn refuse_all(&mut self, error: CudaError, has: impl Fn(u64) -> bool) -> Result<(), CudaError> {
        let mut result = Ok(());
        for capture in &mut self.active {
            if capture.tips.keys().any(|stream| has(*stream)) {
                result = Err(capture.invalidate(error));
            }
        }
        result
    }

    /// Whether one of these streams is in a capture.
    pub fn has(&self, has: impl Fn(u64) -> bool) -> bool {
        self.active.iter().any(|capture| capture.tips.keys().any(|stream| has(*stream)))
    }

    /// Refuses a call that captures cannot see, such as `cudaMalloc`, by `cudaThreadExchangeStreamCaptureMode`.
    pub fn refuse_unsafe(&mut self, thread: Thread) -> Result<(), CudaError> {
        let mut result = Ok(());
        for capture in &mut self.active {
            let is_own = capture.thread == thread.number;
            let is_refused = match thread.mode {
                Mode::Relaxed => false,
                Mode::ThreadLocal => is_own && capture.mode != Mode::Relaxed,
                Mode::Global if is_own => capture.mode != Mode::Relaxed,
                Mode::Global => capture.mode == Mode::Global,
            };
            if is_refused {
                result = Err(capture.invalidate(CudaError::CAPTURE_UNSUPPORTED));
            }
        }
        result
    }

    /// Records an event in the capture of a stream; false if the stream is in none, which also ends what it stood for.
    pub fn record(&mut self, event: u64, stream: u64) -> Result<bool, CudaError> {
        let Some(capture) = self.of(stream) else {
            self.events.remove(&event);
            return Ok(false);
        };
        if capture.is_invalid {
            return Err(CudaError::CAPTURE_INVALIDATED);
        }
        let stands_for = (capture.id, capture.tips(stream).to_vec());
        self.events.insert(event, stands_for);
        Ok(true)
    }

    /// An event is no more.
    pub fn forget(&mut self, event: u64) {
        self.events.remove(&event);
    }

    /// Refuses to wait for or to query an event that was last recorded in a capture.
    pub fn refuse_event(&mut self, event: u64) -> Result<(), CudaError> {
        let Some((id, _)) = self.events.get(&event) else { return Ok(()) };
        let capture = self.active.iter_mut().find(|capture| capture.id == *id);
        Err(capture.map_or(CudaError::CAPTURED_EVENT, |capture| capture.invalidate(CudaError::CAPTURED_EVENT)))
    }

    /// A stream waits for an event: it joins the event's capture, or stays out of all.
    pub fn wait(&mut self, stream: u64, event: u64, is_recorded: bool, is_legacy: bool) -> Result<Wait, CudaError> {
        let own = self.active.iter().position(|capture| capture.tips.contains_key(&stream));
        let Some((id, nodes)) = self.events.get(&event).cloned() else {
            return match own {
                None => Ok(Wait::Uncaptured),
                // "If cudaEventRecord() has not been called, the event represents an empty set of work."
                Some(own) if !is_recorded && !self.active[own].is_invalid => Ok(Wait::Captured),
                Some(own) => Err(self.active[own].invalidate(CudaError::CAPTURE_ISOLATION)),
            };
        };
        let of_event = self.active.iter().position(|capture| capture.id == id);
        let joined = match (own, of_event) {
            // The event's capture is over.
            (None, None) => return Err(CudaError::CAPTURED_EVENT),
            (Some(own), None) => return Err(self.active[own].invalidate(CudaError::CAPTURE_ISOLATION)),
            (Some(own), Some(other)) if own != other => {
                self.active[other].invalidate(CudaError::CAPTURE_MERGE);
                return Err(self.active[own].invalidate(CudaError::CAPTURE_MERGE));
            }
            (_, Some(other)) => &mut self.active[other],
        };
        if is_legacy {
            return Err(joined.invalidate(CudaError::CAPTURE_IMPLICIT));
        }
        if joined.is_invalid {
            return Err(CudaError::CAPTURE_INVALIDATED);
        }
        let tips = joined.tips.entry(stream).or_default();
        nodes.iter().for_each(|node| {
            if !tips.contains(node) {
                tips.push(*node)
            }
        });
        Ok(Wait::Captured)
    }
}

#[cfg(test)]
mod tests;
