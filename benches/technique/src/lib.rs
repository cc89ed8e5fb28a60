//! The technique benchmark: all contenders train the same workloads in turns, and a report compares their speed.
//!
//! `run` prepares the data and starts one process per contender (`player`); in that process, `contender` trains. The
//! workloads are `digits`, `photos` and `text`; they share the training loop in `trainer`. `choice` finds the techniques
//! of the combined contender. `watch` measures what else uses the machine. Python's contenders are in the folder `peers`.

#![forbid(unsafe_code)]

mod choice;
pub mod contender;
pub mod digits;
mod digits_files;
pub mod job;
pub mod model;
mod photo_files;
mod photos;
mod player;
mod text;
mod trainer;
mod watch;

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use overdrive_bench_report::write::{check_writable, write_atomically};
use overdrive_bench_report::{
    BenchOptions, Contender, DeviceChoice, DeviceKind, Machine, Measured, Measurements, Report, Setting, Size,
    Workload, date, html, table,
};
use overdrive_ffi as ffi;
use tch::Cuda;

use job::Job;
use player::{Player, Started, Starting};
use trainer::LEARNING_RATE;

pub use player::JOB_ARGUMENT;

/// Seeds of a full run.
const SEEDS: u32 = 3;

/// Runs the benchmark that the options describe and writes its report.
///
/// # Errors
/// When an option does not fit this machine, the data cannot be read, a contender of ours fails, or the report cannot be
/// written.
pub fn run(options: &BenchOptions) -> Result<()> {
    let bench = Bench::new(options)?;
    let workloads = options.workloads();
    let bar = bench.bar(&workloads)?;
    let measurements = workloads.iter().map(|&workload| bench.measure(workload, &bar)).collect::<Result<Vec<_>>>()?;
    bar.finish_and_clear();
    let report = Report::new(bench.setting(), measurements);
    println!("{}", table::render(&report));
    write_atomically(&options.json, report.to_json()?.as_bytes())?;
    write_atomically(&options.report, html::render(&report).as_bytes())?;
    println!("numbers: {}", options.json.display());
    println!("page:    {}", options.report.display());
    Ok(())
}

struct Bench<'a> {
    options: &'a BenchOptions,
    device: DeviceKind,
    threads: u32,
    work: PathBuf,
    peers: tempfile::TempDir,
}

