//! A model that has the averages as its weights for a while.

use overdrive_core::TorchError;
use tch::Tensor;

use super::{Kept, is_alike};

/// Swaps the averages into the model, and back when dropped (by a panic, say).
pub(super) struct Swapped<'a> {
    kept: [&'a Kept; 2],
    /// The model's own weights, for pairs that differ in dtype or device; the others' are stored in the averages'
    /// tensors.
    models: Vec<Option<Tensor>>,
}

impl<'a> Swapped<'a> {
    /// Nothing is swapped yet.
    pub(super) fn new(kept: [&'a Kept; 2]) -> Self {
        Self { kept, models: Vec::new() }
    }

    fn pairs(&self) -> Result<Vec<(Tensor, Tensor)>, TorchError> {
        let mut pairs = Vec::new();
        for kept in self.kept {
            pairs.extend(kept.model.to_vec()?.into_iter().zip(kept.own.to_vec()?));
        }
        Ok(pairs)
    }

    pub(super) fn lend(&mut self) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        // One pair at a time, so that swapping a pair of the same dtype and device needs only one temporary tensor.
        for (mut model, mut own) in self.pairs()? {
            let copy = model.f_detach_copy()?;
            model.f_copy_(&own)?;
            match is_alike(&model, &own) {
                true => {
                    own.f_copy_(&copy)?;
                    self.models.push(None);
                }
                false => self.models.push(Some(copy)),
            }
        }
        Ok(())
    }

    pub(super) fn give_back(&mut self) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        // Only the pairs that were swapped: fewer than all if memory ran out in between. The last first: weights whose
        // memory several variables share were swapped several times. All of them, also after one that fails.
        let swapped = std::mem::take(&mut self.models).into_iter().zip(self.pairs()?);
        let mut given = Ok(());
        for (saved, (model, own)) in swapped.rev() {
            given = given.and(give_back_pair(saved, model, own));
        }
        given
    }
}

fn give_back_pair(saved: Option<Tensor>, mut model: Tensor, mut own: Tensor) -> Result<(), TorchError> {
    let Some(saved) = saved else {
        let copy = model.f_detach_copy()?;
        model.f_copy_(&own)?;
        return Ok(own.f_copy_(&copy)?);
    };
    let kept = with_changes(&model, &own);
    // It needs no memory, so the model has its weights back where there is none for the rest.
    model.f_copy_(&saved)?;
    Ok(own.f_copy_(&kept?)?)
}

/// The averages with what was changed in the model. Elements that still equal the rounded average were not, and keep their
/// exact average.
fn with_changes(model: &Tensor, own: &Tensor) -> Result<Tensor, TorchError> {
    let here = |tensor: &Tensor| tensor.f_to_device_(own.device(), own.kind(), false, false);
    let (now, rounded) = (here(model)?, here(&own.f_to_kind(model.kind())?)?);
    Ok(own.f_where_self(&now.f_eq_tensor(&rounded)?, &now)?)
}

impl Drop for Swapped<'_> {
    fn drop(&mut self) {
        // `drop` cannot return an error, and after an error or a panic the first failure is reported anyway.
        let _ = self.give_back();
    }
}
