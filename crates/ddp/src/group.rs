//! Process groups.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use overdrive_ffi::c10d::{self, GroupOptions, Store};
use tch::{Device, Tensor};

use crate::error::{Context, DdpError};
use crate::rendezvous::InitMethod;

pub use overdrive_ffi::c10d::Backend;

/// How long a collective may last where nothing else is said.
///
/// # Source
/// `default_pg_timeout`
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Processes that take part in collectives: a value to hand around, and not a global of the process. Clones are the same
/// group.
///
/// All ranks run the same collectives in the same order. After a [`TimedOut`](DdpError::TimedOut) or
/// [`Lost`](DdpError::Lost) the group is of no use; a new one needs a new rendezvous, most simply by restarting.
///
/// Dropping never waits: what is still under way ends on another thread, by its timeout at the latest.
///
/// # Source
/// `torch.distributed.ProcessGroup`
#[derive(Clone, Debug)]
pub struct ProcessGroup(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    engine: c10d::ProcessGroup,
    /// This group's part of the store, where its sub-groups have theirs.
    store: Store,
    backend: Backend,
    rank: usize,
    /// Each member's rank in the outermost group.
    global_ranks: Vec<usize>,
    local_rank: Option<usize>,
    name: Arc<str>,
    settings: Settings,
    /// Of collectives from here on, in milliseconds.
    timeout: AtomicU64,
    /// How many sub-groups have been made, counted alike on all ranks.
    sub_groups: AtomicU64,
    /// How many times the store was used for an agreement, counted alike on all ranks.
    agreements: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    timeout: Duration,
    verify: bool,
    cuda_device: Option<usize>,
    /// All ranks are on this host.
    one_host: bool,
}

/// How a [`ProcessGroup`] is made.
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `init`"]
pub struct ProcessGroupBuilder {
    backend: Backend,
    settings: Settings,
}

/// Meets the other ranks and makes the group of all of them, with PyTorch's defaults.
///
/// # Errors
/// When the launcher's variables are missing or wrong, or ranks do not come within [`DEFAULT_TIMEOUT`].
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
    /// How long meeting, and then each collective, may last. 30 minutes at first.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// Compares each collective over ranks before it runs, so that ranks that run different ones get an error and not a
    /// hang, or an end of the process. Slow: for finding mistakes.
    ///
    /// # Source
    /// `TORCH_DISTRIBUTED_DEBUG=DETAIL`
    pub fn verify(mut self, verify: bool) -> Self {
        self.settings.verify = verify;
        self
    }

    /// The GPU of this rank, for NCCL. Else it is the local rank's.
    ///
    /// # Source
    /// `init_process_group(device_id=..)`
    pub fn cuda_device(mut self, device: usize) -> Self {
        self.settings.cuda_device = Some(device);
        self
    }

    /// Meets the other ranks and makes the group of all of them.
    ///
    /// # Errors
    /// When the launcher's variables are missing or wrong, or ranks do not come in time.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn init(mut self, method: &InitMethod) -> Result<ProcessGroup, DdpError> {
        check_timeout(self.settings.timeout)?;
        let meeting = method.rendezvous()?;
        self.settings.one_host = meeting.one_host();
        if self.backend != Backend::Gloo {
            self.settings.cuda_device = self.settings.cuda_device.or(meeting.local_rank);
        }
        let store = meeting.store(self.settings.timeout)?;
        let failed = |source| meeting.failed(self.settings.timeout, source);
        let store = store.prefixed("default_pg").map_err(failed)?;
        let ranks: Vec<usize> = (0..meeting.world_size).collect();
        ProcessGroup::join(&store, self.backend, "0", meeting.rank, ranks, meeting.local_rank, self.settings)
            .map_err(failed)
    }
}

impl ProcessGroup {
    /// A group over `backend`.
    pub fn builder(backend: Backend) -> ProcessGroupBuilder {
        let settings = Settings { timeout: DEFAULT_TIMEOUT, verify: false, cuda_device: None, one_host: false };
        ProcessGroupBuilder { backend, settings }
    }

