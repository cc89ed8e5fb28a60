//! What a step leaves behind.

use std::collections::BTreeMap;

use overdrive_ffi::allocations::{AllocationWatch, Block};
use overdrive_ffi::autograd::BoxError;
use tch::Device;

use super::record::device_name;
use crate::error::MemoryError;

/// What one line of the program left behind in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leak {
    /// Where.
    pub device: Device,
    /// How many bytes.
    pub bytes: u64,
    /// In how many pieces.
    pub blocks: usize,
    /// The line or function that had them allocated; the caller of `backward` for what a backward pass has made on the
    /// host. None if no function of the program's is known, as for what a backward pass has made on a CUDA device.
    pub caller: Option<String>,
}

/// Runs a step a few times, and fails if it leaves memory behind; see [`LeakCheck`].
///
/// ```
/// use overdrive_memory::{MemoryError, leak_check};
/// use tch::{Device, Kind, Tensor};
///
/// let mut losses = Vec::new();
/// let leaks = leak_check(|| {
///     losses.push(Tensor::rand([10], (Kind::Float, Device::Cpu)));      // kept from step to step
///     Ok::<_, MemoryError>(())
/// });
/// assert!(matches!(leaks, Err(MemoryError::Leaked { .. })));
/// ```
///
/// # Errors
/// [`MemoryError::Leaked`] with the lines whose memory stayed; [`MemoryError::Function`] when the step fails.
pub fn leak_check<E: Into<BoxError>>(step: impl FnMut() -> Result<(), E>) -> Result<(), MemoryError> {
    LeakCheck::default().run(step)
}

/// How [`leak_check`] looks for memory that a step leaves behind.
///
/// The step runs a few times unwatched, because the first steps make an optimizer's state. Then it is watched once. What
/// it had allocated and is still in use a few steps later has leaked: gradients and batches were replaced by then. A tensor
/// that each step replaces by a larger one is not found.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `run`"]
pub struct LeakCheck {
    warmup: usize,
    after: usize,
}

impl Default for LeakCheck {
    fn default() -> Self {
        Self { warmup: 2, after: 2 }
    }
}

impl LeakCheck {
    /// How often the step runs before it is watched; default 2.
    pub fn warmup(mut self, steps: usize) -> Self {
        self.warmup = steps;
        self
    }

    /// How often it runs afterwards; default 2. What is kept for some steps on purpose, such as the batches that a
    /// loader reads ahead, is gone after as many.
    pub fn after(mut self, steps: usize) -> Self {
        self.after = steps;
        self
    }

    /// Runs the step `warmup + 1 + after` times.
    ///
    /// Memory of the whole process is watched, on the host (but for pinned memory) and on CUDA devices: other threads
    /// should not keep anything meanwhile.
    ///
    /// # Errors
    /// As [`leak_check`].
    pub fn run<E: Into<BoxError>>(self, mut step: impl FnMut() -> Result<(), E>) -> Result<(), MemoryError> {
        let mut run = |times: usize| (0..times).try_for_each(|_| step());
        let failed = |error: E| MemoryError::Function { scope: "leak_check".to_owned(), source: error.into() };
        run(self.warmup).map_err(failed)?;
        let watch = AllocationWatch::begin(true)?;
        run(1).map_err(failed)?;
        let last = watch.now().event;
        run(self.after).map_err(failed)?;
        let history = watch.end();
        let left = history.blocks.iter().filter(|block| block.freed.is_none() && block.allocated.event <= last);
        let leaks = by_caller(left);
        if leaks.is_empty() { Ok(()) } else { Err(MemoryError::Leaked { leaks }) }
    }
}

/// The largest first.
fn by_caller<'b>(blocks: impl Iterator<Item = &'b Block>) -> Vec<Leak> {
    let mut leaks: BTreeMap<(String, Option<String>), Leak> = BTreeMap::new();
    for block in blocks {
        let (device, caller) = (block.device, block.caller().map(|it| it.to_string()));
        let leak = leaks.entry((format!("{device:?}"), caller.clone()));
        let leak = leak.or_insert(Leak { device, bytes: 0, blocks: 0, caller });
        (leak.bytes, leak.blocks) = (leak.bytes + block.bytes, leak.blocks + 1);
    }
    let mut leaks: Vec<_> = leaks.into_values().collect();
    leaks.sort_by_key(|leak| std::cmp::Reverse(leak.bytes));
    leaks
}

impl std::fmt::Display for Leak {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { device, bytes, blocks, caller } = self;
        let caller = caller.as_deref().unwrap_or("a function that is not known");
        let device = device_name(*device);
        write!(f, "{bytes} bytes on {device} in {blocks} pieces, allocated by {caller}")
    }
}
