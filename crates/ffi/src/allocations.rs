//! What libtorch allocates and frees, as it happens.
//!
//! Users call `overdrive_memory`.

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tch::{Device, Tensor};

pub use crate::callers::Caller;
use crate::callers::caller_in;
use crate::error::{Error, check};
use crate::memory::storage_of;
use crate::raw_allocations as raw;

/// What a piece of memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// A parameter or a buffer of a module.
    Parameter,
    /// A parameter's gradient.
    Gradient,
    /// State of an optimizer.
    OptimizerState,
    /// A batch of the model's inputs.
    Input,
    /// A tensor that the forward pass has saved for the backward pass.
    Activation,
    /// Everything else, such as the intermediate results of an operator or a pass.
    Temporary,
}

impl Category {
    /// All categories, in their order.
    pub const ALL: [Self; 6] =
        [Self::Parameter, Self::Gradient, Self::OptimizerState, Self::Input, Self::Activation, Self::Temporary];
}

/// A moment of a [`History`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// How many allocations, frees, and beginnings and ends of backward passes there were before.
    pub event: usize,
    /// Nanoseconds since the beginning.
    pub nanoseconds: u64,
}

/// A piece of memory that a tensor has or had.
#[derive(Clone, Debug)]
pub struct Block {
    /// Where it is.
    pub device: Device,
    /// Its address there.
    pub address: u64,
    /// How much was asked for.
    pub bytes: u64,
    /// When it was allocated; the history's beginning, if that was earlier.
    pub allocated: Moment,
    /// When it was freed; `None` while it is in use.
    pub freed: Option<Moment>,
    /// What it is used for, if [`AllocationWatch::tag`] was called for it.
    pub tag: Option<Category>,
    caller: Option<Arc<Backtrace>>,
}

impl Block {
    /// The line or function that had it allocated: the innermost one that belongs neither to libtorch, tch, the
    /// standard library nor a crate of Overdrive. In a backward pass that is the caller of `backward`; for tensors of a
    /// CUDA device the pass runs on another thread, so there it is `None`. Takes milliseconds.
    ///
    /// Lines need a program with debug information.
    pub fn caller(&self) -> Option<Caller> {
        caller_in(&self.caller.as_ref()?.to_string())
    }

    /// Whether it was in use after so many events.
    pub fn is_alive_at(&self, event: usize) -> bool {
        self.allocated.event <= event && self.freed.is_none_or(|freed| freed.event > event)
    }
}

/// What was allocated and freed while an [`AllocationWatch`] lived.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// In the order in which they were allocated.
    pub blocks: Vec<Block>,
    /// When backward passes began and ended, by their beginnings. A pass within another one has an entry of its own.
    pub passes: Vec<(Moment, Option<Moment>)>,
    /// The last moment.
    pub end: Moment,
}

/// Watches what libtorch allocates for tensors in the whole process, until this is dropped: on the host, but for pinned
/// memory and memory that tensors borrow, and on CUDA devices. Each allocation and each free then takes a lock, and
/// with callers each allocation records a backtrace. The allocator that reports on the host stays in place afterwards,
/// as for [`cache_host_memory`](crate::cache_host_memory).
///
/// Memory that was allocated before the watch is seen when it is freed or tagged. On the host, pieces below 256 KiB are
/// seen then only if they were watched or [counted](crate::host_memory::count) when they were allocated. CUDA memory is
/// not seen with `backend:cudaMallocAsync`.
#[derive(Debug)]
pub struct AllocationWatch {
    raw: NonNull<raw::Watch>,
    notes: Arc<Mutex<Notes>>,
}

// SAFETY: the C++ side locks all access.
unsafe impl Send for AllocationWatch {}
// SAFETY: as above.
unsafe impl Sync for AllocationWatch {}

#[derive(Debug)]
struct Notes {
    begin: Instant,
    with_callers: bool,
    events: usize,
    /// The blocks in use: for each device index and address, the block's index in the history.
    alive: HashMap<(i32, u64), usize>,
    history: History,
}

