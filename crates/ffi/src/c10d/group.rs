//! Process groups.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tch::Tensor;

use super::store::Store;
use super::{c_string, millis};
use crate::error::{Error, check, take_text};
use crate::raw_c10d as raw;
use crate::tensor_list::TensorList;

/// Whether NCCL was compiled in, with or without a GPU in this machine.
pub fn nccl_is_compiled() -> bool {
    // SAFETY: no arguments.
    unsafe { raw::od_nccl_compiled() != 0 }
}

/// What runs a group's collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// Gloo, for tensors on the host; tensors on a GPU are copied through the host.
    #[default]
    Gloo,
    /// NCCL, for tensors on GPUs.
    Nccl,
    /// Gloo for tensors on the host and NCCL for those on GPUs (PyTorch: `"cpu:gloo,cuda:nccl"`).
    GlooAndNccl,
}

/// What NCCL's watchdog has found.
///
/// # Source
/// `c10d::ErrorType`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GroupFailure {
    /// A collective has not ended within its timeout.
    TimedOut,
    /// NCCL has reported an error, such as a lost connection.
    Lost,
    /// Another rank has told of one, with `TORCH_NCCL_PROPAGATE_ERROR=1`.
    OnAnotherRank,
}

/// libtorch's flight recorder as JSON: the last collectives of this process's groups over NCCL, or else over Gloo, with
/// their sizes, states and times; `only_active` leaves out those that are done. It keeps 2000, or
/// `TORCH_FR_BUFFER_SIZE`. Does not wait.
///
/// # Errors
/// For NCCL, if that was not compiled in.
///
/// # Source
/// `torch._C._distributed_c10d._dump_nccl_trace_json`
#[doc(alias = "_dump_nccl_trace_json")]
pub fn flight_record(nccl: bool, only_active: bool) -> Result<String, Error> {
    let mut out = ptr::null_mut();
    // SAFETY: `out` lives through the call.
    check(|err| unsafe { raw::od_flight_record(i32::from(nccl), i32::from(only_active), &mut out, err) })?;
    // SAFETY: the call has made a string that is ours.
    Ok(unsafe { take_text(out) })
}

/// Options of a [`ProcessGroup`].
#[derive(Clone, Debug)]
pub struct GroupOptions<'a> {
    /// What runs its collectives.
    pub backend: Backend,
    /// This process's rank in the group.
    pub rank: usize,
    /// Each member's rank in the outermost group, in order; as many as the group has members.
    pub global_ranks: &'a [usize],
    /// A name that is unique among the groups over the same store.
    pub name: &'a str,
    /// Compare each collective over ranks before it runs. Slow: for debugging.
    pub verify: bool,
    /// The GPU that NCCL is bound to; `None`: the first that is used.
    pub cuda_device: Option<usize>,
    /// Whether all members are on this host: Gloo then listens only at the loopback, unless `GLOO_SOCKET_IFNAME` is
    /// set.
    pub one_host: bool,
    /// How long connecting, and then each collective, may take.
    pub timeout: Duration,
    /// Whether NCCL's streams are of high priority.
    pub high_priority: bool,
    /// Split the communicator of this group over NCCL, in place of making one anew; and a number that is the same for all
    /// members, and another one for each part. All ranks of that group take part at the same time, those that are members
    /// of none by [`ProcessGroup::split_none`].
    pub split: Option<(&'a ProcessGroup, u32)>,
}

/// Processes that take part in collectives.
///
/// Threads may share it: collectives start one at a time. The threads have to make sure that their order is the same on
/// all ranks.
///
/// Dropping never waits for Gloo: collectives under way end on another thread, at their timeout at the latest. Over NCCL
/// it [closes](Self::close) the group within its timeout, and aborts it where that fails; in a panic, and after a
/// collective that has failed, it aborts the group at once.
///
/// # Source
/// `c10d::ProcessGroup`
#[derive(Debug)]
pub struct ProcessGroup {
    handle: NonNull<raw::Group>,
    pub(super) rank: usize,
    size: usize,
    /// Of collectives, in milliseconds.
    timeout: AtomicI64,
}

