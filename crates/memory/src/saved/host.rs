//! Saved tensors of GPUs in pinned host memory.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::saved_tensors::{Packed, version, without_history};
use overdrive_ffi::{Error as TorchError, SideStream, SyncTensor, Transfer, empty_pinned};
use tch::{Device, Kind, Tensor};

use super::Store;
use super::order::Order;
use crate::error::MemoryError;
use crate::layout::has_gaps;

/// So many tensors are on the device too, those that were saved or needed last: the computation does not wait for their
/// copies.
const ON_DEVICE: usize = 4;
/// So many tensors are copied back before the backward pass asks for them. While the device computes with one of them, the
/// other one is on its way.
const AHEAD: usize = 2;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps tensors of CUDA devices in pinned host memory.
#[derive(Default)]
pub(super) struct Host(Mutex<HashMap<usize, Arc<Side>>>);

/// What the tensors of a device share.
struct Side {
    stream: SideStream,
    blocks: Blocks,
    stored: Order<OnHost>,
    /// Those with a copy on the device.
    on_device: Mutex<VecDeque<Weak<OnHost>>>,
}

impl Host {
    fn side(&self, device: usize) -> Result<Arc<Side>, TorchError> {
        let mut sides = lock(&self.0);
        if let Some(side) = sides.get(&device) {
            return Ok(Arc::clone(side));
        }
        let stream = SideStream::new(device)?;
        let side = Side { stream, blocks: Blocks::default(), stored: Order::default(), on_device: Mutex::default() };
        Ok(Arc::clone(sides.entry(device).or_insert(Arc::new(side))))
    }
}

impl Store for Host {
    fn store(&self, tensor: &Tensor) -> Result<Option<Arc<dyn Packed>>, BoxError> {
        let Device::Cuda(number) = tensor.device() else { return Ok(None) };
        let side = self.side(number)?;
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        let block = side.blocks.take(bytes)?;
        // One with gaps is made dense by the current stream, of whose memory it is then.
        let tensor = if has_gaps(tensor) { tensor.f_contiguous()? } else { without_history(tensor)? };
        let flat = block.f_narrow(0, 0, bytes as i64)?.f_view_dtype(tensor.kind())?;
        let host = flat.f_as_strided(tensor.size(), tensor.stride(), None)?;
        let copied = Copied::new(side.stream.copy(&tensor, &host)?, tensor);
        let made = side.stored.push(|place| OnHost {
            side: Arc::clone(&side),
            place,
            device: Device::Cuda(number),
            block: SyncTensor(block),
            host: SyncTensor(host),
            state: Mutex::new(State::OnDevice(copied)),
        });
        side.is_on_device(&made);
        Ok(Some(Arc::new(Saved(made))))
    }
}

impl Side {
    /// Takes note of a tensor that was copied just now. The device's memory of the first one noted is free after its copy.
    fn is_on_device(&self, tensor: &Arc<OnHost>) {
        let first = {
            let mut on_device = lock(&self.on_device);
            on_device.push_back(Arc::downgrade(tensor));
            (on_device.len() > ON_DEVICE).then(|| on_device.pop_front()).flatten()
        };
        if let Some(first) = first.and_then(|first| first.upgrade()) {
            first.leave_device();
        }
    }
}

/// Pinned memory that was used before. Only the side stream reads and writes it, in order: no event is needed before it is
/// used again.
#[derive(Default)]
struct Blocks(Mutex<HashMap<usize, Vec<Tensor>>>);

impl Blocks {
    /// What libtorch's allocator of pinned memory makes of a size.
    fn size(bytes: usize) -> usize {
        bytes.next_power_of_two()
    }

    fn take(&self, bytes: usize) -> Result<Tensor, TorchError> {
        let size = Self::size(bytes);
        let idle = lock(&self.0).get_mut(&size).and_then(Vec::pop);
        idle.map_or_else(|| empty_pinned(&[size as i64], Kind::Uint8), Ok)
    }

    fn give(&self, block: Tensor) {
        lock(&self.0).entry(block.numel()).or_default().push(block);
    }
}

/// A tensor in pinned memory.
struct OnHost {
    side: Arc<Side>,
    place: u64,
    device: Device,
    block: SyncTensor,
    /// Of the block's memory.
    host: SyncTensor,
    state: Mutex<State>,
}

/// Where it is besides the host.
enum State {
    OnDevice(Copied),
    Nowhere,
    /// It was changed in place before its copy had ended: the host may have a part of each.
    Changed,
}

/// The device's tensor, from or to which a copy may be under way.
struct Copied {
    transfer: Transfer,
    tensor: Tensor,
    version: i64,
}

impl Copied {
    fn new(transfer: Transfer, tensor: Tensor) -> Self {
        let version = version(&tensor);
        Self { transfer, tensor, version }
    }

    fn is_changed(&self) -> bool {
        version(&self.tensor) != self.version
    }
}

impl OnHost {
    /// Frees the device's memory, once the copy has ended.
    fn leave_device(&self) {
        let mut state = lock(&self.state);
        if let State::OnDevice(copied) = &*state {
            *state = if copied.is_changed() { State::Changed } else { State::Nowhere };
        }
    }

    /// Starts a copy to the device, unless the tensor is there.
    fn upload(&self, state: &mut State) -> Result<bool, TorchError> {
        if !matches!(state, State::Nowhere) {
            return Ok(false);
        }
        // Of the current stream's memory: a part that only the side stream used would be lost to the computation.
        let options = (self.host.kind(), self.device);
        let tensor = Tensor::f_empty_strided(self.host.size(), self.host.stride(), options)?;
        let transfer = self.side.stream.copy(&self.host, &tensor)?;
        *state = State::OnDevice(Copied::new(transfer, tensor));
        Ok(true)
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        self.side.stored.remove(self.place);
        self.side.blocks.give(self.block.shallow_clone());
    }
}

struct Saved(Arc<OnHost>);

impl Packed for Saved {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        let side = &self.0.side;
        let (tensor, is_new) = {
            let mut state = lock(&self.0.state);
            let is_new = self.0.upload(&mut state)?;
            let tensor = match &mut *state {
                State::OnDevice(copied) if !copied.is_changed() => copied.transfer.tensor()?,
                _ => return Err(MemoryError::ChangedInPlace { shape: self.0.host.size() }.into()),
            };
            (tensor, is_new)
        };
        if is_new {
            side.is_on_device(&self.0);
        }
        for next in side.stored.before(self.0.place, AHEAD).iter().filter_map(Weak::upgrade) {
            // Where there is no room for it now, there may be when it is asked for.
            if next.upload(&mut lock(&next.state)).unwrap_or(false) {
                side.is_on_device(&next);
            }
        }
        Ok(tensor)
    }
}
