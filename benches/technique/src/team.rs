//! The contenders of a workload, who take turns.

use anyhow::Result;
use overdrive_bench_report::{Contender, Measured};

use super::player::{Player, Started, Starting};

/// Running contenders, those that have failed, and those that could not run.
#[derive(Default)]
pub struct Team {
    players: Vec<Player>,
    failed: Vec<Measured>,
    absent: Vec<(Contender, String)>,
}

impl Team {
    /// Waits until a contender is ready. One that fails is absent.
    ///
    /// # Errors
    /// When it answers with nonsense.
    pub fn join(&mut self, starting: Starting) -> Result<Option<&Player>> {
        match starting.wait()? {
            Started::Player(player) => self.players.push(*player),
            Started::Missing(contender, reason) => {
                self.absent.push((contender, reason));
                return Ok(None);
            }
        }
        Ok(self.players.last())
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

    /// The next round begins with the second contender of this one, so that no contender always follows the same one.
    pub fn rotate(&mut self) {
        if !self.players.is_empty() {
            self.players.rotate_left(1);
        }
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
