//! A loader's position, and how it is saved.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use overdrive_core::{Entry, StateDict, StateError, TorchError};
use tch::{Kind, Tensor};

use crate::generator::{Generator, STATE_BYTES};
use crate::loader::lane::LanePosition;
use crate::loader::other_ranks::{EARLIER, Earlier, RANKS, RankBatches};
use crate::loader::ranges::Ranges;

/// The entry of the generator's state.
const GENERATOR: &str = "generator";

/// A source's position after a batch; `None` for a dataset, where the batch's number is enough.
pub(crate) type Mark = Option<Box<StreamMark>>;

/// The positions of a stream's lanes, and which lane's turn it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StreamMark {
    pub(crate) turn: usize,
    /// By the lane's number among all ranks.
    pub(crate) lanes: BTreeMap<usize, LanePosition>,
}

/// The limits that a saved position of this loader must keep.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    /// The batches of an epoch, where that is known.
    pub(crate) batches: Option<usize>,
    /// Where a position counts the batches of this rank's own rather than those of all ranks.
    pub(crate) ranks: Option<RankBatches>,
    /// `None` for a dataset.
    pub(crate) lanes: Option<LaneBounds>,
    /// Whether orders are drawn from a generator.
    pub(crate) generator: bool,
}

/// The limits for the lanes of a stream.
#[derive(Clone, Debug)]
pub(crate) struct LaneBounds {
    /// How many lanes all ranks have, and the numbers of this rank's.
    pub(crate) all: usize,
    pub(crate) own: Vec<usize>,
    pub(crate) window: usize,
    /// Whether the stream starts another pass at its end.
    pub(crate) repeat: bool,
}

/// The batches of an epoch that the training loop has had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) epoch: u64,
    /// All batches below this number were delivered.
    pub(crate) batch: usize,
    /// How many of the numbers do not count as batches of this epoch: with `batches_per_epoch`, those whose samples
    /// were all bad; for a stream, those that the epoch before had delivered.
    pub(crate) extra: usize,
    /// Delivered batches with numbers above `batch`; only `in_order(false)` has any.
    pub(crate) ahead: BTreeMap<usize, Mark>,
    /// Further numbers above `batch`, delivered before the state was saved, that the source has not reached again yet.
    pub(crate) before: BTreeSet<usize>,
    pub(crate) mark: Mark,
    /// Other numbers of ranks that had this epoch before; this position counts what they left.
    pub(crate) earlier: Vec<Earlier>,
    /// The state from which the generator draws this epoch's order; none before it has, unless it is known already.
    pub(crate) generator: Option<Arc<[u8]>>,
}

/// The position of a running epoch, and earlier positions, for batches that a caller took before it uses them
/// (`overdrive_core::take_ahead`, as gradient accumulation does).
#[derive(Clone, Debug, Default)]
pub(crate) struct EpochPosition {
    now: Position,
    /// The position before each batch that was taken and is not used yet, oldest first.
    earlier: VecDeque<Position>,
    /// `Some` for a stream, whose next epoch continues where this one ends.
    lanes: Option<LaneBounds>,
    /// Whether the epoch has ended, so that `now` is where the next one begins.
    over: bool,
}

/// What the training loop gets for a batch number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    Batch,
    /// A batch that a caller takes before it uses it.
    Ahead,
    /// Nothing: all samples were bad, or the batch was delivered before the state was saved.
    Nothing,
    /// Nothing, and another batch is made in its place.
    Later,
}

impl EpochPosition {
    pub(crate) fn new(now: Position, lanes: Option<LaneBounds>) -> Self {
        Self { now, earlier: VecDeque::new(), lanes, over: false }
    }

    pub(crate) fn now(&self) -> &Position {
        &self.now
    }

    /// What the training loop has used: without the batches that were only taken ahead.
    pub(crate) fn trained(&self) -> &Position {
        self.earlier.front().unwrap_or(&self.now)
    }

