//! LARS.

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::{Arg, LazyOp};
use tch::Tensor;

use crate::algorithm::{Algorithm, Field, Slot, Step};
use crate::builder::{GroupBuilder, Options};
use crate::foreach::{self, Lent};
use crate::optimizer::GroupOptimizer;
use crate::options::{BETA, NOT_NEGATIVE, Value, options};
use crate::trust::{as_list, at_most_one, norms, or_one};

static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");

/// LARS, for large batches: SGD with momentum whose learning rate (default 1) is scaled for each parameter by a trust
/// ratio, its norm divided by its gradient's norm.
///
/// # Source
/// You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017, algorithm 1.
#[doc(alias = "LARS")]
pub type Lars = GroupOptimizer<LarsOptions>;

/// The options of a [`Lars`].
pub type LarsBuilder = GroupBuilder<LarsOptions>;

/// Whether [`Lars`] applies the learning rate before or after the momentum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LarsForm {
    /// Before: the momentum buffer accumulates gradients times their trust ratio and the learning rate of their step.
    #[default]
    Paper,
    /// After: the momentum buffer accumulates gradients times their trust ratio, and the current learning rate
    /// multiplies the result. Groups without weight decay are not scaled, and 1e-8 guards against a division by zero.
    ///
    /// Source: timm 1.0.22, `timm.optim.Lars`, which follows apex's `LARC`.
    Timm,
}

const FORMS: &[&str] = &["paper", "timm"];
/// timm's guard against a division by zero.
const EPS: f64 = 1e-8;

/// One of `FORMS`.
#[derive(Clone, Debug)]
pub(crate) struct Form(&'static str);

impl Value for Form {
    fn fields(&mut self, name: &str) -> Vec<(String, Field<'_>)> {
        vec![(name.to_owned(), Field::Word(&mut self.0, FORMS))]
    }
}

options! {
    /// The options of a [`Lars`] group, except the learning rate.
    LarsOptions {
        /// The momentum factor, in [0, 1); default 0.9.
        momentum: f64 = 0.9, BETA;
        /// The L2 penalty, added to the gradient; default 5e-4.
        weight_decay: f64 = 5e-4, NOT_NEGATIVE;
        /// A factor of the trust ratio: about how far a step moves a parameter, relative to its norm, at a learning
        /// rate of 1; default 1e-3.
        trust_coefficient: f64 = 1e-3, NOT_NEGATIVE;
        /// Whether the learning rate is scaled for each parameter; default true. Often false for biases and the
        /// weights of norm layers.
        adaptive: bool = true;
        /// Whether the trust ratio is at most 1 / lr, so that the scaled learning rate is at most 1 (LARC); default
        /// false. Only with [`LarsForm::Timm`].
        #[doc(alias = "LARC")]
        trust_clip: bool = false;
        /// Nesterov momentum; default false. Only with [`LarsForm::Timm`].
        nesterov: bool = false;
        #[no_setter]
        form: Form = Form(FORMS[0]);
        /// Maximizes the objective instead of minimizing it; default false.
        maximize: bool = false;
    }
}

impl<Scope> Options<LarsOptions, Scope> {
    /// Whether the learning rate applies before or after the momentum; default [`LarsForm::Paper`].
    pub fn form(self, form: LarsForm) -> Self {
        let word = FORMS[usize::from(form == LarsForm::Timm)];
        self.with(move |options| options.form = Form(word))
    }
}

impl Algorithm for LarsOptions {
    const LR: f64 = 1.0;
    const COUNTS_STEPS: bool = false;
    const COUPLES_ELEMENTS: bool = true;

    fn check(&self) -> Result<(), OptimizerError> {
        for (option, is_on) in [("trust_clip", self.trust_clip), ("nesterov", self.nesterov)] {
            if is_on && !self.is_timms() {
                return Err(OptimizerError::InvalidOption {
                    option,
                    found: 1.0,
                    expected: "off, or with `LarsForm::Timm`",
                });
            }
        }
        Ok(())
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    fn slots(&self, _param: &Tensor) -> Vec<Slot> {
        vec![Slot::zeros("momentum_buffer")]
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let ratios = self.ratios(step)?;
        let updates = match step.penalised_grads(self.maximize, self.weight_decay)? {
            Lent::Given(grads) => foreach::mul_each(grads, &vec![1.0; grads.len()])?,
            Lent::Made(grads) => grads,
        };
        let before = if self.is_timms() { 1.0 } else { step.lr };
        match &ratios {
            Some(ratios) => foreach::mul_(&updates, &as_list(&scaled(ratios, before)?)?)?,
            None if before != 1.0 => foreach::mul_scalar_(&updates, before)?,
            None => {}
        }
        let buffers = &step.slots[0];
        if !self.is_timms() {
            foreach::mul_scalar_(buffers, self.momentum)?;
            foreach::add_(buffers, &updates, 1.0)?;
            return foreach::add_(step.params, buffers, -1.0);
        }
        foreach::mul_scalar_(buffers, self.momentum)?;
        foreach::add_(buffers, &updates, 1.0)?;
        if !self.nesterov {
            return foreach::add_(step.params, buffers, -step.lr);
        }
        foreach::add_(&updates, buffers, self.momentum)?;
        foreach::add_(step.params, &updates, -step.lr)
    }
}

fn scaled(tensor: &Tensor, factor: f64) -> Result<Tensor, TorchError> {
    MUL.tensor(&[Arg::Tensor(tensor), Arg::Double(factor)])
}

impl LarsOptions {
    fn is_timms(&self) -> bool {
        self.form.0 == FORMS[1]
    }

    /// The trust ratio of each parameter; `None` for a group that is not scaled.
    fn ratios(&self, step: &Step<'_>) -> Result<Option<Tensor>, TorchError> {
        if !self.adaptive || (self.is_timms() && self.weight_decay == 0.0) {
            return Ok(None);
        }
        let (params, grads) = (norms(step.params)?, norms(step.grads)?);
        let mut lengths = grads.f_add(&scaled(&params, self.weight_decay)?)?;
        if self.is_timms() {
            lengths = ADD.tensor(&[Arg::Tensor(&lengths), Arg::Double(EPS)])?;
        }
        let ratios = or_one(&scaled(&params, self.trust_coefficient)?.f_div(&lengths)?, &params, &grads)?;
        match self.trust_clip {
            true => at_most_one(&scaled(&ratios, 1.0 / step.lr)?).map(Some),
            false => Ok(Some(ratios)),
        }
    }
}
