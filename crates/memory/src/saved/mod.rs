//! Hooks of the tensors that operators save for the backward pass.

mod closures;
mod compress;
mod disk;
mod folder;
mod host;
mod left_alone;
mod once;
mod order;
mod work;

use std::path::Path;
use std::sync::Arc;

use overdrive_core::Module;
use overdrive_ffi::autograd::BoxError;
pub use overdrive_ffi::saved_tensors::HooksGuard;
use overdrive_ffi::saved_tensors::{Hooks, Packed, is_parameter, is_relu_saving};
use overdrive_ffi::{Error as TorchError, storage};
use tch::Tensor;

use crate::error::MemoryError;
use crate::layout::is_expanded;
pub use closures::saved_tensors_hooks;
pub use compress::Compression;
use disk::Disk;
use host::Host;
use left_alone::LeftAlone;
use once::Seen;

/// Keeps tensors in another form.
pub(crate) trait Store: Send + Sync + 'static {
    /// The tensor in that form; `None` if it is to be kept as it is.
    fn store(&self, tensor: &Tensor) -> Result<Option<Arc<dyn Packed>>, BoxError>;

    /// What ReLU saves of its result, where another form is enough for its gradient.
    fn store_relu(&self, _tensor: &Tensor) -> Result<Option<Arc<dyn Packed>>, BoxError> {
        Ok(None)
    }
}

/// Keeps what operators save for the backward pass in less memory, or elsewhere, while the guard of
/// [`begin`](Self::begin) lives.
///
/// Parameters that require gradients and views of them stay as they are, and so do small and sparse tensors. A tensor that
/// several operators save is kept once.
///
/// ```
/// use overdrive_memory::{Compression, SavedTensors};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let x = Tensor::rand([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let y = {
///     let _guard = SavedTensors::compressed(Compression::BFloat16).min_bytes(1024).begin()?;
///     x.sin().exp()
/// };
/// y.sum(Kind::Float).f_backward()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing happens until `begin`"]
pub struct SavedTensors {
    store: Arc<dyn Store>,
    min_bytes: usize,
    left_alone: Arc<LeftAlone>,
}

impl SavedTensors {
    fn new(store: Arc<dyn Store>) -> Self {
        Self { store, min_bytes: 64 << 10, left_alone: Arc::default() }
    }

    /// Saved tensors are rounded: gradients are approximations, except with [`Compression::Masks`], which is exact.
    pub fn compressed(compression: Compression) -> Self {
        Self::new(Arc::new(compression))
    }

    /// Saved tensors of GPUs are copied to pinned host memory beside the computation, and back ahead of the backward pass,
    /// in the order in which it needs them. The values are the same to the bit; a tensor with gaps in memory comes back dense.
    ///
    /// The last four that were saved or needed are on the device too. The host memory is used again: make it once, not for
    /// each step. It is given back when this and the last tensor in it are dropped. Tensors of a CPU stay as they are.
    ///
    /// A tensor that is changed in place before its copy has ended is an error of the backward pass, as without hooks.
    ///
    /// # Syncs
    /// No, once there is enough pinned memory: the driver may wait where it makes more.
    ///
    /// # Source
    /// `torch.autograd.graph.save_on_cpu(pin_memory=True)`, where the host waits for each copy
    #[doc(alias = "save_on_cpu")]
    pub fn on_host() -> Self {
        Self::new(Arc::new(Host::default()))
    }

    /// Saved tensors are files, in a folder of their own within this one: written beside the forward pass by a thread, read
    /// by it before the backward pass asks for them, and removed after. The values are the same to the bit; a tensor with
    /// gaps in memory comes back dense. A killed process leaves the files; the next one that uses the folder removes them.
    ///
    /// Use it where the disk is fast and no memory (a `tmpfs` is memory).
    ///
    /// # Errors
    /// When nothing can be written there. A tensor that could not be written or read is an error of the backward pass.
    ///
    /// # Syncs
    /// The forward pass waits while more than 32 MiB are to be written, and the backward pass until what it needs is read. A
    /// GPU's tensors are copied to pinned memory and back in the order of its work: no thread but the one that writes waits
    /// for the GPU.
    pub fn on_disk(folder: impl AsRef<Path>) -> Result<Self, MemoryError> {
        Ok(Self::new(Arc::new(Disk::new(folder.as_ref())?)))
    }

    /// These stay as they are, and so do views of them: frozen parameters, buffers and other tensors that are in memory for
    /// longer than the backward pass. Parameters that require gradients need not be given.
    pub fn leave_alone<'a>(mut self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Self {
        self.left_alone = Arc::new(self.left_alone.and(tensors));
        self
    }

    /// The same for a module's buffers, and its parameters that require no gradient.
    pub fn leave_alone_frozen(self, module: &(impl Module + ?Sized)) -> Self {
        let parameters =
            Module::named_parameters(&module).into_iter().map(|parameter| parameter.tensor().shallow_clone());
        let buffers = Module::named_buffers(&module).into_iter().map(|(_, buffer)| buffer);
        let frozen: Vec<Tensor> = parameters.filter(|tensor| !tensor.requires_grad()).chain(buffers).collect();
        self.leave_alone(&frozen)
    }

    /// Tensors in less memory than this stay as they are; default 64 KiB.
    pub fn min_bytes(mut self, bytes: usize) -> Self {
        self.min_bytes = bytes;
        self
    }

    /// Sets the hooks for the calling thread.
    ///
    /// # Errors
    /// When the process has another autograd engine, such as Python's.
    pub fn begin(&self) -> Result<HooksGuard, TorchError> {
        let (store, left_alone) = (Arc::clone(&self.store), Arc::clone(&self.left_alone));
        HooksGuard::new(Arc::new(Filtered { store, min_bytes: self.min_bytes, left_alone, seen: Seen::default() }))
    }
}

impl std::fmt::Debug for SavedTensors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SavedTensors").field("min_bytes", &self.min_bytes).finish_non_exhaustive()
    }
}

/// Stores what is worth it.
struct Filtered {
    store: Arc<dyn Store>,
    min_bytes: usize,
    left_alone: Arc<LeftAlone>,
    seen: Seen,
}

impl Hooks for Filtered {
    fn pack(&self, tensor: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        // A small part keeps the whole in memory. What has no storage, such as a sparse tensor, has no other form.
        let Ok(storage) = storage(tensor) else { return Ok(None) };
        let stays = is_parameter(tensor) || self.left_alone.contains(&storage.address);
        // An expanded one would take more.
        if storage.bytes < self.min_bytes || stays || is_expanded(tensor) {
            return Ok(None);
        }
        // Not for other operators that save the same tensor.
        let of_relu = if is_relu_saving(tensor) { self.store.store_relu(tensor)? } else { None };
        if let Some(stored) = of_relu {
            return Ok(Some(Box::new(Shared(stored))));
        }
        let stored = self.seen.or_store(tensor, || self.store.store(tensor))?;
        Ok(stored.map(|stored| Box::new(Shared(stored)) as _))
    }
}

/// What several operators have saved.
struct Shared(Arc<dyn Packed>);

impl Packed for Shared {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        self.0.unpack()
    }
}