    /// Records a batch that leaves the loader.
    pub(crate) fn delivered(&mut self, number: usize, mark: Mark, given: Given) {
        if given == Given::Ahead {
            self.earlier.push_back(self.now.clone());
        }
        self.now.extra += usize::from(given == Given::Later);
        self.now.delivered(number, mark);
    }

    /// Records that the training loop gets the oldest of the batches that were taken ahead.
    pub(crate) fn handed_out(&mut self) {
        self.earlier.pop_front();
    }

    /// Records the end of the epoch. A caller that takes batches ahead gets here before the last ones are trained on.
    pub(crate) fn ended(&mut self) {
        let repeating = self.lanes.as_ref().filter(|lanes| lanes.repeat);
        self.now = match repeating {
            Some(lanes) => self.now.followed(lanes),
            None => Position::start_of(self.now.epoch.saturating_add(1)),
        };
        self.over = true;
    }

    /// Records that the epoch was dropped early: the next epoch of a stream continues there.
    pub(crate) fn broken_off(&mut self) {
        if let (Some(lanes), false) = (&self.lanes, self.over) {
            (self.now, self.over) = (self.now.followed(lanes), true);
            // Batches that were taken ahead may still be trained on.
            self.earlier.iter_mut().for_each(|position| *position = position.followed(lanes));
        }
    }

    /// Where the next epoch begins.
    pub(crate) fn following(&self) -> Position {
        match (&self.lanes, self.earlier.front()) {
            // Batches were taken ahead and never used: the next epoch of a stream begins with them.
            (Some(_), Some(held)) if self.over && held.epoch == self.now.epoch => held.clone(),
            (Some(lanes), Some(held)) if self.over && lanes.repeat => held.followed(lanes),
            _ if self.over => self.now.clone(),
            (Some(lanes), _) => self.trained().followed(lanes),
            (None, _) => Position::start_of(self.now.epoch.saturating_add(1)),
        }
    }
}

/// The settings that must be equal for a position to mean the same batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) stream: bool,
    /// Samples of a dataset, shards of a stream.
    pub(crate) len: usize,
    /// Samples that all ranks together take in one step; 0 where batches vary in size.
    pub(crate) global_batch_size: usize,
    pub(crate) seed: u64,
    /// The other options that the order depends on.
    pub(crate) order: Vec<(&'static str, i64)>,
}

impl Position {
    pub(crate) fn start_of(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// How many of this epoch's batches are done.
    pub(crate) fn taken(&self) -> usize {
        (self.batch + self.ahead.len() + self.before.len()).saturating_sub(self.extra)
    }

    /// Where the next epoch begins when this one ends here.
    fn followed(&self, lanes: &LaneBounds) -> Self {
        let had = self.ahead.keys().chain(&self.before).map(|number| number - self.batch);
        let (before, epoch) = (had.collect::<BTreeSet<_>>(), self.epoch.saturating_add(1));
        // Without a mark no batch was delivered in order: any that were delivered out of order count from the start of
        // the epoch's pass.
        let start = |_| LanePosition::start_of(self.epoch);
        let start = || StreamMark { turn: 0, lanes: lanes.own.iter().map(|&lane| (lane, start(lane))).collect() };
        let mark = self.mark.clone().or_else(|| (!before.is_empty()).then(|| Box::new(start())));
        Self { epoch, extra: before.len(), before, mark, ..Self::default() }
    }

    /// Records a batch that the training loop gets now, or has had before.
    pub(crate) fn delivered(&mut self, number: usize, mark: Mark) {
        self.before.remove(&number);
        self.ahead.insert(number, mark);
        while let Some(mark) = self.ahead.remove(&self.batch) {
            self.batch += 1;
            self.mark = mark;
        }
    }

    /// `order` is a checksum of the epoch's order, where the identity does not determine it.
    pub(crate) fn save(
        &self,
        identity: &Identity,
        bounds: &Bounds,
        order: Option<u32>,
    ) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        for (key, value) in identity.entries() {
            state.insert(key, Entry::Int(value));
        }
        state.insert("epoch", Entry::Int(self.epoch as i64));
        state.insert("batch", Entry::Int(self.batch as i64));
        let ahead = Ranges(self.ahead.keys().chain(&self.before).copied().collect());
        state.insert("ahead", Entry::Text(ahead.to_string()));
        if self.extra > 0 {
            state.insert("extra", Entry::Int(self.extra as i64));
        }
        if let Some(ranks) = &bounds.ranks {
            state.insert(RANKS, Entry::Int(ranks.rank.world_size as i64));
        }
        if !self.earlier.is_empty() {
            let earlier: Vec<String> = self.earlier.iter().map(Earlier::to_string).collect();
            state.insert(EARLIER, Entry::Text(earlier.join(" ")));
        }
        if let Some(order) = order {
            state.insert("order", Entry::Int(i64::from(order)));
        }
        if let Some(mark) = &self.mark {
            state.insert("turn", Entry::Int(mark.turn as i64));
            for (lane, position) in &mark.lanes {
                state.insert(format!("lane.{lane}"), Entry::Text(position.to_string()));
            }
        }
        if let Some(generator) = &self.generator {
            state.insert(GENERATOR, Entry::Tensor(Tensor::f_from_slice(generator).map_err(TorchError::from)?));
        }
        Ok(state)
    }

