//! Gathers and frees units, in step with the other ranks.

use std::collections::{HashMap, VecDeque};

use overdrive_core::{Growth, Parameter};
use overdrive_ffi::host_memory::read_ahead;
use overdrive_ffi::{TensorId, bump_version};

use super::agreement::Agreed;
use super::gather::{Gather, Packed};
use super::home::{Home, OffloadPolicy};
use super::meeting::{Event, Meeting};
use super::order::Order;
use super::param::ShardedParam;
use super::ranks::Ranks;
use super::unit::{UnitState, Whole};
use crate::error::ShardError;
use crate::link::Link;

pub(super) const PART: &str = "FullyShardedDataParallel";

pub(super) const LOCAL: &str = "backward passes have left gradients local since the last exchange: end `no_sync` before a \
                                window's last pass, or zero the gradients";

/// How much is remembered of what was exchanged at most.
const LOG: usize = 10_000;

/// Something that was exchanged or freed, for those who look at the order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exchange {
    /// A gather of this unit's whole parameters was started.
    GatherStarted(String),
    /// It was waited for, because the unit computes now.
    GatherUsed(String),
    /// The unit's whole parameters were freed.
    Freed(String),
    /// The mean of the unit's gradients was started.
    ReductionStarted(String),
}

/// All units, and what is under way.
pub(super) struct Engine {
    pub(super) ranks: Ranks,
    pub(super) home: Home,
    pub(super) link: Link,
    pub(super) units: Vec<UnitState>,
    /// The unit of each parameter and its index there, in the order of the model.
    pub(super) places: Vec<(usize, usize)>,
    /// Tells of parameters that the model gets after it was sharded.
    pub(super) growth: Option<Growth>,
    pub(super) meeting: Meeting,
    pub(super) order: Order,
    pub(super) prefetches: bool,
    /// The backward pass under way.
    pub(super) pass: Option<Pass>,
    /// Passes leave gradients local.
    pub(super) held: bool,
    /// How many have done so since gradients were last averaged or freed.
    pub(super) window: u64,
    /// Forwards under way, one within the other.
    pub(super) depth: usize,
    /// A failure that all ranks know of has ended what is under way.
    pub(super) is_known: bool,
    /// Gathers that only other ranks need.
    discarded: Vec<Gather>,
    /// Since the last pass began.
    pub(super) log: Vec<Exchange>,
}

#[derive(Default)]
pub(super) struct Pass {
    /// What was wrong with a gradient.
    pub(super) refused: Option<ShardError>,
    /// Units whose means are under way, the first sent first.
    pub(super) under_way: VecDeque<usize>,
}

/// Memory for a unit, and for the next one.
#[derive(Default)]
struct Prepared {
    own: Option<Gather>,
    ahead: Option<(usize, Gather)>,
}

impl Engine {
    pub(super) fn new(ranks: &Ranks) -> Result<Self, ShardError> {
        let (meeting, ranks) = (Meeting::new(&ranks.all)?, ranks.clone());
        Ok(Self {
            // Before the first unit, there is nothing to keep.
            home: Home::open(&OffloadPolicy::None, ranks.all.device())?,
            ranks,
            link: Link::default(),
            units: Vec::new(),
            places: Vec::new(),
            growth: None,
            meeting,
            order: Order::default(),
            prefetches: true,
            pass: None,
            held: false,
            window: 0,
            depth: 0,
            is_known: false,
            discarded: Vec::new(),
            log: Vec::new(),
        })
    }

    fn log(&mut self, made: fn(String) -> Exchange, unit: usize) {
        if self.log.len() == LOG {
            self.log.clear();
        }
        let made = made(self.units[unit].name.clone());
        self.log.push(made);
    }

    /// All parameters, in the order of the model.
    pub(super) fn params(&self) -> impl Iterator<Item = &ShardedParam> {
        self.places.iter().map(|&(unit, index)| &self.units[unit].params[index])
    }

    /// Puts the parameters into the order of the model, which has all of them, under its names.
    pub(super) fn put_in_order(&mut self, model: &[Parameter]) {
        let order: HashMap<TensorId, usize> = model.iter().map(|it| TensorId::of(it.tensor())).zip(0..).collect();
        let mut places = Vec::new();
        for (number, unit) in self.units.iter_mut().enumerate() {
            for (index, param) in unit.params.iter_mut().enumerate() {
                if let Some(&at) = order.get(&TensorId::of(param.whole())) {
                    param.rename(model[at].name());
                    places.push((at, (number, index)));
                }
            }
        }
        places.sort_by_key(|(at, _)| *at);
        self.places = places.into_iter().map(|(_, place)| place).collect();
    }

