//! Kills ranks by SIGKILL at moments drawn from a fixed seed, and checks that the others end with a typed error.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_ddp::DdpError;

use crate::harness::{Rank, all_through_within, free_port, start};

/// Set it to another number for other moments. A test prints its seed.
const SEED: &str = "OVERDRIVE_TEST_SEED";
const DEFAULT_SEED: u64 = 261_127;
/// Marks every process of a test, so that processes left running are found.
pub const MARK: &str = "OVERDRIVE_TEST_MARK";
/// A folder for each kill.
pub const FOLDER: &str = "OVERDRIVE_TEST_FOLDER";
/// A random number, by which the scenario chooses a variant.
const DRAWN: &str = "OVERDRIVE_TEST_DRAWN";
/// Set only for the victim: the file to which it writes what it is doing.
const DOING: &str = "OVERDRIVE_TEST_DOING";
/// One of [`TIMEOUTS`].
const TIMEOUT: &str = "OVERDRIVE_TEST_TIMEOUT";

/// How many kills run at a time; each has several processes.
const AT_ONCE: usize = 4;
/// Only against hanging: on an idle machine, survivors need a hundredth of it.
const LIMIT: Duration = Duration::from_secs(600);

/// Seconds for which survivors wait for a rank whose end they do not notice. On a busy machine they may pass before the
/// rank is killed: then the kill is repeated with the next.
const TIMEOUTS: [u64; 3] = [4, 20, 100];

/// Splitmix64.
pub struct Random(u64);

impl Random {
    /// A different sequence for each test.
    pub fn new(seed: u64, test: &str) -> Self {
        Self(test.bytes().fold(seed, |state, byte| state.wrapping_mul(31).wrapping_add(byte.into())))
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

pub fn seed() -> Result<u64> {
    match std::env::var(SEED) {
        Ok(seed) => seed.parse().with_context(|| format!("{SEED} is {seed:?}, but should be a number")),
        Err(_) => Ok(DEFAULT_SEED),
    }
}

/// Records what a rank that may be killed is doing now.
pub fn doing(what: &str) -> Result<()> {
    let Some(path) = std::env::var_os(DOING) else { return Ok(()) };
    // Overwrites the last text in one write, because the process may be killed at any instant.
    let mut file = File::options().create(true).write(true).truncate(false).open(path)?;
    Ok(file.write_all(format!("{what:<50}").as_bytes())?)
}

/// How long this rank waits for one whose end it does not notice.
pub fn short() -> Result<Duration> {
    Ok(Duration::from_secs(std::env::var(TIMEOUT)?.parse()?))
}

pub fn drawn() -> Result<u64> {
    Ok(std::env::var(DRAWN)?.parse()?)
}

/// Checks that an error is typed and names the operation, and reports it to the parent.
pub fn told(error: &DdpError, operation: &str) -> Result<()> {
    let within = match error {
        DdpError::Hook(inner) => inner.downcast_ref::<DdpError>().context("the hook's error is of no type")?,
        error => error,
    };
    let name = match within {
        DdpError::TimedOut { .. } => "TimedOut",
        DdpError::Lost { .. } => "Lost",
        DdpError::MissingRanks { .. } => "MissingRanks",
        DdpError::Rendezvous { .. } => "Rendezvous",
        _ => bail!("{error:?}"),
    };
    ensure!(error.to_string().contains(operation), "{error} does not name {operation:?}");
    let marker = format!("{MARKER}{}", std::env::var("RANK")?);
    fs::write(Path::new(&std::env::var(FOLDER)?).join(marker), error.to_string())?;
    println!("{TOLD}{name}");
    // On a busy machine a timeout may pass before the victim is killed, and this or another rank gives up: then the
    // victim is killed here, and the kill is repeated.
    if std::env::var_os(DOING).is_some() {
        doing("nothing: a rank has given up")?;
        loop {
            std::thread::park();
        }
    }
    Ok(())
}

const TOLD: &str = "told: ";
/// A rank that reports an error also leaves it in a file, whose name is this and the rank's number.
const MARKER: &str = "told-";

#[derive(Debug)]
struct Moment {
    ranks: usize,
    victim: usize,
    delay: Duration,
    drawn: u64,
}

/// What was observed at one kill.
struct Seen {
    doing: String,
    told: Vec<String>,
    last_end: Duration,
}

/// Kills ranks of a scenario at `count` moments, each up to `latest` after the victim first recorded what it is doing.
/// Then `check` inspects the kill's folder.
pub fn kill(scenario: &str, count: usize, latest: Duration, check: impl Fn(&Path) -> Result<()> + Sync) -> Result<()> {
    let seed = seed()?;
    let mut random = Random::new(seed, scenario);
    let moments = (0..count).map(|_| {
        let ranks = 2 + random.below(2) as usize;
        let victim = random.below(ranks as u64) as usize;
        let delay = Duration::from_micros(random.below(latest.as_micros() as u64));
        Moment { ranks, victim, delay, drawn: random.below(1 << 32) }
    });
    let queue = Mutex::new(moments.collect::<Vec<_>>().into_iter().enumerate());
    let mark = format!("{}-{scenario}", std::process::id());
    let work = || {
        let mut done = Vec::new();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((number, moment)) = next else { return done };
            let seen = undisturbed(scenario, &moment, &mark, &check);
            done.push(seen.with_context(|| format!("{SEED}={seed}, number {number}, {moment:?}")));
        }
    };
    let seen: Vec<Result<Seen>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap_or_else(|_| vec![Err(anyhow::anyhow!("panicked"))]))
            .collect()
    });
    let left = processes_with(&mark)?;
    ensure!(left.is_empty(), "{scenario}: still running: {left:?}");
    report(scenario, seed, seen)
}

