//! The steps and their phases. Reads no clock: the caller passes the time.

use std::collections::VecDeque;
use std::time::Duration;

use overdrive_ffi::TimedEvent;

use super::Phase;
use super::device::DeviceTimeline;
use super::phase::ByPhase;
use crate::StepTimes;

/// Guards beyond this depth open no phase; only leaked guards (`mem::forget`) get that deep.
const DEEPEST: usize = 256;

/// A step that has ended.
pub(super) struct Step {
    pub host: ByPhase<Duration>,
    /// Milliseconds on the device, once it has finished the step.
    pub device: Option<ByPhase<f64>>,
    pub samples: u64,
    pub tokens: u64,
    pub number: u64,
    /// When it ended, by the timer's clock.
    pub end: Duration,
    /// Whether a profiler slowed it down.
    pub is_profiled: bool,
}

impl Step {
    /// For the record of a run, which began at this time by the timer's clock.
    pub fn times(&self, began: Duration) -> StepTimes {
        let total = self.host_seconds();
        StepTimes {
            step: self.number,
            start_seconds: self.end.as_secs_f64() - total - began.as_secs_f64(),
            host_seconds: Phase::ALL.map(|phase| self.host[phase].as_secs_f64()).into(),
            device_seconds: self.device.map(|times| Phase::ALL.map(|phase| times[phase] / 1e3).into()),
            samples: self.samples,
            is_profiled: self.is_profiled,
        }
    }

    pub fn host_seconds(&self) -> f64 {
        Phase::ALL.iter().map(|&phase| self.host[phase].as_secs_f64()).sum()
    }
}

pub(super) struct Timeline {
    warmup_steps: u64,
    window: usize,
    /// Up to when time has been assigned to phases. None before the first phase.
    since: Option<Duration>,
    open: Vec<(u64, Phase)>,
    next_id: u64,
    host: ByPhase<Duration>,
    tokens: u64,
    steps: VecDeque<Step>,
    /// All steps that have ended: the warm-up, those in the window, and older ones.
    pub steps_seen: u64,
    /// How often the clock ran backwards.
    pub clock_jumps: u64,
    pub device: Option<DeviceTimeline<TimedEvent>>,
    /// Whether the current step is profiled.
    pub is_profiled: bool,
}

impl Timeline {
    pub fn new(warmup_steps: u64, window: usize, device: Option<DeviceTimeline<TimedEvent>>) -> Self {
        Self {
            warmup_steps,
            window,
            since: None,
            open: Vec::new(),
            next_id: 0,
            host: ByPhase::default(),
            tokens: 0,
            steps: VecDeque::new(),
            steps_seen: 0,
            clock_jumps: 0,
            device,
            is_profiled: false,
        }
    }

    pub fn steps(&self) -> &VecDeque<Step> {
        &self.steps
    }

    pub fn enter(&mut self, phase: Phase, now: Duration) -> u64 {
        self.assign_time(now);
        let id = self.next_id;
        self.next_id += 1;
        if self.open.len() < DEEPEST {
            self.open.push((id, phase));
        }
        id
    }

    /// Guards may go in any order.
    pub fn leave(&mut self, id: u64, now: Duration) {
        self.assign_time(now);
        if let Some(place) = self.open.iter().rposition(|(of, _)| *of == id) {
            self.open.remove(place);
        }
    }

    pub fn count_tokens(&mut self, tokens: u64) {
        self.tokens = self.tokens.saturating_add(tokens);
    }

    pub fn end_step(&mut self, samples: u64, now: Duration) {
        let timed = self.since.is_some();
        self.assign_time(now);
        if !timed {
            // No step had begun; one begins now.
            self.tokens = 0;
            return;
        }
        let number = self.steps_seen;
        let step = Step {
            host: std::mem::take(&mut self.host),
            device: None,
            samples,
            tokens: std::mem::take(&mut self.tokens),
            number,
            end: now,
            is_profiled: self.is_profiled,
        };
        self.steps_seen += 1;
        if number >= self.warmup_steps {
            if self.steps.len() == self.window {
                self.steps.pop_front();
            }
            self.steps.push_back(step);
        }
        if let Some(device) = &mut self.device {
            device.end_step(number);
            device.begin_step();
        }
        self.resolve();
    }

    pub fn skip(&mut self) {
        self.since = None;
        self.host = ByPhase::default();
        self.tokens = 0;
        if let Some(device) = &mut self.device {
            device.forget_step();
        }
    }

    /// Leaves out the time since the last step, which has just ended.
    pub fn resume(&mut self, now: Duration) {
        self.since = self.since.map(|_| now);
        if let Some(device) = &mut self.device {
            device.forget_step();
            device.begin_step();
        }
    }

    /// Stores the device times of steps that the device has finished.
    pub fn resolve(&mut self) {
        let Some(device) = &mut self.device else { return };
        while let Some((number, times)) = device.next_done() {
            let Some(back) = self.steps_seen.checked_sub(number + 1) else { continue };
            let place = usize::try_from(back).ok().and_then(|back| self.steps.len().checked_sub(back + 1));
            if let Some(step) = place.and_then(|place| self.steps.get_mut(place)) {
                step.device = Some(times);
            }
        }
    }

    /// Assigns the time since the last call to the open phase that was entered last.
    fn assign_time(&mut self, now: Duration) {
        let phase = self.open.last().map_or(Phase::Other, |(_, phase)| *phase);
        match self.since.replace(now) {
            None => {
                if let Some(device) = &mut self.device {
                    device.begin_step();
                }
            }
            Some(since) => {
                match now.checked_sub(since) {
                    Some(time) => self.host[phase] = self.host[phase].saturating_add(time),
                    None => self.clock_jumps += 1,
                }
                if let Some(device) = &mut self.device {
                    device.mark(phase);
                }
            }
        }
    }
}
