//! A run whose ranks are killed at moments drawn from a seed, also while they save, and that other ranks and another stage
//! resume each time. Nothing depends on when exactly a kill comes: whenever it does, the run ends as an undisturbed one.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive_checkpoint::{Checkpoint, Writers, consolidate};
use overdrive_ddp::ProcessGroup;
use rustix::process::{Signal, getpid, kill_process};

use crate::harness::{Meeting, all_through, free_port, start};
use crate::moments::{self, Random};
use crate::resharded::{FOLDER, Run, folder};

const KILLS: usize = 50;
/// How this attempt goes: `STAGE:BACKGROUND`.
const WAY: &str = "OVERDRIVE_TEST_WAY";
/// Set where a rank is killed: Gloo does not always notice that one is gone, and then the others wait for so many seconds. If
/// this passes before the kill, on a busy machine, the ranks fail earlier, and the victim is killed then.
const TIMEOUT: &str = "OVERDRIVE_TEST_TIMEOUT";
const SECONDS: &str = "15";
/// When this rank is killed: `STEP:MOMENT:MICROSECONDS`, after its so many steps.
const KILLED: &str = "OVERDRIVE_TEST_KILLED";
/// How many steps an attempt makes at most before its kill.
const LATEST: u64 = 4;
/// How many more steps a rank trains while its kill is pending. All attempts together end before the last step.
const GRACE: u64 = 1;
const STEPS: u64 = KILLS as u64 * (LATEST + GRACE);

/// The whole states of the last step.
fn ended(folder: &Path) -> Result<[Vec<u8>; 2]> {
    let whole = |part: &str| -> Result<Vec<u8>> {
        let file = folder.join(format!("{part}.safetensors"));
        let step = consolidate(folder, None, part, &file)?;
        ensure!(step == STEPS, "the last step is {step}");
        Ok(std::fs::read(&file)?)
    };
    Ok([whole("model")?, whole("optimizer")?])
}

/// Runs to the end.
fn through(folder: &Path, ranks: usize, way: &str) -> Result<()> {
    let port = free_port();
    let vars = [(FOLDER, folder.to_str().context("a path in UTF-8")?), (WAY, way)];
    let ranks =
        (0..ranks).map(|rank| start("resharded_killed", rank, ranks, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(ranks, Instant::now()).map(drop)
}

pub fn ends_alike() -> Result<()> {
    let seed = moments::seed()?;
    let (whole, killed) = (tempfile::tempdir()?, tempfile::tempdir()?);
    through(whole.path(), 2, "3:true")?;
    let (mut random, mut within) = (Random::new(seed, "resharded"), 0);
    for number in 0..KILLS {
        let ranks = [2, 2, 4][random.below(3) as usize];
        let (victim, way) =
            (random.below(ranks as u64) as usize, format!("{}:{}", 1 + random.below(3), random.below(2) == 0));
        let (step, moment) = (random.below(LATEST + 1), random.below(2));
        let kill = format!("{step}:{moment}:{}", random.below(if step == 0 { 20_000 } else { 5_000 }));
        let what = format!("OVERDRIVE_TEST_SEED={seed}, kill {number}: rank {victim} of {ranks}, way {way}, at {kill}");
        at(killed.path(), ranks, victim, &way, &kill).context(what)?;
        within += usize::from(is_within_a_save(killed.path())?);
    }
    through(killed.path(), 4, "1:false")?;
    ensure!(ended(whole.path())? == ended(killed.path())?, "the last states differ, with OVERDRIVE_TEST_SEED={seed}");
    println!("{KILLS} kills with OVERDRIVE_TEST_SEED={seed}, {within} of them within a save");
    Ok(())
}

/// Whether a rank has left a checkpoint that is not complete, or has one that others lack.
fn is_within_a_save(folder: &Path) -> Result<bool> {
    let mut newest = Vec::new();
    for rank in std::fs::read_dir(folder)? {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(rank?.path())? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        if names.iter().any(|name| name.starts_with(".writing")) {
            return Ok(true);
        }
        newest.push(names.into_iter().filter(|name| name.starts_with("step")).max());
    }
    newest.dedup();
    Ok(newest.len() > 1)
}

/// Kills a rank of an attempt; the others end with an error by themselves.
fn at(folder: &Path, ranks: usize, victim: usize, way: &str, kill: &str) -> Result<()> {
    let (port, started) = (free_port(), Instant::now());
    let folder = folder.to_str().context("a path in UTF-8")?;
    let begin = |rank: usize| {
        let mut vars = vec![(FOLDER, folder), (WAY, way), (TIMEOUT, SECONDS)];
        vars.extend((rank == victim).then_some((KILLED, kill)));
        start("resharded_killed", rank, ranks, port, &vars)
    };
    let under_way = (0..ranks).map(begin).collect::<Result<Vec<_>>>()?;
    // Each is waited for, within a limit: none is left.
    for (rank, ended) in under_way.into_iter().map(|rank| rank.end(started)).enumerate() {
        let ended = ended?;
        match rank == victim {
            true => ensure!(ended.status.code().is_none(), "it ended by itself: {}{}", ended.output, ended.errors),
            false => {
                // The operation that failed, on which rank.
                let told = ended.errors.contains("on rank");
                ensure!(ended.status.code() == Some(1) && told, "rank {rank}: {}{}", ended.output, ended.errors);
            }
        }
    }
    Ok(())
}

/// Kills this process with SIGKILL after a delay, from another thread.
fn kill_after(delay: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let _ = kill_process(getpid(), Signal::KILL);
    });
}

