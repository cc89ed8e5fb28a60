//! One call of a collective, a send or a receive: what a rank sends, what it receives, and what it tells the other
//! ranks of the call.

use super::code::{Code, Failure};
use super::journal;
use super::lanes::{Lane, Lanes, Record};
use super::order;
use super::reduce::{self, DataType, Reduction, Scalar};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AlltoAll,
    Gather,
    Scatter,
    Send,
    Recv,
}

const NAMES: [&str; 10] =
    ["AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter", "Send", "Recv"];

const REDUCTIONS: [&str; 6] = ["sum", "prod", "max", "min", "avg", "premulsum"];

impl Kind {
    pub fn name(self) -> &'static str {
        NAMES[self as usize]
    }

    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    pub fn is_collective(self) -> bool {
        self < Self::Send
    }
}

/// A call. Its addresses are those of the caller.
#[derive(Clone, Debug)]
pub struct Call {
    pub kind: Kind,
    pub send: usize,
    pub receive: usize,
    pub count: usize,
    pub data: DataType,
    pub reduction: Reduction,
    /// The root, or the other rank of a send or a receive.
    pub peer: usize,
}

/// The rank that calls.
#[derive(Clone, Copy)]
pub struct Place {
    pub rank: usize,
    pub ranks: usize,
}

impl Call {
    /// The bytes of as many elements as the call says; `None` if no memory is so large.
    pub fn bytes(&self) -> Option<usize> {
        self.count.checked_mul(self.data.size())
    }

    /// The bytes that this rank sends and receives; `None` if no memory is so large.
    pub fn lengths(&self, place: Place) -> Option<(usize, usize)> {
        let one = self.bytes()?;
        let all = one.checked_mul(place.ranks)?;
        let at_root = |bytes| if place.rank == self.peer { bytes } else { 0 };
        Some(match self.kind {
            Kind::AllReduce => (one, one),
            Kind::Broadcast => (at_root(one), one),
            Kind::Reduce => (one, at_root(one)),
            Kind::AllGather => (one, all),
            Kind::ReduceScatter => (all, one),
            Kind::AlltoAll => (all, all),
            Kind::Gather => (one, at_root(all)),
            Kind::Scatter => (at_root(all), one),
            Kind::Send => (one, 0),
            Kind::Recv => (0, one),
        })
    }

    /// The parts of a call that must be the same at all ranks.
    fn words(&self) -> [u64; 3] {
        let reduction = if self.kind.reduces() { self.reduction.number() } else { 0 };
        // A receive is compared with its send only.
        let kind = if self.kind == Kind::Recv { Kind::Send } else { self.kind };
        let root = if self.kind.is_collective() { self.peer as u64 } else { 0 };
        let first = u64::from(kind as u8) | u64::from(self.data as u8) << 8 | u64::from(reduction) << 16;
        [first, self.count as u64, root]
    }

    /// Writes what this rank sends to the shared file. `send` are the bytes in the host's memory; `before` is what the
    /// device's other communicators were given before a collective. Returns where the record ends.
    pub fn post(&self, lanes: &Lanes, place: Place, send: &[u8], before: &str) -> Result<u64, Failure> {
        if self.kind == Kind::Send {
            return lanes.post(Lane::Pair(place.rank, self.peer), self.words(), send);
        }
        let mut own = send.to_vec();
        if self.kind.reduces() {
            reduce::before(self.data, self.own_reduction(), &mut own, place.ranks);
        }
        order::append(&mut own, before);
        lanes.post(Lane::Collectives(place.rank), self.words(), &own)
    }

    /// Replaces a factor that has to be read from memory by its value.
    fn own_reduction(&self) -> Reduction {
        match self.reduction {
            Reduction::PreMulSum(Scalar::At(at)) => {
                let mut bytes = [0; 8];
                // SAFETY: the caller promises the factor to the collective until it is done.
                unsafe { std::ptr::copy_nonoverlapping(at as *const u8, bytes.as_mut_ptr(), self.data.size()) };
                Reduction::PreMulSum(Scalar::Bytes(bytes))
            }
            reduction => reduction,
        }
    }

