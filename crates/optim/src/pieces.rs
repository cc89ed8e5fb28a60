//! A large tensor on the CPU, stepped piece by piece.
//!
//! Each operator of a step passes over all that it is given. For a whole large tensor, the intermediate results would
//! be as large, in memory that the system has to zero in every step. A piece and its intermediate results stay in the
//! processor's cache.

use overdrive_core::TorchError;
use overdrive_ffi::TensorList;
use tch::{Device, Tensor};

use crate::algorithm::{Algorithm, Step};
use crate::bucket::CPU_LIST_BYTES;

/// Runs the algorithm's step; in pieces, if the result is the same.
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

/// The parameter, its gradient and its slots, each flattened, and the number of elements per piece; `None` if the step
/// cannot be cut or is not worth cutting.
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
