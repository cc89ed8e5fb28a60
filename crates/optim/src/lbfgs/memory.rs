//! What L-BFGS remembers of earlier iterations.

use std::collections::VecDeque;

use overdrive_core::TorchError;
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use super::number::Number;

static ADD: LazyOp = LazyOp::new("aten::add_", "Tensor");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");

/// The least product of a step and the change of the gradient for which the curvature is used.
const LEAST_CURVATURE: f64 = 1e-10;

/// The last direction and gradient, and a history of both: an approximation of the inverse Hessian. Vectors are over all
/// parameters. The fields have PyTorch's names.
#[derive(Debug)]
pub(super) struct Memory {
    pub d: Tensor,
    pub t: Number,
    pub history: VecDeque<Pair>,
    pub h_diag: Number,
    pub prev_flat_grad: Tensor,
    pub prev_loss: f64,
}

/// A step, and how it changed the gradient.
#[derive(Debug)]
pub(super) struct Pair {
    /// The change of the gradient.
    pub old_dir: Tensor,
    /// The step.
    pub old_stp: Tensor,
    /// One over their product.
    pub ro: Number,
}

pub(super) fn dot(one: &Tensor, other: &Tensor) -> Result<Number, TorchError> {
    Number::read(&one.f_dot(other)?)
}

/// The sum of the absolute values.
pub(super) fn sum(tensor: &Tensor) -> Result<Number, TorchError> {
    Number::read(&tensor.f_abs()?.f_sum(tensor.kind())?)
}

pub(super) fn times(tensor: &Tensor, factor: Number) -> Result<Tensor, TorchError> {
    MUL.tensor(&[Arg::Tensor(tensor), Arg::Double(factor.value)])
}

fn add(to: &Tensor, tensor: &Tensor, factor: Number) -> Result<(), TorchError> {
    ADD.call(&[Arg::Tensor(to), Arg::Tensor(tensor), Arg::Double(factor.value)]).map(drop)
}

impl Memory {
    /// Before the first step: the direction is the gradient's opposite.
    pub fn first(grad: &Tensor, loss: f64) -> Result<Self, TorchError> {
        Ok(Self {
            d: grad.f_neg()?,
            t: 0.0.into(),
            history: VecDeque::new(),
            h_diag: 1.0.into(),
            prev_flat_grad: grad.shallow_clone(),
            prev_loss: loss,
        })
    }

    /// A second handle to the same tensors.
    pub fn share(&self) -> Self {
        let pair = |pair: &Pair| Pair {
            old_dir: pair.old_dir.shallow_clone(),
            old_stp: pair.old_stp.shallow_clone(),
            ro: pair.ro,
        };
        Self {
            d: self.d.shallow_clone(),
            history: self.history.iter().map(pair).collect(),
            prev_flat_grad: self.prev_flat_grad.shallow_clone(),
            ..*self
        }
    }

    /// Adds the last step to the history, and sets the next direction.
    pub fn turn(&mut self, grad: &Tensor, loss: f64, history_size: usize) -> Result<(), TorchError> {
        let old_dir = grad.f_sub(&self.prev_flat_grad)?;
        let old_stp = times(&self.d, self.t)?;
        let [curvature, square] = Number::read_both(&old_dir.f_dot(&old_stp)?, &old_dir.f_dot(&old_dir)?)?;
        if curvature > LEAST_CURVATURE {
            while self.history.len() >= history_size {
                self.history.pop_front();
            }
            self.h_diag = curvature / square;
            self.history.push_back(Pair { old_dir, old_stp, ro: Number::from(1.0) / curvature });
        }
        self.d = self.direction(grad)?;
        (self.prev_flat_grad, self.prev_loss) = (grad.shallow_clone(), loss);
        Ok(())
    }

    /// The opposite of the gradient, times the approximate inverse Hessian.
    fn direction(&self, grad: &Tensor) -> Result<Tensor, TorchError> {
        let direction = grad.f_neg()?;
        let mut shares = Vec::new();
        for pair in self.history.iter().rev() {
            let share = dot(&pair.old_stp, &direction)? * pair.ro;
            add(&direction, &pair.old_dir, -share)?;
            shares.push(share);
        }
        let direction = times(&direction, self.h_diag)?;
        for (pair, share) in self.history.iter().zip(shares.into_iter().rev()) {
            let other = dot(&pair.old_dir, &direction)? * pair.ro;
            add(&direction, &pair.old_stp, share - other)?;
        }
        Ok(direction)
    }
}
