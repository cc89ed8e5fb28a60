//! The ranks that a communicator has: those that come to its file, or those of a split or a shrink.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::call::Place;
use super::code::{Code, Failure};
use super::communicator::{Communicator, Seat};
use super::lanes::Lane;

/// The color of a rank that joins no new communicator.
pub const NO_COLOR: i32 = -1;

/// The number of a device on the machine. Two processes that see different devices number them differently; this number
/// is the same for both.
pub fn physical(device: usize) -> u64 {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let number = visible.split(',').nth(device).and_then(|number| number.trim().parse().ok());
    number.unwrap_or(device as u64)
}

/// Whether all ranks have come. `may_look` allows it to look for their processes.
pub fn have_come(seat: &Seat, may_look: impl Fn() -> bool) -> Result<bool, Failure> {
    let (head, place) = (seat.lanes.head(), seat.place);
    let devices: Vec<Option<u64>> = (0..place.ranks).map(|rank| head.device(rank)).collect();
    if devices.contains(&None) {
        let is_gone = |rank: &usize| head.is_alive(*rank) == Some(false);
        let gone = if may_look() { (0..place.ranks).find(is_gone) } else { None };
        return gone.map_or(Ok(false), |rank| Err(ended(rank)));
    }
    // All ranks have it open. Only one of them finds it to remove.
    let _ = std::fs::remove_file(&seat.path);
    let own = devices[place.rank];
    let same = devices.iter().enumerate().find(|(rank, device)| *rank != place.rank && **device == own);
    match (same, own) {
        (Some((rank, _)), Some(device)) => {
            let [one, other] = [place.rank.min(rank), place.rank.max(rank)];
            let text = format!("Duplicate GPU detected : rank {one} and rank {other} both on CUDA device {device}");
            Err(Failure::new(Code::INVALID_USAGE, text))
        }
        _ => Ok(true),
    }
}

/// The failure for a rank whose process is gone.
pub fn ended(rank: usize) -> Failure {
    Failure::new(Code::REMOTE, format!("the process of rank {rank} has ended"))
}

/// A rank's part in a split of another communicator.
pub struct Exchange {
    parent: Arc<Communicator>,
    number: u64,
    color: i32,
}

impl Exchange {
    /// Tells the other ranks where this rank goes.
    pub fn begin(parent: &Arc<Communicator>, color: i32, key: i32) -> Result<Self, Failure> {
        let seat = parent.ready()?;
        let mut counters = parent.counters();
        let number = counters.splits;
        seat.lanes.post(Lane::Members(seat.place.rank), [u64::from(color as u32), u64::from(key as u32), 0], &[])?;
        counters.splits += 1;
        Ok(Self { parent: parent.clone(), number, color })
    }

    /// The file of the new communicator, and this rank's place in it, once all ranks have said where they go.
    pub fn go_on(&self) -> Result<Option<(PathBuf, Place)>, Failure> {
        let parent = &self.parent;
        let Some(seat) = parent.seat() else { return Err(Failure::new(Code::INTERNAL, "there is no seat")) };
        let (lanes, place) = (&seat.lanes, seat.place);
        let mut counters = parent.counters();
        let mut members = Vec::new();
        for rank in 0..place.ranks {
            let (lane, said) = (Lane::Members(rank), counters.members.entry(rank).or_default());
            while let Some(record) = lanes.next(lane)? {
                said.push((record.words[0] as u32 as i32, record.words[1] as u32 as i32));
                lanes.skip(lane, record);
            }
            match said.get(self.number as usize) {
                Some((color, key)) if *color == self.color => members.push((*key, rank)),
                Some(_) => {}
                None => {
                    let is_gone = parent.may_look() && lanes.head().is_alive(rank) == Some(false);
                    return if is_gone { Err(ended(rank)) } else { Ok(None) };
                }
            }
        }
        members.sort_unstable();
        let own = members.iter().position(|(_, rank)| *rank == place.rank);
        let own = own.ok_or_else(|| Failure::new(Code::INTERNAL, "a rank is not in its own split"))?;
        let path = beside(&seat.path, &format!("-s{}.{}", self.number, self.color));
        Ok(Some((path, Place { rank: own, ranks: members.len() })))
    }
}

fn beside(path: &Path, rest: &str) -> PathBuf {
    let mut path = OsString::from(path);
    path.push(rest);
    path.into()
}

/// The file and this rank's place when some ranks are left out. Those ranks do not make this call.
pub fn without(parent: &Communicator, excluded: &[usize]) -> Result<(PathBuf, Place), Failure> {
    let Some(seat) = parent.seat() else {
        return Err(Failure::new(Code::INVALID_ARGUMENT, "the communicator has not begun"));
    };
    let place = seat.place;
    if excluded.is_empty() || excluded.contains(&place.rank) || excluded.iter().any(|rank| *rank >= place.ranks) {
        return Err(Failure::new(Code::INVALID_ARGUMENT, "ranks that cannot be left out"));
    }
    let stay: Vec<usize> = (0..place.ranks).filter(|rank| !excluded.contains(rank)).collect();
    let names: Vec<String> = stay.iter().map(usize::to_string).collect();
    let key = names.join(".");
    let mut counters = parent.counters();
    let number = counters.shrinks.entry(key.clone()).or_default();
    *number += 1;
    let path = beside(&seat.path, &format!("-k{number}.{key}"));
    let rank = stay.iter().position(|rank| *rank == place.rank).unwrap_or(0);
    Ok((path, Place { rank, ranks: stay.len() }))
}
