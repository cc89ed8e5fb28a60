//! Everything that the stand-in knows, behind one lock.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::capture::Captures;
use crate::clock::Accesses;
use crate::environment::{self, Settings};
use crate::error::CudaError;
use crate::faults;
use crate::graph::Graphs;
use crate::issued::Issued;
use crate::memory::Memory;
use crate::nccl::journal;
use crate::operation::Costs;
use crate::peers::Peers;
use crate::progress::{Order, POLLS, Pace, Progress};
use crate::waiting::Locked;
use crate::waits::Waits;

/// A device: its memory, its legacy stream, and where its context was made, if anything has used it.
pub struct Device {
    pub memory: Memory,
    pub legacy: u64,
    pub context: Option<Backtrace>,
}

/// The devices, their work, and what was counted.
pub struct World {
    pub devices: Vec<Device>,
    pub progress: Progress,
    pub peers: Peers,
    pub accesses: Accesses,
    pub finds_races: bool,
    pub captures: Captures,
    pub graphs: Graphs,
    pub costs: Costs,
    /// Whether pinned memory is guarded while a copy of it is queued.
    pub guards: bool,
    /// Streams of a higher priority than the usual one.
    pub high_priority: BTreeSet<u64>,
    pub waits: Waits,
    pub issued: Issued,
    /// Blocks that `cudaFreeAsync` freed, and the event after which nothing uses them.
    pub freed: Vec<(usize, u64)>,
    /// Pinned host memory: address and length.
    pub pinned: BTreeMap<usize, usize>,
    /// How often each thing happened, and how many bytes each kind of copy moved.
    pub counts: BTreeMap<String, u64>,
    /// Races and refused captures, in words.
    pub notes: Vec<String>,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| Mutex::new(World::new(environment::read())));

thread_local! {
    /// The thread's device.
    pub static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// The thread's last error.
    pub static LAST_ERROR: Cell<i32> = const { Cell::new(0) };
    /// Whether it is in a function that the host runs in the order of a stream.
    pub static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Whether the thread is in a function that the host runs in the order of a stream.
pub fn is_in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

/// The world, without a step.
pub fn lock() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The world, and one step of random progress. A function in the order of a stream may not call CUDA, and holds the
/// world already: it gets an empty one, and an error for whatever it asks (`cudaErrorNotPermitted`, by
/// `cudaLaunchHostFunc`).
pub fn world() -> Locked {
    static NOTHING: LazyLock<Mutex<World>> =
        LazyLock::new(|| Mutex::new(World::new(&Settings { devices: 0, bytes: 0 })));
    if is_in_host_function() {
        return Locked::new(&NOTHING);
    }
    let mut world = Locked::new(&WORLD);
    world.progress.tick();
    for (what, note) in journal::take() {
        world.count(what, 1);
        world.notes.push(note);
    }
    world
}

impl World {
    /// A world of its own, for a test: with one device, and work that waits.
    #[cfg(test)]
    pub fn of_a_test() -> Locked {
        let mut world = Self::new(&Settings { devices: 1, bytes: 64 << 20 });
        world.progress.set_pace(Pace::Lazy);
        Locked::new(Box::leak(Box::new(Mutex::new(world))))
    }

    fn new(settings: &Settings) -> Self {
        let mut progress = Progress::new(Pace::Eager);
        // A device without addresses is left out.
        let device = |number| {
            let told = |error: &std::io::Error| eprintln!("fakecuda: there is no device {number}: {error}");
            let memory = Memory::new(settings.bytes).inspect_err(told).ok()?;
            Some(Device { memory, legacy: progress.add_stream(number, Order::Legacy), context: None })
        };
        let devices = (0..settings.devices).filter_map(device).collect();
        Self {
            devices,
            progress,
            peers: Peers::default(),
            accesses: Accesses::default(),
            finds_races: false,
            captures: Captures::default(),
            graphs: Graphs::default(),
            costs: Costs::default(),
            guards: false,
            high_priority: BTreeSet::new(),
            waits: Waits::default(),
            issued: Issued::default(),
            freed: Vec::new(),
            pinned: BTreeMap::new(),
            counts: BTreeMap::new(),
            notes: Vec::new(),
        }
    }

    /// As at the beginning, but for what was counted and noted.
    pub fn restore(&mut self) {
        self.progress.set_pace(Pace::Eager);
        self.progress.set_polls(POLLS);
        (self.finds_races, self.guards, self.costs) = (false, false, Costs::default());
        (self.waits.are_traced, self.issued) = (false, Issued::default());
        self.devices.iter_mut().for_each(|device| device.memory.set_limit(usize::MAX));
    }

    pub fn count(&mut self, what: &str, times: u64) {
        *self.counts.entry(what.to_owned()).or_default() += times;
    }

    /// A loop that asks until work is done is a wait.
    pub fn count_queries(&mut self) {
        if self.progress.has_waited_by_asking() {
            self.count("waits by asking", 1);
            self.waits.note("asking");
        }
    }

    /// Makes a device's context, if it has none.
    pub fn use_device(&mut self, device: usize) -> Result<(), CudaError> {
        let own = self.devices.get_mut(device).ok_or(CudaError::INVALID_DEVICE)?;
        faults::lost(device)?;
        if own.context.is_none() {
            own.context = Some(Backtrace::force_capture());
            self.count(&format!("contexts on device {device}"), 1);
        }
        Ok(())
    }

    /// Says once what was wrong.
    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// The stream of a handle: 0, 1 and 2 are the legacy stream of the thread's device.
    pub fn stream(&self, handle: usize) -> Result<u64, CudaError> {
        match handle {
            0..=2 => self.devices.get(CURRENT.get()).map(|device| device.legacy).ok_or(CudaError::NO_DEVICE),
            _ => {
                let stream = handle as u64;
                self.progress.device_of(stream).map(|_| stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)
            }
        }
    }

    /// As [`stream`](Self::stream), for a launch: it fails in a stream of another device than the thread's (CUDA
    /// programming guide, "Stream and Event Behavior").
    pub fn stream_to_launch(&self, handle: usize) -> Result<u64, CudaError> {
        let stream = self.stream(handle)?;
        let is_own = self.progress.device_of(stream) == Some(CURRENT.get());
        if is_own { Ok(stream) } else { Err(CudaError::INVALID_RESOURCE_HANDLE) }
    }

    /// The number of the device that an address belongs to.
    pub fn device_at(&self, address: usize) -> Option<usize> {
        self.devices.iter().position(|device| device.memory.contains(address))
    }

    /// Where the host finds the bytes of an address, which may be its own.
    pub fn on_host(&self, address: usize) -> usize {
        let at = self.devices.iter().find_map(|device| device.memory.on_host(address));
        at.map_or(address, |at| at as usize)
    }

    /// Whether an address is in pinned memory.
    pub fn is_pinned(&self, address: usize) -> bool {
        self.pinned_block(address).is_some()
    }

    /// The block of pinned memory that holds an address.
    pub fn pinned_block(&self, address: usize) -> Option<Range<usize>> {
        let (&begin, &length) = self.pinned.range(..=address).next_back()?;
        (address < begin + length).then(|| begin..begin + length)
    }
}
