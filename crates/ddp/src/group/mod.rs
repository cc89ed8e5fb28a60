//! Process groups.

mod mem_pool;
mod sub_groups;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use overdrive_ffi::c10d::{self, GroupOptions, Store};
use tch::{Device, Tensor};

use crate::device::{self, Place};
use crate::error::{Context, DdpError};
use crate::rendezvous::InitMethod;

pub use overdrive_ffi::c10d::Backend;

/// How long a collective may take by default, with Gloo or both backends.
///
/// # Source
/// `default_pg_timeout`
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// How long a collective may take by default, with NCCL alone.
///
/// # Source
/// `default_pg_nccl_timeout`
pub const DEFAULT_NCCL_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Processes that take part in collectives: a value to pass around, not a global of the process. Clones are the same
/// group.
///
/// All ranks run the same collectives in the same order. After a [`TimedOut`](DdpError::TimedOut) or
/// [`Lost`](DdpError::Lost) the group is unusable; a new one needs a new rendezvous, most simply by restarting.
///
/// Over NCCL only the device's stream waits for most collectives. A rank that is missing from one is an error of a
/// later collective, or libtorch's watchdog ends the process after the timeout. Where the host waits (a
/// [`barrier`](Self::barrier), [`Work::wait_for`](crate::Work::wait_for), objects) there is an error as over Gloo.
///
/// [`close`](Self::close) ends a group in order. Dropping a group over Gloo never waits: collectives under way end on
/// another thread, at their timeout at the latest. Over NCCL a drop is a `close`, and what is not done at the group's
/// timeout is aborted; it is aborted at once in a panic, and after a collective that has failed.
///
/// # Source
/// `torch.distributed.ProcessGroup`
#[derive(Clone, Debug)]
pub struct ProcessGroup(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    engine: c10d::ProcessGroup,
    /// This group's keys in the store; its sub-groups' keys are below them.
    store: Store,
    backend: Backend,
    rank: usize,
    /// Each member's rank in the outermost group.
    global_ranks: Vec<usize>,
    local_rank: Option<usize>,
    name: Arc<str>,
    settings: Settings,
    /// Of future collectives, in milliseconds.
    timeout: AtomicU64,
    /// How many sub-groups have been made; the same count on all ranks.
    sub_groups: AtomicU64,
    /// Those of which this rank is a member, in the order in which they were made.
    members_of: Mutex<Vec<Weak<Inner>>>,
    /// For a group over NCCL: a group of the same members over Gloo, which exchanges numbers of the host. Made when
    /// first used.
    host: Mutex<Option<ProcessGroup>>,
    /// How many times the ranks have agreed on something through the store; the same count on all ranks.
    agreements: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    /// As the builder was told, or else the backend's default.
    timeout: Duration,
    verify: bool,
    cuda_device: Option<usize>,
    /// All ranks are on this host.
    one_host: bool,
    high_priority: bool,
}

/// Options of a [`ProcessGroup`].
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `init`"]
pub struct ProcessGroupBuilder {
    backend: Backend,
    timeout: Option<Duration>,
    settings: Settings,
}

/// Meets the other ranks and makes the group of all of them, with PyTorch's defaults.
///
/// # Errors
/// When the launcher's variables are missing or wrong, or not all ranks meet within [`DEFAULT_TIMEOUT`].
///
/// # Syncs
/// Waits for all ranks.
///
/// # Source
/// `torch.distributed.init_process_group`
pub fn init_process_group(backend: Backend, method: InitMethod) -> Result<ProcessGroup, DdpError> {
    ProcessGroup::builder(backend).init(&method)
}

impl ProcessGroupBuilder {
    /// How long the rendezvous, and then each collective, may take. 30 minutes by default, and 10 over NCCL alone.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Compares each collective over ranks before it runs: ranks that run different collectives get an error instead of
    /// a hang or a crash. Slow: for debugging.
    ///
    /// # Source
    /// `TORCH_DISTRIBUTED_DEBUG=DETAIL`
    pub fn verify(mut self, verify: bool) -> Self {
        self.settings.verify = verify;
        self
    }

