//! Groups of calls: the calls of a thread between `ncclGroupStart` and `ncclGroupEnd` begin together.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use super::call::{Call, Kind};
use super::code::{Code, Failure};
use super::communicator::{self, Communicator};
use super::reduce::Reduction;
use super::round::Round;
use crate::clock::Access;
use crate::error::CudaError;
use crate::progress::Meeting;
use crate::world::{World, world};
use crate::{faults, operation};

/// A call that has been checked.
struct Planned {
    communicator: Arc<Communicator>,
    stream: u64,
    call: Call,
    accesses: Vec<Access>,
}

#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<Planned>,
    /// Communicators that begin.
    beginning: Vec<Arc<Communicator>>,
    failure: Option<Failure>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Ends a group; the end of the outermost one begins all its calls. The result is the first failure within it.
pub fn end() -> Result<Code, Failure> {
    let group = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(Failure::new(Code::INVALID_USAGE, "ncclGroupEnd: not in a group call."));
        }
        group.depth -= 1;
        Ok(if group.depth == 0 { Some(std::mem::take(group)) } else { None })
    })?;
    let Some(group) = group else { return Ok(Code::SUCCESS) };
    if let Some(failure) = group.failure {
        return Err(failure);
    }
    let mut state = Code::SUCCESS;
    for communicator in group.beginning {
        match if communicator.blocks { communicator.wait() } else { communicator.poll() } {
            Code::SUCCESS => {}
            Code::IN_PROGRESS => state = Code::IN_PROGRESS,
            error => return Err(Failure::new(error, "a communicator does not begin")),
        }
    }
    launch(group.calls)?;
    Ok(state)
}

/// Runs a part of the interface as a group of its own, or within the group that is open.
pub fn within(part: impl FnOnce() -> Result<(), Failure>) -> Result<Code, Failure> {
    start();
    if let Err(failure) = part() {
        GROUP.with_borrow_mut(|group| _ = group.failure.get_or_insert(failure.clone()));
        // The open group fails too, and this call says why.
        return end().and(Err(failure));
    }
    end()
}

/// Waits for a communicator at the end of the group.
pub fn begin(communicator: Arc<Communicator>) {
    GROUP.with_borrow_mut(|group| group.beginning.push(communicator));
}

/// A call as the program makes it, with the handles of the communicator and the stream.
pub struct Asked {
    pub call: Call,
    /// `ncclRedOp_t`.
    pub reduction: i32,
    pub communicator: usize,
    pub stream: usize,
}

/// Adds a call to the group.
pub fn add(asked: Asked) -> Result<(), Failure> {
    let communicator = communicator::of(asked.communicator)?;
    let place = communicator.ready()?.place;
    let mut call = asked.call;
    let name = call.kind.name();
    let refuse = |text: String| Failure::new(Code::INVALID_ARGUMENT, format!("{name} : {text}"));
    if communicator.counters().is_finalized {
        return Err(refuse("the communicator was finalized".to_owned()));
    }
    if call.peer >= place.ranks {
        return Err(refuse(format!("invalid root {} (root should be in the 0..{} range)", call.peer, place.ranks)));
    }
    if call.kind.reduces() {
        call.reduction = reduction(&communicator, asked.reduction, &call).map_err(&refuse)?;
    }
    let lengths = call.lengths(place).ok_or_else(|| refuse("a count that no memory holds".to_owned()))?;
    let world = world();
    let device = communicator.device;
    let stream = match asked.stream {
        0..=2 => Ok(world.devices[device].legacy),
        handle => world.stream(handle).map_err(|error| Failure::new(Code::UNHANDLED_CUDA, error.words().1)),
    }?;
    if world.progress.device_of(stream) != Some(device) {
        return Err(Failure::new(Code::UNHANDLED_CUDA, format!("{name} : a stream of another device")));
    }
    let mut accesses = Vec::new();
    for (address, length, writes) in [(&mut call.send, lengths.0, false), (&mut call.receive, lengths.1, true)] {
        let bytes = *address..address.checked_add(length).ok_or_else(|| refuse("not an address".to_owned()))?;
        if bytes.is_empty() {
            continue;
        }
        *address = host_address(&world, device, &bytes).ok_or_else(|| {
            refuse(format!("{:#x} is not the address of {length} bytes of device {device}", bytes.start))
        })?;
        accesses.push(Access { bytes, writes });
    }
    GROUP.with_borrow_mut(|group| group.calls.push(Planned { communicator, stream, call, accesses }));
    Ok(())
}