    fn join(
        store: &Store,
        backend: Backend,
        name: &str,
        rank: usize,
        global_ranks: Vec<usize>,
        local_rank: Option<usize>,
        settings: Settings,
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
            agreements: AtomicU64::new(0),
        })))
    }

    /// A group of some of this group's ranks, in rising order; none on the others. Every rank of this group calls it.
    ///
    /// # Errors
    /// When a rank does not exist or is given twice, there are none, or a member does not come in time.
    ///
    /// # Syncs
    /// Waits for the members.
    ///
    /// # Source
    /// `torch.distributed.new_group`
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>, DdpError> {
        let wrong = |reason: String| DdpError::InvalidMembers { ranks: ranks.to_vec(), reason };
        let mut members = ranks.to_vec();
        members.sort_unstable();
        members.dedup();
        if members.len() != ranks.len() {
            return Err(wrong("a rank is given twice".to_owned()));
        }
        match members.last() {
            None => return Err(wrong("there are none".to_owned())),
            Some(&last) if last >= self.size() => {
                return Err(wrong(format!("rank {last} is outside the group of {}", self.size())));
            }
            Some(_) => {}
        }
        // PyTorch counts on from the first group's "0".
        let name = (self.0.sub_groups.fetch_add(1, Ordering::Relaxed) + 1).to_string();
        let Ok(rank) = members.binary_search(&self.rank()) else { return Ok(None) };
        let global_ranks = members.iter().map(|&member| self.0.global_ranks[member]).collect();
        let inner = &*self.0;
        Self::join(&inner.store, inner.backend, &name, rank, global_ranks, inner.local_rank, inner.settings)
            .map(Some)
            .map_err(|source| DdpError::between(self.context("new_group"), source))
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.0.engine.size()
    }

    /// This process's place on its host, where the launcher tells it: the index of its GPU.
    pub fn local_rank(&self) -> Option<usize> {
        self.0.local_rank
    }

    /// Each member's rank in the outermost group.
    pub fn global_ranks(&self) -> &[usize] {
        &self.0.global_ranks
    }

    /// What carries the collectives.
    pub fn backend(&self) -> Backend {
        self.0.backend
    }

    /// How long a collective may last.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.0.timeout.load(Ordering::Relaxed))
    }

    /// How long each collective from here on may last; sub-groups begin with the time that this group began with.
    ///
    /// # Errors
    /// When it is less than a millisecond.
    ///
    /// # Source
    /// `_set_pg_timeout`
    pub fn set_timeout(&self, timeout: Duration) -> Result<(), DdpError> {
        check_timeout(timeout)?;
        self.0.engine.set_timeout(timeout)?;
        self.0.timeout.store(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        Ok(())
    }

    /// Where small tensors of the group's own go.
    pub fn device(&self) -> Device {
        match self.0.backend {
            Backend::Nccl => Device::Cuda(self.0.settings.cuda_device.unwrap_or(0)),
            _ => Device::Cpu,
        }
    }

    /// The key-value store that the group's ranks share; keys are the group's own.
    ///
    /// # Source
    /// `torch.distributed.Store`
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// Ends what is under way with an error, where the backend can (NCCL). The group is of no use then.
    ///
    /// # Errors
    /// When the backend refuses.
    ///
    /// # Source
    /// `_abort_process_group`
    pub fn abort(&self) -> Result<(), DdpError> {
        Ok(self.0.engine.abort()?)
    }

    /// Whether each collective is compared over ranks before it runs.
    pub(crate) fn verifies(&self) -> bool {
        self.0.settings.verify
    }

    /// A tensor's sum over ranks, whose backward sums the gradients over ranks.
    pub(crate) fn sum_with_grad(&self, op: &'static str, tensor: &Tensor) -> Result<Tensor, DdpError> {
        self.0.engine.sum_with_grad(tensor).map_err(|source| DdpError::between(self.context(op), source))
    }

    pub(crate) fn engine(&self) -> &c10d::ProcessGroup {
        &self.0.engine
    }

    pub(crate) fn context(&self, op: &'static str) -> Context {
        Context { op, rank: self.rank(), size: self.size(), group: self.0.name.clone() }
    }

    /// Tells apart what ranks agree on through the store; counted alike on all.
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
