//! How work comes into a stream: at once, or as a node of the graph that the stream is captured into.

use std::sync::Arc;

use crate::clock::{Access, Clock};
use crate::error::CudaError;
use crate::faults::{self, Moment};
use crate::graph::{Graph, Step};
use crate::guard::{self, Ticket};
use crate::operation::{Kind, Operation, Work};
use crate::progress::Meeting;
use crate::trace;
use crate::world::World;

impl World {
    /// Puts the numbers of kernels into a stream, which the stand-in computes: nothing counts it.
    pub fn push(&mut self, stream: u64, what: &str, accesses: &[Access], work: Work) -> Result<(), CudaError> {
        let accesses = accesses.to_vec();
        self.issue(stream, Operation { accesses, ..Operation::new(Kind::Numbers, what, work) })
    }

    /// Puts an operation into a stream, or into the graph that the stream is captured into.
    pub fn issue(&mut self, stream: u64, operation: Operation) -> Result<(), CudaError> {
        let (number, what, kind) = (self.graphs.number(), operation.what.clone(), operation.kind);
        let outside = self.captures.of(stream).is_none().then(|| operation.clone());
        if let Some(operation) = outside {
            self.use_legacy(&what, stream)?;
            let fault = self.fault_of(kind, &what)?;
            operation.counts.iter().for_each(|(what, times)| self.count(what, *times));
            return self.enqueue(stream, &operation, fault);
        }
        let captured = self.captures.add(stream, number, Step::Run(operation)).unwrap_or(Ok(()));
        self.judged(&what, captured)?;
        if kind != Kind::Numbers {
            self.count("captured nodes", 1);
        }
        Ok(())
    }

    /// The failure that was planted for a piece of work, and that it meets when it runs.
    ///
    /// # Errors
    /// When the call that issues it has to fail.
    pub fn fault_of(&mut self, kind: Kind, what: &str) -> Result<Option<CudaError>, CudaError> {
        let fault = if kind.is_of_device() { faults::of_work(what) } else { None };
        match fault {
            None => Ok(None),
            Some((Moment::Run, error)) => Ok(Some(error)),
            Some((Moment::Issued, error)) => {
                self.count("failed work", 1);
                Err(error)
            }
        }
    }

    /// Puts an operation into a stream of the device, and notes its races. `fault`: what it meets there, and does
    /// nothing else.
    fn enqueue(&mut self, stream: u64, operation: &Operation, fault: Option<CudaError>) -> Result<(), CudaError> {
        let device = self.use_device_of(stream)?;
        let failing =
            fault.map(|error| Operation { work: Arc::new(move || faults::happen(error)), ..operation.clone() });
        let operation = failing.as_ref().unwrap_or(operation);
        if operation.kind.is_of_device() {
            trace::work(self, (device, stream), &operation.what, &operation.accesses);
            self.issued.add(|| operation.what.clone());
        }
        let tickets = if self.guards { self.guard(operation) } else { Vec::new() };
        let told = match operation.kind {
            // What a function of the program touches too early is an error as anywhere else.
            Kind::Host => self.progress.call(stream, operation.work.clone()),
            kind => {
                let work = if self.guards { guarded(operation, tickets.clone()) } else { operation.work.clone() };
                self.progress.push(stream, work, self.costs.of(kind))
            }
        };
        let (number, clock) = told.ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        tickets.into_iter().for_each(|ticket| self.progress.hold(ticket, stream, number));
        self.note_races((stream, number), &operation.what, &operation.accesses, &clock);
        Ok(())
    }

    /// Puts a kernel into a stream that needs somebody else, and notes its races. The caller has found that
    /// the stream is not captured: a graph could not launch it again.
    pub fn push_meeting(
        &mut self,
        stream: u64,
        what: &str,
        accesses: &[Access],
        meeting: Box<dyn Meeting>,
    ) -> Result<(), CudaError> {
        let device = self.use_device_of(stream)?;
        trace::work(self, (device, stream), what, accesses);
        let meeting = if self.guards { Box::new(Passing(meeting)) } else { meeting };
        let told = self.progress.push_meeting(stream, meeting, self.costs.of(Kind::Kernel));
        let (number, clock) = told.ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        self.note_races((stream, number), what, accesses, &clock);
        Ok(())
    }

