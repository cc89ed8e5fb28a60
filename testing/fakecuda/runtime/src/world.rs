//! Everything that the stand-in knows, behind one lock.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::clock::{Access, Accesses};
use crate::error::CudaError;
use crate::faults::{self, Moment};
use crate::memory::Memory;
use crate::peers::Peers;
use crate::progress::{Order, Pace, Progress, Work};
use crate::trace;

/// What is asked for by a program's environment.
struct Settings {
    devices: usize,
    bytes: usize,
}

impl Settings {
    fn read() -> Self {
        let number =
            |name: &str, usual: usize| std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(usual);
        Self { devices: number("FAKECUDA_DEVICES", 1), bytes: number("FAKECUDA_BYTES", 16 << 30) }
    }
}

/// A device: its memory, its legacy stream, and whether anything has used it.
pub struct Device {
    pub memory: Memory,
    pub legacy: u64,
    pub has_context: bool,
}

/// The devices, their work, and what was counted.
pub struct World {
    pub devices: Vec<Device>,
    pub progress: Progress,
    pub peers: Peers,
    pub accesses: Accesses,
    pub finds_races: bool,
    /// Pinned host memory: address and length.
    pub pinned: BTreeMap<usize, usize>,
    /// How often each thing happened, and how many bytes each kind of copy moved.
    pub counts: BTreeMap<String, u64>,
    /// Races and refused captures, in words.
    pub notes: Vec<String>,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| Mutex::new(World::new(&Settings::read())));

thread_local! {
    /// The thread's device.
    pub static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// The thread's last error.
    pub static LAST_ERROR: Cell<i32> = const { Cell::new(0) };
}

/// The world, and one step of random progress.
pub fn world() -> MutexGuard<'static, World> {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    world.progress.tick();
    world
}

impl World {
    fn new(settings: &Settings) -> Self {
        let mut progress = Progress::new(Pace::Eager);
        // A device without addresses is left out.
        let device = |number| {
            let memory = Memory::new(settings.bytes).ok()?;
            Some(Device { memory, legacy: progress.add_stream(number, Order::Legacy), has_context: false })
        };
        let devices = (0..settings.devices).filter_map(device).collect();
        Self {
            devices,
            progress,
            peers: Peers::default(),
            accesses: Accesses::default(),
            finds_races: false,
            pinned: BTreeMap::new(),
            counts: BTreeMap::new(),
            notes: Vec::new(),
        }
    }

    pub fn count(&mut self, what: &str, times: u64) {
        *self.counts.entry(what.to_owned()).or_default() += times;
    }

    /// Makes a device's context, if it has none.
    pub fn use_device(&mut self, device: usize) -> Result<(), CudaError> {
        let own = self.devices.get_mut(device).ok_or(CudaError::INVALID_DEVICE)?;
        faults::lost(device)?;
        if !std::mem::replace(&mut own.has_context, true) {
            self.count(&format!("contexts on device {device}"), 1);
        }
        Ok(())
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
        self.pinned.range(..=address).next_back().is_some_and(|(begin, length)| address < begin + length)
    }

    /// Puts work into a stream, and notes its races.
    pub fn push(&mut self, stream: u64, what: &str, accesses: &[Access], work: Work) -> Result<(), CudaError> {
        let device = self.progress.device_of(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        self.use_device(device)?;
        let work: Work = match faults::of_work(what) {
            None => work,
            Some((Moment::Issued, error)) => return Err(error).inspect_err(|_| self.count("failed work", 1)),
            Some((Moment::Run, error)) => Box::new(move || faults::happen(error)),
        };
        trace::work(self, (device, stream), what, accesses);
        let (operation, clock) = self.progress.push(stream, work).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        if self.finds_races {
            for race in self.accesses.note((stream, operation), what, accesses, &clock) {
                self.count("races", 1);
                let [first, second] = race.operations.map(|(what, stream, writes)| {
                    format!("{what} of stream {stream:#x} {}", if writes { "writes" } else { "reads" })
                });
                self.notes.push(format!("{second} what {first}: {} bytes, not ordered", race.bytes.len()));
            }
        }
        Ok(())
    }

    /// The host waits for a stream.
    pub fn synchronize(&mut self, stream: u64) -> Result<(), CudaError> {
        self.progress.synchronize(stream).ok_or(CudaError::INVALID_RESOURCE_HANDLE)?;
        let host = self.progress.host().clone();
        self.accesses.forget(&host);
        faults::told()
    }

    /// The host waits for a device.
    pub fn synchronize_device(&mut self, device: usize) -> Result<(), CudaError> {
        let streams = self.progress.ordered().into_iter().filter(|it| self.progress.device_of(*it) == Some(device));
        streams.collect::<Vec<_>>().into_iter().try_for_each(|stream| self.synchronize(stream))
    }

    /// The host waits for everything.
    pub fn synchronize_all(&mut self) {
        self.progress.synchronize_all();
        let host = self.progress.host().clone();
        self.accesses.forget(&host);
    }
}
