//! Pinning a batch and copying it to the device.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use overdrive_ffi::{Arg, CopyEvent, CopyStream, LazyOp, Value};

use crate::tensor_batch::{Footprint, footprint_of};
use crate::{DataError, TensorBatch};

static IS_PINNED: LazyOp = LazyOp::new("aten::is_pinned", "");
static PIN_MEMORY: LazyOp = LazyOp::new("aten::pin_memory", "");

type Change<'a> = &'a mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>;

/// Access to the tensors of a batch, for the options that need it. Without those options a batch can be of any type.
pub(crate) struct TensorOps<B> {
    pub(crate) map: fn(&B, Change<'_>) -> Result<B, DataError>,
    adopt: Adopt<B>,
    pub(crate) has_structure_of: fn(&B, &B) -> bool,
    pub(crate) footprint: fn(&B) -> Footprint,
}

impl<B> Clone for TensorOps<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for TensorOps<B> {}

impl<B: TensorBatch> TensorOps<B> {
    pub(crate) fn new() -> Self {
        let has_structure_of = B::has_structure_of;
        Self { map: B::map_tensors, adopt: adopt::<B>, has_structure_of, footprint: footprint_of::<B> }
    }
}

type Adopt<B> = fn(&B, &mut CopyEvent, Turn) -> Result<(), DataError>;

/// Whether the training loop uses a batch from now on, or a worker does before it.
#[derive(Clone, Copy)]
enum Turn {
    Now,
    Ahead,
}

/// Makes the current stream wait for the copies of `batch`.
fn adopt<B: TensorBatch>(batch: &B, copied: &mut CopyEvent, turn: Turn) -> Result<(), DataError> {
    let mut tensors = Vec::new();
    batch.visit_tensors(&mut |tensor| tensors.push(tensor));
    let tensors = tensors.into_iter().filter(|tensor| tensor.device().is_cuda());
    Ok(match turn {
        Turn::Now => copied.wait(tensors),
        Turn::Ahead => copied.wait_ahead(tensors),
    }?)
}

/// A batch's copies to the device, which may still be under way.
pub(crate) struct Uploaded<B> {
    copied: CopyEvent,
    stream: Arc<CopyStream>,
    adopt: Adopt<B>,
}

impl<B> Uploaded<B> {
    /// Makes the calling thread's current stream wait for the copies. The batch is used until the next one is adopted.
    pub(crate) fn adopt(&mut self, batch: &B) -> Result<(), DataError> {
        (self.adopt)(batch, &mut self.copied, Turn::Now)
    }

    /// The same, for a worker that uses the batch before the training loop does.
    pub(crate) fn adopt_ahead(&mut self, batch: &B) -> Result<(), DataError> {
        (self.adopt)(batch, &mut self.copied, Turn::Ahead)
    }

    /// For the epoch that uses such batches.
    pub(crate) fn used(&self) -> Used {
        Used(self.stream.clone())
    }
}

/// Batches of a stream are used, the last of them until this is dropped. Its memory goes back to the allocator then.
pub(crate) struct Used(Arc<CopyStream>);

impl Drop for Used {
    fn drop(&mut self) {
        if let Err(error) = self.0.end_batch() {
            tracing::debug!(%error, "the memory of the last batch was not given back");
        }
    }
}

/// Pins batches and copies them to their device.
pub(crate) struct Transfer<B> {
    ops: TensorOps<B>,
    pin: bool,
    target: Target,
}

enum Target {
    Host,
    Cuda(Arc<CopyStream>),
    /// A device for which this crate has no streams: the worker waits for its copy.
    Other(Device),
}

impl<B> Transfer<B> {
    /// `None` when batches stay in ordinary host memory.
    pub(crate) fn new(ops: TensorOps<B>, pin: bool, device: Option<Device>) -> Result<Option<Self>, DataError> {
        let target = match device {
            None | Some(Device::Cpu) => Target::Host,
            Some(Device::Cuda(number)) => Target::Cuda(Arc::new(CopyStream::new(number)?)),
            Some(device) => {
                // An early error when the device is not available.
                drop(Tensor::f_zeros([1], (Kind::Float, device))?);
                Target::Other(device)
            }
        };
        // A copy from pageable memory would not overlap with computation.
        let pin = pin || matches!(target, Target::Cuda(_));
        Ok((pin || !matches!(target, Target::Host)).then_some(Self { ops, pin, target }))
    }

    /// Pins a batch and starts its copy.
    pub(crate) fn send(&self, batch: B) -> Result<(B, Option<Uploaded<B>>), DataError> {
        let batch = match self.pin {
            true => (self.ops.map)(&batch, &mut pinned)?,
            false => batch,
        };
        match &self.target {
            Target::Host => Ok((batch, None)),
            Target::Other(device) => {
                Ok(((self.ops.map)(&batch, &mut |tensor| Ok(tensor.f_to_device(*device)?))?, None))
            }
            Target::Cuda(stream) => {
                let batch = (self.ops.map)(&batch, &mut |tensor| Ok(stream.upload(tensor)?))?;
                let (copied, stream) = (stream.record()?, stream.clone());
                Ok((batch, Some(Uploaded { copied, stream, adopt: self.ops.adopt })))
            }
        }
    }
}

/// Pins the tensor; returns it as it is where it is pinned already or not on the host.
fn pinned(tensor: &Tensor) -> Result<Tensor, DataError> {
    let on_host = tensor.device() == Device::Cpu;
    let is_pinned =
        || Ok::<_, DataError>(matches!(IS_PINNED.call(&[Arg::Tensor(tensor), Arg::None])?[..], [Value::Bool(true)]));
    if !on_host || is_pinned()? {
        return Ok(tensor.shallow_clone());
    }
    Ok(PIN_MEMORY.tensor(&[Arg::Tensor(tensor), Arg::None])?)
}
