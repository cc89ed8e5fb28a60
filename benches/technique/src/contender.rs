//! One of our contenders, which runs in its own process and trains on request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_bench_report::report::FIRST_PHASE;
use overdrive_bench_report::{Contender, DeviceKind, Mark, Span, Turn, Versions, Whole, Workload};
use overdrive_dataload::ComputeThreads;
use overdrive_ffi as ffi;
use overdrive_profile::{Diagnosis, Phase, RunProfile, RunRecorder, StepTimer, ThreadTuner};
use tch::{Cuda, Device};

use super::job::{Ask, Job, Said, asked, has_workers, say, threads_in_turns};
use super::trainer::{Batch, Batches, Feed, Steps, Trainer, Until};
use super::watch::wait_until_idle;
use super::{choice, digits, initial, photos, text};

/// Marks of a whole training that has no epochs.
const MARKS: u64 = 20;
/// Steps that are recorded for the timeline and the diagnosis.
const RECORDED: u64 = 10;
/// Warm-up steps: the first calls into libtorch are slow.
const FIRST: u64 = 3;
/// The most pairs of short turns that compare two jobs.
const TRIALS: usize = 3;

/// Answers requests as the job says, until standard input ends.
///
/// # Errors
/// When the data cannot be read or libtorch fails.
pub fn serve(job: &Job) -> Result<()> {
    let device = match job.device {
        DeviceKind::Cpu => Device::Cpu,
        DeviceKind::Cuda => Device::Cuda(0),
    };
    let choice::Choice { job, left_out, failures } = match job.tries && job.contender == Contender::Combined {
        true => choice::choose(job, |one, other| gains(one, other, device)),
        false => choice::Choice { job: job.clone(), left_out: Vec::new(), failures: Vec::new() },
    };
    let job = &job;
    set_switches(job)?;
    let mut trainer = trainer(job, device)?;
    let feed = feed(job, device)?;
    let mut batches = endless(job, &*feed)?;
    let mut choices = settle(job, &mut trainer, &mut batches, feed.read_ahead())?;
    choices.extend(failures);
    let mut peak_device_bytes = None;
    let (parts, options) = (job.parts.clone(), serde_json::Value::Null);
    say(&Said::Ready { choices, parts, left_out, options, versions: Versions::new() })?;
    let mut asks = asked();
    while let Some(ask) = asks.next() {
        match ask? {
            Ask::Warm => {
                // Not before, because in a first look all contenders start at the same time.
                trainer.train(&mut batches, Until::Steps(FIRST), None)?;
                if device.is_cuda() {
                    ffi::cuda::reset_peak_memory_stats(0)?;
                }
                say(&Said::Warm)?;
            }
            Ask::Turn => {
                let (steps, seconds) =
                    turn(&mut trainer, &*feed, &mut batches, (job.settle_seconds, job.turn_seconds))?;
                if device.is_cuda() {
                    // A whole training holds a second model, and only some contenders make one.
                    peak_device_bytes = u64::try_from(ffi::cuda::memory_stats(0)?.allocated_peak_bytes).ok();
                }
                say(&Said::Turn(Turn {
                    seconds,
                    wait_seconds: steps.wait_seconds,
                    samples: steps.inputs * samples_of_an_input(job, device),
                    ..Turn::default()
                }))?;
            }
            Ask::Whole(seed) => {
                let whole = whole(&Job { seed, ..job.clone() }, device, || {
                    say(&Said::Mark)?;
                    let next = asks.next().context("the benchmark has ended")??;
                    ensure!(next == Ask::Mark, "unexpected request {next:?} within a training");
                    Ok(())
                })?;
                say(&Said::Whole(whole))?;
            }
            Ask::Mark => bail!("there is no training to go on with"),
            Ask::Steps => say(&recorded(&mut trainer, &mut batches, device)?)?,
        }
    }
    say(&Said::End { peak_device_bytes })
}

fn trainer(job: &Job, device: Device) -> Result<Trainer> {
    let classes = if job.workload == Workload::Photos { photos::classes(job)? } else { 0 };
    let weights = initial::weights(job.workload, job.seed, device, classes)?;
    match job.workload {
        Workload::Digits => Trainer::new(job, device, &weights, digits::model),
        Workload::Photos => Trainer::new(job, device, &weights, |vs| photos::model(vs, device, classes)),
        Workload::Text => Trainer::new(job, device, &weights, |vs| text::model(vs, device)),
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

/// All epochs from one on. Contenders begin with different ones, so that none reads the files in the order in which
/// another one has just brought them into memory. A cache is filled first.
fn endless<'a>(job: &Job, feed: &'a dyn Feed) -> Result<Batches<'a>> {
    let first = 1_000 * (1 + job.contender as u64) + 100 * job.parts.len() as u64;
    if job.has(Contender::CachePrefetch) {
        feed.epoch(first - 1).try_for_each(|batch| batch.map(drop))?;
    }
    Ok(Box::new((first..).flat_map(|epoch| feed.epoch(epoch))))
}

