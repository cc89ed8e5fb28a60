//! One of our contenders, which runs in its own process and trains on request.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use overdrive_bench_report::report::FIRST_PHASE;
use overdrive_bench_report::{Contender, DeviceKind, Mark, Span, Turn, Whole, Workload};
use overdrive_ffi as ffi;
use overdrive_profile::{Diagnosis, Phase, RunProfile, RunRecorder, StepTimer, ThreadTuner};
use tch::{Cuda, Device};

use super::job::{Ask, Job, Said, asked, has_workers, say};
use super::trainer::{Batch, Batches, Feed, Steps, Trainer, Until};
use super::{choice, digits, photos, text};

/// Marks of a whole training that has no epochs.
const MARKS: u64 = 20;
/// Steps that are recorded for the timeline and the diagnosis.
const RECORDED: u64 = 20;
/// Warm-up steps: the first calls into libtorch are slow.
const FIRST: u64 = 3;
/// Steps of one epoch of the digits, which fill a cache.
const FILLING: u64 = 157;

/// Answers requests as the job says, until standard input ends.
///
/// # Errors
/// When the data cannot be read or libtorch fails.
pub fn serve(job: &Job) -> Result<()> {
    let device = match job.device {
        DeviceKind::Cpu => Device::Cpu,
        DeviceKind::Cuda => Device::Cuda(0),
    };
    let job = &match job.tries && job.contender == Contender::Combined {
        true => choice::choose(job, |job| rate(job, device))?,
        false => job.clone(),
    };
    ffi::context::set_allow_tf32(job.has(Contender::Tf32))?;
    let mut trainer = trainer(job, device)?;
    let feed = feed(job, device)?;
    let mut batches = endless(&*feed);
    let choices = settle(job, &mut trainer, &mut batches)?;
    if device.is_cuda() {
        ffi::cuda::reset_peak_memory_stats(0)?;
    }
    say(&Said::Ready { choices, parts: job.parts.clone(), options: serde_json::Value::Null })?;
    for ask in asked() {
        match ask? {
            Ask::Turn => {
                // Without workers, nothing was read ahead since the last turn.
                let seconds = if has_workers(job) { job.settle_seconds } else { 0.0 };
                trainer.train(&mut batches, Until::Seconds(seconds), None)?;
                let begun = Instant::now();
                let steps = trainer.train(&mut batches, Until::Seconds(job.turn_seconds), None)?;
                say(&Said::Turn(Turn {
                    seconds: begun.elapsed().as_secs_f64(),
                    wait_seconds: steps.wait_seconds,
                    samples: steps.inputs * samples_of_an_input(job, device),
                    ..Turn::default()
                }))?;
            }
            Ask::Whole(seed) => say(&Said::Whole(whole(&Job { seed, ..job.clone() }, device)?))?,
            Ask::Steps => say(&recorded(&mut trainer, &mut batches, device)?)?,
        }
    }
    let peak_device_bytes = match device.is_cuda() {
        true => u64::try_from(ffi::cuda::memory_stats(0)?.allocated_peak_bytes).ok(),
        false => None,
    };
    say(&Said::End { peak_device_bytes })
}

fn trainer(job: &Job, device: Device) -> Result<Trainer> {
    match job.workload {
        Workload::Digits => Trainer::new(job, device, digits::model),
        Workload::Photos => {
            let classes = photos::classes(job)?;
            Trainer::new(job, device, |vs| photos::model(vs, device, classes))
        }
        Workload::Text => Trainer::new(job, device, |vs| text::model(vs, device)),
    }
}

fn feed(job: &Job, device: Device) -> Result<Box<dyn Feed>> {
    match job.workload {
        Workload::Digits => digits::feed(job, device),
        Workload::Photos => photos::feed(job, device),
        Workload::Text => text::feed(job, device),
    }
}

fn test_set(job: &Job, device: Device) -> Result<Option<Batch>> {
    match job.workload {
        Workload::Digits => digits::test_set(job),
        Workload::Photos => photos::test_set(job, device),
        Workload::Text => Ok(None),
    }
}

fn samples_of_an_input(job: &Job, device: Device) -> u64 {
    match job.workload {
        Workload::Digits | Workload::Photos => 1,
        Workload::Text => text::context(device) as u64,
    }
}

fn endless(feed: &dyn Feed) -> Batches<'_> {
    Box::new((0..).flat_map(|epoch| feed.epoch(epoch)))
}

/// Steps per second with the job's parts.
fn rate(job: &Job, device: Device) -> Result<f64> {
    ffi::context::set_allow_tf32(job.has(Contender::Tf32))?;
    let (mut trainer, feed) = (trainer(job, device)?, feed(job, device)?);
    let mut batches = endless(&*feed);
    let filling = if job.workload == Workload::Digits { FILLING } else { 0 };
    trainer.train(&mut batches, Until::Steps(filling), None)?;
    settle(job, &mut trainer, &mut batches)?;
    let seconds = if has_workers(job) { job.settle_seconds } else { 0.0 };
    trainer.train(&mut batches, Until::Seconds(seconds), None)?;
    let begun = Instant::now();
    let steps = trainer.train(&mut batches, Until::Seconds(job.turn_seconds), None)?;
    Ok(steps.steps as f64 / begun.elapsed().as_secs_f64())
}

