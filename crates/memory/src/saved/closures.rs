//! Hooks that are closures.

use std::sync::{Arc, Mutex, PoisonError};

use overdrive_ffi::Error as TorchError;
use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::saved_tensors::{Hooks, HooksGuard, Packed};
use tch::Tensor;

/// Calls `pack` with each tensor that operators of this thread save for the backward pass, until the guard is dropped, and
/// `unpack` with what it returned when the backward pass needs the tensor. `unpack` has to give a tensor of the same
/// shape, dtype and device; it may be called several times.
///
/// `pack` gets all tensors, parameters among them, and runs with gradients off. What it returns must not hold the tensor
/// itself, unless that is a leaf: the two could keep each other alive. `detach` makes another one of the same memory.
///
/// # Errors
/// When the process has another autograd engine, such as Python's. An error of `pack` comes out of the operator, one of
/// `unpack` out of the backward pass.
///
/// # Source
/// `torch.autograd.graph.saved_tensors_hooks`
pub fn saved_tensors_hooks<P: Send + 'static, E: Into<BoxError>>(
    pack: impl Fn(&Tensor) -> Result<P, E> + Send + Sync + 'static,
    unpack: impl Fn(&P) -> Result<Tensor, E> + Send + Sync + 'static,
) -> Result<HooksGuard, TorchError> {
    let unpack: Arc<Unpack<P>> = Arc::new(move |packed: &P| unpack(packed).map_err(Into::into));
    HooksGuard::new(Arc::new(Closures { pack: move |tensor: &Tensor| pack(tensor).map_err(Into::into), unpack }))
}

type Unpack<P> = dyn Fn(&P) -> Result<Tensor, BoxError> + Send + Sync;

struct Closures<F, P> {
    pack: F,
    unpack: Arc<Unpack<P>>,
}

impl<F, P> Hooks for Closures<F, P>
where
    F: Fn(&Tensor) -> Result<P, BoxError> + Send + Sync,
    P: Send + 'static,
{
    fn pack(&self, tensor: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        let packed = Mutex::new((self.pack)(tensor)?);
        Ok(Some(Box::new(PackedBy { packed, unpack: Arc::clone(&self.unpack) })))
    }
}

struct PackedBy<P> {
    packed: Mutex<P>,
    unpack: Arc<Unpack<P>>,
}

impl<P: Send> Packed for PackedBy<P> {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        (self.unpack)(&self.packed.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
