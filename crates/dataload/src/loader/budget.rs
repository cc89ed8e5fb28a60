//! Bounds the bytes of the batches that are being made, and of those that wait to be taken.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use tch::Tensor;

use crate::loader::lock;
use crate::loader::tuner::local_ranks;
use crate::loader::work::{Made, Outcome};
use crate::tensor_batch::{Footprint, footprint_of};
use crate::{Cancellation, DataError, TensorBatch};

/// The host's budget unless set, where its memory is not known: 4 GiB.
const HOST_BYTES: usize = 4 << 30;
/// A device's budget unless set: 4 GiB.
pub(crate) const DEVICE_BYTES: usize = 4 << 30;

/// How many bytes batches may take, and how to measure one.
pub(crate) struct Allowance<B> {
    pub(crate) footprint: fn(&B) -> Footprint,
    pub(crate) limits: Footprint,
}

impl<B> Clone for Allowance<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Allowance<B> {}

/// The bytes that an epoch's batches take.
pub(crate) struct Budget<B> {
    allowance: Allowance<B>,
    held: Mutex<Held>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Held {
    /// How many batches are being made.
    making: usize,
    /// How many threads wait to begin one.
    waiting: usize,
    /// How many are made and not taken, and their bytes.
    ready: usize,
    bytes: Footprint,
    /// What making a batch took at most: its samples and the batch, which is on the host first, wherever it goes.
    largest: Footprint,
}

impl Held {
    /// Whether one more batch may be made. One always may, since the training loop could wait for it forever; and until
    /// the first is made, its size is not known.
    fn admits(&self, limits: Footprint) -> bool {
        let fits = |held: usize, largest: usize, limit: usize| {
            held.saturating_add(largest.saturating_mul(self.making + 1)) <= limit
        };
        self.making + self.ready == 0
            || (fits(self.bytes.host, self.largest.host, limits.host)
                && fits(self.bytes.device, self.largest.device, limits.device))
    }
}

impl<B> Budget<B> {
    pub(crate) fn new(allowance: Allowance<B>) -> Self {
        Self { allowance, held: Mutex::default(), freed: Condvar::new() }
    }

    fn footprint(&self, made: &Made<B>) -> Footprint {
        match &made.result {
            Ok(Outcome::Batch { batch, .. }) => (self.allowance.footprint)(batch),
            _ => Footprint::default(),
        }
    }

    /// Waits until a batch may be made; `None` when cancelled. Calls `meanwhile` while none may, until it has nothing
    /// to do and returns false.
    ///
    /// Batches get their numbers after this, so the one that the training loop waits for never waits here for a later
    /// one.
    pub(crate) fn begin(
        &self,
        cancelled: &Cancellation,
        meanwhile: impl Fn() -> Result<bool, DataError>,
    ) -> Result<Option<Making<'_, B>>, DataError> {
        let mut held = lock(&self.held);
        let mut is_idle = false;
        while !cancelled.is_cancelled() {
            if held.admits(self.allowance.limits) {
                held.making += 1;
                return Ok(Some(Making { budget: self, bytes: None, raw: 0 }));
            }
            if is_idle {
                held.waiting += 1;
                held = self.freed.wait(held).unwrap_or_else(PoisonError::into_inner);
                held.waiting -= 1;
                is_idle = false;
            } else {
                drop(held);
                is_idle = !meanwhile()?;
                held = lock(&self.held);
            }
        }
        Ok(None)
    }

    /// Records that the training loop takes a batch.
    pub(crate) fn taken(&self, made: &Made<B>) {
        let Footprint { host, device } = made.bytes;
        let mut held = lock(&self.held);
        held.ready -= 1;
        held.bytes.host = held.bytes.host.saturating_sub(host);
        held.bytes.device = held.bytes.device.saturating_sub(device);
        self.free(&held);
    }

    fn free(&self, held: &Held) {
        if held.waiting > 0 {
            self.freed.notify_all();
        }
    }

    /// Wakes the threads that wait to begin, after they were cancelled.
    pub(crate) fn wake(&self) {
        let _held = lock(&self.held);
        self.freed.notify_all();
    }
}

/// A batch that is being made.
pub(crate) struct Making<'a, B> {
    budget: &'a Budget<B>,
    /// Its bytes, once it is made.
    bytes: Option<Footprint>,
    /// Those of the samples that it was made of.
    raw: usize,
}

impl<B> Making<'_, B> {
    /// Records that it is made, and waits to be taken.
    pub(crate) fn done(mut self, made: &mut Made<B>) {
        made.bytes = self.budget.footprint(made);
        self.bytes = Some(made.bytes);
        if let Ok(Outcome::Batch { raw, .. }) = made.result {
            self.raw = raw;
        }
    }
}

impl<B> Drop for Making<'_, B> {
    fn drop(&mut self) {
        let mut held = lock(&self.budget.held);
        held.making -= 1;
        if let Some(Footprint { host, device }) = self.bytes {
            held.ready += 1;
            held.bytes.host += host;
            held.bytes.device += device;
            held.largest.host = held.largest.host.max((host + device).saturating_add(self.raw));
            held.largest.device = held.largest.device.max(device);
        }
        self.budget.free(&held);
    }
}

