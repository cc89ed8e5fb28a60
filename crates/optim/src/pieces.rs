//! A large tensor on the CPU, stepped piece by piece.
//!
//! Each operator of a step goes over the whole tensor, and what some of them make in between is as large: memory that the
//! system clears for every step anew. Pieces stay in the processor's cache, and so does what is made of them.

use overdrive_core::TorchError;
use overdrive_ffi::TensorList;
use tch::{Device, Tensor};

use crate::algorithm::{Algorithm, Step};
use crate::bucket::CPU_LIST_BYTES;

/// The algorithm's step; in pieces, where that gives the same.
pub(crate) fn step<A: Algorithm>(algorithm: &A, step: &Step<'_>) -> Result<(), TorchError> {
    let Some((flat, piece)) = flat::<A>(step)? else { return algorithm.step(step) };
    let end = flat[0].numel();
    for start in (0..end).step_by(piece) {
        let len = piece.min(end - start);
        let part = |tensor: &Tensor| TensorList::new(&[tensor.f_narrow(0, start as i64, len as i64)?]);
        let lists = flat.iter().map(part).collect::<Result<Vec<_>, TorchError>>()?;
        let [params, grads, slots @ ..] = &lists[..] else { break };
        algorithm.step(&Step { params, grads, slots, ..*step })?;
    }
    Ok(())
}

/// The parameter, its gradient and its slots in one dimension each, and how many elements a piece has; none where the
/// step is not to be cut.
fn flat<A: Algorithm>(step: &Step<'_>) -> Result<Option<(Vec<Tensor>, usize)>, TorchError> {
    if !A::ELEMENTWISE || step.fused || step.params.len() != 1 {
        return Ok(None);
    }
    let param = step.params.get(0)?;
    let size = param.kind().elt_size_in_bytes();
    if param.device() != Device::Cpu || param.numel() * size <= 2 * CPU_LIST_BYTES {
        return Ok(None);
    }
    let mut flat = Vec::new();
    for list in [step.params, step.grads].into_iter().chain(step.slots) {
        let tensor = list.get(0)?;
        if !tensor.is_contiguous() || tensor.numel() != param.numel() {
            return Ok(None);
        }
        flat.push(tensor.f_detach()?.f_view(-1)?);
    }
    Ok(Some((flat, CPU_LIST_BYTES / size)))
}