impl AllocationWatch {
    /// Starts to watch. With `with_callers`, each allocation records a backtrace, for [`Block::caller`].
    ///
    /// Where there is a CUDA device, CUDA is initialised.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn begin(with_callers: bool) -> Result<Self, Error> {
        let (alive, history) = (HashMap::new(), History::default());
        let notes = Notes { begin: Instant::now(), with_callers, events: 0, alive, history };
        let notes = Arc::new(Mutex::new(notes));
        let owner = Arc::into_raw(Arc::clone(&notes)).cast_mut().cast::<c_void>();
        let mut out = ptr::null_mut();
        // SAFETY: the C++ side drops `owner`, once, also on failure; `out` lives through the call.
        check(|err| unsafe { raw::od_watch_begin(owner, on_event, on_drop, &mut out, err) })?;
        let raw = NonNull::new(out).ok_or_else(|| Error::refused("libtorch returned no watch"))?;
        Ok(Self { raw, notes })
    }

    /// The present moment of the history.
    pub fn now(&self) -> Moment {
        lock(&self.notes).now()
    }

    /// Records what the memory of a tensor is used for. Memory that is older than the watch counts as allocated at its
    /// beginning.
    ///
    /// # Errors
    /// When the tensor has no memory of its own, as a sparse one.
    pub fn tag(&self, tensor: &Tensor, category: Category) -> Result<(), Error> {
        let storage = storage_of(tensor)?;
        if storage.bytes == 0 {
            return Ok(());
        }
        let (device, address) = (tensor.device(), storage.data as u64);
        let place = (index(device), address);
        let mut notes = lock(&self.notes);
        let found = notes.alive.get(&place).copied();
        let number = found.unwrap_or_else(|| notes.add(place, storage.bytes as u64, Moment::default(), None));
        notes.history.blocks[number].tag = Some(category);
        Ok(())
    }

    /// Stops watching, and returns what was seen.
    pub fn end(self) -> History {
        let notes = Arc::clone(&self.notes);
        // Afterwards nothing is reported any more.
        drop(self);
        let mut notes = lock(&notes);
        let end = notes.now();
        History { end, ..std::mem::take(&mut notes.history) }
    }
}

impl Drop for AllocationWatch {
    fn drop(&mut self) {
        // SAFETY: it is live, and never used again.
        unsafe { raw::od_watch_end(self.raw.as_ptr()) }
    }
}

impl Notes {
    fn now(&self) -> Moment {
        let nanoseconds = u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Moment { event: self.events, nanoseconds }
    }

    fn add(&mut self, place: (i32, u64), bytes: u64, allocated: Moment, caller: Option<Arc<Backtrace>>) -> usize {
        let blocks = &mut self.history.blocks;
        let (device, address) = (device(place.0), place.1);
        blocks.push(Block { device, address, bytes, allocated, freed: None, tag: None, caller });
        let number = blocks.len() - 1;
        if let Some(before) = self.alive.insert(place, number) {
            // The earlier block at this address was older than the watch and known only by its tag, and its free was
            // not reported: it must have ended by now.
            blocks[before].freed = Some(allocated);
        }
        number
    }

    fn take_note(&mut self, event: i32, place: (i32, u64), bytes: u64, caller: Option<Arc<Backtrace>>) {
        self.events += 1;
        let now = self.now();
        match event {
            raw::ALLOCATED => {
                self.add(place, bytes, now, caller);
            }
            raw::FREED => {
                let number = self.alive.remove(&place);
                // It was allocated before the watch, so only the time of its free is known.
                let number = number.unwrap_or_else(|| self.add(place, bytes, Moment::default(), None));
                self.alive.remove(&place);
                self.history.blocks[number].freed = Some(now);
            }
            raw::BACKWARD_BEGINS => self.history.passes.push((now, None)),
            raw::BACKWARD_ENDS => {
                // The innermost one that has not ended.
                if let Some(pass) = self.history.passes.iter_mut().rev().find(|pass| pass.1.is_none()) {
                    pass.1 = Some(now);
                }
            }
            _ => {}
        }
    }
}

/// -1 for the host.
fn index(device: Device) -> i32 {
    match device {
        Device::Cuda(index) => i32::try_from(index).unwrap_or(i32::MAX),
        _ => -1,
    }
}

fn device(index: i32) -> Device {
    usize::try_from(index).map_or(Device::Cpu, Device::Cuda)
}

