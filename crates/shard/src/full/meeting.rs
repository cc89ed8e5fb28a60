//! What ranks tell one another before each exchange: so that all make the same one, or none.

use overdrive_ddp::{ProcessGroup, Work};
use tch::{Device, Kind, Tensor};

use super::unit::UnitState;
use crate::error::ShardError;

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The forward of a unit.
    Forward(usize),
    /// The same within a backward pass, for activation checkpointing.
    Recompute(usize),
    /// The backward of a unit.
    Backward(usize),
    /// The end of a backward pass that averages.
    End,
    /// The end of one that leaves gradients local.
    EndHeld,
    /// A backward pass with nothing to compute: it takes part in the exchanges of the others.
    Follow,
    /// An optimizer's step begins.
    Step,
    /// It has ended.
    Stepped,
    /// Gradients are clipped.
    Clip,
    /// Ranks agree on skipping a step.
    Skip,
    /// A number is summed over the ranks.
    Sum,
    /// A state is gathered.
    Save,
    /// This rank has failed between exchanges.
    Failed,
}

const EVENTS: [(Event, &str); 10] = [
    (Event::End, "the end of a backward pass"),
    (Event::EndHeld, "the end of a backward pass that leaves gradients local"),
    (Event::Follow, "a backward pass with nothing to compute"),
    (Event::Step, "the begin of an optimizer's step"),
    (Event::Stepped, "the end of an optimizer's step"),
    (Event::Clip, "clipping"),
    (Event::Skip, "the agreement of a gradient scaler"),
    (Event::Sum, "a sum over the ranks"),
    (Event::Save, "consolidating the state"),
    (Event::Failed, "a failure"),
];

impl Event {
    /// The same for another unit.
    pub(super) fn at(self, unit: usize) -> Self {
        match self {
            Self::Forward(_) => Self::Forward(unit),
            Self::Recompute(_) => Self::Recompute(unit),
            Self::Backward(_) => Self::Backward(unit),
            other => other,
        }
    }

    /// A number for each, and the unit.
    fn encoded(self) -> (i64, i64) {
        match self {
            Self::Forward(unit) => (-3, unit as i64),
            Self::Recompute(unit) => (-2, unit as i64),
            Self::Backward(unit) => (-1, unit as i64),
            other => (EVENTS.iter().position(|(it, _)| *it == other).unwrap_or(EVENTS.len()) as i64, 0),
        }
    }

    fn decoded(kind: i64, unit: i64) -> Self {
        let unit = unit as usize;
        match kind {
            -3 => Self::Forward(unit),
            -2 => Self::Recompute(unit),
            -1 => Self::Backward(unit),
            other => EVENTS.get(other as usize).map_or(Self::Failed, |(it, _)| *it),
        }
    }

    /// What all ranks want to do together, for errors.
    pub(super) fn what(self) -> &'static str {
        match self {
            Self::Forward(_) => "the forward pass",
            Self::Recompute(_) | Self::Backward(_) | Self::End | Self::EndHeld | Self::Follow => "the backward pass",
            Self::Step | Self::Stepped => "the optimizer's step",
            other => other.what_alone(),
        }
    }

    /// What a rank comes to, for errors.
    pub(super) fn told(self, units: &[UnitState]) -> String {
        let name = |unit: usize| units.get(unit).map_or("?", |it| &it.name);
        match self {
            Self::Forward(unit) => format!("the forward of unit `{}`", name(unit)),
            Self::Recompute(unit) => format!("the forward of unit `{}` within a backward pass", name(unit)),
            Self::Backward(unit) => format!("the backward of unit `{}`", name(unit)),
            other => other.what_alone().to_owned(),
        }
    }

    fn what_alone(self) -> &'static str {
        EVENTS.iter().find(|(it, _)| *it == self).map_or("training", |(_, name)| name)
    }
}

/// What a rank says of itself.
#[derive(Clone, Debug)]
pub(super) struct Said {
    pub(super) event: Event,
    /// Why this rank cannot go on.
    pub(super) failed: Option<String>,
    /// What has to be the same on all ranks, each line a name and a value. Told are the first ones.
    pub(super) values: String,
    /// A number of all of them.
    pub(super) digest: i64,
    /// The unit that it would gather ahead.
    pub(super) ahead: Option<usize>,
    /// Its passes leave gradients local.
    pub(super) is_held: bool,
    /// How many passes have left gradients local since they were last averaged or freed.
    pub(super) held: u64,
    /// Units whose whole parameters it does not have.
    pub(super) lacking: Vec<bool>,
    /// Units whose shards it has changed since the unit was gathered.
    pub(super) changed: Vec<bool>,
    /// Units whose gradients it has, all of them.
    pub(super) ready: Vec<bool>,
    /// Parameters of which it has a gradient.
    pub(super) grads: Vec<bool>,
}

/// Bytes of a failure's text; a longer one is cut.
const TEXT: usize = 512;
const HEAD: usize = 8;
const WORDS: usize = HEAD + TEXT / 8;

