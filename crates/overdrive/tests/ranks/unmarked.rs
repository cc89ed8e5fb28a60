//! Programs without a step timer: if a record is requested, steps are inferred from calls to the loader and the
//! optimizer.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use overdrive::prelude::*;
use overdrive_dataload::FnDataset;
use overdrive_ddp::DistributedDataParallel;
use overdrive_profile::{Bottleneck, Diagnosis, Phase, RunProfile, StepTimer, StepTimes};
use tch::nn::{self, Module};

use crate::harness::{Meeting, all_through, free_port, start};
use crate::records::{seconds_of_ops, with_fixed_times};

/// The kind of program to run.
const KIND: &str = "OVERDRIVE_TEST_FAULT";
/// How long it takes to read a sample of the training data.
const READ: Duration = Duration::from_millis(3);
const BATCH: u64 = 4;
/// Batches per epoch.
const BATCHES: u64 = 25;

/// Two epochs with a validation between them; the loop waits for every batch.
pub fn with_a_loader() -> Result<()> {
    let run = only_record("loader", 1)?;
    let steps = run.steps.as_ref().context("no step was timed")?;
    // Steps are counted from the first optimizer step on.
    ensure!(steps.steps_seen == 2 * BATCHES - 1, "{} steps", steps.steps_seen);
    let profiled = run.profiled.as_ref().context("nothing was profiled")?;
    ensure!(profiled.steps == 3, "{} profiled steps", profiled.steps);
    ensure!(run.step_times.iter().all(|step| step.samples == BATCH), "{:?}", run.step_times);
    ensure!(run.share(Phase::Optimizer) > 0.0 && run.share(Phase::Other) > 0.0, "{steps}");
    ensure!(run.notes.len() == 1 && run.notes[0].contains("no StepTimer"), "{:?}", run.notes);
    // However busy the machine is, a sleep is never shorter than asked for.
    let shortest = BATCH as f64 * READ.as_secs_f64();
    let waits = |step: &StepTimes| step.host_seconds[Phase::DataWait as usize] >= shortest;
    ensure!(run.step_times.iter().all(waits), "waited for less than {shortest} s: {:?}", run.step_times);
    waits_are_found_from_a_tenth_of_a_step_on(run)
}

/// By the diagnosis of a run with fixed times. A step waits for its batch for a multiple of the time of its operators.
fn waits_are_found_from_a_tenth_of_a_step_on(mut run: RunProfile) -> Result<()> {
    // Nothing waits for a CPU, and nothing else is known of the machine.
    for sample in &mut run.samples {
        (sample.system, sample.process) = (None, None);
        sample.gpus.clear();
        sample.threads.iter_mut().for_each(|thread| thread.queued_seconds = 0.0);
    }
    // The loader's own operators would add to the wait.
    run.profiled.iter_mut().for_each(|profiled| profiled.ops.retain(|op| op.phase != Phase::DataWait));
    let operators = seconds_of_ops(&run);
    ensure!(operators > 0.0, "no operator was recorded");
    for (times, expected) in [(1.0, &[Bottleneck::SlowRead][..]), (0.2, &[Bottleneck::SlowRead]), (0.05, &[])] {
        with_fixed_times(&mut run, Phase::DataWait, times * operators);
        let diagnosis = Diagnosis::of(&run);
        let found: Vec<Bottleneck> = diagnosis.findings.iter().map(|finding| finding.bottleneck).collect();
        ensure!(found == expected, "a wait of {times} times the operators: {diagnosis}");
    }
    Ok(())
}

pub fn without_a_loader() -> Result<()> {
    let run = only_record("tensors", 1)?;
    let steps = run.steps.as_ref().context("no step was timed")?;
    // The first three optimizer steps show that there is no loader, and count as one step.
    ensure!(steps.steps_seen == 2 * BATCHES - 3, "{} steps", steps.steps_seen);
    ensure!(run.profiled.as_ref().is_some_and(|it| it.steps == 3), "{:?}", run.profiled);
    Ok(())
}