/// How the types of batches that most loaders have are measured, without an option that asks for their tensors.
pub(crate) fn usual_footprint<B: 'static>() -> Option<fn(&B) -> Footprint> {
    fn of<B: TensorBatch + 'static>() -> Box<dyn Any> {
        Box::new(footprint_of::<B> as fn(&B) -> Footprint)
    }
    let usual = [
        of::<Tensor>(),
        of::<(Tensor, Tensor)>(),
        of::<(Tensor, Tensor, Tensor)>(),
        of::<Vec<Tensor>>(),
        of::<Vec<String>>(),
        of::<Vec<Vec<u8>>>(),
        of::<BTreeMap<String, Tensor>>(),
        of::<(Tensor, Vec<String>)>(),
        of::<crate::Ragged>(),
        of::<(Tensor, (crate::Ragged, crate::Ragged))>(),
        of::<(Tensor, (crate::Ragged, crate::Ragged, Vec<String>))>(),
        of::<crate::PackedTokens>(),
        #[cfg(any(feature = "arrow", feature = "parquet"))]
        of::<crate::Table>(),
    ];
    usual.into_iter().find_map(|footprint| footprint.downcast().ok()).map(|footprint| *footprint)
}

/// A quarter of the memory that the process may use, shared with the other ranks of the host.
pub(crate) fn host_bytes() -> usize {
    // Read once: it takes some 0.1 ms, as long as the first batch of a small dataset.
    static LIMIT: OnceLock<Option<usize>> = OnceLock::new();
    let ranks = local_ranks(|name| std::env::var(name).ok()).unwrap_or(1).max(1);
    LIMIT.get_or_init(limit).map_or(HOST_BYTES, |bytes| bytes / 4 / ranks)
}

/// The memory that the process may use: what is installed, or less where control groups limit it.
fn limit() -> Option<usize> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits =
        limit_files(&groups).into_iter().filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok());
    let installed = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| installed(&text));
    installed.into_iter().chain(limits).min()
}

/// The files with the limits of the process's control groups and those around them, given `/proc/self/cgroup`.
fn limit_files(groups: &str) -> Vec<String> {
    let files = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            it if it.split(',').any(|it| it == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => return None,
        };
        let around = Path::new(path).ancestors().map(move |group| format!("{root}{}/{file}", group.display()));
        Some(around.map(|path| path.replace("//", "/")))
    });
    files.flatten().collect()
}

/// The bytes of `MemTotal`.
fn installed(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const LIMITS: Footprint = Footprint { host: 100, device: 50 };

    fn held(making: usize, ready: usize, bytes: [usize; 2], largest: [usize; 2]) -> Held {
        let footprint = |[host, device]: [usize; 2]| Footprint { host, device };
        Held { making, ready, bytes: footprint(bytes), largest: footprint(largest), ..Held::default() }
    }

    #[test]
    fn host_and_device_are_bounded_apart() {
        // Nothing is known yet, then batches of 30 bytes on the host.
        assert!(held(0, 0, [0, 0], [0, 0]).admits(LIMITS) && held(15, 0, [0, 0], [0, 0]).admits(LIMITS));
        assert!(held(0, 2, [60, 0], [30, 0]).admits(LIMITS) && held(1, 1, [30, 0], [30, 0]).admits(LIMITS));
        assert!(!held(0, 3, [90, 0], [30, 0]).admits(LIMITS) && !held(3, 0, [0, 0], [30, 0]).admits(LIMITS));
        // Batches that go to the device are on the host only while they are made.
        assert!(held(0, 1, [0, 20], [20, 20]).admits(LIMITS));
        assert!(!held(0, 2, [0, 40], [20, 20]).admits(LIMITS) && !held(2, 0, [0, 0], [20, 20]).admits(LIMITS));
        assert!(!held(2, 0, [0, 0], [40, 10]).admits(LIMITS));
        // One batch is made, however large.
        assert!(held(0, 0, [0, 0], [1000, 1000]).admits(LIMITS));
    }

    #[test]
    fn a_thread_does_something_else_until_there_is_room() -> Result<(), DataError> {
        let footprint = |_: &()| Footprint { host: 60, device: 0 };
        let (budget, cancelled) = (Budget::new(Allowance { footprint, limits: LIMITS }), Cancellation::new());
        let outcome = Ok(Outcome::Batch { batch: (), samples: 1, raw: 0, uploaded: None });
        let mut made = Made::new(0, outcome, None);
        budget.begin(&cancelled, || Ok(false))?.unwrap().done(&mut made);
        let left = Cell::new(3);
        let meanwhile = || {
            left.set(left.get() - 1);
            if left.get() == 0 {
                budget.taken(&made);
            }
            Ok(true)
        };
        assert!(budget.begin(&cancelled, meanwhile)?.is_some());
        assert_eq!(left.get(), 0);
        Ok(())
    }

    #[test]
    fn a_quarter_of_the_memory_is_found() {
        assert_eq!(installed("MemTotal:       32596152 kB\nMemFree:  1 kB\n"), Some(32_596_152 << 10));
        assert_eq!(installed("MemFree:  1 kB\n"), None);
        assert!(host_bytes() > 0);
        let found = limit_files("12:cpu,memory:/slurm/job\n3:cpuset:/other\n0::/user/a.scope\n");
        let expected = [
            "/sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/user/a.scope/memory.max",
            "/sys/fs/cgroup/user/memory.max",
            "/sys/fs/cgroup/memory.max",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn usual_batches_are_measured() {
        let bytes = |count| Tensor::zeros([count], (tch::Kind::Uint8, tch::Device::Cpu));
        let pair = usual_footprint::<(Tensor, Tensor)>().map(|of| of(&(bytes(3), bytes(4))));
        assert_eq!(pair, Some(Footprint { host: 7, device: 0 }));
        assert!(usual_footprint::<(Tensor, (crate::Ragged, crate::Ragged))>().is_some(), "images, boxes and classes");
        #[cfg(any(feature = "arrow", feature = "parquet"))]
        assert!(usual_footprint::<crate::Table>().is_some());
        assert!(usual_footprint::<Vec<usize>>().is_none());
    }
}
