//! Times the phases of steps on the device, by events.

use std::collections::VecDeque;

use overdrive_ffi::{Error, TimedEvent};

use super::Phase;
use super::phase::ByPhase;

/// A step with more marks gets no device times.
const MOST_MARKS: usize = 1024;
/// How many steps the host may be ahead of the device. Older steps get no device times.
const MOST_PENDING: usize = 64;

/// A point in the device's work: a CUDA event.
pub(super) trait Mark: Sized {
    fn record(&mut self) -> Result<(), Error>;
    fn is_reached(&self) -> Result<bool, Error>;
    /// Fails for marks that are not reached.
    fn milliseconds_to(&self, later: &Self) -> Result<f64, Error>;
}

impl Mark for TimedEvent {
    fn record(&mut self) -> Result<(), Error> {
        self.record()
    }

    fn is_reached(&self) -> Result<bool, Error> {
        self.is_reached()
    }

    fn milliseconds_to(&self, later: &Self) -> Result<f64, Error> {
        self.milliseconds_to(later)
    }
}

/// Marks between the phases of steps that the device may not have finished.
pub(super) struct DeviceTimeline<M> {
    make: Box<dyn FnMut() -> Result<M, Error> + Send>,
    /// Marks to be reused.
    spare: Vec<M>,
    begin: Option<M>,
    /// The marks of the current step, each with the phase before it.
    marks: Vec<(Phase, M)>,
    pending: VecDeque<Pending<M>>,
    /// Steps without device times.
    pub lost_steps: u64,
    /// The error after which nothing more is recorded.
    pub fault: Option<Error>,
}

struct Pending<M> {
    number: u64,
    begin: M,
    marks: Vec<(Phase, M)>,
}

impl<M: Mark> DeviceTimeline<M> {
    /// Makes one mark at once, to fail early if that is not possible.
    pub fn new(make: impl FnMut() -> Result<M, Error> + Send + 'static) -> Result<Self, Error> {
        let mut make = Box::new(make);
        let spare = vec![make()?];
        Ok(Self { make, spare, begin: None, marks: Vec::new(), pending: VecDeque::new(), lost_steps: 0, fault: None })
    }

    pub fn begin_step(&mut self) {
        self.forget_step();
        self.begin = self.recorded();
    }

    /// Records a mark: the device's work since the last mark belongs to this phase.
    pub fn mark(&mut self, phase: Phase) {
        if self.begin.is_none() {
            return;
        }
        if self.marks.len() == MOST_MARKS {
            return self.forget_step();
        }
        match self.recorded() {
            Some(mark) => self.marks.push((phase, mark)),
            None => self.forget_step(),
        }
    }

    /// Ends the step with its last mark.
    pub fn end_step(&mut self, number: u64) {
        let Some(begin) = self.begin.take() else {
            self.lost_steps += 1;
            return;
        };
        self.pending.push_back(Pending { number, begin, marks: std::mem::take(&mut self.marks) });
        if self.pending.len() > MOST_PENDING
            && let Some(oldest) = self.pending.pop_front()
        {
            self.lost_steps += 1;
            self.recycle(oldest);
        }
    }

    /// Drops the current step.
    pub fn forget_step(&mut self) {
        self.spare.extend(self.begin.take());
        self.spare.extend(self.marks.drain(..).map(|(_, mark)| mark));
    }

    /// Removes the oldest step if the device has finished it, and returns its number and milliseconds.
    pub fn next_done(&mut self) -> Option<(u64, ByPhase<f64>)> {
        if self.fault.is_some() {
            return None;
        }
        let times = match Self::times(self.pending.front()?) {
            Ok(times) => times?,
            Err(error) => return self.fail(error),
        };
        let step = self.pending.pop_front()?;
        let number = step.number;
        self.recycle(step);
        Some((number, times))
    }

    /// None if the device has not finished the step.
    fn times(step: &Pending<M>) -> Result<Option<ByPhase<f64>>, Error> {
        let reached = |mark: &M| mark.is_reached();
        if !step.marks.last().map_or(Ok(true), |(_, end)| reached(end))? {
            return Ok(None);
        }
        let mut times = ByPhase::default();
        let mut from = &step.begin;
        for (phase, to) in &step.marks {
            match from.milliseconds_to(to) {
                Ok(milliseconds) => times[*phase] += milliseconds.max(0.0),
                // An error although both marks are reached. (A mark may not be reached yet, although the last one is,
                // if another stream was current for a while.)
                Err(error) if reached(from)? && reached(to)? => return Err(error),
                Err(_) => return Ok(None),
            }
            from = to;
        }
        Ok(Some(times))
    }

    fn recorded(&mut self) -> Option<M> {
        if self.fault.is_some() {
            return None;
        }
        let mark = self.spare.pop().map_or_else(|| (self.make)(), Ok);
        let recorded = mark.and_then(|mut mark| mark.record().map(|()| mark));
        recorded.map_or_else(|error| self.fail(error), Some)
    }

