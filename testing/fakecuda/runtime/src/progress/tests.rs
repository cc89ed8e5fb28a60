use std::sync::{Arc, Mutex};

use super::*;
use crate::error::CudaError;

/// A cost that no test here looks at.
const FREE: u64 = 0;

/// What has run, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<&'static str>>>);

impl Log {
    fn work(&self, name: &'static str) -> Work {
        let log = self.0.clone();
        Arc::new(move || log.lock().unwrap().push(name))
    }

    fn taken(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Progress {
    /// The host waits for a stream. Returns how many items it found waiting, `None` if there is no such stream.
    fn synchronize(&mut self, stream: u64) -> Option<u64> {
        let target = self.target(stream)?;
        let waiting = self.streams[&stream].issued - self.streams[&stream].done;
        assert!(self.reach(&target), "nothing here waits for somebody else");
        Some(waiting)
    }

    fn synchronize_event(&mut self, event: u64) {
        let target = self.target_of_event(event).unwrap();
        assert!(self.reach(&target), "nothing here waits for somebody else");
    }

    fn synchronize_all(&mut self) {
        self.targets(None).iter().for_each(|target| assert!(self.reach(target)));
    }
}

#[test]
fn eager_work_runs_at_once_and_lazy_work_when_it_is_waited_for() {
    let log = Log::default();
    let mut eager = Progress::new(Pace::Eager);
    let stream = eager.add_stream(0, Order::Legacy);
    eager.push(stream, log.work("eager"), FREE);
    assert_eq!(log.taken(), ["eager"]);
    let mut lazy = Progress::new(Pace::Lazy);
    let stream = lazy.add_stream(0, Order::NonBlocking);
    lazy.push(stream, log.work("one"), FREE);
    lazy.push(stream, log.work("two"), FREE);
    assert_eq!((log.taken(), lazy.is_idle(stream)), (vec![], Some(false)));
    assert_eq!(lazy.synchronize(stream), Some(2));
    assert_eq!((log.taken(), lazy.is_idle(stream)), (vec!["one", "two"], Some(true)));
    assert_eq!(lazy.push(99, log.work("never"), FREE), None);
}

#[test]
fn a_stream_waits_for_an_event_and_its_order_is_known() {
    let log = Log::default();
    let mut progress = Progress::new(Pace::Lazy);
    let [copy, compute] = [0, 1].map(|_| progress.add_stream(0, Order::NonBlocking));
    let event = progress.add_event(true);
    assert!(progress.wait_for_event(compute, event), "one that was never recorded");
    let (number, _) = progress.push(copy, log.work("copy"), FREE).unwrap();
    let (_, before) = progress.push(compute, log.work("early"), FREE).unwrap();
    assert!(!before.has_seen(copy, number));
    progress.record(event, copy);
    progress.push(copy, log.work("later"), FREE);
    progress.wait_for_event(compute, event);
    let (_, before) = progress.push(compute, log.work("kernel"), FREE).unwrap();
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
    let event = progress.add_event(true);
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
    progress.push(elsewhere, log.work("elsewhere"), FREE);
    progress.push(free, log.work("free"), FREE);
    progress.push(blocking, log.work("blocking"), FREE);
    let (number, before) = progress.push(legacy, log.work("legacy"), FREE).unwrap();
    assert!(before.has_seen(blocking, 1) && !before.has_seen(free, 1) && !before.has_seen(elsewhere, 1));
    let (_, before) = progress.push(blocking, log.work("after"), FREE).unwrap();
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
                progress.push(stream, log.work(name), FREE);
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
    let (number, _) = progress.push(one, Arc::new(|| {}), FREE).unwrap();
    let event = progress.add_event(true);
    progress.record(event, one);
    assert!(!progress.host().has_seen(one, number));
    progress.synchronize_event(event);
    assert!(progress.host().has_seen(one, number));
    assert!(progress.push(other, Arc::new(|| {}), FREE).unwrap().1.has_seen(one, number));
    assert!(progress.end_stream(one) && progress.device_of(one).is_none() && !progress.end_stream(one));
    let legacy = progress.add_stream(0, Order::Legacy);
    assert!(!progress.end_stream(legacy));
}

#[test]
fn the_devices_clock_follows_the_order_of_streams_and_not_of_runs() {
    let run = |pace| {
        let mut progress = Progress::new(pace);
        let [copy, compute] = [0, 1].map(|_| progress.add_stream(0, Order::NonBlocking));
        let [begin, copied, end] = [0; 3].map(|_| progress.add_event(true));
        progress.record(begin, compute);
        progress.push(copy, Arc::new(|| {}), 700);
        progress.record(copied, copy);
        progress.push(compute, Arc::new(|| {}), 200);
        progress.wait_for_event(compute, copied);
        progress.push(compute, Arc::new(|| {}), 50);
        progress.record(end, compute);
        progress.synchronize_all();
        // What the host issues now cannot begin before what it has waited for.
        let late = progress.add_event(true);
        progress.push(copy, Arc::new(|| {}), 10);
        progress.record(late, copy);
        progress.synchronize(copy);
        [copied, end, late].map(|event| progress.elapsed(begin, event))
    };
    let expected = [Ok(700), Ok(750), Ok(760)];
    assert_eq!(run(Pace::Eager), expected);
    assert_eq!(run(Pace::Lazy), expected);
    assert!((0..50).all(|seed| run(Pace::Random(seed)) == expected));
}

#[test]
fn times_of_events_that_have_none_are_errors() {
    let mut progress = Progress::new(Pace::Lazy);
    let stream = progress.add_stream(0, Order::NonBlocking);
    let [one, other] = [0; 2].map(|_| progress.add_event(true));
    let untimed = progress.add_event(false);
    progress.record(one, stream);
    assert_eq!(progress.elapsed(one, other), Err(CudaError::INVALID_RESOURCE_HANDLE), "never recorded");
    progress.record(other, stream);
    progress.record(untimed, stream);
    assert_eq!(progress.elapsed(one, other), Err(CudaError::NOT_READY));
    progress.synchronize(stream);
    assert_eq!(progress.elapsed(one, other), Ok(0));
    assert_eq!(progress.elapsed(one, untimed), Err(CudaError::INVALID_RESOURCE_HANDLE));
    assert_eq!(progress.elapsed(one, 99), Err(CudaError::INVALID_RESOURCE_HANDLE));
}

#[test]
fn a_program_that_asks_often_enough_is_told_that_its_work_is_done() {
    let log = Log::default();
    let mut progress = Progress::new(Pace::Lazy);
    let stream = progress.add_stream(0, Order::NonBlocking);
    let event = progress.add_event(false);
    progress.set_polls(3);
    progress.push(stream, log.work("first"), FREE);
    progress.record(event, stream);
    progress.push(stream, log.work("second"), FREE);
    assert_eq!([0; 4].map(|_| progress.query_event(event)), [Some(false), Some(false), Some(false), Some(true)]);
    assert_eq!(log.taken(), ["first"]);
    assert_eq!([0; 4].map(|_| progress.query(stream)), [Some(false), Some(false), Some(false), Some(true)]);
    assert_eq!((log.taken(), progress.query(stream)), (vec!["second"], Some(true)));
    assert_eq!((progress.query(99), progress.query_event(99)), (None, None));
}

#[test]
fn what_a_query_has_found_done_comes_before_what_the_host_issues_then() {
    let mut progress = Progress::new(Pace::Eager);
    let [one, other] = [0, 1].map(|_| progress.add_stream(0, Order::NonBlocking));
    let (number, _) = progress.push(one, Arc::new(|| {}), FREE).unwrap();
    assert!(!progress.push(other, Arc::new(|| {}), FREE).unwrap().1.has_seen(one, number));
    assert_eq!(progress.query(one), Some(true));
    assert!(progress.push(other, Arc::new(|| {}), FREE).unwrap().1.has_seen(one, number));
}

#[test]
fn the_legacy_stream_begins_when_blocking_streams_are_done() {
    let mut progress = Progress::new(Pace::Lazy);
    let [legacy, blocking] = [Order::Legacy, Order::Blocking].map(|order| progress.add_stream(0, order));
    let [begin, end] = [0; 2].map(|_| progress.add_event(true));
    progress.record(begin, legacy);
    progress.push(blocking, Arc::new(|| {}), 300);
    progress.push(legacy, Arc::new(|| {}), 20);
    progress.record(end, legacy);
    progress.synchronize_all();
    assert_eq!(progress.elapsed(begin, end), Ok(320));
}
