//! Streams and events: what waits for what, and which work has run.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::clock::Clock;
use crate::guard::Ticket;
use crate::operation::Work;

mod host;
mod meeting;

pub use meeting::{Meeting, Target};

/// What a stream has an implicit order with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// All blocking streams of its device: it is the stream of calls that name none.
    Legacy,
    /// The legacy stream of its device.
    Blocking,
    /// Nothing.
    NonBlocking,
}

/// Numbers below have meanings of their own as handles.
const FIRST: u64 = 0x100;

enum Item {
    Run(Work),
    /// The same for a function of the host, which may touch what all work before it has written.
    Call(Work, Clock),
    /// Nothing behind it runs before it is done.
    Meet(Box<dyn Meeting>),
    /// Nothing behind it runs before this stream has come so far.
    Wait {
        stream: u64,
        until: u64,
    },
    /// An event happens, unless it was recorded again since.
    Record {
        event: u64,
        recording: u64,
    },
}

/// When work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// At once.
    Eager,
    /// Only when something waits for it.
    Lazy,
    /// As lazy, and a few items at each call, in an order that follows from this seed.
    Random(u64),
}

struct Stream {
    device: usize,
    order: Order,
    items: VecDeque<Item>,
    /// How many items were put in, and how many are done.
    issued: u64,
    done: u64,
    /// The number of its last operation, for [`Clock`].
    operations: u64,
    clock: Clock,
    /// When its last item is done, by the device's clock.
    time: u64,
}

#[derive(Clone, Default)]
struct Event {
    /// How often it was recorded, and in which stream it was last; the number of that item.
    recordings: u64,
    at: Option<(u64, u64)>,
    has_happened: bool,
    clock: Clock,
    /// When its last recording happens, by the device's clock; nothing for an event without timing.
    time: u64,
    is_timed: bool,
}

/// All streams and events.
pub struct Progress {
    pace: Pace,
    streams: HashMap<u64, Stream>,
    events: HashMap<u64, Event>,
    next: u64,
    /// Streams that nobody may use any more, but whose work is not done.
    ending: BTreeSet<u64>,
    /// What the host has waited for, and when that was done.
    host: Clock,
    host_time: u64,
    /// What was known of a device's streams that have ended.
    ended: BTreeMap<usize, Clock>,
    /// The guarded copies that the host has not waited for, with their streams and numbers.
    guarded: Vec<(Ticket, u64, u64)>,
    /// How many queries in a row have found work that is not done, and how many may.
    not_ready: u64,
    polls: u64,
    /// Whether the last query has waited by asking that often.
    was_asked_often: bool,
}

/// How many queries in a row find the same work waiting before it runs, unless a test says otherwise.
pub const POLLS: u64 = 1000;

impl Progress {
    /// Without streams.
    pub fn new(pace: Pace) -> Self {
        Self {
            pace,
            streams: HashMap::new(),
            events: HashMap::new(),
            next: FIRST,
            ending: BTreeSet::new(),
            host: Clock::default(),
            host_time: 0,
            ended: BTreeMap::new(),
            guarded: Vec::new(),
            not_ready: 0,
            polls: POLLS,
            was_asked_often: false,
        }
    }

    /// From now on. What waits, runs.
    pub fn set_pace(&mut self, pace: Pace) {
        for stream in self.ordered() {
            self.run_until(stream, u64::MAX);
        }
        self.pace = pace;
    }

    /// A new stream.
    pub fn add_stream(&mut self, device: usize, order: Order) -> u64 {
        let (items, clock) = (VecDeque::new(), Clock::default());
        let stream = Stream { device, order, items, issued: 0, done: 0, operations: 0, clock, time: 0 };
        self.streams.insert(self.next, stream);
        self.next += 1;
        self.next - 1
    }

    /// A new event, which has not been recorded.
    pub fn add_event(&mut self, is_timed: bool) -> u64 {
        self.events.insert(self.next, Event { is_timed, ..Event::default() });
        self.next += 1;
        self.next - 1
    }

