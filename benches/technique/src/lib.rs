//! The technique benchmark: all contenders train the same workloads in turns, and a report compares their speed.
//!
//! `run` prepares the data and starts one process per contender (`player`); in that process, `contender` trains. The
//! workloads are `digits`, `photos` and `text`; they share the training loop in `trainer`. `choice` finds the techniques
//! of the combined contender. `watch` measures what else uses the machine. Python's contenders are in the folder `peers`.

#![forbid(unsafe_code)]

mod choice;
pub mod contender;
mod data;
pub mod digits;
mod digits_files;
mod initial;
mod interrupt;
pub mod job;
pub mod model;
mod photo_files;
mod photos;
mod player;
mod team;
mod text;
mod trainer;
mod watch;

use std::io::IsTerminal;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use overdrive_bench_report::write::{check_writable, write_atomically};
use overdrive_bench_report::{
    BenchOptions, Contender, DeviceChoice, DeviceKind, Machine, Measurements, Report, Setting, Size, Versions,
    Workload, date, html, table,
};
use overdrive_ffi as ffi;
use overdrive_ffi::cuda::{self, NoCuda};

use data::Data;
use interrupt::Interrupt;
use job::Job;
use player::{MOST_REPETITIONS, Player, Started, Starting};
use team::{Team, failures_of_ours};
use trainer::LEARNING_RATE;
use watch::Watch;

pub use player::JOB_ARGUMENT;

/// Seeds of a full run.
const SEEDS: u32 = 3;

/// Runs the benchmark that the options describe and writes its report.
///
/// # Errors
/// When an option does not fit this machine, the data cannot be read, or the report cannot be written. When a contender of
/// ours fails, after the report of the others.
pub fn run(options: &BenchOptions) -> Result<()> {
    let mut bench = Bench::new(options)?;
    let interrupt = Interrupt::watch(options, bench.peers.path())?;
    let workloads = options.workloads();
    let bar = bench.bar(&workloads)?;
    let (mut measurements, mut failures) = (Vec::<Measurements>::new(), Vec::new());
    for &workload in &workloads {
        let measured = bench.measure(workload, &bar);
        interrupt.wait_if_signalled();
        match measured {
            Ok(measured) => measurements.push(measured),
            Err(error) => failures.push(format!("{workload}: {error:#}")),
        }
        // After each workload, so that what ends the program later takes nothing away.
        bench.write(&measurements, &failures)?;
        interrupt.has_written(&measurements);
    }
    bar.finish_and_clear();
    let failed = failures.clone();
    for all in &measurements {
        failures
            .extend(failures_of_ours(&all.measured, &all.absent).iter().map(|it| format!("{}, {it}", all.workload)));
    }
    if measurements.is_empty() {
        bail!("nothing was measured: {}", failures.join("; "));
    }
    println!("{}", table::render(&Report::new(bench.setting(&failed), measurements)));
    println!("numbers: {}", options.json.display());
    println!("page:    {}", options.report.display());
    ensure!(failures.is_empty(), "{}", failures.join("; "));
    Ok(())
}

struct Bench<'a> {
    options: &'a BenchOptions,
    device: DeviceKind,
    threads: u32,
    peers: tempfile::TempDir,
    /// Python's software, once a contender of Python's has answered.
    python: Versions,
    began: Instant,
}

impl<'a> Bench<'a> {
    fn new(options: &'a BenchOptions) -> Result<Self> {
        let device = device(options.device)?;
        options.check(device == DeviceKind::Cuda)?;
        ensure!(
            options.json != options.report || options.json == Path::new("/dev/null"),
            "--json and --report both name {}: give each a file of its own",
            options.json.display()
        );
        // Checked now, because a failure after minutes of training would lose the numbers.
        check_writable(&options.json)?;
        check_writable(&options.report)?;
        let threads = options.threads.unwrap_or_else(|| Machine::detect(None).cores as u32);
        let peers = tempfile::tempdir()?;
        for (name, source) in [
            ("common.py", include_str!("../peers/common.py")),
            ("digits.py", include_str!("../peers/digits.py")),
            ("photos.py", include_str!("../peers/photos.py")),
            ("text.py", include_str!("../peers/text.py")),
        ] {
            std::fs::write(peers.path().join(name), source)?;
        }
        Ok(Self { options, device, threads, peers, python: Versions::new(), began: Instant::now() })
    }

    fn write(&self, measurements: &[Measurements], failures: &[String]) -> Result<()> {
        if measurements.is_empty() {
            return Ok(());
        }
        let report = Report::new(self.setting(failures), measurements.to_vec());
        write_atomically(&self.options.json, report.to_json()?.as_bytes())?;
        Ok(write_atomically(&self.options.report, html::render(&report).as_bytes())?)
    }