/// First an optimizer without a loader, then another optimizer with a loader.
pub fn whose_loop_changes() -> Result<()> {
    let run = only_record("change", 1)?;
    let steps = run.steps.as_ref().context("no step was timed")?;
    // The first part as without a loader; then two of the four epochs pass until the loader is detected.
    ensure!(steps.steps_seen == 4 * BATCHES - 3, "{} steps", steps.steps_seen);
    let (first, last) = run.step_times.split_at(run.step_times.len() - 2 * BATCHES as usize);
    ensure!(first.iter().all(|step| step.samples == 0) && last.iter().all(|step| step.samples == BATCH), "{run:?}");
    Ok(())
}

/// The program's own timer takes over the record, with the phases that it marks.
pub fn with_a_timer() -> Result<()> {
    let run = only_record("timer", 1)?;
    ensure!(run.steps.as_ref().is_some_and(|it| it.steps_seen == BATCHES), "{:?}", run.steps);
    ensure!(run.share(Phase::Forward) > 0.0 && !run.notes.iter().any(|it| it.contains("no StepTimer")), "{run:?}");
    Ok(())
}

/// Timers one after the other are each recorded; a concurrent one is only counted in a note.
pub fn with_several_timers() -> Result<()> {
    let mut runs = all_records("timers", 1)?;
    runs.sort_by_key(|run| run.steps.as_ref().map(|steps| steps.steps_seen));
    let steps: Vec<_> = runs.iter().filter_map(|run| run.steps.as_ref()).map(|steps| steps.steps_seen).collect();
    ensure!(steps == [15, BATCHES], "{steps:?}");
    ensure!(runs.iter().all(|run| run.profiled.as_ref().is_some_and(|it| it.steps == 3)), "{runs:?}");
    ensure!(runs[0].notes.iter().any(|it| it.starts_with("1 more of this process")), "{:?}", runs[0].notes);
    ensure!(runs[1].notes.is_empty(), "{:?}", runs[1].notes);
    Ok(())
}

/// The program ends while its steps are being profiled.
pub fn that_exit_early() -> Result<()> {
    let run = only_record("exit", 1)?;
    // 10 for warm-up, 5 before profiling, one to start the profiler, one profiled; the first optimizer step is not
    // counted.
    ensure!(run.steps.as_ref().is_some_and(|it| it.steps_seen == 17), "{:?}", run.steps);
    ensure!(run.profiled.as_ref().is_some_and(|it| it.steps == 1), "{:?}", run.profiled);
    Ok(())
}

pub fn under_ddp() -> Result<()> {
    let run = only_record("ddp", 2)?;
    ensure!(run.ranks.len() == 2, "{} reports", run.ranks.len());
    ensure!(run.share(Phase::Backward) > 0.0, "{:?}", run.steps);
    let backward = run.profiled.as_ref().and_then(|it| it.phase(Phase::Backward)).context("nothing was profiled")?;
    // An exchange may also end before the operator that has begun it.
    ensure!(backward.communication_seconds + backward.exchange_operator_seconds > 0.0, "{backward:?}");
    Ok(())
}

/// The merged record of a program that leaves one record per rank.
fn only_record(kind: &str, ranks: usize) -> Result<RunProfile> {
    let runs = all_records(kind, ranks)?;
    ensure!(runs.len() == ranks, "{} records of {ranks} ranks", runs.len());
    Ok(RunProfile::merge_ranks(runs)?)
}

fn all_records(kind: &str, ranks: usize) -> Result<Vec<RunProfile>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("a folder of ASCII letters")?;
    let asked = [("OVERDRIVE_PROFILE", path), ("OVERDRIVE_PROFILE_BEFORE", "5"), ("OVERDRIVE_PROFILE_STEPS", "3")];
    let vars = [asked[0], asked[1], asked[2], (KIND, kind)];
    let (port, started) = (free_port(), Instant::now());
    let begun = (0..ranks).map(|rank| start("unmarked", rank, ranks, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(begun, started)?;
    records(folder.path())
}

fn records(folder: &Path) -> Result<Vec<RunProfile>> {
    let mut runs = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "json") {
            runs.push(RunProfile::read_json(path)?);
        }
    }
    Ok(runs)
}