    /// Reads a state, which must be of a loader with the same `identity` and the same order in the saved epoch.
    pub(crate) fn load(
        state: &StateDict,
        identity: &Identity,
        bounds: &Bounds,
        order: impl Fn(u64) -> Result<Option<u32>, StateError>,
    ) -> Result<Self, StateError> {
        for (key, expected) in identity.entries() {
            let found = state.int(key)?;
            if found != expected {
                return Err(mismatch(key, expected, found));
            }
        }
        let mut position = Self::start_of(natural(state, "epoch")?);
        position.batch = natural(state, "batch")? as usize;
        let ahead = text(state, "ahead")?;
        let Ranges(before) = ahead.parse().map_err(|()| mismatch("ahead", "numbers of batches", ahead))?;
        position.before = before;
        if bounds.lanes.is_some() && state.get("extra").is_ok() {
            position.extra = natural(state, "extra")? as usize;
            let most = position.batch.saturating_add(position.before.len());
            if position.extra > most {
                return Err(mismatch("extra", format!("at most {most}"), position.extra));
            }
        }
        let mut known = vec!["epoch", "batch", "ahead"];
        let mut batches = bounds.batches.map(|batches| batches.saturating_add(position.extra));
        if let Some(ranks) = &bounds.ranks {
            ranks.load(&mut position, state)?;
            batches = Some(ranks.len(&position.earlier));
            known.extend([RANKS, EARLIER]);
        }
        if let Some(batches) = batches {
            if position.batch > batches {
                return Err(mismatch("batch", format!("at most {batches}"), position.batch));
            }
            if position.before.last().is_some_and(|&last| last >= batches) {
                return Err(mismatch("ahead", format!("numbers below {batches}"), ahead));
            }
        }
        if position.before.first().is_some_and(|&first| first < position.batch) {
            return Err(mismatch("ahead", format!("numbers from {} on", position.batch), ahead));
        }
        // Before the first batch, a state has no lanes where they are at the start of the epoch's pass.
        let has_lanes = position.batch > 0 || state.iter().any(|(key, _)| is_of_lanes(key));
        if let Some(lanes) = bounds.lanes.as_ref().filter(|_| has_lanes) {
            position.mark = Some(Box::new(lanes.load(state, identity.len, position.epoch)?));
        }
        let expected = order(position.epoch)?;
        // An epoch of which no batch was delivered may be drawn yet.
        if bounds.generator && (position.taken() > 0 || state.get(GENERATOR).is_ok()) {
            position.generator = Some(generator(state)?);
            known.push(GENERATOR);
        }
        if bounds.lanes.is_some() {
            known.push("extra");
        }
        if let Some(expected) = expected {
            known.push("order");
            let found = state.int("order")?;
            if found != i64::from(expected) {
                let expected = format!("{expected}, which is the sampler's order in epoch {}", position.epoch);
                return Err(mismatch("order", expected, found));
            }
        }
        let marked = position.mark.is_some();
        let unknown = |key: &str| {
            let own = known.contains(&key) || (marked && is_of_lanes(key));
            !own && !identity.entries().iter().any(|(entry, _)| *entry == key)
        };
        match state.iter().find(|(key, _)| unknown(key)) {
            Some((key, _)) => Err(StateError::Unexpected { key: key.to_owned() }),
            None => Ok(position),
        }
    }
}

