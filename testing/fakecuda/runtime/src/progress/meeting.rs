//! Work that needs somebody else, such as a collective its peers: it holds its stream up, but nobody who asks for it.

use super::{Item, Pace, Progress};
use crate::clock::Clock;

/// Work that is asked to go on until it is done.
pub trait Meeting: Send {
    /// Whether somebody else waits for it.
    fn is_wanted(&self) -> bool;

    /// Begins or goes on, without waiting. True once it is done.
    fn advance(&mut self) -> bool;
}

/// How far a stream has to come, and what is known to be done then.
pub struct Target {
    at: Option<(u64, u64)>,
    clock: Clock,
    /// When it is done, by the device's clock.
    time: u64,
}

impl Progress {
    /// Puts a meeting into a stream, as `push` does with other work.
    pub fn push_meeting(&mut self, stream: u64, meeting: Box<dyn Meeting>, nanoseconds: u64) -> Option<(u64, Clock)> {
        let told = self.begin(stream, nanoseconds)?;
        self.put(stream, Item::Meet(meeting));
        Some(told)
    }

    /// What a stream holds by now; `None` if there is no such stream.
    pub fn target(&self, stream: u64) -> Option<Target> {
        let own = self.streams.get(&stream)?;
        Some(Target { at: Some((stream, own.issued)), clock: own.clock.clone(), time: own.time })
    }

    /// An event's last recording; `None` if there is no such event.
    pub fn target_of_event(&self, event: u64) -> Option<Target> {
        self.events.get(&event).map(|own| Target { at: own.at, clock: own.clock.clone(), time: own.time })
    }

    /// What a device's streams hold by now, and those that have ended; those of all devices without one.
    pub fn targets(&self, device: Option<usize>) -> Vec<Target> {
        let streams = self.ordered().into_iter();
        let own = streams.filter(|stream| device.is_none_or(|device| self.streams[stream].device == device));
        let ended = self.ended.iter().filter(|(own, _)| device.is_none_or(|device| device == **own));
        let ended = ended.map(|(_, clock)| Target { at: None, clock: clock.clone(), time: 0 });
        own.filter_map(|stream| self.target(stream)).chain(ended).collect()
    }

    /// Runs what comes before a target. True once all of it is done, and the host knows.
    pub fn reach(&mut self, target: &Target) -> bool {
        let is_done = target.at.is_none_or(|(stream, until)| self.run_until(stream, until));
        if is_done {
            self.know(&target.clock, target.time);
        }
        is_done
    }