    /// Ends a stream, after its work; false if there is none. What waits for somebody else is done later.
    pub fn end_stream(&mut self, stream: u64) -> bool {
        let is_legacy = self.streams.get(&stream).is_none_or(|own| own.order == Order::Legacy);
        if is_legacy || self.ending.contains(&stream) {
            return false;
        }
        if self.run_until(stream, u64::MAX) {
            self.remove_stream(stream);
        } else {
            self.ending.insert(stream);
        }
        true
    }

    /// A stream's work is done, and nobody uses it any more.
    fn remove_stream(&mut self, stream: u64) {
        if let Some(own) = self.streams.remove(&stream) {
            self.ended.entry(own.device).or_default().join(&own.clock);
        }
    }

    /// Ends an event, also one that was recorded and has not happened; false if there is none.
    pub fn end_event(&mut self, event: u64) -> bool {
        self.events.remove(&event).is_some()
    }

    /// The device of a stream, if there is this one.
    pub fn device_of(&self, stream: u64) -> Option<usize> {
        self.streams.get(&stream).filter(|_| !self.ending.contains(&stream)).map(|own| own.device)
    }

    /// The order of a stream with others, if there is this one.
    pub fn order_of(&self, stream: u64) -> Option<Order> {
        self.streams.get(&stream).map(|own| own.order)
    }

    /// Puts work into a stream, which the device needs so many nanoseconds for. Returns the operation's number, and
    /// what is done before it.
    pub fn push(&mut self, stream: u64, work: Work, nanoseconds: u64) -> Option<(u64, Clock)> {
        let told = self.begin(stream, nanoseconds)?;
        self.put(stream, Item::Run(work));
        Some(told)
    }

    /// As [`Self::push`], for a function of the host.
    pub fn call(&mut self, stream: u64, work: Work) -> Option<(u64, Clock)> {
        let told = self.begin(stream, 0)?;
        self.put(stream, Item::Call(work, told.1.clone()));
        Some(told)
    }

    fn begin(&mut self, stream: u64, nanoseconds: u64) -> Option<(u64, Clock)> {
        self.wait_implicitly(stream);
        let (host, begin) = (self.host.clone(), self.time_of(stream)?);
        let own = self.streams.get_mut(&stream)?;
        own.time = begin.saturating_add(nanoseconds);
        own.operations += 1;
        own.clock.join(&host);
        own.clock.set(stream, own.operations);
        Some((own.operations, own.clock.clone()))
    }

    /// Records an event in a stream; false if there is no such stream or event.
    pub fn record(&mut self, event: u64, stream: u64) -> bool {
        self.wait_implicitly(stream);
        let host = self.host.clone();
        let (Some(own), Some(event_own)) = (self.streams.get_mut(&stream), self.events.get_mut(&event)) else {
            return false;
        };
        own.clock.join(&host);
        own.time = own.time.max(self.host_time);
        event_own.time = own.time;
        event_own.recordings += 1;
        event_own.clock = own.clock.clone();
        (event_own.at, event_own.has_happened) = (Some((stream, own.issued + 1)), false);
        let recording = event_own.recordings;
        self.put(stream, Item::Record { event, recording });
        true
    }

    /// Makes a stream wait for an event's last recording; false if there is no such stream or event. One that was never
    /// recorded is not waited for.
    pub fn wait_for_event(&mut self, stream: u64, event: u64) -> bool {
        let Some(event) = self.events.get(&event).cloned() else { return false };
        let Some(own) = self.streams.get_mut(&stream) else { return false };
        if let Some((other, until)) = event.at {
            own.clock.join(&event.clock);
            own.time = own.time.max(event.time);
            if other != stream && !event.has_happened {
                self.put(stream, Item::Wait { stream: other, until });
            }
        }
        true
    }

    /// Whether an event's last recording has happened; true for one that was never recorded, `None` if there is none.
    pub fn has_happened(&self, event: u64) -> Option<bool> {
        self.events.get(&event).map(|event| event.at.is_none() || event.has_happened)
    }

    /// Whether an event was ever recorded; `None` if there is none.
    pub fn is_recorded(&self, event: u64) -> Option<bool> {
        self.events.get(&event).map(|event| event.at.is_some())
    }

    /// How many items were put into a stream.
    pub fn issued(&self, stream: u64) -> Option<u64> {
        self.streams.get(&stream).map(|own| own.issued)
    }