fn report(scenario: &str, seed: u64, all: Vec<Result<Seen>>) -> Result<()> {
    let (mut doing, mut told) = (BTreeMap::new(), BTreeMap::new());
    let (mut last_end, mut failures, count) = (Duration::ZERO, String::new(), all.len());
    for seen in all {
        match seen {
            Ok(seen) => {
                *doing.entry(seen.doing).or_insert(0) += 1;
                seen.told.into_iter().for_each(|name| *told.entry(name).or_insert(0) += 1);
                last_end = last_end.max(seen.last_end);
            }
            Err(error) => failures += &format!("{error:#}\n"),
        }
    }
    println!(
        "{scenario}: seed {seed}, {count} kills; the victims were at {doing:?}; the others' errors were {told:?}, the \
         last of them {last_end:.1?} later"
    );
    ensure!(failures.is_empty(), "{failures}");
    Ok(())
}

/// Kills a rank with longer and longer timeouts, until none passes before the kill.
fn undisturbed(scenario: &str, moment: &Moment, mark: &str, check: &impl Fn(&Path) -> Result<()>) -> Result<Seen> {
    for timeout in TIMEOUTS {
        if let Some(seen) = at(scenario, moment, mark, timeout, check)? {
            return Ok(seen);
        }
        println!("{scenario}: a timeout of {timeout} s passed before the kill");
    }
    bail!("ranks gave up before the kill with each of the timeouts {TIMEOUTS:?} s")
}

/// None if a rank gave up before the kill, in a time in which its timeout can have passed.
fn at(
    scenario: &str,
    moment: &Moment,
    mark: &str,
    timeout: u64,
    check: &impl Fn(&Path) -> Result<()>,
) -> Result<Option<Seen>> {
    let folder = tempfile::tempdir()?;
    let doing = folder.path().join("doing");
    let (port, started) = (free_port(), Instant::now());
    let [drawn, seconds] = [moment.drawn, timeout].map(|it| it.to_string());
    let [path, file] = [folder.path(), &doing].map(|it| it.display().to_string());
    let mut vars = vec![(MARK, mark), (DRAWN, &*drawn), (FOLDER, &*path), (TIMEOUT, &*seconds)];
    let mut start = |rank: usize| {
        vars.truncate(4);
        vars.extend((rank == moment.victim).then_some((DOING, &*file)));
        start(scenario, rank, moment.ranks, port, &vars)
    };
    let mut ranks: Vec<Rank> = (0..moment.ranks).map(&mut start).collect::<Result<_>>()?;
    while fs::metadata(&doing).map_or(0, |file| file.len()) == 0 {
        if started.elapsed() > LIMIT || ranks[moment.victim].try_wait()?.is_some() {
            let mut victim = ranks.remove(moment.victim);
            victim.kill()?;
            let ended = victim.end(started)?;
            bail!("never under way, {}: {}\n{}", ended.status, ended.output, ended.errors);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    std::thread::sleep(moment.delay);
    // Errors before the kill are not because of it.
    let early = reported(folder.path())?;
    let before = started.elapsed();
    ensure!(
        early.is_empty() || before >= Duration::from_secs(timeout),
        "an error {before:?} after the start, before the kill and before a timeout of {timeout} s: {early:?}"
    );
    let mut victim = ranks.remove(moment.victim);
    victim.kill()?;
    let killed = Instant::now();
    let victim = victim.end(started)?;
    ensure!(victim.status.code().is_none(), "the victim ended by itself:\n{}{}", victim.output, victim.errors);
    let survivors = all_through_within(LIMIT, ranks, killed)?;
    let last_end = killed.elapsed();
    let told: Vec<String> = survivors
        .iter()
        .flat_map(|rank| rank.output.lines())
        .filter_map(|line| line.strip_prefix(TOLD).map(str::to_owned))
        .collect();
    ensure!(told.len() == survivors.len(), "{told:?} by {} survivors", survivors.len());
    check(folder.path())?;
    let doing = fs::read_to_string(&doing)?.trim().to_owned();
    Ok(early.is_empty().then_some(Seen { doing, told, last_end }))
}

/// The errors that ranks have reported so far.
fn reported(folder: &Path) -> Result<Vec<String>> {
    let mut errors = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(MARKER) {
            errors.push(fs::read_to_string(entry.path())?);
        }
    }
    Ok(errors)
}

/// The processes with this mark in their environment, where the system has `/proc`.
pub fn processes_with(mark: &str) -> Result<Vec<String>> {
    let wanted = format!("{MARK}={mark}");
    let Ok(processes) = fs::read_dir("/proc") else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for process in processes {
        let path = process?.path();
        // A process that has ended meanwhile, or belongs to another user, cannot be read.
        let Ok(variables) = fs::read(path.join("environ")) else { continue };
        if variables.split(|&byte| byte == 0).any(|variable| variable == wanted.as_bytes()) {
            found.push(path.display().to_string());
        }
    }
    Ok(found)
}