    fn recycle(&mut self, step: Pending<M>) {
        self.spare.push(step.begin);
        self.spare.extend(step.marks.into_iter().map(|(_, mark)| mark));
    }

    fn fail<T>(&mut self, error: Error) -> Option<T> {
        tracing::warn!(%error, "device times are no longer recorded");
        self.lost_steps += self.pending.len() as u64;
        self.pending.clear();
        self.fault = Some(error);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A device that finishes its work when the test says so.
    #[derive(Default)]
    struct Device {
        made: usize,
        recorded: Vec<f64>,
        now: f64,
        done: usize,
        fails: bool,
    }

    struct Planted {
        device: Arc<Mutex<Device>>,
        index: usize,
    }

    impl Mark for Planted {
        fn record(&mut self) -> Result<(), Error> {
            let mut device = self.device.lock().unwrap();
            if device.fails {
                return overdrive_ffi::test_throw(0);
            }
            self.index = device.recorded.len();
            let now = device.now;
            device.recorded.push(now);
            Ok(())
        }

        fn is_reached(&self) -> Result<bool, Error> {
            Ok(self.index < self.device.lock().unwrap().done)
        }

        fn milliseconds_to(&self, later: &Self) -> Result<f64, Error> {
            assert!(self.is_reached()? && later.is_reached()?, "asked too early");
            let device = self.device.lock().unwrap();
            Ok(device.recorded[later.index] - device.recorded[self.index])
        }
    }

    fn planted() -> (Arc<Mutex<Device>>, DeviceTimeline<Planted>) {
        let device = Arc::new(Mutex::new(Device::default()));
        let of = device.clone();
        let timeline = DeviceTimeline::new(move || {
            of.lock().unwrap().made += 1;
            Ok(Planted { device: of.clone(), index: usize::MAX })
        });
        (device, timeline.unwrap())
    }

    fn step(device: &Mutex<Device>, timeline: &mut DeviceTimeline<Planted>, number: u64) {
        timeline.begin_step();
        for (phase, milliseconds) in [(Phase::Forward, 2.0), (Phase::Backward, 4.0), (Phase::Forward, 1.0)] {
            device.lock().unwrap().now += milliseconds;
            timeline.mark(phase);
        }
        timeline.end_step(number);
    }

    #[test]
    fn a_step_has_times_only_when_the_device_has_finished_it() {
        let (device, mut timeline) = planted();
        step(&device, &mut timeline, 7);
        step(&device, &mut timeline, 8);
        assert!(timeline.next_done().is_none());
        device.lock().unwrap().done = 4;
        let (number, times) = timeline.next_done().unwrap();
        assert_eq!((number, times[Phase::Forward], times[Phase::Backward], times[Phase::Other]), (7, 3.0, 4.0, 0.0));
        assert!(timeline.next_done().is_none());
        device.lock().unwrap().done = 8;
        assert_eq!(timeline.next_done().unwrap().0, 8);
        assert_eq!(timeline.lost_steps, 0);
        // From here on no new marks are needed.
        let made = device.lock().unwrap().made;
        for number in 9..100 {
            step(&device, &mut timeline, number);
            device.lock().unwrap().done += 4;
            assert_eq!(timeline.next_done().unwrap().0, number);
        }
        assert_eq!(device.lock().unwrap().made, made);
    }

    #[test]
    fn marks_are_reused_and_a_device_that_is_far_behind_loses_steps() {
        let (device, mut timeline) = planted();
        for number in 0..1000 {
            step(&device, &mut timeline, number);
        }
        assert_eq!((timeline.pending.len(), timeline.lost_steps), (MOST_PENDING, 1000 - MOST_PENDING as u64));
        assert!(device.lock().unwrap().made <= 4 * (MOST_PENDING + 2), "{}", device.lock().unwrap().made);
        device.lock().unwrap().done = 4000;
        assert_eq!(timeline.next_done().unwrap().0, 1000 - MOST_PENDING as u64);
    }

    #[test]
    fn a_step_with_very_many_phases_has_no_times() {
        let (device, mut timeline) = planted();
        timeline.begin_step();
        (0..3 * MOST_MARKS).for_each(|_| timeline.mark(Phase::Forward));
        timeline.end_step(0);
        step(&device, &mut timeline, 1);
        device.lock().unwrap().done = usize::MAX;
        assert_eq!(timeline.next_done().unwrap().0, 1);
        assert_eq!(timeline.lost_steps, 1);
        assert!(device.lock().unwrap().made <= MOST_MARKS + 2);
    }

    #[test]
    fn nothing_is_recorded_after_a_device_failure() {
        let (device, mut timeline) = planted();
        step(&device, &mut timeline, 0);
        device.lock().unwrap().fails = true;
        step(&device, &mut timeline, 1);
        assert!(timeline.fault.is_some());
        device.lock().unwrap().fails = false;
        step(&device, &mut timeline, 2);
        assert!(timeline.next_done().is_none());
        assert_eq!(timeline.lost_steps, 3);
    }
}
