//! When the events of a run happen.

use anyhow::{Context, Result};

use crate::choices::{Accum, Cell, Overflow};
use crate::data::{self, Windows};

/// After how many windows the run is interrupted and resumed, within an epoch.
pub fn resumed_at(cell: &Cell) -> usize {
    if cell.accumulator == Accum::Off { 5 } else { 4 }
}

/// After how many windows the bias is unfrozen.
pub const UNFROZEN_AT: usize = 2;

/// Where a loss is made infinite; none: nowhere. With several ranks, one rank's infinity reaches all.
pub struct Planted(Option<Place>);

#[derive(Clone, Copy)]
struct Place {
    window: usize,
    micro: usize,
    rank: usize,
    pass: usize,
}

impl Planted {
    pub fn of(cell: &Cell, ranks: &[Windows]) -> Result<Self> {
        let all = &ranks[0];
        let ends_epoch = all.ends_epoch.iter().position(|ends| *ends).unwrap_or_default();
        // A window after the first; with accumulation one of several micro-batches.
        let later = |rank: usize| {
            let is_open = |window: &Vec<_>| cell.accumulator == Accum::Off || window.len() > 1;
            (1..all.windows.len()).find(|&window| is_open(&ranks[rank].windows[window])).unwrap_or(1)
        };
        let (rank, pass) =
            (usize::from(cell.overflow == Overflow::OneRank), 1 + usize::from(cell.overflow == Overflow::Second));
        let (window, wants_first) = match cell.overflow {
            Overflow::Never => return Ok(Self(None)),
            Overflow::First => (0, false),
            Overflow::Open => (later(rank), true),
            Overflow::Short => (ends_epoch, false),
            Overflow::OneRank => (later(rank), true),
            Overflow::Resumed => (resumed_at(cell), false),
            Overflow::Second => (later(rank), false),
        };
        // A micro-batch that counts 0 has no backward pass.
        let counts = |window: usize, micro: &usize| data::count(cell, &ranks[rank].windows[window][*micro]) > 0;
        let in_window = |window: usize| -> Option<usize> {
            let micros = 0..ranks[rank].windows[window].len();
            match wants_first {
                true => micros.into_iter().find(|micro| counts(window, micro)),
                false => micros.into_iter().rev().find(|micro| counts(window, micro)),
            }
        };
        let found = (window..all.windows.len()).find_map(|window| Some((window, in_window(window)?)));
        let (window, micro) = found.context("no window has anything to overflow in")?;
        Ok(Self(Some(Place { window, micro, rank, pass })))
    }

    pub fn is_at(&self, window: usize, micro: usize, rank: usize, pass: usize) -> bool {
        self.0.is_some_and(|place| (window, micro, rank, pass) == (place.window, place.micro, place.rank, place.pass))
    }
}