/// Warms up. With a loader's workers, it also finds the number of compute threads by trying.
fn settle(job: &Job, trainer: &mut Trainer, batches: &mut Batches<'_>) -> Result<Vec<String>> {
    tch::set_num_threads(i32::try_from(job.threads)?);
    if job.device == DeviceKind::Cuda || !has_workers(job) {
        trainer.train(batches, Until::Steps(FIRST), None)?;
        return Ok(Vec::new());
    }
    let most = i32::try_from(job.threads)?;
    let mut tuner = ThreadTuner::new(most);
    let chosen = loop {
        trainer.train(batches, Until::Steps(1), None)?;
        if let Some(chosen) = tuner.step() {
            break chosen;
        }
    };
    Ok(vec![format!("{chosen} of {most} threads compute")])
}

/// Trains new weights, from opening the data to the last step.
fn whole(job: &Job, device: Device) -> Result<Whole> {
    let test = test_set(job, device)?;
    let mut clock = Clock::start(device);
    let feed = feed(job, device)?;
    let mut trainer = trainer(job, device)?;
    let mut result = Whole { seed: job.seed, ..Whole::default() };
    let mut mark = |trainer: &Trainer, clock: &mut Clock, steps: Steps| -> Result<()> {
        let seconds = clock.pause();
        let accuracy = test.as_ref().map(|(images, labels)| trainer.accuracy(images, labels)).transpose()?;
        let loss = steps.loss.is_finite().then_some(steps.loss);
        result.marks.push(Mark { seconds, loss, accuracy });
        (result.seconds, result.wait_seconds) = (seconds, result.wait_seconds + steps.wait_seconds);
        clock.resume();
        Ok(())
    };
    if job.workload == Workload::Text {
        let mut batches = endless(&*feed);
        for _ in 0..MARKS {
            let steps = trainer.train(&mut batches, Until::Steps(job.length / MARKS), None)?;
            mark(&trainer, &mut clock, steps)?;
        }
    } else {
        for epoch in 0..job.length {
            let steps = trainer.train(&mut feed.epoch(epoch), Until::Steps(u64::MAX), None)?;
            mark(&trainer, &mut clock, steps)?;
        }
    }
    Ok(result)
}

/// Records a few steps: their timeline, and what the diagnosis says.
fn recorded(trainer: &mut Trainer, batches: &mut Batches<'_>, device: Device) -> Result<Said> {
    let recorder = RunRecorder::new().steps_before(RECORDED / 2).sample_interval(Duration::from_millis(100));
    let timer = StepTimer::builder().device(device).warmup_steps(RECORDED / 4).record(recorder).build()?;
    trainer.train(batches, Until::Steps(RECORDED), Some(&timer))?;
    let run = timer.finish()?;
    let diagnosis = Diagnosis::of(&run);
    let finding = |finding: &overdrive_profile::Finding| {
        format!("{} (at most {:.2}x): {}", finding.bottleneck, finding.speedup_bound(), finding.remedy)
    };
    let mut next: Vec<String> = diagnosis.findings.iter().map(finding).collect();
    if let (true, Some(bound)) = (next.is_empty(), diagnosis.bound_by) {
        next.push(format!("no finding takes a tenth of a step; the run is bound by {bound}"));
    }
    Ok(Said::Steps { timeline: timeline(&run).context("no step was timed")?, next })
}

/// Four steps without the profiler, phase by phase.
fn timeline(run: &RunProfile) -> Option<Vec<Span>> {
    let steps: Vec<_> = run.step_times.iter().filter(|step| !step.is_profiled).take(4).collect();
    let begun = steps.first()?.start_seconds;
    let mut spans = Vec::new();
    for step in steps {
        let mut at = step.start_seconds - begun;
        for (phase, seconds) in Phase::ALL.iter().zip(&step.host_seconds) {
            if *seconds > 0.0 || phase.name() == FIRST_PHASE {
                spans.push(Span { phase: phase.name().to_owned(), start: at, seconds: *seconds });
            }
            at += seconds;
        }
    }
    Some(spans)
}

/// Seconds of training without testing. `Trainer::train` has read its loss before `pause`, so the device has finished.
struct Clock {
    started: Instant,
    elapsed: f64,
}

impl Clock {
    fn start(device: Device) -> Self {
        if let Device::Cuda(index) = device {
            Cuda::synchronize(index as i64);
        }
        Self { started: Instant::now(), elapsed: 0.0 }
    }

    /// Stops it and returns the seconds so far.
    fn pause(&mut self) -> f64 {
        self.elapsed += self.started.elapsed().as_secs_f64();
        self.elapsed
    }

    fn resume(&mut self) {
        self.started = Instant::now();
    }
}
