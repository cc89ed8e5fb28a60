//! The options of L-BFGS.

use overdrive_core::{OptimizerError, OptimizerId, Parameter};
use overdrive_ffi::TensorList;
use tch::Kind;

use super::{Lbfgs, State};
use crate::algorithm::check_not_negative;
use crate::builder::tensors;
use crate::check_params;
use crate::sgd::SgdOptions;

/// How [`Lbfgs`] chooses the length of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LineSearch {
    /// The learning rate.
    #[default]
    None,
    /// A search along the direction for a point that satisfies the strong Wolfe conditions, first at the learning rate.
    StrongWolfe,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LbfgsOptions {
    pub lr: f64,
    pub max_iter: i64,
    pub max_eval: i64,
    pub tolerance_grad: f64,
    pub tolerance_change: f64,
    pub history_size: i64,
    pub line_search_fn: LineSearch,
}

/// The options of an [`Lbfgs`].
#[derive(Debug)]
#[must_use = "options do nothing until `build`"]
pub struct LbfgsBuilder {
    params: Vec<Parameter>,
    options: LbfgsOptions,
    max_eval: Option<i64>,
}

impl LbfgsBuilder {
    pub(super) fn new(params: Vec<Parameter>) -> Self {
        let options = LbfgsOptions {
            lr: 1.0,
            max_iter: 20,
            max_eval: 25,
            tolerance_grad: 1e-7,
            tolerance_change: 1e-9,
            history_size: 100,
            line_search_fn: LineSearch::None,
        };
        Self { params, options, max_eval: None }
    }

    /// The length of a step, in directions; default 1. The first step is shorter.
    pub fn lr(mut self, lr: f64) -> Self {
        self.options.lr = lr;
        self
    }

    /// The most iterations in a step, at least 1; default 20.
    pub fn max_iter(mut self, max_iter: i64) -> Self {
        self.options.max_iter = max_iter;
        self
    }

    /// The most evaluations of the loss in a step, at least 1; default 5/4 of `max_iter`.
    pub fn max_eval(mut self, max_eval: i64) -> Self {
        self.max_eval = Some(max_eval);
        self
    }

    /// A step ends when no gradient is above this; default 1e-7.
    pub fn tolerance_grad(mut self, tolerance: f64) -> Self {
        self.options.tolerance_grad = tolerance;
        self
    }

    /// A step ends when the loss or all parameters change by less than this; default 1e-9.
    pub fn tolerance_change(mut self, tolerance: f64) -> Self {
        self.options.tolerance_change = tolerance;
        self
    }

    /// How many steps the history holds, at least 1; default 100.
    pub fn history_size(mut self, size: i64) -> Self {
        self.options.history_size = size;
        self
    }

    /// The choice of the step length; default [`LineSearch::None`].
    pub fn line_search_fn(mut self, line_search_fn: LineSearch) -> Self {
        self.options.line_search_fn = line_search_fn;
        self
    }

    /// The optimizer.
    ///
    /// # Errors
    /// When there is no parameter, an option is out of range, a parameter is not a dense leaf, is given twice, or
    /// differs from the first in dtype or device, or the dtype is not float32 or float64.
    pub fn build(mut self) -> Result<Lbfgs, OptimizerError> {
        self.options.max_eval = self.max_eval.unwrap_or(self.options.max_iter.saturating_mul(5) / 4).max(0);
        self.options.check()?;
        let Some(first) = self.params.first() else { return Err(OptimizerError::NoParameters) };
        // Any algorithm that refuses no parameter of its own.
        check_params::check(std::iter::once((&SgdOptions::default(), self.params.as_slice())))?;
        let (kind, device) = (first.tensor().kind(), first.tensor().device());
        for (index, param) in self.params.iter().enumerate() {
            let (own, place) = (param.tensor().kind(), param.tensor().device());
            if (own, place) != (kind, device) || !matches!(kind, Kind::Float | Kind::Double) {
                let reason = format!(
                    "it is {own:?} on {place:?}, but L-BFGS treats all parameters as one vector: give it parameters \
                     that are all Float or all Double, on one device"
                );
                return Err(OptimizerError::parameter(param, index, reason));
            }
        }
        let list = TensorList::new(&tensors(&self.params))?;
        let (id, state) = (OptimizerId::new(), State::default());
        Ok(Lbfgs { id, params: self.params, list, options: self.options, state, freed: 0 })
    }
}

impl LbfgsOptions {
    pub fn check(&self) -> Result<(), OptimizerError> {
        let counts = [("max_iter", self.max_iter), ("max_eval", self.max_eval), ("history_size", self.history_size)];
        for (option, found) in counts {
            OptimizerError::check_range(option, found as f64, 1.0..f64::INFINITY, "at least 1")?;
        }
        OptimizerError::check_lr(self.lr)?;
        check_not_negative("tolerance_grad", self.tolerance_grad)?;
        check_not_negative("tolerance_change", self.tolerance_change)
    }
}
