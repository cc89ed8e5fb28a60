//! Buffers, such as running statistics: overwritten with one rank's, or handed to a hook.

use std::cell::RefCell;

use overdrive_ffi::TensorList;
use tch::Tensor;

use super::{DistributedDataParallel, builder};
use crate::error::DdpError;

/// When a buffer hook is called.
///
/// # Source
/// `_BufferCommHookLocation`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BufferHookLocation {
    /// Before the forward pass.
    #[default]
    PreForward,
    /// After the forward pass, which has updated running statistics.
    PostForward,
}

type Hook = Box<dyn FnMut(&[(String, Tensor)]) -> Result<(), DdpError> + Send>;

/// The buffers that ranks exchange.
pub(super) struct Buffers {
    list: TensorList,
    named: Vec<(String, Tensor)>,
    hook: RefCell<Option<(BufferHookLocation, Hook)>>,
}

impl std::fmt::Debug for Buffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Buffers").field(&self.named).finish()
    }
}

impl Buffers {
    /// `None` without buffers.
    pub(super) fn new(named: Vec<(String, Tensor)>) -> Result<Option<Self>, DdpError> {
        let list = TensorList::new(&named.iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())?;
        // Batch normalization keeps its statistics for backward, though it does not use them there. Autograd would refuse
        // a pass before which a hook has written to them: so the hook gets tensors with version counters of their own.
        let unseen = |(name, tensor): (String, Tensor)| Ok((name, tensor.f_data()?));
        let named = named.into_iter().map(unseen).collect::<Result<Vec<_>, DdpError>>()?;
        Ok((!named.is_empty()).then(|| Self { list, named, hook: RefCell::new(None) }))
    }

    pub(super) fn has_hook(&self) -> bool {
        self.hook.borrow().is_some()
    }
}

impl DistributedDataParallel {
    /// Overwrites the buffers (running statistics, say) of all ranks with those of rank 0, or calls the
    /// [buffer hook](Self::register_buffer_comm_hook), if a training step has run since the last time; a forward pass that
    /// trains does it by itself. Does nothing with
    /// [`broadcast_buffers(false)`](super::DdpBuilder::broadcast_buffers).
    ///
    /// # Errors
    /// When a rank has exited or does not take part within the group's timeout, the hook has failed, or it is called
    /// from within one.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn sync_buffers(&self) -> Result<(), DdpError> {
        self.check_hook()?;
        self.outside_backward("sync_buffers")?;
        self.exchange_buffers(true)
    }

    /// Calls `hook` with the names and tensors of all buffers instead of overwriting them with rank 0's: to average
    /// them, for instance. It is called on all ranks, once after each synchronised backward: before or after the next
    /// forward pass that trains. It writes to the tensors, which autograd does not see, and may run any collectives.
    /// Another call replaces it. Without buffers, and with
    /// [`broadcast_buffers(false)`](super::DdpBuilder::broadcast_buffers), it is never called.
    ///
    /// # Errors
    /// [`DdpError::WithinBackward`] in the middle of a pass.
    ///
    /// # Source
    /// `DistributedDataParallel._register_buffer_comm_hook`
    pub fn register_buffer_comm_hook(
        &self,
        location: BufferHookLocation,
        hook: impl FnMut(&[(String, Tensor)]) -> Result<(), DdpError> + Send + 'static,
    ) -> Result<(), DdpError> {
        self.outside_backward("register_buffer_comm_hook")?;
        if let Some(buffers) = &self.buffers {
            *buffers.hook.borrow_mut() = Some((location, Box::new(hook)));
        }
        Ok(())
    }

    /// Exchanges the buffers, if this is where that happens.
    pub(super) fn sync_buffers_at(&self, location: BufferHookLocation, active: bool) -> Result<(), DdpError> {
        let Some(buffers) = &self.buffers else { return Ok(()) };
        let wanted = buffers.hook.borrow().as_ref().map_or(BufferHookLocation::PreForward, |(location, _)| *location);
        if wanted == location { self.exchange_buffers(active) } else { Ok(()) }
    }

    /// Overwrites the buffers with one rank's, or calls the hook, if a synchronised backward has run since the last time.
    /// `active`: this rank has inputs.
    fn exchange_buffers(&self, active: bool) -> Result<(), DdpError> {
        let Some(buffers) = &self.buffers else { return Ok(()) };
        if !self.state.borrow().needs_buffers {
            return Ok(());
        }
        // Taken out, because it may call this object.
        let hook = buffers.hook.borrow_mut().take();
        if let Some((location, mut hook)) = hook {
            self.state.borrow_mut().needs_buffers = false;
            let called = hook(&buffers.named);
            buffers.hook.borrow_mut().get_or_insert((location, hook));
            self.state.borrow_mut().needs_buffers = called.is_err();
            return called;
        }
        let root = if self.state.borrow().joining.is_some() { self.common_rank(active)? } else { 0 };
        let sent = self.group.engine().broadcast_coalesced(&buffers.list, builder::BROADCAST_BYTES, root);
        sent.map_err(|source| self.failed("broadcast of buffers", source))?;
        self.state.borrow_mut().needs_buffers = false;
        Ok(())
    }
}