    /// Lets meetings go on although the host waits for none: eager ones, and those that somebody else waits for.
    pub fn serve(&mut self) {
        for stream in self.ordered() {
            let own = &self.streams[&stream];
            let is_wanted = |item: &Item| matches!(item, Item::Meet(meeting) if meeting.is_wanted());
            let until = match self.pace {
                Pace::Eager => own.issued,
                _ if self.ending.contains(&stream) => own.issued,
                _ => own.items.iter().rposition(is_wanted).map_or(0, |at| own.done + 1 + at as u64),
            };
            if self.run_until(stream, until) && self.is_idle(stream) == Some(true) && self.ending.remove(&stream) {
                self.remove_stream(stream);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::super::Order;
    use super::*;

    /// A cost that no test here looks at.
    const FREE: u64 = 0;

    /// A meeting whose others come when the test says so.
    #[derive(Clone, Default)]
    struct Other(Arc<(AtomicBool, AtomicBool)>);

    impl Meeting for Other {
        fn is_wanted(&self) -> bool {
            self.0.0.load(Ordering::Relaxed)
        }

        fn advance(&mut self) -> bool {
            self.0.1.load(Ordering::Relaxed)
        }
    }

    fn counted(times: &Arc<AtomicUsize>) -> super::super::Work {
        let times = times.clone();
        Arc::new(move || _ = times.fetch_add(1, Ordering::Relaxed))
    }

    #[test]
    fn a_meeting_holds_up_its_stream_and_those_that_wait_for_it_but_not_the_host() {
        for pace in [Pace::Eager, Pace::Lazy, Pace::Random(3)] {
            let (mut progress, other, times) = (Progress::new(pace), Other::default(), Arc::default());
            let [meets, waits] = [0, 1].map(|device| progress.add_stream(device, Order::NonBlocking));
            let event = progress.add_event(false);
            progress.push_meeting(meets, Box::new(other.clone()), FREE);
            progress.record(event, meets);
            progress.wait_for_event(waits, event);
            progress.push(waits, counted(&times), FREE);
            let (target, of_event) = (progress.target(waits).unwrap(), progress.target_of_event(event).unwrap());
            progress.tick();
            assert!(!progress.reach(&target) && !progress.reach(&of_event));
            assert_eq!((progress.has_happened(event), times.load(Ordering::Relaxed)), (Some(false), 0));
            assert!(!progress.host().has_seen(meets, 1));
            other.0.1.store(true, Ordering::Relaxed);
            assert!(progress.reach(&target) && progress.reach(&of_event));
            assert_eq!((progress.has_happened(event), times.load(Ordering::Relaxed)), (Some(true), 1));
            assert!(progress.host().has_seen(meets, 1));
        }
    }

    #[test]
    fn lazy_meetings_are_served_once_somebody_wants_them_and_eager_ones_always() {
        let (mut lazy, other, times) = (Progress::new(Pace::Lazy), Other::default(), Arc::default());
        let stream = lazy.add_stream(0, Order::NonBlocking);
        other.0.1.store(true, Ordering::Relaxed);
        lazy.push(stream, counted(&times), FREE);
        lazy.push_meeting(stream, Box::new(other.clone()), FREE);
        lazy.push(stream, counted(&times), FREE);
        lazy.serve();
        assert_eq!(times.load(Ordering::Relaxed), 0);
        other.0.0.store(true, Ordering::Relaxed);
        lazy.serve();
        assert_eq!((times.load(Ordering::Relaxed), lazy.is_idle(stream)), (1, Some(false)), "not what is behind it");
        let (mut eager, other) = (Progress::new(Pace::Eager), Other::default());
        let stream = eager.add_stream(0, Order::NonBlocking);
        eager.push_meeting(stream, Box::new(other.clone()), FREE);
        eager.push(stream, counted(&times), FREE);
        assert_eq!(times.load(Ordering::Relaxed), 1);
        other.0.1.store(true, Ordering::Relaxed);
        eager.serve();
        assert_eq!((times.load(Ordering::Relaxed), eager.is_idle(stream)), (2, Some(true)));
    }

    #[test]
    fn who_asks_often_enough_makes_work_run_up_to_a_meeting_and_behind_it_once_the_others_have_come() {
        let (mut progress, other, times) = (Progress::new(Pace::Lazy), Other::default(), Arc::default());
        let (stream, event) = (progress.add_stream(0, Order::NonBlocking), progress.add_event(false));
        progress.set_polls(1);
        progress.push(stream, counted(&times), FREE);
        progress.push_meeting(stream, Box::new(other.clone()), FREE);
        progress.push(stream, counted(&times), FREE);
        progress.record(event, stream);
        assert_eq!((progress.query_event(event), times.load(Ordering::Relaxed)), (Some(false), 0));
        assert_eq!((progress.query_event(event), times.load(Ordering::Relaxed)), (Some(false), 1));
        assert_eq!((progress.query(stream), progress.host().has_seen(stream, 1)), (Some(false), false));
        other.0.1.store(true, Ordering::Relaxed);
        assert_eq!((progress.query(stream), times.load(Ordering::Relaxed)), (Some(true), 2));
        assert_eq!((progress.query_event(event), progress.host().has_seen(stream, 3)), (Some(true), true));
    }

    #[test]
    fn a_stream_that_ends_with_a_meeting_is_gone_at_once_and_its_work_later() {
        let (mut progress, other) = (Progress::new(Pace::Lazy), Other::default());
        let stream = progress.add_stream(0, Order::NonBlocking);
        progress.push_meeting(stream, Box::new(other.clone()), FREE);
        assert!(progress.end_stream(stream) && !progress.end_stream(stream));
        assert_eq!((progress.device_of(stream), progress.is_idle(stream)), (None, Some(false)));
        other.0.1.store(true, Ordering::Relaxed);
        progress.serve();
        assert_eq!(progress.is_idle(stream), None);
    }
}