// SAFETY: the group is counted atomically and belongs to no thread.
unsafe impl Send for ProcessGroup {}
// SAFETY: the C++ side starts collectives one at a time, those of backward passes included.
unsafe impl Sync for ProcessGroup {}

impl ProcessGroup {
    /// Joins a group; the other members do the same over the same store.
    ///
    /// # Errors
    /// When a member does not join within the timeout, or the backend is not compiled in.
    ///
    /// # Syncs
    /// Waits for all members.
    pub fn new(store: &Store, options: &GroupOptions<'_>) -> Result<Self, Error> {
        let name = c_string(options.name)?;
        let size = options.global_ranks.len();
        if options.rank >= size {
            return Err(Error::refused(format!("rank {} is outside a group of {size}", options.rank)));
        }
        // libtorch stores device numbers in eight bits.
        if let Some(device) = options.cuda_device.filter(|&device| device > i8::MAX as usize) {
            return Err(Error::refused(format!("there is no CUDA device {device}")));
        }
        let global_ranks: Vec<u64> = options.global_ranks.iter().map(|&rank| rank as u64).collect();
        let wanted = raw::GroupOptions {
            backend: match options.backend {
                Backend::Gloo => raw::GLOO,
                Backend::Nccl => raw::NCCL,
                Backend::GlooAndNccl => raw::GLOO_AND_NCCL,
            },
            rank: int(options.rank)?,
            size: int(size)?,
            name: name.as_ptr(),
            global_ranks: global_ranks.as_ptr(),
            verify: i32::from(options.verify),
            cuda_device: options.cuda_device.map_or(Ok(-1), int)?,
            one_host: i32::from(options.one_host),
            timeout_ms: millis(options.timeout),
            high_priority: i32::from(options.high_priority),
            split_from: options.split.map_or(ptr::null(), |(parent, _)| parent.as_ptr()),
            color: options.split.map_or(Ok(0), |(_, color)| int(color as usize))?,
        };
        if options.split.is_some() && options.cuda_device.is_none() {
            return Err(Error::refused("a split needs the CUDA device"));
        }
        let mut out = ptr::null_mut();
        // SAFETY: what the options point to outlives the call.
        check(|err| unsafe { raw::od_group_new(store.as_ptr(), &wanted, &mut out, err) })?;
        let handle = NonNull::new(out).ok_or_else(|| Error::refused("libtorch returned no group"))?;
        Ok(Self { handle, rank: options.rank, size, timeout: AtomicI64::new(millis(options.timeout)) })
    }