/// Trains for some seconds like a long training does. Returns the steps and the exact time.
fn turn(
    trainer: &mut Trainer,
    feed: &dyn Feed,
    batches: &mut Batches<'_>,
    (settle, seconds): (f64, f64),
) -> Result<(Steps, f64)> {
    if feed.read_ahead() > 0 {
        // Those that workers have read while the contender waited for its turn are not used.
        batches.take(feed.read_ahead()).try_for_each(|batch| batch.map(drop))?;
        trainer.train(batches, Until::Seconds(settle), None)?;
    }
    let begun = Instant::now();
    let steps = trainer.train(batches, Until::Seconds(seconds), None)?;
    Ok((steps, begun.elapsed().as_secs_f64()))
}

/// Sets what applies to the whole process: matrix products in TensorFloat-32, which convolutions use by default, and the
/// cache of host memory.
fn set_switches(job: &Job) -> Result<()> {
    /// More than a step of any workload frees.
    const CACHED: usize = 4 << 30;
    static CACHES: AtomicBool = AtomicBool::new(false);
    ffi::context::set_matmul_allow_tf32(job.has(Contender::Tf32))?;
    let caches = job.has(Contender::HostCache);
    // Nothing is called without a trial of it, because it would install the cache's allocator.
    if CACHES.swap(caches, Ordering::Relaxed) != caches {
        ffi::cache_host_memory(if caches { CACHED } else { 0 })?;
    }
    Ok(())
}

/// Whether a job is faster than another one, in most of a few pairs of short turns.
fn gains(one: &Job, other: &Job, device: Device) -> Result<bool> {
    let feeds = [feed(one, device)?, feed(other, device)?];
    let mut runs = Vec::new();
    for (job, feed) in [one, other].into_iter().zip(&feeds) {
        set_switches(job)?;
        let (mut trainer, mut batches) = (trainer(job, device)?, endless(job, &**feed)?);
        untuned_threads(job)?;
        trainer.train(&mut batches, Until::Steps(FIRST), None)?;
        runs.push((job, trainer, feed, batches));
    }
    let (mut faster, mut slower) = (0, 0);
    while faster.max(slower) <= TRIALS / 2 {
        let mut rates = Vec::new();
        for (job, trainer, feed, batches) in &mut runs {
            // The other one's loader still reads ahead.
            wait_until_idle();
            set_switches(job)?;
            untuned_threads(job)?;
            // Long enough for workers to work and to rest.
            let share = if has_workers(job) { 2.0 / 3.0 } else { 1.0 / 3.0 };
            let seconds = (job.settle_seconds / 3.0, job.turn_seconds * share);
            let (steps, seconds) = turn(trainer, &***feed, batches, seconds)?;
            rates.push(steps.inputs as f64 / seconds);
        }
        match rates[0] / rates[1] > 1.0 + choice::MIN_GAIN {
            true => faster += 1,
            false => slower += 1,
        }
    }
    Ok(faster > slower)
}

/// Sets the number of compute threads without trying: all, or half of them beside a loader's workers.
fn untuned_threads(job: &Job) -> Result<i32> {
    let most = i32::try_from(job.threads)?;
    let threads = if has_workers(job) && job.device == DeviceKind::Cpu { (most / 2).max(1) } else { most };
    // Where they take turns with a loader's workers, its next batch sets them.
    tch::set_num_threads(threads);
    Ok(threads)
}

/// Sets the number of compute threads. With a loader's workers, finds the fastest by trying.
fn settle(job: &Job, trainer: &mut Trainer, batches: &mut Batches<'_>, read_ahead: usize) -> Result<Vec<String>> {
    let threads = untuned_threads(job)?;
    if job.device == DeviceKind::Cuda || !has_workers(job) {
        return Ok(Vec::new());
    }
    if let Some(ComputeThreads { beside_workers, alone }) = threads_in_turns(job) {
        return Ok(vec![format!("{beside_workers} of {alone} threads compute beside workers, all while they rest")]);
    }
    let most = i32::try_from(job.threads)?;
    if !job.tries {
        // Others start at the same time, so nothing can be measured. Tuned Python takes as many.
        return Ok(vec![format!("{threads} of {most} threads compute")]);
    }
    // Batches that were read ahead beside another number of threads are used up first.
    let mut tuner = ThreadTuner::new(most).settling_steps(read_ahead);
    let chosen = loop {
        trainer.train(batches, Until::Steps(1), None)?;
        if let Some(chosen) = tuner.step() {
            break chosen;
        }
    };
    Ok(vec![format!("{chosen} of {most} threads compute")])
}

