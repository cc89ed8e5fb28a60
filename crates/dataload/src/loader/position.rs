//! How far a loader is, and how that is saved.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use overdrive_core::{Entry, StateDict, StateError};

use crate::loader::lane::LanePosition;
use crate::loader::ranges::Ranges;

/// Where a source is after a batch: nothing for a dataset, where the number says it all.
pub(crate) type Mark = Option<Box<StreamMark>>;

/// Where the lanes of a stream are, and whose turn it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StreamMark {
    pub(crate) turn: usize,
    /// By the lane's number among all ranks.
    pub(crate) lanes: BTreeMap<usize, LanePosition>,
}

/// What a position of this loader may say.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    /// The batches of an epoch, where that is known.
    pub(crate) batches: Option<usize>,
    /// None for a dataset.
    pub(crate) lanes: Option<LaneBounds>,
}

/// The same of the lanes of a stream.
#[derive(Clone, Debug)]
pub(crate) struct LaneBounds {
    /// How many there are on all ranks, and which are this rank's.
    pub(crate) all: usize,
    pub(crate) own: Vec<usize>,
    pub(crate) window: usize,
    /// Whether the stream begins anew at its end.
    pub(crate) repeat: bool,
}

/// The batches of an epoch that the training loop has had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) epoch: u64,
    /// How many were delivered before the first gap.
    pub(crate) batch: usize,
    /// How many of the numbers do not count: nothing was left of their batches, or the epoch before has delivered them.
    pub(crate) extra: usize,
    /// Those behind it, which only `in_order(false)` leaves.
    pub(crate) ahead: BTreeMap<usize, Mark>,
    /// Those behind it that were delivered before the state was saved, as far as the source has not passed them again.
    pub(crate) before: BTreeSet<usize>,
    pub(crate) mark: Mark,
}

/// The position of a running epoch, and the ones a few batches before it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    now: Position,
    /// The positions before the batches that were taken ahead of their use, oldest first.
    earlier: VecDeque<Position>,
    /// Those of a stream: its next epoch goes on where this one ends.
    lanes: Option<LaneBounds>,
    /// Whether the epoch has ended, so that `now` is where the next one begins.
    over: bool,
}

/// What the training loop gets of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    Batch,
    /// A batch that it does not use yet.
    Ahead,
    /// It has no content, or was delivered before the state was saved.
    Nothing,
    /// It has no content, and another batch takes its place.
    Later,
}

impl Progress {
    pub(crate) fn new(now: Position, lanes: Option<LaneBounds>) -> Self {
        Self { now, earlier: VecDeque::new(), lanes, over: false }
    }

    pub(crate) fn now(&self) -> &Position {
        &self.now
    }

    /// What the training loop has had: not the batches that are held ahead of it.
    pub(crate) fn trained(&self) -> &Position {
        self.earlier.front().unwrap_or(&self.now)
    }

    /// Takes note of a batch that leaves the loader now.
    pub(crate) fn delivered(&mut self, number: usize, mark: Mark, given: Given) {
        if given == Given::Ahead {
            self.earlier.push_back(self.now.clone());
        }
        self.now.extra += usize::from(given == Given::Later);
        self.now.delivered(number, mark);
    }

    /// Takes note that the training loop gets the oldest of the batches that were taken ahead.
    pub(crate) fn handed_out(&mut self) {
        self.earlier.pop_front();
    }

    /// Takes note of the end of the epoch: whoever looks ahead knows of it while the last batch is trained on, or while
    /// several are not yet.
    pub(crate) fn ended(&mut self) {
        let goes_on = self.lanes.as_ref().filter(|lanes| lanes.repeat);
        self.now = match goes_on {
            Some(lanes) => self.now.followed(lanes),
            None => Position::start_of(self.now.epoch.saturating_add(1)),
        };
        self.over = true;
    }

    /// Takes note that nobody will take the rest of the epoch: of a stream, the next one goes on there.
    pub(crate) fn broken_off(&mut self) {
        if let (Some(lanes), false) = (&self.lanes, self.over) {
            (self.now, self.over) = (self.now.followed(lanes), true);
            // Batches that were taken ahead may still be trained on.
            self.earlier.iter_mut().for_each(|position| *position = position.followed(lanes));
        }
    }

    /// Where the epoch after this one begins.
    pub(crate) fn following(&self) -> Position {
        match (&self.lanes, self.earlier.front()) {
            // Batches that were taken ahead and never used: the next epoch of a stream begins with them.
            (Some(_), Some(held)) if self.over && held.epoch == self.now.epoch => held.clone(),
            (Some(lanes), Some(held)) if self.over && lanes.repeat => held.followed(lanes),
            _ if self.over => self.now.clone(),
            (Some(lanes), _) => self.trained().followed(lanes),
            (None, _) => Position::start_of(self.now.epoch.saturating_add(1)),
        }
    }
}