    /// Takes part in a [split](GroupOptions::split) of this group's communicator on `device`, as a rank that is a member of
    /// no part.
    ///
    /// # Errors
    /// When the group is not over NCCL, or NCCL fails.
    ///
    /// # Syncs
    /// Waits for the other ranks of this group.
    ///
    /// # Source
    /// `ProcessGroupNCCL::performNocolorSplit`
    pub fn split_none(&self, device: usize) -> Result<(), Error> {
        let device = int(device)?;
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_group_split_none(self.as_ptr(), device, err) })
    }

    /// Waits for all members; the error on rank 0 names the missing ones.
    ///
    /// # Errors
    /// When a member does not call it within `timeout`. Rank 0 names the first missing member, or all with
    /// `wait_all_ranks`.
    ///
    /// # Syncs
    /// Waits for all members.
    ///
    /// # Source
    /// `monitored_barrier`
    pub fn monitored_barrier(&self, timeout: Duration, wait_all_ranks: bool) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe {
            raw::od_group_monitored_barrier(self.as_ptr(), millis(timeout), i32::from(wait_all_ranks), err)
        })
    }

    /// Overwrites the tensors with those of `root`, packed into buffers of `bytes`.
    ///
    /// # Errors
    /// When a member has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all members.
    ///
    /// # Source
    /// `_broadcast_coalesced`
    pub fn broadcast_coalesced(&self, tensors: &TensorList, bytes: usize, root: usize) -> Result<(), Error> {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let root = int(root)?;
        // SAFETY: both handles are live.
        check(|err| unsafe { raw::od_group_broadcast_coalesced(self.as_ptr(), tensors.as_ptr(), bytes, root, err) })
    }

    /// Compares the parameters' number, shapes and dtypes with those of rank 0.
    ///
    /// # Errors
    /// Only on ranks that differ from rank 0.
    ///
    /// # Syncs
    /// Waits for all members.
    ///
    /// # Source
    /// `_verify_params_across_processes`
    pub fn verify_params(&self, params: &TensorList) -> Result<(), Error> {
        // SAFETY: both handles are live.
        check(|err| unsafe { raw::od_group_verify_params(self.as_ptr(), params.as_ptr(), err) })
    }

    /// Sets how long each collective from here on may take.
    ///
    /// # Errors
    /// None are known.
    pub fn set_timeout(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_group_set_timeout(self.as_ptr(), millis(timeout), err) })?;
        self.timeout.store(millis(timeout), Ordering::Relaxed);
        Ok(())
    }

    /// Waits until collectives under way are done, and frees what the backends hold. From then on each collective is an
    /// error. Closing again does nothing.
    ///
    /// # Errors
    /// When work is under way after `timeout`: it is aborted then, and its results are undefined.
    ///
    /// # Syncs
    /// Waits for collectives under way, and over NCCL for the members' own `close`.
    ///
    /// # Source
    /// `destroy_process_group`
    pub fn close(&self, timeout: Duration) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_group_close(self.as_ptr(), millis(timeout), err) })
    }

    /// Ends collectives under way, where the backend supports it (NCCL). Their results are undefined, and the group is
    /// unusable afterwards.
    ///
    /// # Errors
    /// When the backend refuses.
    pub fn abort(&self) -> Result<(), Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_group_abort(self.as_ptr(), err) })
    }

    /// What NCCL's watchdog has found; `None` for nothing, and over Gloo. Does not wait.
    ///
    /// # Errors
    /// None are known.
    ///
    /// # Source
    /// `ProcessGroupNCCL::getError`
    pub fn failure(&self) -> Result<Option<GroupFailure>, Error> {
        let mut number = 0;
        // SAFETY: the handle is live, and `number` lives through the call.
        check(|err| unsafe { raw::od_group_failure(self.as_ptr(), &mut number, err) })?;
        Ok(match number {
            0 => None,
            1 => Some(GroupFailure::TimedOut),
            2 => Some(GroupFailure::Lost),
            _ => Some(GroupFailure::OnAnotherRank),
        })
    }

    /// A tensor's sum over ranks, which can be differentiated: backward sums the gradients over ranks.
    ///
    /// # Errors
    /// When a member has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all members, in backward too.
    pub fn sum_with_grad(&self, tensor: &Tensor) -> Result<Tensor, Error> {
        let mut out = ptr::null_mut();
        // SAFETY: the handle and the tensor are live.
        check(|err| unsafe { raw::od_group_sum_with_grad(self.as_ptr(), tensor.as_ptr(), &mut out, err) })?;
        // SAFETY: on success `out` is a tensor that we own.
        Ok(unsafe { Tensor::from_ptr(out) })
    }

    /// How many members it has.
    pub fn size(&self) -> usize {
        self.size
    }

    pub(super) fn as_ptr(&self) -> *const raw::Group {
        self.handle.as_ptr()
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let timeout = if std::thread::panicking() { 0 } else { self.timeout.load(Ordering::Relaxed) };
        // SAFETY: the handle is ours, and not used after this.
        unsafe { raw::od_group_free(self.handle.as_ptr(), timeout) }
    }
}

pub(super) fn int(value: usize) -> Result<i32, Error> {
    i32::try_from(value).map_err(|_| Error::refused(format!("{value} is too large for libtorch, at most 2147483647")))
}
