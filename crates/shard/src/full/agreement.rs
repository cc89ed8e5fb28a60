//! Decisions that all ranks make together, before each exchange.

use super::engine::{Engine, PART};
use super::meeting::{Event, Said};
use super::unit::{CHANGED, UnitState};
use crate::error::ShardError;

/// What all ranks have said.
pub(super) struct Agreed {
    pub(super) event: Event,
    /// The unit to gather ahead.
    pub(super) ahead: Option<usize>,
    /// Units that some rank lacks.
    pub(super) lacking: Vec<bool>,
    /// Units that all ranks lack.
    pub(super) freed: Vec<bool>,
    /// Units whose shards some rank has changed since they were gathered.
    pub(super) changed: Vec<bool>,
    /// Units whose gradients all ranks have.
    pub(super) ready: Vec<bool>,
    /// Parameters of which some rank has a gradient.
    pub(super) grads: Vec<bool>,
}

impl Engine {
    fn said(&self, event: Event, failed: Option<String>, values: String) -> Said {
        let is_held = self.held || self.pass.is_none();
        let is_ready = |unit: &UnitState| {
            let is_all = event == Event::Follow || unit.is_ready();
            unit.is_trained() && !unit.is_sent && !is_held && is_all
        };
        let units = || self.units.iter();
        Said {
            event,
            failed,
            digest: digest(&values),
            values,
            ahead: self.next(event),
            is_held: self.held,
            held: self.window,
            lacking: units().map(UnitState::is_lacking).collect(),
            changed: units().map(UnitState::is_changed).collect(),
            ready: units().map(is_ready).collect(),
            grads: units().flat_map(|unit| unit.has_grad.iter().copied()).collect(),
        }
    }

    /// Agrees with all ranks on what comes next. An error of one rank is one of all.
    pub(super) fn meet(&mut self, event: Event, own: Result<(), ShardError>) -> Result<Agreed, ShardError> {
        self.meet_with(event, own, String::new())
    }

    fn meet_with(&mut self, event: Event, own: Result<(), ShardError>, values: String) -> Result<Agreed, ShardError> {
        if let Err(broken) = self.link.check(PART) {
            return Err(own.err().unwrap_or(broken.into()));
        }
        let said = self.said(event, own.as_ref().err().map(ShardError::to_string), values);
        if self.ranks.all.size() == 1 {
            own?;
            let Said { event, ahead, lacking, changed, ready, grads, .. } = said;
            return Ok(Agreed { event, ahead, freed: lacking.clone(), lacking, changed, ready, grads });
        }
        let met = self.meeting.exchange(&said);
        let all = self.link.watch(met)?;
        if let Err(error) = own.and_then(|()| self.compare(event, &all)) {
            self.is_known = true;
            if all.iter().any(|it| it.event != all[0].event) {
                // Some ranks free gradients after such a failure, so all do.
                self.clear_grads()?;
            }
            return Err(error);
        }
        // Orders may differ, after a failure of one rank for instance: all take the same one's.
        let (leads, ahead) = leader(&all).map_or((Event::Follow, None), |rank| (all[rank].event, all[rank].ahead));
        self.is_known = false;
        let over = |of: fn(&Said) -> &Vec<bool>, is_any: bool| -> Vec<bool> {
            let at = |at: usize| match is_any {
                true => all.iter().any(|it| of(it)[at]),
                false => all.iter().all(|it| of(it)[at]),
            };
            (0..of(&all[0]).len()).map(at).collect()
        };
        let (lacking, grads) = (over(|it| &it.lacking, true), over(|it| &it.grads, true));
        let (freed, changed) = (over(|it| &it.lacking, false), over(|it| &it.changed, true));
        Ok(Agreed { event: leads, ahead, lacking, freed, changed, ready: over(|it| &it.ready, false), grads })
    }

