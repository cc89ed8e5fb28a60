//! Steps of programs without a step timer, inferred from the activity of loaders, optimizers and backward passes.

use std::cell::RefCell;

use overdrive_core::{Activity, ActivityObserver, ActivityObserverEntry, OptimizerId};
use overdrive_ffi::profiler::{ScopeGuard, record_function};
use tch::{Device, Tensor};

use super::{Phase, StepTimer};
use crate::run::{Claim, NO_STEP_TIMER};
use crate::{ProfileError, RunRecorder};

/// After this many updates without a batch in between, the data do not come from a loader of these crates.
const UPDATES_WITHOUT_DATA: u32 = 3;
/// After this many updates, of any optimizers, without the end of a step, the program is in another loop than before.
const UPDATES_WITHOUT_END: u32 = 50;

inventory::submit!(ActivityObserverEntry(&Unmarked));

thread_local! {
    static TRAINING: RefCell<Training> = const { RefCell::new(Training::NotYet) };
}

/// Whether this thread trains.
enum Training {
    /// No optimizer has stepped yet.
    NotYet,
    Timed(Box<Steps>),
    /// The thread has a step timer, or no record was asked for.
    NotTimed,
}

struct Unmarked;

impl ActivityObserver for Unmarked {
    fn begins(&self, activity: Activity<'_>) {
        with_training(|training| match (&mut *training, activity) {
            (Training::Timed(steps), activity) => steps.begins(activity),
            (Training::NotYet, Activity::OptimizerStep(optimizer)) => {
                let device = optimizer.params().first().map_or(Device::Cpu, Tensor::device);
                *training = match Steps::new(device, optimizer.id()) {
                    Ok(Some(steps)) => Training::Timed(Box::new(steps)),
                    Ok(None) => Training::NotTimed,
                    Err(error) => {
                        // Printed, because no call of the program could return it, and the user asked for a record.
                        eprintln!("overdrive-profile: the run is not recorded: {error}");
                        Training::NotTimed
                    }
                };
            }
            _ => {}
        });
    }

    fn ends(&self, samples: Option<u64>) {
        with_training(|training| {
            if let Training::Timed(steps) = training {
                steps.ends(samples);
            }
        });
    }
}

/// Called when the thread makes a step timer: discards what was recorded without one.
pub(super) fn stop_on_this_thread() {
    with_training(|training| {
        if let Training::Timed(steps) = std::mem::replace(training, Training::NotTimed) {
            steps.timer.discard();
        }
    });
}

/// Does nothing while the thread ends, or when called from within itself.
fn with_training(then: impl FnOnce(&mut Training)) {
    let _ = TRAINING.try_with(|training| training.try_borrow_mut().map(|mut training| then(&mut training)));
}

/// What a step ends with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Unknown,
    /// The call that asks a loader for the next batch, if an optimizer has stepped.
    NextBatch,
    /// An update of the first optimizer.
    Update,
}

struct Steps {
    timer: StepTimer,
    end: End,
    open: Vec<Open>,
    first_optimizer: OptimizerId,
    /// Updates of the first optimizer since the last batch was asked for.
    updates: u32,
    /// Updates of all optimizers in this step.
    updates_in_step: u32,
    /// The loader that was asked for the last batch.
    loader: Option<usize>,
    samples: u64,
}

/// An activity that has not ended yet.
struct Open {
    phase: u64,
    optimizer: Option<OptimizerId>,
    _scope: ScopeGuard,
}

impl Steps {
    /// Called at the first update, which is in no step. None if no record was asked for.
    fn new(device: Device, first_optimizer: OptimizerId) -> Result<Option<Self>, ProfileError> {
        let Some(claim) = Claim::take() else { return Ok(None) };
        let recorder = RunRecorder::new().note(NO_STEP_TIMER).claimed(claim)?;
        let timer = StepTimer::builder().device(device).record(recorder).build()?;
        Ok(Some(Self {
            timer,
            end: End::Unknown,
            open: Vec::new(),
            first_optimizer,
            updates: 0,
            updates_in_step: 0,
            loader: None,
            samples: 0,
        }))
    }

    fn begins(&mut self, activity: Activity<'_>) {
        let (phase, optimizer) = match activity {
            Activity::NextBatch(loader) => {
                self.next_batch(loader);
                (Phase::DataWait, None)
            }
            Activity::OptimizerStep(optimizer) => (Phase::Optimizer, Some(optimizer.id())),
            Activity::Backward => (Phase::Backward, None),
            _ => (Phase::Other, None),
        };
        let _scope = record_function(phase.name());
        self.open.push(Open { phase: self.timer.enter(phase), optimizer, _scope });
    }

    fn ends(&mut self, samples: Option<u64>) {
        // The first update began before this was made, so it has no entry.
        let Some(Open { phase, optimizer, _scope }) = self.open.pop() else { return };
        self.timer.leave(phase);
        self.samples += samples.unwrap_or(0);
        if let Some(optimizer) = optimizer.filter(|_| self.open.is_empty()) {
            self.updated(optimizer);
        }
    }

    fn next_batch(&mut self, loader: usize) {
        let is_other = self.loader.replace(loader) != Some(loader);
        match self.end {
            End::Unknown | End::NextBatch if self.updates_in_step > 0 => {
                self.end = End::NextBatch;
                self.end_step();
            }
            // Batches of another loader, or several batches without an update: there was a validation.
            End::Update if self.updates == 0 => self.skip(),
            End::Unknown | End::NextBatch if is_other => self.skip(),
            _ => {}
        }
        self.updates = 0;
    }

    fn updated(&mut self, optimizer: OptimizerId) {
        self.updates_in_step += 1;
        if self.updates_in_step == UPDATES_WITHOUT_END {
            self.restart(optimizer);
        } else if optimizer == self.first_optimizer {
            self.updates += 1;
            if self.end == End::Unknown && self.updates == UPDATES_WITHOUT_DATA {
                self.end = End::Update;
            }
            if self.end == End::Update {
                self.end_step();
            }
        }
    }

    fn end_step(&mut self) {
        self.timer.step(std::mem::take(&mut self.samples));
        self.updates_in_step = 0;
    }

    fn skip(&mut self) {
        self.timer.skip();
        self.samples = 0;
    }

    /// Detects the end of steps anew, because the old one no longer occurs: the program uses another optimizer or other
    /// data.
    fn restart(&mut self, first_optimizer: OptimizerId) {
        self.skip();
        (self.end, self.first_optimizer) = (End::Unknown, first_optimizer);
        (self.updates, self.updates_in_step) = (0, 0);
    }
}