/// Trains new weights, from opening the data to the last step. Calls `wait` at each mark but the last, where the other
/// contenders train up to theirs; that is not timed.
fn whole(job: &Job, device: Device, mut wait: impl FnMut() -> Result<()>) -> Result<Whole> {
    let test = test_set(job, device)?;
    let mut clock = Clock::start(device);
    let feed = feed(job, device)?;
    let mut trainer = trainer(job, device)?;
    // The text's pieces are those of Python's contenders.
    tch::manual_seed(i64::from(job.seed));
    let mut result = Whole { seed: job.seed, ..Whole::default() };
    let is_text = job.workload == Workload::Text;
    let mut batches = if is_text { endless(job, &*feed)? } else { Box::new(std::iter::empty()) };
    let marks = if is_text { MARKS } else { job.length };
    for mark in 0..marks {
        if mark > 0 {
            wait()?;
            clock.resume();
        }
        let steps = match is_text {
            true => trainer.train(&mut batches, Until::Steps(job.length / MARKS), None)?,
            false => trainer.train(&mut feed.epoch(mark), Until::Steps(u64::MAX), None)?,
        };
        let seconds = clock.pause();
        let accuracy = test.as_ref().map(|(images, labels)| trainer.accuracy(images, labels)).transpose()?;
        let loss = steps.loss.is_finite().then_some(steps.loss);
        result.marks.push(Mark { seconds, loss, accuracy });
        (result.seconds, result.wait_seconds) = (seconds, result.wait_seconds + steps.wait_seconds);
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use overdrive_nn::Module;
    use tch::{Kind, Tensor};

    use super::*;

    /// An epoch has four batches of two. Writes down which epoch each batch is of.
    #[derive(Default)]
    struct Recorded(RefCell<Vec<u64>>);

    impl Feed for Recorded {
        fn epoch(&self, epoch: u64) -> Batches<'_> {
            Box::new((0..4).map(move |_| {
                self.0.borrow_mut().push(epoch);
                Ok((Tensor::ones([2, 3], (Kind::Float, Device::Cpu)), Tensor::from_slice(&[0i64, 1])))
            }))
        }

        fn read_ahead(&self) -> usize {
            5
        }
    }

    fn job(parts: Vec<Contender>) -> Job {
        let job = serde_json::json!({
            "workload": "digits", "contender": "tch", "parts": parts, "device": "cpu", "seed": 0, "threads": 1,
            "batch_size": 2, "tries": true, "has_bf16": false, "options": null, "settle_seconds": 0.0,
            "turn_seconds": 0.0, "length": 1, "train": "", "test": null, "test_images": 0,
        });
        serde_json::from_value(job).unwrap()
    }

    #[test]
    fn a_cache_is_filled_before_the_first_batch() {
        let (without, with) = (Recorded::default(), Recorded::default());
        let first = |feed: &Recorded, parts| drop(endless(&job(parts), feed).unwrap().next().unwrap().unwrap());
        first(&without, vec![]);
        first(&with, vec![Contender::CachePrefetch]);
        let (without, with) = (without.0.into_inner(), with.0.into_inner());
        // The epoch that fills it is another one, and is read whole.
        assert!(without.len() == 1 && with.len() == 5, "{without:?} {with:?}");
        assert!(with[..4].iter().all(|epoch| *epoch == with[4] - 1), "{with:?}");
    }

    #[test]
    fn a_turn_counts_no_batch_that_was_read_before_it() {
        let (job, feed) = (job(Vec::new()), Recorded::default());
        let linear = |vs: &tch::nn::Path<'_>| {
            let linear = tch::nn::linear(vs, 3, 2, Default::default());
            Ok(Box::new(move |x: &Tensor, _: bool| x.apply(&linear)) as super::super::trainer::Model)
        };
        let weights = overdrive_nn::Linear::new(3, 2).unwrap().named_parameters();
        let mut trainer = Trainer::new(&job, Device::Cpu, &weights, linear).unwrap();
        let mut batches = endless(&job, &feed).unwrap();
        let (steps, seconds) = turn(&mut trainer, &feed, &mut batches, (0.0, 0.0)).unwrap();
        // Five thrown away, one step of settling, one that is timed.
        assert_eq!((feed.0.borrow().len(), steps.steps, steps.inputs), (7, 1, 2));
        assert!(seconds > 0.0 && steps.wait_seconds < seconds);
    }

    #[test]
    fn a_trial_leaves_the_switches_as_they_were() {
        let switches = || (ffi::context::matmul_allow_tf32().unwrap(), ffi::context::cudnn_allow_tf32().unwrap());
        let before = switches();
        let freed = || drop(Tensor::zeros([1 << 20], (Kind::Float, Device::Cpu)));
        set_switches(&job(vec![Contender::Tf32, Contender::HostCache])).unwrap();
        freed();
        assert_eq!(switches(), (true, before.1));
        assert!(ffi::cached_host_memory().unwrap() >= 4 << 20);
        set_switches(&job(Vec::new())).unwrap();
        freed();
        assert_eq!((switches(), ffi::cached_host_memory().unwrap()), (before, 0));
    }
}