    /// A unit computes next: its whole parameters are here afterwards, and those of the next are on their way.
    pub(super) fn come_to(&mut self, event: Event, unit: usize) -> Result<(), ShardError> {
        let is_stale = !matches!(event, Event::Backward(_)) && self.units[unit].is_stale();
        let renewed = if is_stale { self.forget(unit) } else { Ok(()) };
        let renewed = renewed.and_then(|()| self.make_room());
        let prepared = renewed.and_then(|()| self.prepare(unit, self.next(event)));
        let (prepared, own) = match prepared {
            Ok(prepared) => (prepared, Ok(())),
            Err(error) => (Prepared::default(), Err(error)),
        };
        let agreed = self.meet(event, own)?;
        self.carry_out(&agreed, unit, prepared)?;
        self.order.record(event);
        self.look_further(event);
        Ok(())
    }

    /// Starts to read the rows of units that come after the one which is gathered ahead.
    fn look_further(&mut self, event: Event) {
        let mut second = self.next(event).and_then(|ahead| self.next(event.at(ahead)));
        if let Some(unit) = second.filter(|_| self.home.uploads()) {
            if self.units[unit].is_lacking() && self.units[unit].packed.is_none() {
                // What fails is tried again when it is needed.
                self.units[unit].packed = Packed::new(&self.units[unit].params, &self.home).ok();
            }
            second = self.next(event.at(unit));
        }
        if let Some(unit) = second.filter(|_| self.home.is_on_disk()) {
            self.units[unit].params.iter().for_each(|param| read_ahead(param.shard.tensor()));
        }
    }

    /// Forgets whole parameters of which some rank has changed its shards since, other than by the optimizer.
    fn forget(&mut self, unit: usize) -> Result<(), ShardError> {
        if let Whole::Coming(gather) = std::mem::replace(&mut self.units[unit].whole, Whole::Freed) {
            self.discarded.push(gather);
            return Ok(());
        }
        let freed = self.units[unit].free();
        // A graph that was made of the old values cannot run any more.
        self.units[unit].params.iter().for_each(|param| bump_version(param.whole()));
        freed
    }

    /// Frees the buffers of means that were started, where others are to be started: before memory for gathers is taken. Not
    /// all ranks do, so nothing is sent.
    fn make_room(&mut self) -> Result<(), ShardError> {
        if !self.units.iter().any(|unit| unit.is_trained() && unit.is_ready() && !unit.is_sent) {
            return Ok(());
        }
        let under_way: Vec<usize> = self.pass.iter().flat_map(|pass| pass.under_way.iter().copied()).collect();
        let waited = under_way.into_iter().try_for_each(|unit| self.units[unit].wait_for_parts());
        self.link.watch(waited)
    }

    fn prepare(&mut self, unit: usize, ahead: Option<usize>) -> Result<Prepared, ShardError> {
        let mut gather = |unit: usize| self.units[unit].is_lacking().then(|| self.gather(unit)).transpose();
        let ahead = match ahead {
            Some(ahead) => gather(ahead)?.map(|it| (ahead, it)),
            None => None,
        };
        Ok(Prepared { own: gather(unit)?, ahead })
    }

    fn gather(&mut self, unit: usize) -> Result<Gather, ShardError> {
        Gather::prepare(self.units[unit].pack(&self.home)?, self.ranks.parts.size())
    }

    /// The unit that this rank would gather ahead.
    pub(super) fn next(&self, event: Event) -> Option<usize> {
        self.prefetches.then(|| self.order.next(event)).flatten()
    }

