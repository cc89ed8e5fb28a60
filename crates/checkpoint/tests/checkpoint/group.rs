//! Ranks as threads of this process, one of which may die at a chosen call.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use overdrive_core::{RankGroup, SyncError};

/// Longer than any wait of a passing test.
const HANG: Duration = Duration::from_secs(120);

#[derive(Default)]
struct Round {
    number: u64,
    arrived: usize,
    largest: Option<i64>,
    result: i64,
    gone: bool,
}

/// One rank's handle to the group. Dropping it makes the others' calls fail.
pub struct Rank {
    shared: Arc<(Mutex<Round>, Condvar)>,
    rank: usize,
    world_size: usize,
    /// How many more calls succeed before it dies.
    lives: Mutex<usize>,
}

impl Rank {
    /// All ranks of a group. `lives`: ranks that die, and after how many calls.
    pub fn group(world_size: usize, lives: &[(usize, usize)]) -> Vec<Self> {
        let shared = Arc::default();
        let of = |rank| lives.iter().find(|(dying, _)| *dying == rank).map_or(usize::MAX, |(_, calls)| *calls);
        (0..world_size)
            .map(|rank| Self { shared: Arc::clone(&shared), rank, world_size, lives: Mutex::new(of(rank)) })
            .collect()
    }

    fn leave(&self) {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner).gone = true;
        self.shared.1.notify_all();
    }

    fn lost(&self, why: &str) -> SyncError {
        SyncError(format!("rank {}: {why}", self.rank).into())
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.leave();
    }
}

impl RankGroup for Rank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn max(&self, value: i64) -> Result<i64, SyncError> {
        {
            let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
            if *lives == 0 {
                self.leave();
                return Err(self.lost("died"));
            }
            *lives -= 1;
        }
        let (round, changed) = &*self.shared;
        let mut round = round.lock().unwrap_or_else(PoisonError::into_inner);
        let number = round.number;
        round.largest = round.largest.max(Some(value));
        round.arrived += 1;
        if round.arrived == self.world_size {
            round.result = round.largest.take().unwrap_or_default();
            (round.arrived, round.number) = (0, number + 1);
            changed.notify_all();
            return Ok(round.result);
        }
        let waits = |round: &mut Round| round.number == number && !round.gone;
        let (round, _) = changed.wait_timeout_while(round, HANG, waits).unwrap_or_else(PoisonError::into_inner);
        // The result stays until this rank takes part in the next round.
        if round.number > number { Ok(round.result) } else { Err(self.lost("another rank is gone")) }
    }
}

/// Runs each rank on its own thread.
pub fn run<T: Send>(group: Vec<Rank>, rank: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &rank;
        let ranks: Vec<_> = group.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}