    /// An error if a rank has failed, or does something else.
    fn compare(&self, event: Event, all: &[Said]) -> Result<(), ShardError> {
        let failed = all.iter().enumerate().find_map(|(rank, it)| Some((rank, it.failed.clone()?)));
        if let Some((rank, reason)) = failed {
            return Err(ShardError::OtherRank { what: event.what(), rank, reason });
        }
        // A rank that follows does not see what the others hold.
        let (leads, first) = leader(all).map_or((Event::Follow, 0), |rank| (all[rank].event, rank));
        let next = |rank: usize| all[rank].event.told(&self.units);
        if let Some(rank) = all.iter().position(|it| it.event != leads && it.event != Event::Follow) {
            let what = "what comes next".to_owned();
            return Err(ShardError::RanksDisagree { what, rank, found: next(rank), expected: next(first) });
        }
        if let Event::Backward(unit) = leads
            && let Some(rank) = all.iter().position(|it| it.changed[unit])
        {
            let reason = format!("parameters of unit `{}`: {CHANGED}", self.units[unit].name);
            return Err(ShardError::OtherRank { what: event.what(), rank, reason });
        }
        if let Some(rank) = all.iter().position(|it| it.event == leads && it.digest != all[first].digest) {
            let [(what, found), (_, expected)] = differing(&all[rank].values, &all[first].values);
            return Err(ShardError::RanksDisagree { what, rank, found, expected });
        }
        if !matches!(leads, Event::End | Event::EndHeld | Event::Follow) {
            return Ok(());
        }
        if let Some(rank) = all.iter().position(|it| it.is_held != all[first].is_held) {
            let what = "whether the pass leaves gradients local".to_owned();
            let [found, expected] = [rank, first].map(|rank| all[rank].is_held.to_string());
            return Err(ShardError::RanksDisagree { what, rank, found, expected });
        }
        if let Some(rank) = all.iter().position(|it| it.held != all[0].held) {
            let what = "how many passes have left gradients local".to_owned();
            let [found, expected] = [all[rank].held, all[0].held].map(|it| it.to_string());
            return Err(ShardError::RanksDisagree { what, rank, found, expected });
        }
        Ok(())
    }

    /// As [`meet`](Self::meet), where nothing but the agreement is needed.
    pub(super) fn agree(&mut self, event: Event, own: Result<(), ShardError>) -> Result<(), ShardError> {
        self.agree_on(event, own, String::new())
    }

    /// The same, and on values: each line is a name, ` = ` and a value.
    pub(super) fn agree_on(
        &mut self,
        event: Event,
        own: Result<(), ShardError>,
        values: String,
    ) -> Result<(), ShardError> {
        let agreed = self.meet_with(event, own, values).map(drop);
        self.is_known = false;
        agreed
    }

    /// Tells the other ranks of a failure between exchanges, without waiting for them.
    pub(super) fn tell(&mut self, reason: String) {
        if self.ranks.all.size() == 1 || self.is_known || self.link.check(PART).is_err() {
            return;
        }
        self.is_known = true;
        let told = self.meeting.tell(&self.said(Event::Failed, Some(reason), String::new()));
        // The others do so when they hear of it. It fails for no leaf.
        let _ = self.clear_grads();
        // The others find that this rank does not answer; the failure itself is reported here.
        let _ = self.link.watch(told);
    }

    /// A failure between exchanges, in a forward.
    pub(super) fn fail_between(&mut self, reason: String) {
        if self.pass.is_some() {
            // The pass reports it, unless what runs again is only left early because it has saved enough.
            return;
        }
        self.tell(reason);
        // The outermost one ends what is under way.
        if self.depth == 0 {
            self.is_known = false;
            self.reset();
        }
    }
}

/// The first rank that has something of its own to do.
fn leader(all: &[Said]) -> Option<usize> {
    all.iter().position(|it| it.event != Event::Follow)
}

/// A number that is another one for other text (FNV-1a).
fn digest(text: &str) -> i64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
        as i64
}

/// The first of these lines that differ: the name, and the value of each.
fn differing(found: &str, expected: &str) -> [(String, String); 2] {
    let part = |line: &str| line.split_once(" = ").map(|(name, value)| (name.to_owned(), value.to_owned()));
    let differs = found.lines().zip(expected.lines()).find(|(one, other)| one != other);
    match differs.and_then(|(one, other)| Some([part(one)?, part(other)?])) {
        Some(parts) => parts,
        // Behind what was told.
        None => ["other", "one"].map(|value| ("a value of many".to_owned(), value.to_owned())),
    }
}
