//! Layers that are checkpointed in groups.

use overdrive_ffi::autograd::BoxError;
use tch::Tensor;

use super::checkpoint;
use crate::error::MemoryError;

/// Runs layers one after the other, in `segments` groups of which all but the last are checkpointed. The backward pass
/// begins with the last one, so what it saves is needed at once; it has the layers that are left over too.
///
/// A layer owns its module:
/// ```
/// # use overdrive_memory::checkpoint_sequential;
/// # use std::sync::Arc;
/// # use tch::{Device, Kind, Tensor};
/// # struct Block;
/// # impl Block { fn forward(&self, x: &Tensor) -> Result<Tensor, tch::TchError> { x.f_sin() } }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let blocks: Vec<_> = (0..8).map(|_| Arc::new(Block)).collect();
/// # let x = Tensor::rand([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let layers = blocks.iter().map(|block| {
///     let block = Arc::clone(block);
///     move |x: &Tensor| block.forward(x)
/// });
/// let y = checkpoint_sequential(layers, 4, &x)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When there are no segments, or more than layers; otherwise as [`checkpoint`](super::checkpoint()).
///
/// # Source
/// `torch.utils.checkpoint.checkpoint_sequential`
#[track_caller]
pub fn checkpoint_sequential<E: Into<BoxError> + 'static>(
    layers: impl IntoIterator<Item = impl Fn(&Tensor) -> Result<Tensor, E> + Send + 'static>,
    segments: usize,
    input: &Tensor,
) -> Result<Tensor, MemoryError> {
    let mut layers: Vec<_> = layers.into_iter().collect();
    if segments == 0 || segments > layers.len() {
        return Err(MemoryError::Segments { segments, layers: layers.len() });
    }
    let length = layers.len() / segments;
    let mut x = input.shallow_clone();
    for _ in 1..segments {
        let segment: Vec<_> = layers.drain(..length).collect();
        x = checkpoint(move |[x]| run(&segment, x), [&x])?;
    }
    let scope = format!("the last of {segments} segments");
    run(&layers, &x).map_err(|error: E| MemoryError::Function { scope, source: error.into() })
}

fn run<E>(layers: &[impl Fn(&Tensor) -> Result<Tensor, E>], input: &Tensor) -> Result<Tensor, E> {
    layers.iter().try_fold(input.shallow_clone(), |x, layer| layer(&x))
}
