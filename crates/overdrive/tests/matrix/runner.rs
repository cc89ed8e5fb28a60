//! Runs cells in parallel, on as many lanes as there are cores. A lane has two threads, which are its two ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, anyhow};
use overdrive::ddp::{Backend, InitMethod};
use overdrive::prelude::*;

use crate::choices::{Cell, Opt, Ranks};
use crate::data::Trained;
use crate::subject;
use crate::totals::{Totals, judge};

pub fn run(cells: Vec<Cell>) -> Result<Totals> {
    // Checkpoints are synced to disk, which costs little in a memory file system.
    let memory = Path::new("/dev/shm");
    let folder = match memory.is_dir() {
        true => tempfile::tempdir_in(memory)?,
        false => tempfile::tempdir()?,
    };
    let lanes = std::thread::available_parallelism()?.get();
    let totals = Mutex::new(Totals::default());
    std::thread::scope(|scope| {
        let start = |number: usize| {
            let own: Vec<Cell> = cells.iter().skip(number).step_by(lanes).copied().collect();
            let (folder, totals) = (folder.path().join(format!("lane-{number}")), &totals);
            scope.spawn(move || Lane { folder: &folder, totals }.run(&own))
        };
        let lanes: Vec<_> = (0..lanes).map(start).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().map_err(|_| anyhow!("a lane panicked"))?)
    })?;
    Ok(totals.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns a panic into an error.
pub fn caught(run: impl FnOnce() -> Result<Trained>) -> Result<Trained> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(anyhow!("it panicked")))
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    Ok(())
}

struct Lane<'a> {
    folder: &'a Path,
    totals: &'a Mutex<Totals>,
}

impl Lane<'_> {
    fn run(&self, cells: &[Cell]) -> Result<()> {
        let (meet, found) = (Barrier::new(2), Mutex::new([None, None]));
        std::fs::create_dir_all(self.folder)?;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| self.rank(1, cells, &meet, &found));
            let first = self.rank(0, cells, &meet, &found);
            other.join().map_err(|_| anyhow!("rank 1 panicked"))?.and(first)
        })
    }

    fn group(&self, number: usize, rank: usize, world_size: usize) -> Result<ProcessGroup> {
        let path = self.folder.join(format!("meet-{number}-{world_size}"));
        let method = InitMethod::File { path, rank, world_size };
        Ok(ProcessGroup::builder(Backend::Gloo).timeout(Duration::from_secs(600)).init(&method)?)
    }

    /// Both ranks run each cell in one process group, which is rebuilt after a cell has failed.
    fn rank(
        &self,
        rank: usize,
        cells: &[Cell],
        meet: &Barrier,
        found: &Mutex<[Option<Result<Trained>>; 2]>,
    ) -> Result<()> {
        let (mut alone, mut both) = (None, None);
        for (number, cell) in cells.iter().enumerate() {
            let own = self.folder.join("run");
            let is_alone = cell.ranks == Ranks::Alone;
            if !is_alone || rank == 0 {
                let (group, size) = if is_alone { (&mut alone, 1) } else { (&mut both, 2) };
                let ready = group.take().map_or_else(|| self.group(number, rank, size), Ok);
                let outcome = ready.and_then(|ready| {
                    // 1-bit Adam needs a group, even of one rank.
                    let uses = !is_alone || cell.optimizer == Opt::OneBit;
                    let outcome = caught(|| subject::run(cell, rank, uses.then_some(&ready), &own));
                    *group = Some(ready);
                    outcome
                });
                lock(found)[rank] = Some(outcome);
            }
            meet.wait();
            if lock(found).iter().any(|it| matches!(it, Some(Err(_)))) {
                both = None;
            }
            meet.wait();
            if rank == 0 {
                let mut results: Vec<_> = std::mem::take(&mut *lock(found)).into_iter().flatten().collect();
                // No early return here: the other rank waits at the barrier below.
                results.extend(remove(&own).err().map(Err));
                let verdict = judge(cell, results);
                lock(self.totals).add(cell, verdict);
            }
            meet.wait();
        }
        Ok(())
    }
}