    /// Whether a stream has no work left.
    pub fn is_idle(&self, stream: u64) -> Option<bool> {
        self.streams.get(&stream).map(|own| own.done == own.issued)
    }

    /// When a stream could begin its next item, by the device's clock: not before the host issued it.
    pub fn time_of(&self, stream: u64) -> Option<u64> {
        self.streams.get(&stream).map(|own| own.time.max(self.host_time))
    }

    /// Sets when a stream begins its next item, for nodes of a graph, which need not follow each other.
    pub fn set_time(&mut self, stream: u64, time: u64) {
        if let Some(own) = self.streams.get_mut(&stream) {
            own.time = time;
        }
    }

    /// Lets a stream run a few items, if the pace is random.
    pub fn tick(&mut self) {
        let Pace::Random(seed) = &mut self.pace else { return };
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let random = *seed;
        let waiting: Vec<u64> =
            self.ordered().into_iter().filter(|stream| self.is_idle(*stream) == Some(false)).collect();
        if !(random >> 33).is_multiple_of(3) || waiting.is_empty() {
            return;
        }
        let stream = waiting[(random >> 40) as usize % waiting.len()];
        let done = self.streams[&stream].done;
        self.run_until(stream, done + 1 + (random >> 50) % 3);
    }

    fn ordered(&self) -> Vec<u64> {
        let mut streams: Vec<u64> = self.streams.keys().copied().collect();
        streams.sort_unstable();
        streams
    }

    /// The legacy stream waits for all blocking streams, and they for it.
    fn wait_implicitly(&mut self, stream: u64) {
        let Some((device, order)) = self.streams.get(&stream).map(|own| (own.device, own.order)) else { return };
        for other in self.ordered() {
            let pair = (order, self.streams[&other].order);
            let are_ordered = matches!(pair, (Order::Legacy, Order::Blocking) | (Order::Blocking, Order::Legacy));
            if !are_ordered || self.streams[&other].device != device {
                continue;
            }
            let (clock, time, done, until) = {
                let other = &self.streams[&other];
                (other.clock.clone(), other.time, other.done, other.issued)
            };
            if let Some(own) = self.streams.get_mut(&stream) {
                own.clock.join(&clock);
                own.time = own.time.max(time);
            }
            if done < until {
                self.put(stream, Item::Wait { stream: other, until });
            }
        }
    }

    fn put(&mut self, stream: u64, item: Item) {
        let Some(own) = self.streams.get_mut(&stream) else { return };
        own.items.push_back(item);
        own.issued += 1;
        let issued = own.issued;
        if self.pace == Pace::Eager {
            self.run_until(stream, issued);
        }
    }

    /// Runs a stream's items up to this one, and what they wait for. False if one of them waits for somebody else.
    fn run_until(&mut self, stream: u64, until: u64) -> bool {
        // The streams that wait for each other; a wait never leads back, because it is for what was put in before.
        let mut waiting = vec![(stream, until)];
        while let Some(&(stream, until)) = waiting.last() {
            let Some(own) = self.streams.get(&stream).filter(|own| own.done < until) else {
                waiting.pop();
                continue;
            };
            if let Some(&Item::Wait { stream: other, until }) = own.items.front()
                && self.streams.get(&other).is_some_and(|other| other.done < until)
            {
                waiting.push((other, until));
                continue;
            }
            let Some(own) = self.streams.get_mut(&stream) else { continue };
            if let Some(Item::Meet(meeting)) = own.items.front_mut()
                && !meeting.advance()
            {
                return false;
            }
            let Some(item) = own.items.pop_front() else {
                waiting.pop();
                continue;
            };
            own.done += 1;
            match item {
                Item::Run(work) => work(),
                // "The start of execution of the function has the same effect as synchronizing an event recorded
                // immediately prior to it" (`cudaLaunchHostFunc`).
                Item::Call(work, clock) => {
                    self.let_go(&clock);
                    work();
                }
                Item::Wait { .. } | Item::Meet(_) => {}
                Item::Record { event, recording } => {
                    if let Some(event) = self.events.get_mut(&event).filter(|event| event.recordings == recording) {
                        event.has_happened = true;
                    }
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests;