/// A workload's data, and the sentences about it in the report.
struct Data {
    job: Job,
    facts: Vec<String>,
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
        Ok(Self { options, device, threads, work: work_folder(), peers })
    }

    /// Measures all contenders of a workload.
    fn measure(&self, workload: Workload, bar: &ProgressBar) -> Result<Measurements> {
        note(bar, format!("{workload}: data"));
        let Data { mut job, facts } = self.data(workload)?;
        let (mut players, mut absent) = (Vec::new(), Vec::new());
        let contenders = self.options.contenders(workload, self.device == DeviceKind::Cuda);
        let mut started = Vec::new();
        if !job.tries {
            // They measure nothing at their start, so they can start at the same time.
            started = contenders.iter().map(|&contender| self.start(&job, contender)).collect::<Result<_>>()?;
        }
        let mut started = started.into_iter();
        for contender in contenders {
            note(bar, format!("{workload}: starting {contender}"));
            let starting = started.next().map_or_else(|| self.start(&job, contender), Ok)?;
            match starting.wait()? {
                Started::Player(player) => {
                    if contender == Contender::PytorchTuned {
                        job.options.clone_from(&player.options);
                    }
                    players.push(*player);
                }
                Started::Missing(reason) => absent.push((contender, reason)),
            }
            bar.inc(1);
        }
        for round in 1..=self.options.rounds() {
            ask_each(&mut players, &mut absent, |player| {
                note(bar, format!("{workload}: {} {round}/{}", player.measured.contender, self.options.rounds()));
                bar.inc(1);
                player.turn()
            })?;
        }
        let (mut parts, mut next) = (Vec::new(), Vec::new());
        for player in &mut players {
            let is_combined = player.measured.contender == Contender::Combined;
            if is_combined {
                parts.clone_from(&player.parts);
            }
            // A quick run has no time for this.
            if job.tries && (is_combined || player.measured.contender == Contender::Tch) {
                let said = player.steps()?;
                next = if is_combined { said } else { next };
            }
        }
        for seed in self.seeds(workload) {
            ask_each(&mut players, &mut absent, |player| {
                if !self.is_trained_whole(player.measured.contender) {
                    return Ok(());
                }
                note(bar, format!("{workload}: {}, whole training, seed {seed}", player.measured.contender));
                bar.inc(1);
                player.whole(seed)
            })?;
        }
        let measured = players.into_iter().map(Player::end).collect::<Result<Vec<Measured>>>()?;
        Ok(Measurements { workload, facts, measured, absent, parts, next })
    }

    fn start(&self, job: &Job, contender: Contender) -> Result<Starting> {
        let parts = match contender {
            Contender::Combined => choice::all(job),
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

    fn data(&self, workload: Workload) -> Result<Data> {
        let (cuda, quick) = (self.device == DeviceKind::Cuda, self.options.size() == Size::Quick);
        let job = Job {
            workload,
            contender: Contender::Tch,
            parts: Vec::new(),
            device: self.device,
            seed: self.options.seed,
            threads: self.threads,
            tries: !quick,
            has_bf16: cuda || Machine::detect(None).has_bf16_hardware(),
            options: serde_json::Value::Null,
            batch_size: 32,
            settle_seconds: if quick { 0.2 } else { 0.5 },
            turn_seconds: if quick { 0.4 } else { 1.5 },
            length: 0,
            train: PathBuf::new(),
            test: None,
            test_images: 0,
        };
        Ok(match workload {
            Workload::Digits => {
                let idx = data_folder(self.options.data.as_deref())?;
                let (train, test) = if quick { (4_000, 1_000) } else { (usize::MAX, usize::MAX) };
                let data = digits_files::prepare(&idx, &self.work, train, test)?;
                let facts = vec![
                    format!("{} training and {} test images of MNIST, one PNG file each.", data.train, data.test),
                    "A CNN of 2 convolutions and 2 linear layers, 105,866 parameters; batches of 128.".to_owned(),
                ];
                let test = (Some(data.idx), data.test);
                let job = Job { batch_size: 128, length: 5, train: data.png, test: test.0, test_images: test.1, ..job };
                Data { job, facts }
            }
            Workload::Photos => {
                let photos = match &self.options.photos {
                    Some(folder) => photo_files::of_user(folder)?,
                    None => {
                        let (train, times) = if quick { (32, 16) } else { (128, 8) };
                        photo_files::prepare(&self.work, train, times, if quick { 8 } else { 64 })?
                    }
                };
                let model = if cuda { "ResNet-50 at 224 pixels" } else { "ResNet-18 at 96 pixels" };
                let facts =
                    vec![photos.fact, format!("{model}, RandomResizedCrop and RandomHorizontalFlip; batches of 16.")];
                let job = Job {
                    batch_size: 16,
                    settle_seconds: if quick { 0.7 } else { 2.0 },
                    turn_seconds: if quick { 1.0 } else { 3.5 },
                    length: 3,
                    train: photos.train,
                    test: photos.test,
                    ..job
                };
                Data { job: Job { test_images: photos.test_images, ..job }, facts }
            }
            Workload::Text => {
                let facts = vec![
                    "Hamlet, 163 kB, in pieces of random places; batches of 32.".to_owned(),
                    match cuda {
                        true => {
                            "GPT-2's smallest shape, 124 million parameters, 1024 characters of context.".to_owned()
                        }
                        false => "A GPT of 4 blocks and width 192, 1.8 million parameters, 128 characters of context."
                            .to_owned(),
                    },
                ];
                let train = data_file("text/hamlet.txt")?;
                let batch_size = if cuda { 8 } else { 32 };
                Data { job: Job { length: 400, train, batch_size, ..job }, facts }
            }
        })
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

    fn setting(&self) -> Setting {
        let gpu = (self.device == DeviceKind::Cuda).then(|| ffi::cuda::device_name(0).ok()).flatten();
        let versions = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
        let size = match self.options.size() {
            Size::Quick => "quick",
            Size::Default => "default",
            Size::Full => "full",
        };
        Setting {
            measured_at: date::utc_now(),
            machine: Machine::detect(gpu),
            versions: BTreeMap::from(versions.map(|(name, version)| (name.to_owned(), version.to_owned()))),
            device: self.device,
            size: size.to_owned(),
            rounds: self.options.rounds(),
            seeds: self.seeds(Workload::Digits),
            threads: self.threads,
            method: method(),
        }
    }
}

/// Asks all players in turn. A Python contender that fails is absent from then on.
fn ask_each(
    players: &mut Vec<Player>,
    absent: &mut Vec<(Contender, String)>,
    mut ask: impl FnMut(&mut Player) -> Result<()>,
) -> Result<()> {
    for mut player in std::mem::take(players) {
        match ask(&mut player) {
            Ok(()) => players.push(player),
            Err(error) if player.measured.contender.is_python() => {
                absent.push((player.measured.contender, format!("it failed: {error:#}")));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
        "Each contender runs in its own process and waits while another one trains. They take turns, so a slow spell of \
         the machine affects all of them; a ratio compares two turns of the same round. A turn is steady training: \
         contenders whose workers read ahead first use up the batches that were read while they waited."
            .to_owned(),
        "A whole training is timed from opening the data to the last step, without the start of the process, imports \
         and testing."
            .to_owned(),
        "During each timing, the CPU time of other processes and the time stolen by the hypervisor are measured, and the \
         pace of fixed work before and after. A disturbed timing is repeated, at most twice. If it is still disturbed, it \
         is marked, and nothing is concluded from it."
            .to_owned(),
        format!(
            "All use AdamW with a learning rate of {LEARNING_RATE}. Each technique is plain tch with one change. At its \
             start, combined tries the techniques one after the other and keeps those that make steps faster; tuned \
             Python chooses its options in the same way. Contenders with a loader try how many threads libtorch computes \
             fastest with."
        ),
        "Memory is that of the process and its workers at the end of a turn; shared pages count once.".to_owned(),
    ]
    .to_vec()
}

/// The device that the options ask for.
fn device(choice: DeviceChoice) -> Result<DeviceKind> {
    match (choice, Cuda::is_available()) {
        (DeviceChoice::Cuda, false) => bail!("--device cuda: libtorch sees no CUDA device; leave it out, or give cpu"),
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, false) => Ok(DeviceKind::Cpu),
        (DeviceChoice::Cuda | DeviceChoice::Auto, true) => Ok(DeviceKind::Cuda),
    }
}

/// Where generated data is kept for the next run: in `target/`, if that exists.
fn work_folder() -> PathBuf {
    match Path::new("target").is_dir() {
        true => PathBuf::from("target/bench/data"),
        false => std::env::temp_dir().join("overdrive-bench-data"),
    }
}

/// The folder given by `--data`, or the images in the workspace or the bundle.
fn data_folder(asked: Option<&Path>) -> Result<PathBuf> {
    asked.map_or_else(|| data_file("mnist"), |folder| Ok(folder.to_owned()))
}

/// A file or folder in `data/`, of the workspace or next to the program.
fn data_file(name: &str) -> Result<PathBuf> {
    let beside_program = std::env::current_exe().ok().and_then(|program| Some(program.parent()?.join("data")));
    let in_workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data");
    let mut folders = [Some(PathBuf::from("data")), beside_program, Some(in_workspace)].into_iter().flatten();
    let found = folders.find_map(|folder| Some(folder.join(name)).filter(|path| path.exists()));
    found.with_context(|| {
        format!("data/{name} is neither in this folder nor next to the program: run it in the workspace or the bundle")
    })
}