    /// The GPU of this rank, for NCCL. By default, the local rank is its index, and GPU 0 where the process sees one
    /// alone, as with Slurm's `--gpus-per-task`; without a launcher that sets one, a guess: the rank modulo the number of
    /// GPUs, which is right where each host has as many ranks as GPUs. If several ranks have to guess, a warning says so.
    /// Two ranks on one GPU are an error.
    ///
    /// # Source
    /// `init_process_group(device_id=..)`
    pub fn cuda_device(mut self, device: usize) -> Self {
        self.settings.cuda_device = Some(device);
        self
    }

    /// Makes NCCL's streams of high priority: a device that is computing begins collectives earlier. False by default.
    ///
    /// # Source
    /// `ProcessGroupNCCL.Options(is_high_priority_stream=True)`
    pub fn high_priority_stream(mut self, high: bool) -> Self {
        self.settings.high_priority = high;
        self
    }

    /// Meets the other ranks and makes the group of all of them.
    ///
    /// # Errors
    /// When the launcher's variables are missing or wrong, or not all ranks meet within the timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn init(mut self, method: &InitMethod) -> Result<ProcessGroup, DdpError> {
        let default = if self.backend == Backend::Nccl { DEFAULT_NCCL_TIMEOUT } else { DEFAULT_TIMEOUT };
        self.settings.timeout = self.timeout.unwrap_or(default);
        check_timeout(self.settings.timeout)?;
        let meeting = method.rendezvous()?;
        self.settings.one_host = meeting.one_host();
        if self.backend != Backend::Gloo {
            let gpus = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
            let place = Place { rank: meeting.rank, world_size: meeting.world_size, local_rank: meeting.local_rank };
            self.settings.cuda_device = device::choose(self.settings.cuda_device, place, gpus)?;
        }
        let store = meeting.store(self.settings.timeout)?;
        let failed = |source| meeting.failed(self.settings.timeout, source);
        let store = store.prefixed("default_pg").map_err(failed)?;
        if let Some(device) = self.settings.cuda_device.filter(|_| meeting.world_size > 1) {
            device::claim(&store, device, meeting.rank)?;
        }
        let ranks: Vec<usize> = (0..meeting.world_size).collect();
        ProcessGroup::join(&store, self.backend, "0", meeting.rank, ranks, meeting.local_rank, self.settings, None)
            .map_err(failed)
    }
}

impl ProcessGroup {
    /// A builder of a group over `backend`.
    pub fn builder(backend: Backend) -> ProcessGroupBuilder {
        let (timeout, verify, cuda_device) = (DEFAULT_TIMEOUT, false, None);
        let settings = Settings { timeout, verify, cuda_device, one_host: false, high_priority: false };
        ProcessGroupBuilder { backend, timeout: None, settings }
    }

    #[allow(clippy::too_many_arguments)] // One for each part of a group.
    fn join(
        store: &Store,
        backend: Backend,
        name: &str,
        rank: usize,
        global_ranks: Vec<usize>,
        local_rank: Option<usize>,
        settings: Settings,
        split: Option<(&c10d::ProcessGroup, u32)>,
    ) -> Result<Self, overdrive_core::TorchError> {
        let engine = c10d::ProcessGroup::new(
            store,
            &GroupOptions {
                backend,
                rank,
                global_ranks: &global_ranks,
                name,
                verify: settings.verify,
                cuda_device: settings.cuda_device,
                one_host: settings.one_host,
                timeout: settings.timeout,
                high_priority: settings.high_priority,
                split,
            },
        )?;
        let store = store.prefixed(&format!("{name}/"))?;
        Ok(Self(Arc::new(Inner {
            engine,
            store,
            backend,
            rank,
            global_ranks,
            local_rank,
            name: name.into(),
            settings,
            timeout: AtomicU64::new(u64::try_from(settings.timeout.as_millis()).unwrap_or(u64::MAX)),
            sub_groups: AtomicU64::new(0),
            members_of: Mutex::default(),
            host: Mutex::new(None),
            agreements: AtomicU64::new(0),
        })))
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.0.engine.size()
    }

