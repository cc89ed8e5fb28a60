//! Streams and events: what waits for what, and which work has run.

use std::collections::{HashMap, VecDeque};

use crate::clock::Clock;

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

/// Work in a stream.
pub type Work = Box<dyn FnOnce() + Send>;

enum Item {
    Run(Work),
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
}

#[derive(Clone, Default)]
struct Event {
    /// How often it was recorded, and in which stream it was last; the number of that item.
    recordings: u64,
    at: Option<(u64, u64)>,
    has_happened: bool,
    clock: Clock,
}

/// All streams and events.
pub struct Progress {
    pace: Pace,
    streams: HashMap<u64, Stream>,
    events: HashMap<u64, Event>,
    next: u64,
    /// What the host has waited for.
    host: Clock,
}

impl Progress {
    /// Without streams.
    pub fn new(pace: Pace) -> Self {
        Self { pace, streams: HashMap::new(), events: HashMap::new(), next: FIRST, host: Clock::default() }
    }

    /// From now on. What waits, runs.
    pub fn set_pace(&mut self, pace: Pace) {
        self.ordered().into_iter().for_each(|stream| self.run_until(stream, u64::MAX));
        self.pace = pace;
    }

    /// A new stream.
    pub fn add_stream(&mut self, device: usize, order: Order) -> u64 {
        let (items, clock) = (VecDeque::new(), Clock::default());
        let stream = Stream { device, order, items, issued: 0, done: 0, operations: 0, clock };
        self.streams.insert(self.next, stream);
        self.next += 1;
        self.next - 1
    }

    /// A new event, which has not been recorded.
    pub fn add_event(&mut self) -> u64 {
        self.events.insert(self.next, Event::default());
        self.next += 1;
        self.next - 1
    }

    /// Ends a stream, after its work; false if there is none.
    pub fn end_stream(&mut self, stream: u64) -> bool {
        if self.streams.get(&stream).is_none_or(|own| own.order == Order::Legacy) {
            return false;
        }
        self.run_until(stream, u64::MAX);
        self.streams.remove(&stream).is_some()
    }

    /// Ends an event, also one that was recorded and has not happened; false if there is none.
    pub fn end_event(&mut self, event: u64) -> bool {
        self.events.remove(&event).is_some()
    }

    /// The device of a stream, if there is this one.
    pub fn device_of(&self, stream: u64) -> Option<usize> {
        self.streams.get(&stream).map(|own| own.device)
    }

    /// Puts work into a stream. Returns the operation's number, and what is done before it.
    pub fn push(&mut self, stream: u64, work: Work) -> Option<(u64, Clock)> {
        self.wait_implicitly(stream);
        let host = self.host.clone();
        let own = self.streams.get_mut(&stream)?;
        own.operations += 1;
        own.clock.join(&host);
        own.clock.set(stream, own.operations);
        let told = (own.operations, own.clock.clone());
        self.put(stream, Item::Run(work));
        Some(told)
    }