    /// Measures all contenders of a workload.
    fn measure(&mut self, workload: Workload, bar: &ProgressBar) -> Result<Measurements> {
        note(bar, format!("{workload}: data"));
        let made = data::of_workload(workload, self.options, self.device, self.threads);
        let Data { mut job, facts } = made.map_err(data::with_remedy)?;
        Watch::calibrate();
        let mut team = Team::default();
        let contenders = self.options.contenders(workload, self.device == DeviceKind::Cuda);
        let mut started = Vec::new();
        if !job.tries {
            // They measure nothing at their start, so they can start at the same time.
            started = contenders.iter().map(|&contender| self.start(&job, contender)).collect::<Result<_>>()?;
        }
        let mut started = started.into_iter();
        for contender in contenders {
            note(bar, format!("{workload}: starting {contender}"));
            let started = match started.next() {
                Some(starting) => starting.wait()?,
                None => self.start_undisturbed(&job, contender)?,
            };
            if let Some(player) = team.join(started) {
                if contender == Contender::PytorchTuned {
                    job.options.clone_from(&player.options);
                }
                self.python.extend(player.versions.clone());
            }
            bar.inc(1);
        }
        team.ask(Player::warm);
        for round in 1..=self.options.rounds() {
            team.begin_round(round as usize - 1);
            team.ask(|player| {
                note(bar, format!("{workload}: {} {round}/{}", player.measured.contender, self.options.rounds()));
                bar.inc(1);
                player.turn()
            });
        }
        let (mut parts, mut left_out, mut next) = (Vec::new(), Vec::new(), Vec::new());
        team.ask(|player| {
            let is_combined = player.measured.contender == Contender::Combined;
            if is_combined {
                parts.clone_from(&player.parts);
                left_out.clone_from(&player.left_out);
            }
            // A quick run has no time for this.
            if job.tries && (is_combined || player.measured.contender == Contender::Tch) {
                let said = player.steps()?;
                next = if is_combined { said } else { std::mem::take(&mut next) };
            }
            Ok(())
        });
        for (round, seed) in self.seeds(workload).into_iter().enumerate() {
            // All train up to their next mark in turn, so that a slow spell of the machine affects all of them.
            for mark in 0.. {
                let mut is_over = true;
                team.begin_round(round + mark);
                team.ask(|player| {
                    let contender = player.measured.contender;
                    let is_done = player.measured.wholes.len() > round;
                    if is_done || !self.is_trained_whole(contender) {
                        return Ok(());
                    }
                    note(bar, format!("{workload}: {contender}, whole training, seed {seed}, mark {}", mark + 1));
                    let is_last = player.train_on(seed)?;
                    bar.inc(u64::from(is_last));
                    is_over &= is_last;
                    Ok(())
                });
                if is_over {
                    break;
                }
            }
        }
        let (measured, absent) = team.end();
        Ok(Measurements { workload, facts, measured, absent, parts, left_out, next })
    }

    /// Starts a contender and waits until it has chosen its options. If something else used the machine meanwhile, it is
    /// started again, at most twice.
    fn start_undisturbed(&self, job: &Job, contender: Contender) -> Result<Started> {
        let mut repetitions = 0;
        loop {
            let mut watch = Watch::start(std::process::id());
            let starting = self.start(job, contender)?;
            starting.process().into_iter().for_each(|process| watch.follow(process));
            let mut started = starting.wait()?;
            let Started::Player(player) = &mut started else { return Ok(started) };
            let (disturbance, _) = watch.stop();
            if !disturbance.is_too_much() {
                return Ok(started);
            }
            if repetitions == MOST_REPETITIONS {
                player.measured.choices.push("chosen while something else used the machine".to_owned());
                return Ok(started);
            }
            repetitions += 1;
        }
    }

    fn start(&self, job: &Job, contender: Contender) -> Result<Starting> {
        let parts = match contender {
            Contender::Combined if job.tries => choice::all(job),
            Contender::Combined => choice::usual(job),
            technique if technique.is_technique() => vec![technique],
            _ => Vec::new(),
        };
        Player::start(&Job { contender, parts, ..job.clone() }, &self.options.python, self.peers.path())
    }

    /// The seeds of the whole trainings of a workload.
    fn seeds(&self, workload: Workload) -> Vec<u32> {
        let first = self.options.seed;
        match self.options.size() {
            Size::Quick => Vec::new(),
            Size::Default if workload == Workload::Digits => vec![first],
            Size::Default => Vec::new(),
            Size::Full => (0..SEEDS).map(|seed| first.wrapping_add(seed)).collect(),
        }
    }

    fn is_trained_whole(&self, contender: Contender) -> bool {
        let compiled = contender == Contender::PytorchCompiled && self.options.size() == Size::Full;
        matches!(contender, Contender::Pytorch | Contender::PytorchTuned | Contender::Tch | Contender::Combined)
            || compiled
    }