type Pair = (Tensor, Tensor);

fn sample(index: usize) -> Pair {
    let inputs = Tensor::full([64], index as f64 / 100.0, (Kind::Float, Device::Cpu));
    (inputs.shallow_clone(), inputs.sin())
}

fn loader(count: u64, wait: Duration) -> Result<DataLoader<Pair>> {
    let dataset = FnDataset::new((count * BATCH) as usize, move |index| {
        std::thread::sleep(wait);
        Ok(sample(index))
    });
    let stack = |samples: Vec<Pair>| {
        let (inputs, targets): (Vec<Tensor>, Vec<Tensor>) = samples.into_iter().unzip();
        Ok((Tensor::stack(&inputs, 0), Tensor::stack(&targets, 0)))
    };
    Ok(DataLoader::builder(dataset).batch_size(BATCH as usize).collate(stack).build()?)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let kind = std::env::var(KIND)?;
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 64, 64, Default::default());
    let optimizer = || AdamW::builder(vs.trainable_variables()).build();
    let mut opt = optimizer()?;
    let group = (kind == "ddp").then(|| meeting.group()).transpose()?;
    let ddp = group.as_ref().map(|group| DistributedDataParallel::new(&vs, group)).transpose()?;
    let train = |opt: &mut dyn Optimizer, (inputs, targets): &Pair| -> Result<()> {
        let error = |outputs: Tensor| (outputs - targets).square().mean(Kind::Float);
        match &ddp {
            Some(ddp) => ddp.backward(&error(ddp.forward(|| model.forward(inputs))?))?,
            None => error(model.forward(inputs)).backward(),
        }
        opt.step()?;
        Ok(opt.zero_grad()?)
    };
    if kind == "tensors" || kind == "change" {
        (0..2 * BATCHES as usize).try_for_each(|index| train(&mut opt, &sample(index)))?;
    }
    if kind == "change" {
        let (mut opt, loader) = (optimizer()?, loader(BATCHES, Duration::ZERO)?);
        (0..4).flat_map(|_| loader.iter()).try_for_each(|batch| train(&mut opt, &batch?))?;
    }
    if kind == "tensors" || kind == "change" {
        return Ok(());
    }
    if kind == "timers" {
        for count in [15, BATCHES] {
            let timer = StepTimer::builder().warmup_steps(0).build()?;
            if count < BATCHES {
                let elsewhere = std::thread::spawn(|| StepTimer::builder().build().map(|timer| timer.step(1)));
                elsewhere.join().map_err(|_| anyhow!("the other thread panicked"))??;
            }
            for index in 0..count as usize {
                let _phase = timer.phase(Phase::Forward);
                train(&mut opt, &sample(index))?;
                timer.step(BATCH);
            }
        }
        return Ok(());
    }
    let loader = loader(BATCHES, READ)?;
    for (number, batch) in loader.iter().enumerate() {
        train(&mut opt, &batch?)?;
        if kind == "exit" && number == 18 {
            // The line that the harness expects of a rank.
            println!("rank {} is through", meeting.rank);
            std::process::exit(0);
        }
    }
    if kind == "timer" {
        let timer = StepTimer::builder().warmup_steps(0).build()?;
        for batch in timer.batches(&loader) {
            let _phase = timer.phase(Phase::Forward);
            train(&mut opt, &batch?)?;
            timer.step(BATCH);
        }
        return Ok(());
    }
    let validation = self::loader(3, Duration::ZERO)?;
    for batch in &validation {
        let (inputs, _) = batch?;
        let _ = no_grad(|| model.forward(&inputs));
    }
    for batch in &loader {
        train(&mut opt, &batch?)?;
    }
    Ok(())
}