    /// The exchanges that all ranks have agreed on. All are started before one is waited for: whatever fails on this rank
    /// then, the others do not wait for it.
    fn carry_out(&mut self, agreed: &Agreed, unit: usize, prepared: Prepared) -> Result<(), ShardError> {
        self.send_ready(&agreed.ready)?;
        let own = match agreed.lacking[unit] {
            true => Some(self.start(unit, prepared.own)?),
            false => None,
        };
        // Where some have an old one, all get the new one at once, when the unit computes; a backward pass is refused then.
        let is_same = |unit: usize| match agreed.event {
            Event::Forward(_) => agreed.freed[unit] || !agreed.changed[unit],
            _ => !agreed.changed[unit],
        };
        let is_ahead = |it: &usize| agreed.lacking[*it] && is_same(*it);
        if let Some(ahead) = agreed.ahead.filter(is_ahead) {
            let own = prepared.ahead.filter(|(unit, _)| *unit == ahead).map(|(_, gather)| gather);
            let gather = self.start(ahead, own)?;
            match &mut self.units[ahead].whole {
                whole @ Whole::Freed => *whole = Whole::Coming(gather),
                // Here already: only the others need it.
                _ => self.discarded.push(gather),
            }
        }
        // Another rank's rows may be new, where this one has the old ones.
        let is_old = agreed.changed[unit] && own.is_some() && !self.units[unit].is_lacking();
        let forgotten = if is_old { self.forget(unit) } else { Ok(()) };
        if let Err(error) = forgotten {
            self.discarded.extend(own);
            return Err(error);
        }
        let gather = match (std::mem::replace(&mut self.units[unit].whole, Whole::Freed), own) {
            (Whole::Here, own) => {
                self.units[unit].whole = Whole::Here;
                self.discarded.extend(own);
                return Ok(());
            }
            (Whole::Coming(coming), own) => {
                self.discarded.extend(own);
                coming
            }
            (Whole::Freed, Some(own)) => own,
            // Nobody lacks it, so it is here.
            (Whole::Freed, None) => return Ok(()),
        };
        let finished = gather.finish(&mut self.units[unit].params, self.ranks.parts.size());
        self.units[unit].versions = self.link.watch(finished)?;
        self.units[unit].whole = Whole::Here;
        self.log(Exchange::GatherUsed, unit);
        Ok(())
    }

    /// Does as the other ranks, and keeps nothing.
    pub(super) fn come_along(&mut self, agreed: &Agreed, unit: usize) -> Result<(), ShardError> {
        self.carry_out(agreed, unit, Prepared::default())?;
        self.order.record(agreed.event);
        self.free(unit)
    }

    /// After an agreement: the other ranks do the same, and wait for this one.
    fn start(&mut self, unit: usize, prepared: Option<Gather>) -> Result<Gather, ShardError> {
        let prepared = match prepared {
            Some(gather) => Ok(gather),
            None => self.gather(unit),
        };
        let started = prepared.and_then(|mut gather| {
            gather.start(&self.ranks.parts)?;
            Ok(gather)
        });
        if started.is_err() {
            self.link.breaks();
        }
        self.log(Exchange::GatherStarted, unit);
        started
    }

    /// Starts the means of units whose gradients all ranks have; waits for those that were started before, so that their
    /// buffers are freed.
    fn send_ready(&mut self, ready: &[bool]) -> Result<(), ShardError> {
        let units: Vec<usize> = (0..ready.len()).filter(|&unit| ready[unit]).collect();
        if !units.is_empty() {
            self.wait_for_means()?;
        }
        units.into_iter().try_for_each(|unit| self.send(unit))
    }

    pub(super) fn send(&mut self, unit: usize) -> Result<(), ShardError> {
        let sent = self.units[unit].take_rest().and_then(|()| self.units[unit].send(&self.ranks));
        // The others have started it already.
        if sent.is_err() && self.ranks.all.size() > 1 {
            self.link.breaks();
        }
        sent?;
        if let Some(pass) = &mut self.pass {
            pass.under_way.push_back(unit);
        }
        self.log(Exchange::ReductionStarted, unit);
        Ok(())
    }

    pub(super) fn wait_for_means(&mut self) -> Result<(), ShardError> {
        let under_way = self.pass.as_mut().map(|pass| std::mem::take(&mut pass.under_way)).unwrap_or_default();
        for unit in under_way {
            let waited = self.units[unit].wait(&mut self.home);
            self.link.watch(waited)?;
        }
        Ok(())
    }

    /// Frees a unit's whole parameters, if they are here.
    pub(super) fn free(&mut self, unit: usize) -> Result<(), ShardError> {
        if matches!(self.units[unit].whole, Whole::Here) {
            self.log(Exchange::Freed, unit);
            return self.units[unit].free();
        }
        Ok(())
    }

    /// Frees all units, also those that were gathered ahead.
    pub(super) fn free_all(&mut self) -> Result<(), ShardError> {
        let waited = self.discarded.drain(..).try_for_each(Gather::discard);
        let mut freed = self.link.watch(waited);
        for unit in 0..self.units.len() {
            self.units[unit].packed = None;
            let own = match std::mem::replace(&mut self.units[unit].whole, Whole::Freed) {
                Whole::Coming(gather) => {
                    let waited = gather.discard();
                    self.link.watch(waited)
                }
                whole => {
                    self.units[unit].whole = whole;
                    self.free(unit)
                }
            };
            freed = freed.and(own);
        }
        freed
    }

    /// Ends what is under way after a failure.
    pub(super) fn reset(&mut self) {
        self.pass = None;
        self.order.cut();
        self.home.forget();
        self.discarded.clear();
        self.units.iter_mut().for_each(UnitState::reset);
    }
}