fn lock(notes: &Mutex<Notes>) -> MutexGuard<'_, Notes> {
    notes.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn on_event(owner: *mut c_void, event: i32, address: u64, bytes: u64, device: i32) {
    // SAFETY: `owner` came out of `Arc::into_raw` in `begin`, and its reference is kept while the watch lives.
    let notes = unsafe { &*owner.cast::<Mutex<Notes>>() };
    let with_callers = event == raw::ALLOCATED && lock(notes).with_callers;
    let caller = with_callers.then(|| Arc::new(Backtrace::force_capture()));
    lock(notes).take_note(event, (device, address), bytes, caller);
}

extern "C" fn on_drop(owner: *mut c_void) {
    // SAFETY: the reference that `Arc::into_raw` made, given here once.
    drop(unsafe { Arc::from_raw(owner.cast::<Mutex<Notes>>()) });
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;

    const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

    /// Blocks of this size: other tests of this process allocate meanwhile.
    fn of_size(history: &History, bytes: u64) -> Vec<&Block> {
        history.blocks.iter().filter(|block| block.bytes == bytes).collect()
    }

    #[test]
    fn blocks_are_seen_from_their_allocation_until_they_are_freed() {
        let watch = AllocationWatch::begin(false).unwrap();
        let kept = Tensor::zeros([1237], F32);
        let before = watch.now().event;
        drop(Tensor::zeros([100_003], F32));
        let history = watch.end();
        let [kept_block] = of_size(&history, 4 * 1237)[..] else { panic!("{history:?}") };
        assert!(kept_block.freed.is_none() && kept_block.is_alive_at(before));
        assert_eq!(kept_block.address, kept.data_ptr() as u64);
        let [freed] = of_size(&history, 4 * 100_003)[..] else { panic!("{history:?}") };
        assert!(freed.freed.is_some_and(|at| at > freed.allocated && at <= history.end));
        assert!(!freed.is_alive_at(before));
    }

    #[test]
    fn threads_may_allocate_and_free_while_a_watch_ends() {
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                        drop(Tensor::zeros([1000], F32));
                    }
                });
            }
            for _ in 0..2000 {
                drop(AllocationWatch::begin(false).unwrap().end());
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    #[test]
    fn older_memory_is_seen_when_it_is_freed() {
        let outer = AllocationWatch::begin(false).unwrap();
        let old = Tensor::zeros([1277], F32);
        let watch = AllocationWatch::begin(false).unwrap();
        drop(old);
        let history = watch.end();
        drop(outer);
        let [block] = of_size(&history, 4 * 1277)[..] else { panic!("{history:?}") };
        assert_eq!(block.allocated, Moment::default());
        assert!(block.freed.is_some());
    }

    #[test]
    fn nothing_is_noted_after_the_end() {
        let watch = AllocationWatch::begin(false).unwrap();
        let other = AllocationWatch::begin(false).unwrap();
        drop(watch);
        let _after = Tensor::zeros([1249], F32);
        assert_eq!(of_size(&other.end(), 4 * 1249).len(), 1);
    }

    #[test]
    fn older_memory_can_be_tagged() {
        let old = Tensor::zeros([90_001], F32);
        let watch = AllocationWatch::begin(false).unwrap();
        watch.tag(&old, Category::Parameter).unwrap();
        watch.tag(&old.view([-1, 1]), Category::Parameter).unwrap();
        let history = watch.end();
        let [block] = of_size(&history, 4 * 90_001)[..] else { panic!("{history:?}") };
        assert_eq!((block.tag, block.allocated, block.freed), (Some(Category::Parameter), Moment::default(), None));
    }

    #[test]
    fn backward_passes_are_noted() {
        let x = Tensor::rand([7], F32).set_requires_grad(true);
        let watch = AllocationWatch::begin(false).unwrap();
        let y = x.sin().sum(Kind::Float);
        let before = watch.now();
        y.backward();
        let after = watch.now();
        let history = watch.end();
        // Other tests run passes as well.
        let is_ours = |(begin, end): &(Moment, Option<Moment>)| *begin > before && end.is_some_and(|end| end <= after);
        assert!(history.passes.iter().any(is_ours), "{history:?}");
    }

    #[test]
    fn callers_are_lines_of_the_program() {
        let watch = AllocationWatch::begin(true).unwrap();
        let _kept = Tensor::zeros([1259], F32);
        let history = watch.end();
        let [block] = of_size(&history, 4 * 1259)[..] else { panic!("{history:?}") };
        // This crate's own lines count as between; the test harness calls them.
        assert!(block.caller.is_some());
    }
}