    /// This process's index on its host, and so its GPU's, where the launcher sets it.
    pub fn local_rank(&self) -> Option<usize> {
        self.0.local_rank
    }

    /// Each member's rank in the outermost group.
    pub fn global_ranks(&self) -> &[usize] {
        &self.0.global_ranks
    }

    /// The backend that runs the collectives.
    pub fn backend(&self) -> Backend {
        self.0.backend
    }

    /// How long a collective may take.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.0.timeout.load(Ordering::Relaxed))
    }

    /// Sets how long each collective from here on may take. New sub-groups still begin with this group's original
    /// timeout.
    ///
    /// # Errors
    /// When it is less than a millisecond.
    ///
    /// # Source
    /// `_set_pg_timeout`
    #[doc(alias = "_set_pg_timeout")]
    pub fn set_timeout(&self, timeout: Duration) -> Result<(), DdpError> {
        check_timeout(timeout)?;
        self.0.engine.set_timeout(timeout)?;
        if let Some(host) = &*self.0.host.lock().unwrap_or_else(PoisonError::into_inner) {
            host.set_timeout(timeout)?;
        }
        self.0.timeout.store(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        Ok(())
    }

    /// The device of the small tensors that the group itself sends: over [`Backend::Nccl`] the rank's GPU
    /// ([`cuda_device`](ProcessGroupBuilder::cuda_device)), otherwise the CPU.
    pub fn device(&self) -> Device {
        match self.0.backend {
            Backend::Nccl => Device::Cuda(self.0.settings.cuda_device.unwrap_or(0)),
            _ => Device::Cpu,
        }
    }

    /// The group that exchanges numbers of the host. Over NCCL they would have to go to the device and back, and so
    /// wait for all of its work; so a group over NCCL has one over Gloo for them. The first call makes that group, so
    /// every rank has to call it.
    #[doc(hidden)] // For `overdrive-shard`.
    pub fn of_the_host(&self) -> Result<Self, DdpError> {
        let inner = &*self.0;
        if inner.backend != Backend::Nccl {
            return Ok(self.clone());
        }
        let mut host = inner.host.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(host) = &*host {
            return Ok(host.clone());
        }
        let settings = Settings { timeout: self.timeout(), cuda_device: None, ..inner.settings };
        let ranks = inner.global_ranks.clone();
        let made = Self::join(&inner.store, Backend::Gloo, "host", inner.rank, ranks, inner.local_rank, settings, None)
            .map_err(|source| DdpError::between(self.context("a group of the host"), source))?;
        Ok(host.insert(made).clone())
    }

    /// The key-value store that the group's ranks share. Other groups do not see its keys.
    ///
    /// # Source
    /// `torch.distributed.Store`
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// Whether each collective is compared over ranks before it runs.
    pub(crate) fn verifies(&self) -> bool {
        self.0.settings.verify
    }

    /// A tensor's sum over ranks; its backward sums the gradients over ranks.
    pub(crate) fn sum_with_grad(&self, op: &'static str, tensor: &Tensor) -> Result<Tensor, DdpError> {
        self.0.engine.sum_with_grad(tensor).map_err(|source| DdpError::between(self.context(op), source))
    }

    pub(crate) fn engine(&self) -> &c10d::ProcessGroup {
        &self.0.engine
    }

    pub(crate) fn context(&self, op: &'static str) -> Context {
        Context { op, rank: self.rank(), size: self.size(), group: self.0.name.clone() }
    }

    /// The number of the ranks' next agreement through the store, so that each agreement has its own keys; the same on
    /// all ranks.
    pub(crate) fn next_agreement(&self) -> u64 {
        self.0.agreements.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn check_rank(&self, what: &'static str, rank: usize) -> Result<(), DdpError> {
        if rank < self.size() { Ok(()) } else { Err(DdpError::InvalidRank { what, rank, size: self.size() }) }
    }
}

fn check_timeout(timeout: Duration) -> Result<(), DdpError> {
    if timeout >= Duration::from_millis(1) {
        return Ok(());
    }
    let found = format!("{timeout:?}");
    Err(DdpError::InvalidOption { option: "timeout", found, expected: "at least a millisecond" })
}