    fn bar(&self, workloads: &[Workload]) -> Result<ProgressBar> {
        let cuda = self.device == DeviceKind::Cuda;
        let of = |&workload: &Workload| {
            let contenders = self.options.contenders(workload, cuda);
            let whole = contenders.iter().filter(|contender| self.is_trained_whole(**contender)).count();
            contenders.len() * (1 + self.options.rounds() as usize) + whole * self.seeds(workload).len()
        };
        let style = ProgressStyle::with_template("{msg:44} {wide_bar} {percent:>3} %  {elapsed}")?;
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        Ok(ProgressBar::with_draw_target(Some(workloads.iter().map(of).sum::<usize>() as u64), target)
            .with_style(style))
    }

    fn setting(&self, failures: &[String]) -> Setting {
        let gpu = (self.device == DeviceKind::Cuda).then(|| ffi::cuda::device_name(0).ok()).flatten();
        let versions = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
        let ours = versions.into_iter().map(|(name, version)| (name.to_owned(), version.to_owned()));
        let size = match self.options.size() {
            Size::Quick => "quick",
            Size::Default => "default",
            Size::Full => "full",
        };
        Setting {
            measured_at: date::utc_now(),
            same_initial_weights: true,
            run_seconds: Some(self.began.elapsed().as_secs_f64()),
            machine: Machine::detect(gpu),
            versions: ours.chain(self.python.clone()).collect(),
            device: self.device,
            size: size.to_owned(),
            rounds: self.options.rounds(),
            seeds: self.options.workloads().iter().map(|it| self.seeds(*it)).max_by_key(Vec::len).unwrap_or_default(),
            threads: self.threads,
            method: method(),
            failures: failures.to_vec(),
        }
    }
}

/// Shows what is measured now: next to the progress bar, or as a line if there is no terminal.
fn note(bar: &ProgressBar, what: String) {
    if bar.is_hidden() {
        eprintln!("{what}");
    }
    bar.set_message(what);
}

fn method() -> Vec<String> {
    [
        "Each contender runs in its own process and waits while another one trains. They take turns, so a \
         slow spell of the machine affects all of them, and the order changes from round to round; a ratio \
         compares two turns of the same round. A turn is steady training: batches that workers read while the \
         contender waited are thrown away first."
            .to_owned(),
        "A whole training is timed from opening the data to the last step, without the start of the process, \
         imports and testing. The contenders take turns here too: all train one epoch, or a twentieth of the \
         text's steps, then the next. It is not repeated; if it was disturbed on the whole, it is marked."
            .to_owned(),
        "During each timing, the CPU time of other processes and the time stolen by the hypervisor are \
         measured, and the pace of fixed work before and after. A disturbed timing is repeated, at most \
         twice, and with --quick one of each contender. If it is still disturbed, it is marked, and nothing \
         is concluded from it. A contender whose start, in which it chooses its options, was disturbed is \
         started again, at most twice; after that its choices say so."
            .to_owned(),
        format!(
            "All use AdamW with a learning rate of {LEARNING_RATE}. Each technique is plain tch with one \
             change; on a GPU, a loader also copies its batches beside the computation. At its start, Overdrive \
             begins with all techniques that usually gain, and leaves out or adds one at a time: it keeps those that \
             make steps faster by 2%. PyTorch tuned by hand tries precision, fused, channels_last, decoder, threads \
             and workers, and on a GPU to copy photographs as bytes. A trial compares by up to three short turns each, \
             taken in turns. Contenders with a loader, but without take_turns, then try how many threads libtorch \
             computes fastest with. A first look tries nothing."
        ),
        "On the command line (--only), PyTorch as written is pytorch, PyTorch tuned by hand pytorch_tuned, \
         PyTorch tuned and compiled pytorch_compiled, plain tch tch, and Overdrive combined."
            .to_owned(),
        "All test in float32, and begin with the same weights: those that PyTorch draws for the seed.".to_owned(),
        "Other processes on a GPU are not watched.".to_owned(),
        "Peak memory is the most that the process and its workers held in a turn: what they hold at its end, \
         with shared pages counted once, and how much more each had at its peak. It includes what allocators \
         keep from trials at the start."
            .to_owned(),
    ]
    .to_vec()
}

/// The device that the options ask for.
fn device(choice: DeviceChoice) -> Result<DeviceKind> {
    match (choice, cuda::why_unavailable()) {
        (DeviceChoice::Cuda, Some(why)) => bail!("--device cuda: {why}; leave it out, or give cpu"),
        (
            DeviceChoice::Auto,
            Some(why @ (NoCuda::CpuBuild { has_gpu: true } | NoCuda::NotLinked | NoCuda::NoDevice)),
        ) => {
            println!("No GPU is used: {why}.");
            Ok(DeviceKind::Cpu)
        }
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, Some(_)) => Ok(DeviceKind::Cpu),
        (DeviceChoice::Cuda | DeviceChoice::Auto, None) => Ok(DeviceKind::Cuda),
    }
}
