//! The contenders of a workload, who take turns.

use anyhow::Result;
use overdrive_bench_report::{Contender, Measured};

use super::player::{Player, Started};

/// Running contenders, those that have failed, and those that could not run.
#[derive(Default)]
pub struct Team {
    players: Vec<Player>,
    failed: Vec<Measured>,
    absent: Vec<(Contender, String)>,
}

impl Team {
    /// Takes a contender in. One that could not run is absent.
    pub fn join(&mut self, started: Started) -> Option<&Player> {
        match started {
            Started::Player(player) => self.players.push(*player),
            Started::Missing(contender, reason) => {
                self.absent.push((contender, reason));
                return None;
            }
        }
        self.players.last()
    }

    /// Asks all in turn. What was measured of one that fails is kept, and it is not asked again.
    pub fn ask(&mut self, mut ask: impl FnMut(&mut Player) -> Result<()>) {
        for mut player in std::mem::take(&mut self.players) {
            match ask(&mut player) {
                Ok(()) => self.players.push(player),
                Err(error) => self.fail(player.measured.clone(), &error),
            }
        }
    }

    fn fail(&mut self, measured: Measured, error: &anyhow::Error) {
        let failure = format!("{error:#}");
        match measured.turns.is_empty() {
            true => self.absent.push((measured.contender, format!("it failed: {failure}"))),
            false => self.failed.push(Measured { failure: Some(failure), ..measured }),
        }
    }

    /// Puts the contenders into the order of a round, so that none always goes first or follows the same one.
    pub fn begin_round(&mut self, round: usize) {
        self.players.sort_by_key(|player| player.measured.contender);
        reorder(&mut self.players, round);
    }

    /// Ends all. Returns what was measured in the order of the contenders, and who was absent.
    pub fn end(mut self) -> (Vec<Measured>, Vec<(Contender, String)>) {
        let mut ended = Vec::new();
        for mut player in std::mem::take(&mut self.players) {
            match player.end() {
                Ok(()) => ended.push(player.measured.clone()),
                Err(error) => self.fail(player.measured.clone(), &error),
            }
        }
        ended.append(&mut self.failed);
        ended.sort_by_key(|measured| measured.contender);
        (ended, self.absent)
    }
}

/// The failures of our own contenders: those are errors of this benchmark.
pub fn failures_of_ours(measured: &[Measured], absent: &[(Contender, String)]) -> Vec<String> {
    let late = measured.iter().filter_map(|one| Some((one.contender, one.failure.clone()?)));
    let ours = late.chain(absent.iter().cloned()).filter(|(contender, _)| !contender.is_python());
    ours.map(|(contender, reason)| format!("{contender}: {reason}")).collect()
}

/// Every second round goes backwards, and after two rounds another one is first.
fn reorder<T>(contenders: &mut [T], round: usize) {
    if contenders.is_empty() {
        return;
    }
    contenders.rotate_left(round / 2 % contenders.len());
    if round % 2 == 1 {
        contenders.reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_contender_always_goes_first_or_follows_the_same_one() {
        for count in 2..12 {
            let rounds: Vec<Vec<usize>> = (0..3)
                .map(|round| {
                    let mut order: Vec<_> = (0..count).collect();
                    reorder(&mut order, round);
                    order
                })
                .collect();
            assert_ne!(rounds[0][0], rounds[1][0]);
            for one in 0..count {
                let before = |order: &Vec<usize>| {
                    let at = order.iter().position(|it| *it == one).unwrap();
                    at.checked_sub(1).map(|at| order[at])
                };
                assert!(rounds.iter().any(|order| before(order) != before(&rounds[0])), "{one} of {rounds:?}");
            }
        }
        reorder::<usize>(&mut [], 3);
    }
}