/// The host's address of bytes of a device or of pinned memory, if they are all in one allocation. NCCL checks that
/// with `NCCL_CHECK_POINTERS` only; otherwise its kernels fault.
fn host_address(world: &World, device: usize, bytes: &Range<usize>) -> Option<usize> {
    let block = world.devices.get(device)?.memory.block(bytes.start);
    let is_pinned = || world.is_pinned(bytes.start) && world.is_pinned(bytes.end - 1);
    let is_there = block.map_or_else(is_pinned, |block| bytes.end <= block.end);
    is_there.then(|| world.on_host(bytes.start))
}

fn reduction(communicator: &Communicator, number: i32, call: &Call) -> Result<Reduction, String> {
    let own = || communicator.counters().operators.get(&number).copied();
    let reduction = match (Reduction::new(number), own()) {
        (Some(reduction), _) => reduction,
        (None, Some((data, reduction))) if data == call.data => reduction,
        (None, Some(_)) => return Err("the data type is not that of the reduction operation".to_owned()),
        (None, None) => return Err(format!("invalid reduction operation {number}")),
    };
    // A GPU of compute capability 9 reduces them; this stand-in does not.
    if call.data.can_be_reduced() { Ok(reduction) } else { Err(format!("no reduction of {:?}", call.data)) }
}

/// Puts the calls into their streams, as one launch for each communicator.
fn launch(mut calls: Vec<Planned>) -> Result<(), Failure> {
    while let Some(first) = calls.first() {
        let communicator = first.communicator.clone();
        let (own, others) = calls.into_iter().partition(|planned| Arc::ptr_eq(&planned.communicator, &communicator));
        calls = others;
        launch_of(&communicator, own)?;
    }
    Ok(())
}

fn launch_of(communicator: &Arc<Communicator>, planned: Vec<Planned>) -> Result<(), Failure> {
    let cuda = |error: CudaError| Failure::new(Code::UNHANDLED_CUDA, error.words().1);
    let mut streams: Vec<u64> = Vec::new();
    for Planned { stream, .. } in &planned {
        if !streams.contains(stream) {
            streams.push(*stream);
        }
    }
    let name = name_of(planned.iter().map(|planned| planned.call.kind));
    let mut world = world();
    // A graph can have NCCL's calls, but here a graph could not launch them again.
    for stream in &streams {
        world.use_stream(&name, *stream).map_err(cuda)?;
    }
    let fault = world.fault_of(operation::Kind::Kernel, &name).map_err(cuda)?;
    for Planned { call, stream, .. } in &planned {
        world.count(&format!("nccl {}", call.kind.name()), 1);
        if world.high_priority.contains(stream) {
            world.count("nccl calls on streams of high priority", 1);
        }
        world.count(&format!("bytes nccl {}", call.kind.name()), call.bytes().unwrap_or(0) as u64);
        world.issued.add(|| format!("nccl {} of {} {:?}", call.kind.name(), call.count, call.data));
    }
    // Empty collectives launch nothing in NCCL. Here their ranks meet all the same, so that a count other than 0 at
    // another rank is found.
    if planned.iter().any(|planned| planned.call.count > 0 || !planned.call.kind.is_collective()) {
        world.count("launches", 1);
        world.count(&format!("kernel {name}"), 1);
    }
    let accesses: Vec<Access> = planned.iter().flat_map(|planned| planned.accesses.clone()).collect();
    let calls = planned.into_iter().map(|planned| planned.call).collect();
    let meeting: Box<dyn Meeting> = match fault {
        None => Box::new(Round::new(communicator, calls)?),
        Some(error) => Box::new(Failing(error)),
    };
    let Some((stream, others)) = streams.split_first() else { return Ok(()) };
    // "NCCL will enforce a stream dependency of all streams before the NCCL kernel starts and block all streams until
    // the NCCL kernel completes." (user guide, CUDA Stream Semantics)
    let event = world.progress.add_event(false);
    for other in others {
        world.progress.record(event, *other);
        world.progress.wait_for_event(*stream, event);
    }
    world.push_meeting(*stream, &name, &accesses, meeting).map_err(cuda)?;
    world.progress.record(event, *stream);
    for other in others {
        world.progress.wait_for_event(*other, event);
    }
    world.progress.end_event(event);
    Ok(())
}

/// A kernel with a planted failure: its peers wait for it forever.
struct Failing(CudaError);

impl Meeting for Failing {
    fn is_wanted(&self) -> bool {
        false
    }

    fn advance(&mut self) -> bool {
        faults::happen(self.0);
        true
    }
}

/// The name of the kernel: that of the function if there is only one.
fn name_of(mut kinds: impl Iterator<Item = Kind>) -> String {
    let part = |kind: Kind| if kind.is_collective() { kind.name() } else { "SendRecv" };
    let first = kinds.next().map_or("Generic", part);
    let name = if kinds.all(|kind| part(kind) == first) { first } else { "Generic" };
    format!("ncclDevKernel_{name}")
}
