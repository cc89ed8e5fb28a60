//! A group of calls in a stream. Its calls begin together, and it is done when all of them are.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::call::{Call, Kind};
use super::code::{Code, Failure};
use super::communicator::{Communicator, Seat, are_links_cut};
use super::lanes::Lane;
use super::members;
use super::order;
use super::server::Pending;
use crate::poison::poison;
use crate::progress::Meeting;

/// A call of a group.
struct Part {
    call: Call,
    /// Its number among the collectives, or among the sends or receives between two ranks.
    number: u64,
    /// What the device's other communicators were given before this collective.
    before: String,
    /// Where its record ends, if it sends something.
    end: u64,
}

pub struct Round {
    communicator: Arc<Communicator>,
    number: u64,
    parts: Vec<Part>,
    has_begun: bool,
    _pending: Pending,
}

impl Round {
    /// Makes the next group of a communicator.
    pub fn new(communicator: &Arc<Communicator>, calls: Vec<Call>) -> Result<Self, Failure> {
        let pending = Pending::new()?;
        let mut counters = communicator.counters();
        let mut part = |call: Call| {
            let next = match call.kind {
                Kind::Send => counters.sends.entry(call.peer).or_default(),
                Kind::Recv => counters.receives.entry(call.peer).or_default(),
                _ => &mut counters.collectives,
            };
            *next += 1;
            let seat = communicator.seat().filter(|_| call.kind.is_collective());
            let before = seat.map(|seat| order::give(communicator.device, &seat.path)).unwrap_or_default();
            Part { number: *next - 1, call, before, end: 0 }
        };
        let parts = calls.into_iter().map(&mut part).collect();
        drop(counters);
        let number = communicator.issue();
        Ok(Self { communicator: communicator.clone(), number, parts, has_begun: false, _pending: pending })
    }

    fn begin(&mut self) -> Result<(), Failure> {
        let seat = seat_of(&self.communicator)?;
        for part in &mut self.parts {
            if part.call.kind == Kind::Recv {
                let pair = (seat.place.rank, part.call.peer);
                seat.lanes.receives(pair).fetch_add(1, Ordering::AcqRel);
                continue;
            }
            let length = part.call.lengths(seat.place).map_or(0, |lengths| lengths.0);
            poison().read(part.call.kind.name(), part.call.send, length);
            // SAFETY: the caller promises these bytes to the collective until it is done; they were found to be there.
            let bytes = unsafe { bytes_at(part.call.send, length) };
            part.end = part.call.post(&seat.lanes, seat.place, bytes, &part.before)?;
        }
        self.has_begun = true;
        Ok(())
    }

    /// Makes progress; true once everything is done.
    fn go_on(&mut self) -> Result<bool, Failure> {
        if are_links_cut() {
            return Ok(false);
        }
        if !self.has_begun {
            self.begin()?;
        }
        let communicator = self.communicator.clone();
        let seat = seat_of(&communicator)?;
        loop {
            let before = self.parts.len();
            let mut left = Vec::with_capacity(before);
            for part in self.parts.drain(..) {
                // In order, because each lane is read in order.
                let comes_later = left.iter().any(|other: &Part| same_lane(&other.call, &part.call));
                if comes_later || !is_done(&part, seat)? {
                    left.push(part);
                }
            }
            self.parts = left;
            if self.parts.is_empty() {
                return Ok(true);
            }
            if self.parts.len() == before {
                break;
            }
        }
        if communicator.may_look()
            && let Some(rank) = self.parts.iter().find_map(|part| missing(part, seat))
        {
            return Err(members::ended(rank));
        }
        Ok(false)
    }
}

/// The seat. There is one, because calls were only accepted with it.
fn seat_of(communicator: &Communicator) -> Result<&Seat, Failure> {
    communicator.seat().ok_or_else(|| Failure::new(Code::INTERNAL, "there is no seat"))
}

fn same_lane(one: &Call, other: &Call) -> bool {
    match (one.kind.is_collective(), other.kind.is_collective()) {
        (true, true) => true,
        (false, false) => one.kind == other.kind && one.peer == other.peer,
        _ => false,
    }
}

/// # Safety
/// So many bytes have to be there, unless there are none, and nobody may write them.
unsafe fn bytes_at<'a>(at: usize, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(at as *const u8, length) }
}

fn is_done(part: &Part, seat: &Seat) -> Result<bool, Failure> {
    let call = &part.call;
    if call.kind == Kind::Send {
        // A send waits for its receive, as `nccl.h` says: "This operation is blocking for the GPU."
        return Ok(seat.lanes.is_received(Lane::Pair(seat.place.rank, call.peer), part.end));
    }
    let length = call.lengths(seat.place).map_or(0, |lengths| lengths.1);
    let receive: &mut [u8] = if length == 0 {
        &mut []
    } else {
        // SAFETY: the caller promises these bytes to the collective until it is done; they were found to be there.
        unsafe { std::slice::from_raw_parts_mut(call.receive as *mut u8, length) }
    };
    let is_done = call.meet(&seat.lanes, seat.place, part.number, receive)?;
    if is_done {
        poison().clear(call.receive, length);
    }
    Ok(is_done)
}

/// A rank whose process has ended before it came to this call.
fn missing(part: &Part, seat: &Seat) -> Option<usize> {
    let (call, lanes, own) = (&part.call, &seat.lanes, seat.place.rank);
    let has_come = |rank: usize| match call.kind {
        Kind::Send => lanes.is_received(Lane::Pair(own, rank), part.end),
        Kind::Recv => lanes.records(Lane::Pair(rank, own)) > part.number,
        _ => lanes.records(Lane::Collectives(rank)) > part.number,
    };
    let mut awaited = if call.kind.is_collective() { 0..seat.place.ranks } else { call.peer..call.peer + 1 };
    // In this order, because what a process has written stays after its end.
    awaited.find(|rank| lanes.head().is_alive(*rank) == Some(false) && !has_come(*rank))
}

/// Whether a peer has come to this call.
fn is_awaited(part: &Part, seat: &Seat) -> bool {
    let (lanes, own, peer) = (&seat.lanes, seat.place.rank, part.call.peer);
    match part.call.kind {
        Kind::Send => lanes.receives((peer, own)).load(Ordering::Acquire) > part.number,
        Kind::Recv => lanes.records(Lane::Pair(peer, own)) > part.number,
        _ => {
            let mut others = (0..seat.place.ranks).filter(|rank| *rank != own);
            others.any(|rank| lanes.records(Lane::Collectives(rank)) > part.number)
        }
    }
}

impl Meeting for Round {
    fn is_wanted(&self) -> bool {
        let communicator = &self.communicator;
        let is_awaited = || {
            let seat = communicator.seat();
            seat.is_some_and(|seat| self.parts.iter().any(|part| is_awaited(part, seat)))
        };
        if communicator.wants(self.number) || communicator.is_over() || communicator.broken().is_some() {
            return true;
        }
        if is_awaited() {
            communicator.want(self.number);
            return true;
        }
        false
    }

    fn advance(&mut self) -> bool {
        let is_over = self.communicator.is_over();
        if !is_over && !self.communicator.is_turn_of(self.number) {
            self.communicator.want(self.number);
            return false;
        }
        let is_done = is_over
            || match self.go_on() {
                Ok(true) => true,
                Ok(false) => self.communicator.broken().inspect(|why| self.communicator.break_with(why)).is_some(),
                Err(failure) => {
                    self.communicator.break_with(&failure);
                    true
                }
            };
        if is_done {
            self.communicator.end(self.number);
        }
        is_done
    }
}
