//! The step count of each parameter, as the float32 scalars that fused Adam kernels read.

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Device, Kind, Tensor};

use crate::foreach;

static COPY: LazyOp = LazyOp::new("aten::clone", "");
static ADD: LazyOp = LazyOp::new("aten::add_", "Scalar");

/// The step counts of a bucket's parameters. While every parameter has had a gradient in every step, all share one
/// scalar: one addition per step instead of hundreds.
#[derive(Debug)]
pub(crate) struct StepCounts {
    /// One handle per parameter, all to the same scalar while `shared` is `Some`; empty for an algorithm that does not
    /// count.
    counts: TensorList,
    shared: Option<Tensor>,
}

impl StepCounts {
    pub(crate) fn zeros(len: usize, device: Device) -> Result<Self, TorchError> {
        Self::same(Tensor::f_zeros([], (Kind::Float, device))?, len)
    }

    fn same(scalar: Tensor, len: usize) -> Result<Self, TorchError> {
        let counts = TensorList::new(&vec![&scalar; len])?;
        Ok(Self { counts, shared: Some(scalar) })
    }

    /// For an algorithm that does not count.
    pub(crate) fn none() -> Result<Self, TorchError> {
        Ok(Self { counts: TensorList::new::<Tensor>(&[])?, shared: None })
    }

    /// Copies of saved scalars, whose values are `values`, on `device`; one shared scalar if all are equal.
    pub(crate) fn load(saved: &[Tensor], values: &[f64], device: Device) -> Result<Self, TorchError> {
        let own =
            |count: &Tensor| Ok::<_, TorchError>(count.f_detach()?.f_to_device_(device, Kind::Float, false, true)?);
        match saved.first() {
            Some(first) if values.iter().all(|value| *value == values[0]) => Self::same(own(first)?, saved.len()),
            _ => {
                let own = saved.iter().map(own).collect::<Result<Vec<_>, _>>()?;
                Ok(Self { counts: TensorList::new(&own)?, shared: None })
            }
        }
    }

    /// A second handle to the same scalars.
    pub(crate) fn share(&self) -> Result<Self, TorchError> {
        Ok(Self { counts: self.counts.share()?, shared: self.shared.as_ref().map(Tensor::shallow_clone) })
    }

    /// The scalars of all parameters, in order.
    pub(crate) fn list(&self) -> &TensorList {
        &self.counts
    }

    /// Whether all parameters share one scalar.
    pub(crate) fn shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Gives each parameter its own scalar, because only some are about to be stepped.
    pub(crate) fn split(&mut self) -> Result<(), TorchError> {
        if self.shared.is_some() {
            let own: Result<Vec<_>, TorchError> =
                self.counts.to_vec()?.iter().map(|count| COPY.tensor(&[Arg::Tensor(count)])).collect();
            self.counts = TensorList::new(&own?)?;
            self.shared = None;
        }
        Ok(())
    }

    /// Adds `steps` to the scalars in `of`; while shared, `of` has to be all of them.
    pub(crate) fn add(&mut self, of: &TensorList, steps: f64) -> Result<(), TorchError> {
        match &self.shared {
            Some(scalar) => ADD.call(&[Arg::Tensor(scalar), Arg::Double(steps)]).map(drop),
            None if of.is_empty() => Ok(()),
            None => foreach::add_scalar_(of, steps),
        }
    }

    /// Subtracts `found_inf`, which is 1 after a skipped step, without waiting for the device.
    pub(crate) fn subtract(&mut self, of: &TensorList, found_inf: &Tensor) -> Result<(), TorchError> {
        match &mut self.shared {
            Some(scalar) => Ok(scalar.f_sub_(found_inf).map(drop)?),
            None if of.is_empty() => Ok(()),
            None => foreach::sub_(of, &TensorList::new(&vec![found_inf; of.len()])?),
        }
    }
}