    /// Receives what the other ranks have sent, if all of it is there; false if not. `receive` are the bytes to write.
    pub fn meet(&self, lanes: &Lanes, place: Place, number: u64, receive: &mut [u8]) -> Result<bool, Failure> {
        let from: Vec<Lane> = match self.kind {
            Kind::Recv => vec![Lane::Pair(self.peer, place.rank)],
            _ => (0..place.ranks).map(Lane::Collectives).collect(),
        };
        let records: Vec<Record> =
            from.iter().map_while(|lane| lanes.next(*lane).transpose()).collect::<Result<_, _>>()?;
        if records.len() < from.len() {
            return Ok(false);
        }
        if let Some(text) = self.mismatch(place, number, &records) {
            return Err(Failure::new(Code::INVALID_USAGE, text));
        }
        if self.kind.is_collective() {
            self.compare_orders(lanes, number, &records)?;
        }
        self.take(lanes, place, &from, receive)?;
        from.iter().zip(records).for_each(|(lane, record)| lanes.skip(*lane, record));
        Ok(true)
    }

    /// Notes ranks that were given this collective and those of another communicator in opposite orders.
    fn compare_orders(&self, lanes: &Lanes, number: u64, records: &[Record]) -> Result<(), Failure> {
        let before = |rank: usize| order::read(lanes, Lane::Collectives(rank), records[rank]);
        let first = before(0)?;
        for rank in 1..records.len() {
            if let Some((one, other)) = order::difference(&first, &before(rank)?) {
                let kind = self.kind.name();
                journal::leave(
                    "collectives in opposite orders",
                    format!(
                        "nccl: rank 0 was given collective {number} ({kind}) after {one} of another communicator, rank \
                         {rank} after {other}: on GPUs they may wait for each other without an end"
                    ),
                );
            }
        }
        Ok(())
    }

    fn mismatch(&self, place: Place, number: u64, records: &[Record]) -> Option<String> {
        if self.kind == Kind::Recv {
            let sent = records.first().filter(|record| record.words != self.words())?;
            let (sent, own) = (described(sent.words), described(self.words()));
            let (from, to) = (self.peer, place.rank);
            return Some(format!("send {number} of rank {from} to rank {to}: it sends {sent}, and {own} are received"));
        }
        // Every rank compares the others with rank 0, so that all find the same text.
        let (first, others) = records.split_first()?;
        let rank = others.iter().position(|record| record.words != first.words)? + 1;
        let [one, other] = [first, &records[rank]].map(|record| described(record.words));
        Some(format!("collective {number}: rank 0 calls {one}, and rank {rank} calls {other}"))
    }

    fn take(&self, lanes: &Lanes, place: Place, from: &[Lane], receive: &mut [u8]) -> Result<(), Failure> {
        let one = self.bytes().unwrap_or(0);
        // A rank that is not the root of a reduction receives nothing.
        if receive.is_empty() {
            return Ok(());
        }
        let begin = match self.kind {
            Kind::ReduceScatter | Kind::AlltoAll | Kind::Scatter => (place.rank * one) as u64,
            _ => 0,
        };
        match self.kind {
            Kind::Broadcast | Kind::Scatter => lanes.take(from[self.peer], begin, receive),
            Kind::AllGather | Kind::AlltoAll | Kind::Gather => {
                let mut parts = from.iter().zip(receive.chunks_exact_mut(one));
                parts.try_for_each(|(lane, part)| lanes.take(*lane, begin, part))
            }
            Kind::Send | Kind::Recv => lanes.take(from[0], 0, receive),
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => {
                lanes.take(from[0], begin, receive)?;
                let mut other = vec![0; one];
                for lane in &from[1..] {
                    lanes.take(*lane, begin, &mut other)?;
                    reduce::combine(self.data, self.reduction, receive, &other);
                }
                reduce::after(self.data, self.reduction, receive, place.ranks);
                Ok(())
            }
        }
    }
}

fn described([first, count, root]: [u64; 3]) -> String {
    let [kind, data, reduction, ..] = first.to_le_bytes();
    let kind = NAMES.get(usize::from(kind)).copied().unwrap_or("an unknown call");
    let Some(data) = DataType::new(i32::from(data)) else { return kind.to_owned() };
    let text = format!("{kind} of {count} {data:?}").replace("Send of ", "");
    match kind {
        "Broadcast" | "Gather" | "Scatter" => format!("{text}, root {root}"),
        "AllReduce" | "ReduceScatter" => format!("{text}, {}", REDUCTIONS[usize::from(reduction % 6)]),
        "Reduce" => format!("{text}, {}, root {root}", REDUCTIONS[usize::from(reduction % 6)]),
        _ => text,
    }
}
