//! How often each parameter was stepped, as the float32 scalars that fused Adam kernels read.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Device, Kind, Tensor};

static COPY: LazyOp = LazyOp::new("aten::clone", "");
static ADD: LazyOp = LazyOp::new("aten::add_", "Scalar");
static FOREACH_ADD: LazyOp = LazyOp::new("aten::_foreach_add_", "Scalar");
static FOREACH_SUB: LazyOp = LazyOp::new("aten::_foreach_sub_", "List");

/// While every parameter has had a gradient each time, all share one scalar: one addition a step in place of hundreds.
#[derive(Debug)]
pub(crate) struct StepCounts {
    /// One handle a parameter, all to the same scalar while `shared`.
    counts: TensorList,
    shared: Option<Tensor>,
}

impl StepCounts {
    pub(crate) fn zeros(len: usize, device: Device) -> Result<Self, TorchError> {
        let scalar = Tensor::f_zeros([], (Kind::Float, device))?;
        let counts = TensorList::new(&vec![&scalar; len])?;
        Ok(Self { counts, shared: Some(scalar) })
    }

    /// The scalars of all parameters, in order.
    pub(crate) fn list(&self) -> &TensorList {
        &self.counts
    }

    /// Gives each parameter a scalar of its own, because only some are about to be stepped.
    pub(crate) fn part(&mut self) -> Result<(), TorchError> {
        if self.shared.take().is_some() {
            let own: Result<Vec<_>, TorchError> =
                self.counts.to_vec()?.iter().map(|count| COPY.tensor(&[Arg::Tensor(count)])).collect();
            self.counts = TensorList::new(&own?)?;
        }
        Ok(())
    }

    /// Counts one step for the parameters whose scalars are in `of`: all of them while shared.
    pub(crate) fn add_one(&mut self, of: &TensorList) -> Result<(), TorchError> {
        match &mut self.shared {
            Some(scalar) => drop(ADD.call(&[Arg::Tensor(scalar), Arg::Double(1.0)])?),
            None => drop(FOREACH_ADD.call(&[Arg::TensorList(of), Arg::Double(1.0)])?),
        }
        Ok(())
    }

    /// Takes the step back where `found_inf` is 1, without waiting for the device.
    pub(crate) fn subtract(&mut self, of: &TensorList, found_inf: &Tensor) -> Result<(), TorchError> {
        match &mut self.shared {
            Some(scalar) => drop(scalar.f_sub_(found_inf)?),
            None => {
                let found_infs = TensorList::new(&vec![found_inf; of.len()])?;
                drop(FOREACH_SUB.call(&[Arg::TensorList(of), Arg::TensorList(&found_infs)])?);
            }
        }
        Ok(())
    }
}
