//! Uneven inputs: ranks that have finished take part in the other ranks' collectives.

use overdrive_ffi::c10d::ReduceOp;
use tch::{Kind, Tensor};

use super::{BufferHookLocation, Buffers, DistributedDataParallel, builder};
use crate::error::DdpError;
use crate::work::Work;

/// Options of [`join_with`](DistributedDataParallel::join_with).
///
/// # Source
/// The arguments of `Join`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JoinOptions {
    /// Divide gradients by the number of ranks that still have inputs, and not by the world size
    /// (`divide_by_initial_world_size=False`).
    pub by_active_ranks: bool,
    /// End the loop on all ranks, with [`DdpError::InputsExhausted`], as soon as one rank has finished: then no rank trains
    /// without the others. Each forward pass waits for all ranks.
    pub throw_on_early_termination: bool,
}

/// Something with collectives of its own in a loop of [`join_with`](DistributedDataParallel::join_with): a rank that has
/// finished answers those of the ranks that go on.
///
/// # Source
/// `Joinable`, `JoinHook`
pub trait Joinable {
    /// Answers the collectives of one iteration, with values that add nothing.
    ///
    /// # Errors
    /// Any; `join_with` returns it.
    fn main_hook(&self) -> Result<(), DdpError>;

    /// Is called on all ranks when all have finished. `is_last_joiner`: this rank was one of the last.
    ///
    /// # Errors
    /// Any; `join_with` returns it.
    fn post_hook(&self, _is_last_joiner: bool) -> Result<(), DdpError> {
        Ok(())
    }
}

/// Resets the state of `join` when the training in it ends, also by a panic.
struct Joining<'a>(&'a DistributedDataParallel);

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.borrow_mut();
        (state.joining, state.is_exhausted) = (None, false);
    }
}

impl DistributedDataParallel {
    /// Runs a training loop that may have more steps on some ranks. A rank that has finished joins the others'
    /// collectives with gradients of zero until all have finished, and then takes the model of one that finished last.
    ///
    /// Gradients are always divided by the world size, or with `by_active_ranks` by the number of ranks that still have
    /// inputs. A communication hook divides by itself: all of ours by the world size in either case. Only DDP's own
    /// collectives are answered: not a [`SyncBatchNorm`](crate::SyncBatchNorm)'s, or sums of losses in the loop.
    ///
    /// # Errors
    /// With [`sparse_gradients`](super::DdpBuilder::sparse_gradients),
    /// [`skip_all_reduce_unused_params`](super::DdpBuilder::skip_all_reduce_unused_params) or a buffer hook; when a
    /// rank has exited or does not take part within the group's timeout; [`DdpError::HookHasFailed`] when the
    /// communication hook failed before or in the loop; [`DdpError::Hook`] when it fails while this rank answers
    /// others. Where a hook fails only on some ranks, the others wait until the timeout.
    ///
    /// # Panics
    /// When the loop panics, or the hook while this rank answers others; the other ranks then wait until the timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `DistributedDataParallel.join`
    pub fn join<T>(&self, by_active_ranks: bool, train: impl FnOnce() -> T) -> Result<T, DdpError> {
        self.join_with(JoinOptions { by_active_ranks, ..JoinOptions::default() }, &[], train)
    }

    /// [`join`](Self::join) with options, and with others that have collectives in the loop: in each iteration behind those
    /// of this `DistributedDataParallel`, in the order in which they are given.
    ///
    /// # Errors
    /// As `join`; [`DdpError::InputsExhausted`] on every rank with
    /// [`throw_on_early_termination`](JoinOptions::throw_on_early_termination), which forward passes in the loop return
    /// too; and the errors of `others`.
    ///
    /// # Panics
    /// As `join`.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.algorithms.Join`
    pub fn join_with<T>(
        &self,
        options: JoinOptions,
        others: &[&dyn Joinable],
        train: impl FnOnce() -> T,
    ) -> Result<T, DdpError> {
        if self.state.borrow().joining.is_some() {
            return Err(DdpError::CannotHoldBack("join is already running, and cannot be nested"));
        }
        self.hook_works()?;
        if options.by_active_ranks && self.is_mixed {
            let reason = "mixed precision divides gradients by the number of all ranks: leave `by_active_ranks` out";
            return Err(DdpError::Unsupported { op: "join", reason: reason.to_owned() });
        }
        let unanswered = [
            ("sparse_gradients", self.has_sparse),
            ("skip_all_reduce_unused_params", self.skips_unused),
            ("a buffer hook", self.buffers.as_ref().is_some_and(Buffers::has_hook)),
        ];
        if let Some((option, _)) = unanswered.iter().find(|(_, is_set)| *is_set) {
            let reason = format!("a rank that has finished cannot answer the others with {option}");
            return Err(DdpError::Unsupported { op: "join", reason });
        }
        self.state.borrow_mut().joining = Some(options);
        let _joining = Joining(self);
        let result = train();
        if self.state.borrow().is_exhausted {
            return Err(DdpError::InputsExhausted { rank: self.group.rank() });
        }
        let mut is_last = true;
        while self.active_ranks()? > 0 {
            is_last = false;
            if options.throw_on_early_termination {
                self.go_on(false)?;
            }
            self.shadow()?;
            others.iter().try_for_each(|other| other.main_hook())?;
        }
        // All take the model of a rank that was active to the end.
        let root = self.common_rank(is_last)?;
        let sent = self.group.engine().broadcast_coalesced(&self.states, builder::BROADCAST_BYTES, root);
        sent.map_err(|source| self.failed("join", source))?;
        others.iter().try_for_each(|other| other.post_hook(is_last))?;
        Ok(result)
    }