    /// Records an event in a stream; false if there is no such stream or event.
    pub fn record(&mut self, event: u64, stream: u64) -> bool {
        self.wait_implicitly(stream);
        let host = self.host.clone();
        let (Some(own), Some(event_own)) = (self.streams.get_mut(&stream), self.events.get_mut(&event)) else {
            return false;
        };
        own.clock.join(&host);
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

    /// The host waits for an event; false if there is none.
    pub fn synchronize_event(&mut self, event: u64) -> bool {
        let Some(own) = self.events.get(&event).cloned() else { return false };
        if let Some((stream, until)) = own.at {
            self.run_until(stream, until);
        }
        self.host.join(&own.clock);
        true
    }

    /// The host waits for a stream. Returns how many items it found waiting, `None` if there is no such stream.
    pub fn synchronize(&mut self, stream: u64) -> Option<u64> {
        let own = self.streams.get(&stream)?;
        let (waiting, clock) = (own.issued - own.done, own.clock.clone());
        self.run_until(stream, u64::MAX);
        self.host.join(&clock);
        Some(waiting)
    }

    /// The host waits for everything. Returns how many items it found waiting.
    pub fn synchronize_all(&mut self) -> u64 {
        self.ordered().into_iter().filter_map(|stream| self.synchronize(stream)).sum()
    }

    /// Whether a stream has no work left.
    pub fn is_idle(&self, stream: u64) -> Option<bool> {
        self.streams.get(&stream).map(|own| own.done == own.issued)
    }

    /// What the host has waited for.
    pub fn host(&self) -> &Clock {
        &self.host
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

    /// All streams, in the order that they were made in.
    pub fn ordered(&self) -> Vec<u64> {
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
            let (clock, done, until) = {
                let other = &self.streams[&other];
                (other.clock.clone(), other.done, other.issued)
            };
            if let Some(own) = self.streams.get_mut(&stream) {
                own.clock.join(&clock);
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

    /// Runs a stream's items up to this one, and what they wait for.
    fn run_until(&mut self, stream: u64, until: u64) {
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
            let Some(item) = own.items.pop_front() else {
                waiting.pop();
                continue;
            };
            own.done += 1;
            match item {
                Item::Run(work) => work(),
                Item::Wait { .. } => {}
                Item::Record { event, recording } => {
                    if let Some(event) = self.events.get_mut(&event).filter(|event| event.recordings == recording) {
                        event.has_happened = true;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// What has run, in order.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<&'static str>>>);

    impl Log {
        fn work(&self, name: &'static str) -> Work {
            let log = self.0.clone();
            Box::new(move || log.lock().unwrap().push(name))
        }

        fn taken(&self) -> Vec<&'static str> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    #[test]
    fn eager_work_runs_at_once_and_lazy_work_when_it_is_waited_for() {
        let log = Log::default();
        let mut eager = Progress::new(Pace::Eager);
        let stream = eager.add_stream(0, Order::Legacy);
        eager.push(stream, log.work("eager"));
        assert_eq!(log.taken(), ["eager"]);
        let mut lazy = Progress::new(Pace::Lazy);
        let stream = lazy.add_stream(0, Order::NonBlocking);
        lazy.push(stream, log.work("one"));
        lazy.push(stream, log.work("two"));
        assert_eq!((log.taken(), lazy.is_idle(stream)), (vec![], Some(false)));
        assert_eq!(lazy.synchronize(stream), Some(2));
        assert_eq!((log.taken(), lazy.is_idle(stream)), (vec!["one", "two"], Some(true)));
        assert_eq!(lazy.push(99, log.work("never")), None);
    }

    #[test]
    fn a_stream_waits_for_an_event_and_its_order_is_known() {
        let log = Log::default();
        let mut progress = Progress::new(Pace::Lazy);
        let [copy, compute] = [0, 1].map(|_| progress.add_stream(0, Order::NonBlocking));
        let event = progress.add_event();
        assert!(progress.wait_for_event(compute, event), "one that was never recorded");
        let (number, _) = progress.push(copy, log.work("copy")).unwrap();
        let (_, before) = progress.push(compute, log.work("early")).unwrap();
        assert!(!before.has_seen(copy, number));
        progress.record(event, copy);
        progress.push(copy, log.work("later"));
        progress.wait_for_event(compute, event);
        let (_, before) = progress.push(compute, log.work("kernel")).unwrap();
        assert!(before.has_seen(copy, number) && !before.has_seen(copy, number + 1));
        assert_eq!(progress.has_happened(event), Some(false));
        progress.synchronize(compute);
        assert_eq!(log.taken(), ["early", "copy", "kernel"]);
        assert_eq!(progress.has_happened(event), Some(true));
        progress.synchronize_all();
        assert_eq!(log.taken(), ["later"]);
    }

    #[test]
    fn an_event_that_is_recorded_again_has_not_happened_yet() {
        let mut progress = Progress::new(Pace::Lazy);
        let stream = progress.add_stream(0, Order::NonBlocking);
        let event = progress.add_event();
        progress.record(event, stream);
        progress.synchronize(stream);
        assert_eq!(progress.has_happened(event), Some(true));
        progress.record(event, stream);
        assert_eq!(progress.has_happened(event), Some(false));
        assert!(progress.end_event(event) && !progress.end_event(event));
        progress.synchronize_all();
    }

    #[test]
    fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
        let log = Log::default();
        let mut progress = Progress::new(Pace::Lazy);
        let [legacy, blocking, free] =
            [Order::Legacy, Order::Blocking, Order::NonBlocking].map(|order| progress.add_stream(0, order));
        let elsewhere = progress.add_stream(1, Order::Blocking);
        progress.push(elsewhere, log.work("elsewhere"));
        progress.push(free, log.work("free"));
        progress.push(blocking, log.work("blocking"));
        let (number, before) = progress.push(legacy, log.work("legacy")).unwrap();
        assert!(before.has_seen(blocking, 1) && !before.has_seen(free, 1) && !before.has_seen(elsewhere, 1));
        let (_, before) = progress.push(blocking, log.work("after")).unwrap();
        assert!(before.has_seen(legacy, number));
        progress.synchronize(blocking);
        assert_eq!(log.taken(), ["blocking", "legacy", "after"]);
    }

    #[test]
    fn random_progress_follows_from_its_seed_and_keeps_each_streams_order() {
        let run = |seed| {
            let log = Log::default();
            let mut progress = Progress::new(Pace::Random(seed));
            let streams = [0, 1].map(|_| progress.add_stream(0, Order::NonBlocking));
            for name in ["a", "b", "c", "d"] {
                for stream in streams {
                    progress.push(stream, log.work(name));
                    progress.tick();
                }
            }
            progress.synchronize_all();
            log.taken()
        };
        assert_eq!(run(7), run(7));
        assert!((1..20).any(|seed| run(seed) != run(7)));
        assert!((1..20).all(|seed| run(seed).iter().filter(|it| **it == "a").count() == 2 && run(seed)[0] == "a"));
    }

    #[test]
    fn what_the_host_has_waited_for_comes_before_what_it_issues_then() {
        let mut progress = Progress::new(Pace::Lazy);
        let [one, other] = [0, 1].map(|_| progress.add_stream(0, Order::NonBlocking));
        let (number, _) = progress.push(one, Box::new(|| {})).unwrap();
        let event = progress.add_event();
        progress.record(event, one);
        assert!(!progress.host().has_seen(one, number));
        progress.synchronize_event(event);
        assert!(progress.host().has_seen(one, number));
        assert!(progress.push(other, Box::new(|| {})).unwrap().1.has_seen(one, number));
        assert!(progress.end_stream(one) && progress.device_of(one).is_none() && !progress.end_stream(one));
        let legacy = progress.add_stream(0, Order::Legacy);
        assert!(!progress.end_stream(legacy));
    }
}
