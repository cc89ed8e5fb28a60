//! One of the lanes of a stream: each reads its share of the shards, and the lanes take turns.

use std::fmt;
use std::str::FromStr;

use crate::loader::order::{Domain, permutation};
use crate::stream::Located;
use crate::{Cancellation, DataError, Deferred, IterableDataset, ShardStream, StreamPosition};

/// Everything needed to bring a [`Lane`] back to where it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LanePosition {
    /// The number of the lane's pass over its shards. The order depends on it rather than on the epoch's number, so
    /// that an epoch can begin in the middle of a pass.
    pub(crate) pass: u64,
    /// Where the current window begins.
    pub(crate) window_start: StreamPosition,
    /// The window's number in this pass.
    pub(crate) window: u64,
    /// How many items of the window have been taken.
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

/// An item of a stream and its origin.
pub(crate) struct Item<S> {
    /// The number of its lane's pass.
    pub(crate) pass: u64,
    pub(crate) shard: usize,
    pub(crate) position: u64,
    pub(crate) sample: Result<Deferred<S>, DataError>,
}

/// The settings that all lanes share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LanePlan {
    pub(crate) seed: u64,
    /// How many lanes there are, on all ranks.
    pub(crate) lanes: usize,
    pub(crate) shuffle: bool,
    /// The number of items that are shuffled with each other.
    pub(crate) window: usize,
    /// A window ends with the item that brings it to this many bytes.
    pub(crate) window_bytes: usize,
    /// Whether a lane starts another pass at its end.
    pub(crate) repeat: bool,
}

/// Reads every `lanes`-th shard in the order of a pass, and shuffles the items of each window.
pub(crate) struct Lane<D: IterableDataset + Clone> {
    dataset: D,
    plan: LanePlan,
    number: usize,
    stream: ShardStream<D>,
    /// The window's remaining items, in reverse: the last is given next.
    waiting: Vec<Located<D::Sample>>,
    position: LanePosition,
    /// Whether the current window has to be read again first, after a resume in its middle.
    resumes: bool,
    /// Whether this pass has given a sample: without this check, a lane of empty shards would start passes endlessly.
    has_given: bool,
}

impl<D: IterableDataset + Clone> Lane<D> {
    /// Lane `number` at `position`. Nothing is read yet: the interrupted window is read again at the first `next`, in a
    /// worker thread.
    pub(crate) fn at(dataset: D, plan: LanePlan, number: usize, position: LanePosition) -> Self {
        let stream = shards(&dataset, plan, number, position.pass, position.window_start);
        let resumes = position.taken > 0;
        let has_given = position.window > 0 || resumes;
        Self { dataset, plan, number, stream, waiting: Vec::new(), position, resumes, has_given }
    }

    pub(crate) fn position(&self) -> LanePosition {
        self.position
    }

    /// The shard that is being read, and the position of its next item.
    pub(crate) fn place(&self) -> Option<(usize, u64)> {
        self.stream.place()
    }

    /// The next item; `None` at the end, or when `cancelled` was set, after which the lane must not be used any more.
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
            if self.waiting.is_empty() && self.plan.repeat && self.has_given {
                let pass = self.position.pass + 1;
                self.position = LanePosition::start_of(pass);
                self.has_given = false;
                self.stream = shards(&self.dataset, self.plan, self.number, pass, StreamPosition::default());
                self.fill(cancelled);
            }
        }
        let (shard, position, sample) = self.waiting.pop()?;
        // Only good samples count: shards of nothing but errors would be read endlessly.
        self.has_given |= sample.is_ok();
        self.position.taken += 1;
        Some(Item { pass: self.position.pass, shard, position, sample })
    }

    /// Reads the window that begins at the stream's position.
    fn fill(&mut self, cancelled: &Cancellation) {
        let (mut items, mut bytes) = (Vec::with_capacity(self.plan.window.min(1024)), 0usize);
        while items.len() < self.plan.window
            && bytes < self.plan.window_bytes
            && !cancelled.is_cancelled()
            && let Some((shard, position, sample)) = self.stream.next_item(cancelled)
        {
            bytes = bytes.saturating_add(sample.as_ref().map_or(0, Deferred::bytes));
            items.push(Some((shard, position, sample)));
        }
        let window = [self.number as u64, self.position.pass, self.position.window];
        let order = permutation(items.len(), self.plan.seed, Domain::Window, &window);
        self.waiting = order.into_iter().rev().filter_map(|index| items[index].take()).collect();
    }
}

/// The shards of lane `number`, in the order of the pass.
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
