//! What a stream is given to do.

use std::sync::Arc;

use crate::clock::Access;

/// What an operation does on the host's side. A graph's work runs at each launch, so it can be called many times.
pub type Work = Arc<dyn Fn() + Send + Sync>;

/// What an operation is to a graph, and how long the device takes for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A kernel, which a program launched.
    Kernel,
    /// A copy of so many bytes.
    Copy(usize),
    /// A fill of so many bytes.
    Fill(usize),
    /// A function that the host runs in the order of a stream.
    Host,
    /// The numbers of kernels, which the stand-in computes: no work of the real device, and no node of its own.
    Numbers,
}

impl Kind {
    /// Whether the real device does it: then it may fail, and CUPTI records it.
    pub fn is_of_device(self) -> bool {
        matches!(self, Self::Kernel | Self::Copy(_) | Self::Fill(_))
    }
}

/// An operation, before it has a stream.
#[derive(Clone)]
pub struct Operation {
    pub kind: Kind,
    /// Its name, for people.
    pub what: String,
    pub accesses: Vec<Access>,
    pub work: Work,
    /// What is counted when it is put into a stream: a captured operation is counted at the launches of its graph.
    pub counts: Vec<(String, u64)>,
}

impl Operation {
    /// An operation that touches no memory and that nothing counts.
    pub fn new(kind: Kind, what: &str, work: Work) -> Self {
        Self { kind, what: what.to_owned(), accesses: Vec::new(), work, counts: Vec::new() }
    }

    /// A kernel that does nothing.
    pub fn kernel(name: &str) -> Self {
        let counts = vec![("launches".to_owned(), 1), (format!("kernel {name}"), 1)];
        Self { counts, ..Self::new(Kind::Kernel, name, Arc::new(|| {})) }
    }
}

/// How long the device takes, in nanoseconds of its own clock. It has no other time: the machine's never enters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Costs {
    /// What each kernel takes. At 0 copies take nothing either.
    pub kernel: u64,
}

/// The rate of copies and fills, once kernels have a cost. It is a round number near what PCIe 5.0 x16 moves in one
/// direction (63 GB/s before the protocol's own needs), and says nothing of any machine.
const BYTES_PER_NANOSECOND: u64 = 50;

impl Costs {
    /// How long an operation takes.
    pub fn of(self, kind: Kind) -> u64 {
        match kind {
            Kind::Kernel => self.kernel,
            Kind::Copy(bytes) | Kind::Fill(bytes) if self.kernel > 0 => bytes as u64 / BYTES_PER_NANOSECOND,
            _ => 0,
        }
    }
}
