//! Muon.

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Kind, Tensor};

use crate::algorithm::{Algorithm, Field, Slot, Step};
use crate::builder::{GroupBuilder, Options};
use crate::foreach;
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, NOT_NEGATIVE, Value, options};

static ADDMM: LazyOp = LazyOp::new("aten::addmm", "");
static CLAMP_MIN: LazyOp = LazyOp::new("aten::clamp_min", "");

/// Muon: momentum, orthogonalised by Newton-Schulz iterations in bfloat16, for the matrices of hidden layers; lr 1e-3.
/// Embeddings, heads, biases and gains need another optimizer.
///
/// # Source
/// `torch.optim.Muon`; Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al.,
/// "Muon is Scalable for LLM Training", 2025.
pub type Muon = GroupOptimizer<MuonOptions>;

/// The options of a [`Muon`].
pub type MuonBuilder = GroupBuilder<MuonOptions>;

/// How [`Muon`] adjusts the learning rate to the shape of a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdjustLr {
    /// Times sqrt(max(1, rows / columns)).
    #[default]
    Original,
    /// Times 0.2 sqrt(max(rows, columns)), so that AdamW's learning rate and weight decay can be reused.
    MatchRmsAdamW,
}

const ADJUSTMENTS: &[&str] = &["original", "match_rms_adamw"];

/// One of `ADJUSTMENTS`.
#[derive(Clone, Debug)]
pub(crate) struct Adjustment(&'static str);

impl Value for Adjustment {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        vec![(name.to_owned(), Field::Word(&mut self.0, ADJUSTMENTS))]
    }
}

options! {
    /// The options of a [`Muon`] group, except the learning rate.
    MuonOptions {
        /// Decoupled weight decay: a step multiplies a parameter by 1 - lr * weight_decay; default 0.1.
        weight_decay: f64 = 0.1, NOT_NEGATIVE;
        /// The decay rate of the average of gradients, in [0, 1); default 0.95.
        momentum: f64 = 0.95, BETA;
        /// Nesterov momentum; default true.
        nesterov: bool = true;
        /// The coefficients of the Newton-Schulz polynomial; default (3.4445, -4.775, 2.0315).
        ns_coefficients(a: f64, b: f64, c: f64) = (3.4445, -4.775, 2.0315);
        /// The smallest norm to divide by; default 1e-7.
        eps: f64 = 1e-7, NOT_NEGATIVE;
        /// The number of Newton-Schulz iterations, below 100; default 5.
        ns_steps: i64 = 5, (0.0..100.0, "at least 0 and below 100");
        #[no_setter]
        adjust_lr_fn: Adjustment = Adjustment(ADJUSTMENTS[0]);
    }
}

impl<Scope> Options<MuonOptions, Scope> {
    /// How the learning rate is adjusted to the shape; default [`AdjustLr::Original`].
    #[doc(alias = "adjust_lr_fn")]
    pub fn adjust_lr(self, adjust: AdjustLr) -> Self {
        let word = ADJUSTMENTS[usize::from(adjust == AdjustLr::MatchRmsAdamW)];
        self.with(move |options| options.adjust_lr_fn = Adjustment(word))
    }
}

impl Algorithm for MuonOptions {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = false;
    const COUPLES_ELEMENTS: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        // Checked here, because the error of a declared range would name a single coefficient and not the option.
        let (a, b, c) = self.ns_coefficients;
        let any = f64::MIN..f64::INFINITY;
        [a, b, c]
            .into_iter()
            .try_for_each(|it| OptimizerError::check_range("ns_coefficients", it, any.clone(), "finite numbers"))
    }

    fn refuses(&self, param: &Tensor) -> Option<String> {
        let size = param.size();
        (size.len() != 2).then(|| format!("its shape is {size:?}, but Muon is for matrices: use AdamW for it"))
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("momentum_buffer")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let buffers = &step.slots[0];
        foreach::lerp_(buffers, step.grads, 1.0 - self.momentum)?;
        let averages = match self.nesterov {
            true => foreach::lerp(step.grads, buffers, self.momentum)?,
            false => buffers.share()?,
        };
        foreach::mul_scalar_(step.params, 1.0 - step.lr * self.weight_decay)?;
        for (param, average) in step.params.to_vec()?.iter().zip(averages.to_vec()?) {
            let update = self.orthogonal(&average)?;
            let one = |tensor: &Tensor| TensorList::new(&[tensor]);
            foreach::add_(&one(param)?, &one(&update)?, -self.adjusted(step.lr, &param.size()))?;
        }
        Ok(())
    }
}

impl MuonOptions {
    fn adjusted(&self, lr: f64, size: &[i64]) -> f64 {
        let (rows, columns) = (size[0] as f64, size[1] as f64);
        match self.adjust_lr_fn.0 == ADJUSTMENTS[0] {
            true => lr * (rows / columns).max(1.0).sqrt(),
            false => lr * (0.2 * rows.max(columns).sqrt()),
        }
    }

    /// Approximately U V' of the singular value decomposition U S V' of the matrix: all singular values are moved close
    /// to 1.
    fn orthogonal(&self, matrix: &Tensor) -> Result<Tensor, TorchError> {
        let (a, b, c) = self.ns_coefficients;
        let tall = matrix.size()[0] > matrix.size()[1];
        let flip = |x: Tensor| if tall { x.f_transpose(0, 1) } else { Ok(x) };
        let mut x = flip(matrix.f_to_kind(Kind::BFloat16)?)?;
        // Dividing by the norm makes all singular values at most 1. Not in place, because `x` may share the momentum's
        // memory.
        x = x.f_div(&CLAMP_MIN.tensor(&[Arg::Tensor(&x.f_norm()?), Arg::Double(self.eps)])?)?;
        for _ in 0..self.ns_steps {
            let gram = x.f_mm(&x.f_transpose(0, 1)?)?;
            let weighted = |x: &Tensor, y: &Tensor, z: &Tensor, beta, alpha| {
                let (beta, alpha) = (Arg::Double(beta), Arg::Double(alpha));
                ADDMM.tensor(&[Arg::Tensor(x), Arg::Tensor(y), Arg::Tensor(z), beta, alpha])
            };
            let update = weighted(&gram, &gram, &gram, b, c)?;
            x = weighted(&x, &update, &x, a, 1.0)?;
        }
        Ok(flip(x)?)
    }
}
