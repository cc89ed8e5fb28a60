//! One of the shards that a stream reads side by side.

use std::fmt;
use std::str::FromStr;

use crate::loader::order::{Domain, permutation};
use crate::{Cancellation, DataError, Deferred, IterableDataset, ShardStream, StreamPosition};

/// The shard that an item was read from, its place there, and the item.
type Read<S> = (usize, u64, Result<Deferred<S>, DataError>);

/// All that it takes to bring a [`Lane`] back to where it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LanePosition {
    /// How often the lane has begun anew, in all epochs: its order follows from that, and not from the epoch's number, so
    /// that an epoch can go on in the middle.
    pub(crate) pass: u64,
    /// Where the window begins.
    pub(crate) window_start: StreamPosition,
    /// The window's number since the pass began.
    pub(crate) window: u64,
    /// How many items of the window have been given.
    pub(crate) taken: usize,
}

impl LanePosition {
    /// The start of a pass.
    pub(crate) fn start_of(pass: u64) -> Self {
        Self { pass, ..Self::default() }
    }
}

impl fmt::Display for LanePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StreamPosition { shard, sample } = self.window_start;
        write!(f, "{} {shard} {sample} {} {}", self.pass, self.window, self.taken)
    }
}

impl FromStr for LanePosition {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let numbers: Vec<u64> = text.split(' ').map(str::parse).collect::<Result<_, _>>().map_err(|_| ())?;
        let [pass, shard, sample, window, taken] = numbers[..] else { return Err(()) };
        let index = |number| usize::try_from(number).map_err(|_| ());
        let window_start = StreamPosition { shard: index(shard)?, sample };
        Ok(Self { pass, window_start, window, taken: index(taken)? })
    }
}

/// An item of a stream and where it is from.
pub(crate) struct Item<S> {
    /// How often its lane had begun anew.
    pub(crate) pass: u64,
    pub(crate) shard: usize,
    pub(crate) position: u64,
    pub(crate) sample: Result<Deferred<S>, DataError>,
}

/// What all lanes have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LanePlan {
    pub(crate) seed: u64,
    /// How many lanes there are, on all ranks.
    pub(crate) lanes: usize,
    pub(crate) shuffle: bool,
    /// Items that are mixed with each other.
    pub(crate) window: usize,
    /// Whether a lane begins anew at its end.
    pub(crate) repeat: bool,
}

/// Reads every `lanes`-th shard of the order of a pass, and mixes the items of a window.
pub(crate) struct Lane<D: IterableDataset + Clone> {
    dataset: D,
    plan: LanePlan,
    number: usize,
    stream: ShardStream<D>,
    /// The items of the window in the order in which they are given, from the last to the first.
    waiting: Vec<Read<D::Sample>>,
    position: LanePosition,
    /// Whether the window that was begun is still to be read again.
    resumes: bool,
    /// Whether this pass has given anything: a lane of empty shards would begin anew for ever.
    fruitful: bool,
}

impl<D: IterableDataset + Clone> Lane<D> {
    /// The lane with this number, at `position`. Nothing is read yet: the first sample asked for is to re-read the window
    /// that was begun, on a worker's time.
    pub(crate) fn at(dataset: D, plan: LanePlan, number: usize, position: LanePosition) -> Self {
        let stream = shards(&dataset, plan, number, position.pass, position.window_start);
        let resumes = position.taken > 0;
        let fruitful = position.window > 0 || resumes;
        Self { dataset, plan, number, stream, waiting: Vec::new(), position, resumes, fruitful }
    }

    pub(crate) fn position(&self) -> LanePosition {
        self.position
    }

    /// The shard that is being read, and the place there of the next item.
    pub(crate) fn place(&self) -> Option<(usize, u64)> {
        self.stream.place()
    }

    /// The next item; none at the end, or early when `cancelled` has been set: the lane is then of no more use.
    pub(crate) fn next(&mut self, cancelled: &Cancellation) -> Option<Item<D::Sample>> {
        if std::mem::take(&mut self.resumes) {
            self.fill(cancelled);
            self.waiting.truncate(self.waiting.len().saturating_sub(self.position.taken));
        }
        if self.waiting.is_empty() {
            if self.position.taken > 0 {
                let window_start = self.stream.position();
                self.position =
                    LanePosition { window_start, window: self.position.window + 1, taken: 0, ..self.position };
            }
            self.fill(cancelled);
            if self.waiting.is_empty() && self.plan.repeat && self.fruitful {
                let pass = self.position.pass + 1;
                self.position = LanePosition::start_of(pass);
                self.fruitful = false;
                self.stream = shards(&self.dataset, self.plan, self.number, pass, StreamPosition::default());
                self.fill(cancelled);
            }
        }
        let (shard, position, sample) = self.waiting.pop()?;
        // Shards of nothing but errors would begin anew for ever.
        self.fruitful |= sample.is_ok();
        self.position.taken += 1;
        Some(Item { pass: self.position.pass, shard, position, sample })
    }

    /// Reads the window that begins where the stream is.
    fn fill(&mut self, cancelled: &Cancellation) {
        let mut items = Vec::with_capacity(self.plan.window.min(1024));
        while items.len() < self.plan.window
            && !cancelled.is_cancelled()
            && let Some((shard, position, sample)) = self.stream.next_item(cancelled)
        {
            items.push(Some((shard, position, sample)));
        }
        let window = [self.number as u64, self.position.pass, self.position.window];
        let order = permutation(items.len(), self.plan.seed, Domain::Window, &window);
        self.waiting = order.into_iter().rev().filter_map(|index| items[index].take()).collect();
    }
}

/// The shards of lane `number` in their order.
fn shards<D: IterableDataset + Clone>(
    dataset: &D,
    plan: LanePlan,
    number: usize,
    pass: u64,
    from: StreamPosition,
) -> ShardStream<D> {
    let order = match plan.shuffle {
        true => permutation(dataset.shards(), plan.seed, Domain::Shards, &[pass]),
        false => (0..dataset.shards()).collect(),
    };
    ShardStream::new(dataset.clone(), order.into_iter().skip(number).step_by(plan.lanes), from)
}
