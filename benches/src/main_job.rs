//! The main job: every technique trains the same model on the same data, and a report says what each gained.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use overdrive::ffi;
use overdrive_bench_report::report::{Config, Setting};
use overdrive_bench_report::write::{check_writable, write_atomically};
use overdrive_bench_report::{
    BenchOptions, DeviceChoice, DeviceKind, Machine, Report, Run, Technique, date, html, table,
};
use tch::Cuda;

use crate::images::{Prepared, prepare};
use crate::job::{BATCH_SIZE, Job, MICRO_BATCHES, Message};
use crate::trainer::LEARNING_RATE;

/// Runs the bench that the options describe and writes its report.
///
/// # Errors
/// When an option does not fit this machine, the data cannot be read, a run fails, or the report cannot be written.
pub fn run(options: &BenchOptions) -> Result<()> {
    let device = device(options.device)?;
    let techniques = options.techniques(device == DeviceKind::Cuda)?;
    ensure!(
        options.json != options.report || options.json == Path::new("/dev/null"),
        "--json and --report both name {}: give each a file of its own",
        options.json.display()
    );
    // Before minutes of training, not after.
    check_writable(&options.json)?;
    check_writable(&options.report)?;

    let idx = data_folder(options.data.as_deref())?;
    let size = options.size();
    let data = prepare(&idx, &work_folder(), size.train_images, size.test_images)?;
    let threads = options.threads.unwrap_or_else(|| Machine::detect(None).cores as u32);

    let jobs = jobs(options, device, &techniques, &data, threads);
    let runs = run_all(&jobs)?;
    let report = Report::from_runs(setting(options, &data, device, threads), &runs)?;

    println!("{}", table::render(&report));
    write_atomically(&options.json, report.to_json()?.as_bytes())?;
    write_atomically(&options.report, html::render(&report).as_bytes())?;
    println!("numbers: {}", options.json.display());
    println!("page:    {}", options.report.display());
    Ok(())
}

/// The device that the options ask for.
fn device(choice: DeviceChoice) -> Result<DeviceKind> {
    match (choice, Cuda::is_available()) {
        (DeviceChoice::Cuda, false) => bail!("--device cuda: libtorch sees no CUDA device; leave it out, or give cpu"),
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, false) => Ok(DeviceKind::Cpu),
        (DeviceChoice::Cuda | DeviceChoice::Auto, true) => Ok(DeviceKind::Cuda),
    }
}

/// Every repetition runs every technique once, so that a machine that slows down slows all of them.
fn jobs(
    options: &BenchOptions,
    device: DeviceKind,
    techniques: &[Technique],
    data: &Prepared,
    threads: u32,
) -> Vec<Job> {
    let job = |repetition, technique| Job {
        technique,
        device,
        repetition,
        epochs: options.size().epochs,
        seed: options.seed,
        threads,
        train_images: data.dataset.train,
        test_images: data.dataset.test,
        idx: data.idx.clone(),
        png: data.png.clone(),
    };
    (0..options.repeat).flat_map(|number| techniques.iter().map(move |&technique| job(number, technique))).collect()
}

fn run_all(jobs: &[Job]) -> Result<Vec<Run>> {
    let terminal = std::io::stderr().is_terminal();
    let total = jobs.iter().map(Job::steps).sum();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template("{msg:32} {wide_bar} {percent:>3} %  {elapsed} of about {duration}")?;
    let bar = ProgressBar::with_draw_target(Some(total), target).with_style(style);
    let mut runs = Vec::with_capacity(jobs.len());
    let mut done = 0;
    for (index, job) in jobs.iter().enumerate() {
        bar.set_message(format!("{}/{} {}", index + 1, jobs.len(), job.technique));
        let run = run_one(job, |steps| bar.set_position(done + steps))?;
        done += job.steps();
        bar.set_position(done);
        if !terminal {
            let accuracy = run.epochs.last().map_or(0.0, |mark| mark.accuracy * 100.0);
            println!("{}/{} {:<14} {:7.2} s  {accuracy:.2} %", index + 1, jobs.len(), job.technique, run.seconds);
        }
        runs.push(run);
    }
    bar.finish_and_clear();
    Ok(runs)
}

/// The argument that makes this program one run of the bench; the job follows as JSON.
pub const JOB_ARGUMENT: &str = "--job";

fn run_one(job: &Job, mut progress: impl FnMut(u64)) -> Result<Run> {
    let mut child = Command::new(std::env::current_exe().context("where is this program?")?)
        .args([JOB_ARGUMENT, &serde_json::to_string(job)?])
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start a run")?;
    let stdout = child.stdout.take().context("a run has no standard output")?;
    let mut result = None;
    for line in BufReader::new(stdout).lines() {
        match serde_json::from_str(&line?).context("a run said something unexpected")? {
            Message::Steps(steps) => progress(steps),
            Message::Done(run) => result = Some(run),
        }
    }
    let status = child.wait()?;
    match result {
        Some(run) if status.success() => Ok(run),
        _ => bail!("the run of {} failed ({status}); its message is above", job.technique),
    }
}

/// Where the encoded images are kept for the next time: with the build's other outputs, where there are any.
fn work_folder() -> PathBuf {
    match Path::new("target").is_dir() {
        true => PathBuf::from("target/bench/data"),
        false => std::env::temp_dir().join("overdrive-bench-data"),
    }
}

/// The folder that `--data` names, or the images that ship with the workspace or the bundle.
fn data_folder(asked: Option<&Path>) -> Result<PathBuf> {
    if let Some(folder) = asked {
        return Ok(folder.to_owned());
    }
    let beside_program = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.join("data/mnist")));
    let in_workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/mnist");
    let mut candidates = [Some(PathBuf::from("data/mnist")), beside_program, Some(in_workspace)].into_iter().flatten();
    candidates
        .find(|folder| folder.is_dir())
        .context("data/mnist is neither here nor beside the program: give a folder with the four idx files with --data")
}

fn setting(options: &BenchOptions, data: &Prepared, device: DeviceKind, threads: u32) -> Setting {
    let gpu = (device == DeviceKind::Cuda).then(|| ffi::cuda::device_name(0).ok()).flatten();
    let versions = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
    let method = [
        "Each run is a process of its own; the repetitions are interleaved, and a speed-up is the median of the ratios \
         within a repetition."
            .to_owned(),
        "The clock starts before the data is opened and stops behind the last step of each epoch, the device's queued \
         work included; start of the process, first calls into libtorch and testing are not on it."
            .to_owned(),
        "Every run has the same initial weights, the same order of images and the same size of step; images are PNG \
         files in the file cache of the system."
            .to_owned(),
        format!("Accumulation adds up {MICRO_BATCHES} micro-batches a step; combined is cache, prefetch, bf16 and accumulation."),
    ];
    Setting {
        measured_at: date::utc_now(),
        machine: Machine::detect(gpu),
        versions: BTreeMap::from(versions.map(|(name, version)| (name.to_owned(), version.to_owned()))),
        dataset: data.dataset.clone(),
        config: Config {
            quick: options.quick,
            epochs: options.size().epochs,
            repeat: options.repeat,
            seed: options.seed,
            threads,
            batch_size: BATCH_SIZE as u32,
            model: "CNN of 2 convolutions and 2 linear layers, 105,866 parameters".to_owned(),
            optimizer: format!("fused AdamW, learning rate {LEARNING_RATE}"),
        },
        method: method.to_vec(),
    }
}