impl Said {
    fn words(&self) -> Vec<i64> {
        let (kind, unit) = self.event.encoded();
        let text = self.failed.as_deref().unwrap_or(&self.values);
        let cut = text.char_indices().map(|(at, it)| at + it.len_utf8()).take_while(|end| *end <= TEXT).last();
        let text = &text.as_bytes()[..cut.unwrap_or(0)];
        let mut words = vec![kind, unit, i64::from(self.failed.is_some()), text.len() as i64, self.held as i64];
        let ahead = self.ahead.map_or(-1, |unit| unit as i64);
        words.extend([self.digest, ahead, i64::from(self.is_held)]);
        let mut padded = text.to_vec();
        padded.resize(TEXT, 0);
        words.extend(
            padded.chunks_exact(8).map(|it| it.iter().rev().fold(0, |word, &byte| word << 8 | i64::from(byte))),
        );
        for bits in [&self.lacking, &self.changed, &self.ready, &self.grads] {
            words.extend(bits.chunks(63).map(|it| it.iter().rev().fold(0, |word, &bit| word << 1 | i64::from(bit))));
        }
        words
    }

    fn read(words: &[i64], units: usize, params: usize) -> Self {
        let bytes: Vec<u8> = words[HEAD..WORDS].iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = String::from_utf8_lossy(&bytes[..(words[3] as usize).min(TEXT)]).into_owned();
        let mut rest = &words[WORDS..];
        let mut bits = |count: usize| {
            let (own, others) = rest.split_at(count.div_ceil(63));
            rest = others;
            (0..count).map(|at| own[at / 63] >> (at % 63) & 1 == 1).collect::<Vec<bool>>()
        };
        Self {
            event: Event::decoded(words[0], words[1]),
            values: if words[2] == 0 { text.clone() } else { String::new() },
            failed: (words[2] != 0).then_some(text),
            digest: words[5],
            ahead: usize::try_from(words[6]).ok(),
            is_held: words[7] != 0,
            held: words[4] as u64,
            lacking: bits(units),
            changed: bits(units),
            ready: bits(units),
            grads: bits(params),
        }
    }
}

/// Exchanges what ranks say.
pub(super) struct Meeting {
    host: ProcessGroup,
    /// What was told without waiting for the others.
    told: Option<(Work, Tensor)>,
}

impl Meeting {
    /// Every rank calls it.
    pub(super) fn new(group: &ProcessGroup) -> Result<Self, ShardError> {
        Ok(Self { host: group.of_the_host()?, told: None })
    }

    fn start(&self, said: &Said) -> Result<(Work, Tensor), ShardError> {
        let words = said.words();
        let own = Tensor::f_from_slice(&words)?;
        let size = (words.len() * self.host.size()) as i64;
        let mut all = Tensor::f_empty([size], (Kind::Int64, Device::Cpu))?;
        Ok((self.host.all_gather_into_async(&mut all, &own)?, all))
    }

    /// What each rank says, in their order.
    pub(super) fn exchange(&mut self, said: &Said) -> Result<Vec<Said>, ShardError> {
        if let Some((work, _)) = self.told.take() {
            work.wait()?;
        }
        let (work, all) = self.start(said)?;
        work.wait()?;
        let words = Vec::<i64>::try_from(&all)?;
        let length = words.len() / self.host.size();
        let (units, params) = (said.lacking.len(), said.grads.len());
        Ok(words.chunks_exact(length).map(|words| Said::read(words, units, params)).collect())
    }

    /// Says it without waiting: the other ranks hear it before their next exchange.
    pub(super) fn tell(&mut self, said: &Said) -> Result<(), ShardError> {
        if let Some((work, _)) = self.told.take() {
            work.wait()?;
        }
        self.told = Some(self.start(said)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_again() {
        let bits = |count: usize, step: usize| (0..count).map(|at| at % step == 0).collect::<Vec<_>>();
        let text = "ü".repeat(400);
        let said = Said {
            event: Event::Backward(70),
            failed: Some(text.clone()),
            values: "`max_norm` = 1.0".to_owned(),
            digest: -5,
            ahead: Some(9),
            is_held: true,
            held: 3,
            lacking: bits(71, 3),
            changed: bits(71, 5),
            ready: bits(71, 2),
            grads: bits(200, 7),
        };
        let read = Said::read(&said.words(), 71, 200);
        assert_eq!((read.event, read.held), (said.event, said.held));
        assert_eq!((read.digest, read.ahead, read.is_held), (-5, Some(9), true));
        assert_eq!(
            (read.lacking, read.changed, read.ready, read.grads),
            (said.lacking.clone(), said.changed.clone(), said.ready.clone(), said.grads.clone())
        );
        assert_eq!(read.failed.as_deref(), Some(&*"ü".repeat(256)), "cut");
        let good = Said { failed: None, event: Event::Step, ahead: None, ..said };
        let read = Said::read(&good.words(), 71, 200);
        assert_eq!((read.event, read.failed, read.ahead), (Event::Step, None, None));
        assert_eq!(read.values, good.values);
    }
}