    fn use_device_of(&mut self, stream: u64) -> Result<usize, CudaError> {
        let device = self.progress.device_of(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        self.use_device(device).map(|()| device)
    }

    fn note_races(&mut self, at: (u64, u64), what: &str, accesses: &[Access], clock: &Clock) {
        if self.finds_races {
            for race in self.accesses.note(at, what, accesses, clock) {
                self.count("races", 1);
                self.note(race.to_string());
            }
        }
    }

    /// Guards the pinned memory of a copy.
    fn guard(&mut self, operation: &Operation) -> Vec<Ticket> {
        if !matches!(operation.kind, Kind::Copy(_)) {
            return Vec::new();
        }
        let accesses = operation.accesses.iter();
        let pinned = accesses.filter_map(|access| Some((access, self.pinned_block(access.bytes.start)?)));
        let tickets: Vec<_> =
            pinned.map(|(access, block)| guard::protect(&access.bytes, &block, access.writes)).collect();
        let left_out = tickets.iter().filter(|ticket| ticket.is_none()).count();
        if left_out > 0 {
            self.count("copies that the guard left out", left_out as u64);
        }
        tickets.into_iter().flatten().collect()
    }

    /// Launches an executable graph: all its nodes, in the order of a stream, and behind its last launch.
    pub fn launch_graph(&mut self, handle: usize, stream: u64) -> Result<(), CudaError> {
        let executable = self.graphs.executables.get(&handle).ok_or(CudaError::INVALID_VALUE)?;
        let (graph, launched) = (executable.graph.clone(), executable.launched);
        let graphs = &mut self.graphs;
        if let Some(captured) = self.captures.add_graph(stream, &graph, || graphs.number()) {
            self.judged("cudaGraphLaunch", captured)?;
            self.count("captured nodes", graph.real_nodes().len() as u64);
            return Ok(());
        }
        self.use_legacy("cudaGraphLaunch", stream)?;
        // A launch that fails puts none of its nodes into the stream.
        let faults = graph.nodes.iter().map(|node| match &node.step {
            Step::Run(operation) => self.fault_of(operation.kind, &operation.what),
            Step::Record(_) | Step::Wait(_) => Ok(None),
        });
        let faults: Vec<_> = faults.collect::<Result<_, _>>()?;
        self.count("graph launches", 1);
        self.progress.wait_for_event(stream, launched);
        self.run_graph(&graph, &faults, stream)?;
        self.progress.record(launched, stream);
        Ok(())
    }

    /// Each node begins, by the device's clock, when those that it depends on are done.
    fn run_graph(&mut self, graph: &Graph, faults: &[Option<CudaError>], stream: u64) -> Result<(), CudaError> {
        let begin = self.progress.time_of(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        let mut ends = std::collections::BTreeMap::new();
        for (node, fault) in graph.nodes.iter().zip(faults) {
            let before = node.dependencies.iter().filter_map(|it| ends.get(it)).max().copied();
            self.progress.set_time(stream, before.unwrap_or(begin));
            match &node.step {
                Step::Run(operation) => {
                    for (what, times) in &operation.counts {
                        self.count(&format!("in graphs: {what}"), *times);
                    }
                    self.enqueue(stream, operation, *fault)?;
                }
                // An event that is gone has nobody who waits for it.
                Step::Record(event) => {
                    self.progress.record(*event, stream);
                }
                Step::Wait(event) => {
                    self.progress.wait_for_event(stream, *event);
                }
            }
            ends.insert(node.number, self.progress.time_of(stream).unwrap_or(begin));
        }
        self.progress.set_time(stream, ends.values().max().copied().unwrap_or(begin));
        Ok(())
    }
}

/// A meeting that may touch guarded memory.
struct Passing(Box<dyn Meeting>);

impl Meeting for Passing {
    fn is_wanted(&self) -> bool {
        self.0.is_wanted()
    }

    fn advance(&mut self) -> bool {
        let mut is_done = false;
        guard::run(&[], || is_done = self.0.advance());
        is_done
    }
}

/// The operation's work, which may touch guarded memory.
fn guarded(operation: &Operation, tickets: Vec<Ticket>) -> Work {
    let work = operation.work.clone();
    Arc::new(move || guard::run(&tickets, || work()))
}