/// When this rank is killed: after so many steps; before or within a step, or in saving; after which delay.
fn own_kill() -> Result<Option<(u64, u64, Duration)>> {
    let Ok(kill) = std::env::var(KILLED) else { return Ok(None) };
    let numbers = kill.split(':').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    Ok(Some((numbers[0], numbers[1], Duration::from_micros(numbers[2]))))
}

/// Trains from the newest checkpoint that is complete, and saves every second step.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let (group, kill) = (meeting.group()?, own_kill()?);
    let ended = train(&group, kill);
    if kill.is_some() {
        println!("before its kill: {ended:?}");
        kill_after(Duration::ZERO);
        loop {
            std::thread::park();
        }
    }
    ended
}

fn train(group: &ProcessGroup, kill: Option<(u64, u64, Duration)>) -> Result<()> {
    let way = std::env::var(WAY)?;
    let (stage, background) = way.split_once(':').context("a way")?;
    if let Ok(seconds) = std::env::var(TIMEOUT) {
        group.barrier()?;
        group.set_timeout(Duration::from_secs(seconds.parse()?))?;
    }
    let mut run = Run::new(stage.parse()?, group, 1)?;
    let builder = Checkpoint::builder(folder()?).keep(2).background(background.parse()?);
    let mut checkpoint = builder.ranks(group.clone(), Writers::Each).build()?;
    // All groups are made: from here on, ranks wait for one another in collectives alone.
    group.barrier()?;
    if let Some((0, _, delay)) = kill {
        kill_after(delay);
    }
    let first = run.resume(&mut checkpoint)?.unwrap_or(0);
    let is_at = |step: u64, moment: u64| kill.filter(|kill| (kill.0, kill.1) == (step + 1 - first, moment));
    if let Some((_, _, delay)) = is_at(first, 0) {
        kill_after(delay);
    }
    run.train(group, first..STEPS, |run, step| {
        // Within saving, or at the beginning of the next step.
        if let Some((_, _, delay)) = is_at(step, 1) {
            kill_after(delay);
        }
        if (step + 1) % 2 == 0 || step + 1 == STEPS {
            run.save(step + 1, &mut checkpoint)?;
        }
        if let Some((_, _, delay)) = is_at(step + 1, 0) {
            kill_after(delay);
        }
        while kill.is_some_and(|kill| step + 1 - first >= kill.0 + GRACE) {
            std::thread::park();
        }
        Ok(())
    })?;
    Ok(checkpoint.finish()?)
}
