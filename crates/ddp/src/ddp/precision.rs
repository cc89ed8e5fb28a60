//! Mixed precision: passes in a lower precision, and an optimizer that steps in full precision.

use overdrive_core::STEPPED_IN_BACKWARD;
use overdrive_ffi::TensorList;
use tch::{Kind, Tensor};

use super::DistributedDataParallel;
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::hooks::InLowPrecision;

/// The dtypes of [`mixed_precision`](super::DdpBuilder::mixed_precision). `None` leaves what it is about as it is.
///
/// # Source
/// `torch.nn.parallel.distributed._MixedPrecision`
#[doc(alias = "_MixedPrecision")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MixedPrecision {
    /// Of parameters in forward and backward passes, and so of the computation and its gradients.
    pub param_dtype: Option<Kind>,
    /// In which gradients are sent and added up; that of the passes by default.
    pub reduce_dtype: Option<Kind>,
    /// Of floating-point buffers, which are converted once.
    pub buffer_dtype: Option<Kind>,
}

impl MixedPrecision {
    pub(super) fn check(&self) -> Result<(), DdpError> {
        let dtypes = [
            ("mixed_precision, param_dtype", self.param_dtype),
            ("mixed_precision, reduce_dtype", self.reduce_dtype),
            ("mixed_precision, buffer_dtype", self.buffer_dtype),
        ];
        for (option, kind) in dtypes.into_iter().filter_map(|(option, kind)| Some((option, kind?))) {
            if !is_floating(kind) {
                let (found, expected) = (format!("{kind:?}"), "BFloat16, Half, Float or Double");
                return Err(DdpError::InvalidOption { option, found, expected });
            }
        }
        Ok(())
    }

    /// Converts floating-point buffers, for all who have a handle.
    pub(super) fn convert(&self, buffers: &[(String, Tensor)]) -> Result<(), DdpError> {
        let Some(kind) = self.buffer_dtype else { return Ok(()) };
        for (_, buffer) in buffers.iter().filter(|(_, buffer)| is_floating(buffer.kind())) {
            buffer.shallow_clone().f_set_data(&buffer.f_detach()?.f_to_kind(kind)?)?;
        }
        Ok(())
    }

    /// The frozen parameters that passes use in a lower precision.
    pub(super) fn frozen(&self, frozen: &[(String, Tensor)]) -> Result<Option<TensorList>, DdpError> {
        let of_passes = frozen.iter().map(|(_, tensor)| tensor).filter(|tensor| is_floating(tensor.kind()));
        Ok(self.param_dtype.map(|_| TensorList::new(&of_passes.collect::<Vec<_>>())).transpose()?)
    }

    pub(super) fn hook(&self, group: &ProcessGroup) -> InLowPrecision {
        InLowPrecision { group: group.clone(), reduce: self.reduce_dtype }
    }
}

pub(super) fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::BFloat16 | Kind::Half | Kind::Float | Kind::Double)
}

pub(super) const IN_BACKWARD: &str = "mixed precision has the gradients in full precision after backward alone: step after \
                                      it, not in backward";

/// A pass in low precision has begun. It ends with the backward pass if it is kept, and else when this is dropped.
#[must_use = "the pass ends when it is dropped"]
pub(super) struct Lowered<'a>(Option<&'a DistributedDataParallel>);

impl Lowered<'_> {
    pub(super) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Lowered<'_> {
    fn drop(&mut self) {
        if let Some(ddp) = self.0 {
            // There is no memory for the gradients of this pass then, which has failed.
            let _out_of_memory = ddp.raise();
        }
    }
}

impl DistributedDataParallel {
    /// Begins a pass in low precision, unless one has begun.
    pub(super) fn lower(&self) -> Result<Lowered<'_>, DdpError> {
        if !self.is_mixed {
            return Ok(Lowered(None));
        }
        if self.params.iter().any(|(_, param)| STEPPED_IN_BACKWARD.contains(param)) {
            return Err(DdpError::Unsupported { op: "mixed_precision", reason: IN_BACKWARD.to_owned() });
        }
        let begins = self.reducer.borrow().lower()?;
        Ok(Lowered(begins.then_some(self)))
    }

    /// Ends a pass in low precision, if one has not ended.
    pub(super) fn raise(&self) -> Result<(), DdpError> {
        if self.is_mixed { Ok(self.reducer.borrow().raise()?) } else { Ok(()) }
    }
}