impl LaneBounds {
    fn load(&self, state: &StateDict, shards: usize, epoch: u64) -> Result<StreamMark, StateError> {
        let turn = natural(state, "turn")? as usize;
        if turn >= self.own.len() {
            return Err(mismatch("turn", format!("a number below {}", self.own.len()), turn));
        }
        let mut lanes = BTreeMap::new();
        for (key, _) in state.iter().filter(|(key, _)| key.starts_with("lane.")) {
            let number = key["lane.".len()..].parse().ok().filter(|&number: &usize| number < self.all);
            let number = number.ok_or_else(|| StateError::Unexpected { key: key.to_owned() })?;
            lanes.insert(number, self.position(key, text(state, key)?, shards.div_ceil(self.all), epoch)?);
        }
        // The state may have other ranks' lanes too, but must have this rank's.
        match self.own.iter().find(|number| !lanes.contains_key(number)) {
            Some(number) => Err(StateError::Missing { key: format!("lane.{number}") }),
            None => Ok(StreamMark { turn, lanes }),
        }
    }

    fn position(&self, key: &str, found: &str, shards: usize, epoch: u64) -> Result<LanePosition, StateError> {
        let expected = "pass, shard, item, window and offset in the window, within this stream's limits";
        let wrong = || mismatch(key, expected, found);
        let position: LanePosition = found.parse().map_err(|()| wrong())?;
        let reached = position.window_start.shard <= shards
            && position.taken <= self.window
            && (self.repeat || position.pass <= epoch)
            // Counters of items, which no run brings that far; bounded so that they cannot overflow.
            && position.pass.max(position.window).max(position.window_start.sample) < 1 << 53;
        if reached { Ok(position) } else { Err(wrong()) }
    }
}

impl Identity {
    fn entries(&self) -> Vec<(&'static str, i64)> {
        let mut entries = vec![
            (if self.stream { "shards" } else { "samples" }, self.len as i64),
            ("global_batch_size", self.global_batch_size as i64),
            ("seed", self.seed as i64),
            // Since version 2, a stream's lanes count passes over the whole run instead of within an epoch.
            ("version", if self.stream { 2 } else { 1 }),
        ];
        entries.extend(&self.order);
        entries
    }
}

/// The saved state of the generator.
fn generator(state: &StateDict) -> Result<Arc<[u8]>, StateError> {
    let saved = state.tensor(GENERATOR, &[STATE_BYTES as i64], Kind::Uint8)?;
    let saved = Vec::<u8>::try_from(saved).map_err(TorchError::from)?;
    match Generator::restored(&saved, false) {
        Some(_) => Ok(saved.into()),
        None => Err(mismatch(GENERATOR, "the state of a CPU generator", "another one")),
    }
}

fn is_of_lanes(key: &str) -> bool {
    key == "turn" || key.starts_with("lane.")
}

pub(super) fn natural(state: &StateDict, key: &str) -> Result<u64, StateError> {
    let value = state.int(key)?;
    u64::try_from(value).map_err(|_| mismatch(key, "0 or more", value))
}

pub(super) fn text<'a>(state: &'a StateDict, key: &str) -> Result<&'a str, StateError> {
    match state.get(key)? {
        Entry::Text(text) => Ok(text),
        other => Err(mismatch(key, "a string", format!("{other:?}"))),
    }
}

pub(super) fn mismatch(key: &str, expected: impl ToString, found: impl ToString) -> StateError {
    StateError::Mismatch { key: key.to_owned(), expected: expected.to_string(), found: found.to_string() }
}