    /// Counts this rank as active before a forward pass.
    pub(super) fn announce_forward(&self, options: JoinOptions) -> Result<Work, DdpError> {
        if self.state.borrow().is_exhausted {
            return Err(DdpError::InputsExhausted { rank: self.group.rank() });
        }
        let mut one = self.number(1.0)?;
        let active = self.group.all_reduce_async(&mut one, ReduceOp::Sum)?;
        if options.throw_on_early_termination {
            self.go_on(true)?;
        }
        Ok(active)
    }

    /// An error if not all ranks have inputs.
    fn go_on(&self, has_inputs: bool) -> Result<(), DdpError> {
        let mut exhausted = self.number(f64::from(u8::from(!has_inputs)))?;
        self.group.on_host(self.group.all_reduce_async(&mut exhausted, ReduceOp::Sum)?)?;
        if exhausted.f_double_value(&[0])? > 0.0 {
            self.state.borrow_mut().is_exhausted = true;
            return Err(DdpError::InputsExhausted { rank: self.group.rank() });
        }
        Ok(())
    }

    /// Announces whether this rank's backward averages gradients. Active ranks do not wait for the result.
    pub(super) fn announce_backward(&self, synchronised: bool) -> Result<(), DdpError> {
        let mut flag = self.number(f64::from(u8::from(synchronised)))?;
        drop(self.group.all_reduce_async(&mut flag, ReduceOp::Sum)?);
        Ok(())
    }

    /// The highest rank that may serve as the root.
    pub(super) fn common_rank(&self, may_serve: bool) -> Result<usize, DdpError> {
        let rank = if may_serve { self.group.rank() as i64 } else { -1 };
        let mut highest = Tensor::f_full([1], rank, (Kind::Int64, self.group.device()))?;
        self.group.on_host(self.group.all_reduce_async(&mut highest, ReduceOp::Max)?)?;
        Ok(usize::try_from(highest.f_int64_value(&[0])?).unwrap_or(0))
    }

    /// How many ranks are about to run a forward pass. An error if the hook has failed: it could not answer the others.
    fn active_ranks(&self) -> Result<i64, DdpError> {
        self.hook_works()?;
        let mut count = self.number(0.0)?;
        let work = self.group.all_reduce_async(&mut count, ReduceOp::Sum)?;
        let timeout = self.group.timeout();
        work.engine().wait(Some(timeout)).map_err(|source| DdpError::between(self.group.context("join"), source))?;
        let active = count.f_double_value(&[0])? as i64;
        if active == 0 {
            // All ranks have finished: the next backward divides by the world size again.
            self.reducer.borrow().divide_by(work.engine(), true)?;
        }
        Ok(active)
    }

    /// Takes part in the collectives of the other ranks' next forward and backward pass.
    fn shadow(&self) -> Result<(), DdpError> {
        // Buckets are of the passes' dtype.
        let lowered = self.lower()?;
        self.begin_forward(false, "join")?;
        drop(lowered);
        self.sync_buffers_at(BufferHookLocation::PreForward, false)?;
        let mut flag = self.number(0.0)?;
        self.group.on_host(self.group.all_reduce_async(&mut flag, ReduceOp::Sum)?)?;
        let synchronised = flag.f_double_value(&[0])? > 0.0;
        self.state.borrow_mut().needs_buffers = synchronised;
        if synchronised {
            let shadowed = self.reducer.borrow_mut().shadow_backward();
            self.check_hook()?;
            shadowed.map_err(|source| self.failed("join", source))?;
        }
        Ok(())
    }

    /// A float32 tensor, as PyTorch's `join` sends. The device fills it: the host would wait for an upload.
    fn number(&self, value: f64) -> Result<Tensor, DdpError> {
        Ok(Tensor::f_full([1], value, (Kind::Float, self.group.device()))?)
    }
}