/// What has to agree for a position to mean the same batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) stream: bool,
    /// Samples of a dataset, shards of a stream.
    pub(crate) len: usize,
    /// Samples that all ranks take together in one step; 0 where the user makes the batches.
    pub(crate) global_batch_size: usize,
    pub(crate) seed: u64,
    /// The other options that the order follows from.
    pub(crate) order: Vec<(&'static str, i64)>,
}

impl Position {
    pub(crate) fn start_of(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// How many batches the training loop has had.
    pub(crate) fn taken(&self) -> usize {
        (self.batch + self.ahead.len() + self.before.len()).saturating_sub(self.extra)
    }

    /// Where the next epoch begins when this one ends here.
    fn followed(&self, lanes: &LaneBounds) -> Self {
        let had = self.ahead.keys().chain(&self.before).map(|number| number - self.batch);
        let (before, epoch) = (had.collect::<BTreeSet<_>>(), self.epoch.saturating_add(1));
        // Nothing was taken in turn: where something was out of turn, it is counted from the epoch's start.
        let start = |_| LanePosition::start_of(self.epoch);
        let start = || StreamMark { turn: 0, lanes: lanes.own.iter().map(|&lane| (lane, start(lane))).collect() };
        let mark = self.mark.clone().or_else(|| (!before.is_empty()).then(|| Box::new(start())));
        Self { epoch, batch: 0, extra: before.len(), ahead: BTreeMap::new(), before, mark }
    }

    /// Takes note of a batch that the training loop gets now, or has had before.
    pub(crate) fn delivered(&mut self, number: usize, mark: Mark) {
        self.before.remove(&number);
        self.ahead.insert(number, mark);
        while let Some(mark) = self.ahead.remove(&self.batch) {
            self.batch += 1;
            self.mark = mark;
        }
    }

    /// `order` is a checksum of the epoch's order, where the identity does not say it all.
    pub(crate) fn save(&self, identity: &Identity, order: Option<u32>) -> StateDict {
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
        if let Some(order) = order {
            state.insert("order", Entry::Int(i64::from(order)));
        }
        if let Some(mark) = &self.mark {
            state.insert("turn", Entry::Int(mark.turn as i64));
            for (lane, position) in &mark.lanes {
                state.insert(format!("lane.{lane}"), Entry::Text(position.to_string()));
            }
        }
        state
    }

    /// Reads a state, which must be of a loader with the same `identity`, and of the same `order` in its epoch.
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
        if let Some(batches) = bounds.batches.map(|batches| batches.saturating_add(position.extra)) {
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
        // Before the first batch is done, the lanes may be where the epoch's own pass begins, and are not told.
        let told = position.batch > 0 || state.iter().any(|(key, _)| is_of_lanes(key));
        if let Some(lanes) = bounds.lanes.as_ref().filter(|_| told) {
            position.mark = Some(Box::new(lanes.load(state, identity.len, position.epoch)?));
        }
        let expected = order(position.epoch)?;
        let mut known = vec!["epoch", "batch", "ahead"];
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
        let stranger = |key: &str| {
            let own = known.contains(&key) || (marked && is_of_lanes(key));
            !own && !identity.entries().iter().any(|(entry, _)| *entry == key)
        };
        match state.iter().find(|(key, _)| stranger(key)) {
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
        // The states of other ranks may be there too, but this rank's must be.
        match self.own.iter().find(|number| !lanes.contains_key(number)) {
            Some(number) => Err(StateError::Missing { key: format!("lane.{number}") }),
            None => Ok(StreamMark { turn, lanes }),
        }
    }

    fn position(&self, key: &str, found: &str, shards: usize, epoch: u64) -> Result<LanePosition, StateError> {
        let expected = "pass, shard, item, window and place of a lane that this stream can have";
        let wrong = || mismatch(key, expected, found);
        let position: LanePosition = found.parse().map_err(|()| wrong())?;
        let reached = position.window_start.shard <= shards
            && position.taken <= self.window
            && (self.repeat || position.pass <= epoch)
            // An item has been given for each of them, and the next number must not overflow.
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
            // A stream's lanes say where they are in the run since 2, and not in the epoch.
            ("version", if self.stream { 2 } else { 1 }),
        ];
        entries.extend(&self.order);
        entries
    }
}

fn is_of_lanes(key: &str) -> bool {
    key == "turn" || key.starts_with("lane.")
}

fn natural(state: &StateDict, key: &str) -> Result<u64, StateError> {
    let value = state.int(key)?;
    u64::try_from(value).map_err(|_| mismatch(key, "0 or more", value))
}

fn text<'a>(state: &'a StateDict, key: &str) -> Result<&'a str, StateError> {
    match state.get(key)? {
        Entry::Text(text) => Ok(text),
        other => Err(mismatch(key, "a text", format!("{other:?}"))),
    }
}

fn mismatch(key: &str, expected: impl ToString, found: impl ToString) -> StateError {
    StateError::Mismatch { key: key.to_owned(), expected: expected.to_string(), found: found.to_string() }
}
