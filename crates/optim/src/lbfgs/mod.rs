//! L-BFGS.

mod line_search;
mod memory;
mod number;
mod options;
mod state;

use overdrive_core::{
    Activity, Behavior, IntoParameters, Optimizer, OptimizerError, OptimizerId, Parameter, Stateful, TorchError,
    activity, check_averaged, check_not_stepped_in_backward,
};
use overdrive_ffi::TensorList;
use tch::Tensor;

use crate::foreach;
use line_search::{Point, largest, strong_wolfe};
use memory::{Memory, dot, sum, times};
use number::Number;
pub use options::{LbfgsBuilder, LineSearch};

/// L-BFGS: steps along the gradient times an approximate inverse Hessian, which it keeps as a history of steps and
/// gradients. For smooth losses over few parameters that are computed on all of the data.
///
/// A step takes several iterations, each of which evaluates the loss, so it has its own form,
/// [`step_with`](Self::step_with):
///
/// ```
/// # use overdrive_optim::{Lbfgs, LineSearch};
/// # use tch::{Device, Kind, Tensor};
/// # fn main() -> Result<(), overdrive_core::OptimizerError> {
/// # let weight = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let mut opt = Lbfgs::builder([&weight]).line_search_fn(LineSearch::StrongWolfe).build()?;
/// let loss = opt.step_with(|| {
///     let loss = (&weight - 3.0).square().sum(Kind::Float);
///     loss.backward();
///     Ok::<_, overdrive_core::OptimizerError>(loss)
/// })?;
/// # assert!(loss == 8.0 && (weight.double_value(&[0]) - 3.0).abs() < 1e-5);
/// # Ok(())
/// # }
/// ```
///
/// It has one parameter group. The history takes 2 `history_size` numbers per parameter. Ranks of a
/// `DistributedDataParallel` have to decide alike: return the mean of their losses from the closure.
///
/// # Differences from PyTorch
/// The same numbers, bit for bit; but a step that fails leaves everything as it was, gradients are freed before each
/// evaluation, a gradient that is not finite ends the step, and in a line search a loss of NaN counts as infinite.
///
/// # Source
/// `torch.optim.LBFGS`; Liu and Nocedal, "On the Limited Memory BFGS Method", 1989.
#[derive(Debug)]
#[doc(alias = "LBFGS")]
pub struct Lbfgs {
    id: OptimizerId,
    params: Vec<Parameter>,
    list: TensorList,
    options: options::LbfgsOptions,
    state: State,
    freed: u64,
}

#[derive(Debug, Default)]
struct State {
    func_evals: i64,
    n_iter: i64,
    /// None before the first iteration.
    memory: Option<Memory>,
}

/// The parameters before a step, which they get back if it fails or panics.
struct Before {
    params: TensorList,
    values: TensorList,
    is_done: bool,
}

impl Drop for Before {
    fn drop(&mut self) {
        if !self.is_done {
            let _no_grad = tch::no_grad_guard();
            // The step's own error is reported.
            let _ = foreach::copy_(&self.params, &self.values);
        }
    }
}

impl Lbfgs {
    /// A builder with PyTorch's options: a learning rate of 1, and no line search.
    pub fn builder(params: impl IntoParameters) -> LbfgsBuilder {
        LbfgsBuilder::new(params.into_parameters())
    }

    /// Takes up to `max_iter` iterations, and returns the loss before them.
    ///
    /// The closure computes the loss, calls `backward` and returns the loss; gradients are freed before. It has to be
    /// the same function of the parameters each time.
    ///
    /// # Errors
    /// Those of the closure, and when it leaves no gradient, or libtorch fails. Parameters, history and counts are then
    /// as before the step; the gradients are those that the closure left.
    ///
    /// # Syncs
    /// Several times an iteration, and twice for each entry of the history.
    ///
    /// # Source
    /// `LBFGS.step(closure)`
    pub fn step_with<E: From<OptimizerError>>(
        &mut self,
        mut closure: impl FnMut() -> Result<Tensor, E>,
    ) -> Result<f64, E> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        let mut before = self.before()?;
        let mut state = self.state.share();
        let first = self.iterate(&mut state, &mut closure)?;
        before.is_done = true;
        self.state = state;
        Ok(first)
    }

    fn before(&self) -> Result<Before, OptimizerError> {
        Ok(Before { params: self.list.share()?, values: self.copies()?, is_done: false })
    }

    fn iterate<E: From<OptimizerError>>(
        &self,
        state: &mut State,
        closure: &mut impl FnMut() -> Result<Tensor, E>,
    ) -> Result<f64, E> {
        let (first, mut grad) = self.evaluated(closure)?;
        check_averaged(self)?;
        check_not_stepped_in_backward(self)?;
        let (options, mut loss, mut evaluations) = (self.options, first, 1);
        state.func_evals += 1;
        if self.is_at_end(&grad)? {
            return Ok(first);
        }
        for iteration in 1..=options.max_iter {
            let (t, slope) = self.turn(state, &grad, loss)?;
            let Some(memory) = &mut state.memory else { break };
            memory.t = t;
            if slope > -options.tolerance_change {
                break;
            }
            let mut evaluated = 0;
            if options.line_search_fn == LineSearch::StrongWolfe {
                let start = Point { t: 0.0.into(), loss: loss.into(), grad, slope };
                let limits = (options.tolerance_change, options.max_eval - evaluations);
                let found;
                (found, evaluated) = self.searched(start, memory, limits, closure)?;
                (memory.t, loss, grad) = (found.t, found.loss.value, found.grad);
                self.advance(memory.t, &memory.d)?;
            } else {
                self.advance(t, &memory.d)?;
                // The loss at the end is not needed.
                if iteration < options.max_iter {
                    (loss, grad) = self.evaluated(closure)?;
                    evaluated = 1;
                }
            }
            evaluations += evaluated;
            state.func_evals += evaluated;
            let is_over = iteration == options.max_iter || evaluations >= options.max_eval;
            if is_over || self.is_at_end(&grad)? || self.is_stuck(memory, loss)? {
                break;
            }
        }
        Ok(first)
    }

    /// Sets the next direction; returns the first step length and the slope along the direction.
    fn turn(&self, state: &mut State, grad: &Tensor, loss: f64) -> Result<(Number, Number), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        state.n_iter += 1;
        let lr = Number::from(self.options.lr);
        let t = match &mut state.memory {
            Some(memory) => {
                memory.turn(grad, loss, self.options.history_size as usize)?;
                lr
            }
            none => {
                *none = Some(Memory::first(grad, loss)?);
                let sum = sum(grad)?;
                Number::from(1.0).min(Number::from(1.0) / sum) * lr
            }
        };
        let slope = state.memory.as_ref().map_or(Ok(0.0.into()), |memory| dot(grad, &memory.d))?;
        Ok((t, slope))
    }

    fn searched<E: From<OptimizerError>>(
        &self,
        start: Point,
        memory: &Memory,
        limits: (f64, i64),
        closure: &mut impl FnMut() -> Result<Tensor, E>,
    ) -> Result<(Point, i64), E> {
        let origin = self.copies()?;
        strong_wolfe(start, memory.t, &memory.d, limits, |t| {
            self.advance(t, &memory.d)?;
            let (loss, grad) = self.evaluated(closure)?;
            Ok(self.back(&origin, &memory.d, (t, loss, grad))?)
        })
    }

    /// Goes back to where a line search began; returns the point that was evaluated.
    fn back(
        &self,
        origin: &TensorList,
        direction: &Tensor,
        (t, loss, grad): (Number, f64, Tensor),
    ) -> Result<Point, OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        foreach::copy_(&self.list, origin)?;
        let slope = dot(&grad, direction)?;
        Ok(Point { t, loss: if loss.is_nan() { f64::INFINITY } else { loss }.into(), grad, slope })
    }

    /// The loss and the gradient.
    fn evaluated<E: From<OptimizerError>>(
        &self,
        closure: &mut impl FnMut() -> Result<Tensor, E>,
    ) -> Result<(f64, Tensor), E> {
        self.list.clear_grads().map_err(OptimizerError::from)?;
        let loss = closure()?;
        let value = loss.f_double_value(&[]).map_err(|error| OptimizerError::from(TorchError::from(error)))?;
        Ok((value, self.flat_grad()?))
    }

    /// The gradients of all parameters as one vector.
    fn flat_grad(&self) -> Result<Tensor, OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        let grads: Vec<Tensor> = self.params.iter().map(|param| param.tensor().grad()).collect();
        if !grads.iter().any(Tensor::defined) {
            let reason = "it left no gradient: call `backward` on the loss in it";
            return Err(OptimizerError::DoesNotFit { part: "the closure of `step_with`", reason });
        }
        let flat = |(param, grad): (&Parameter, &Tensor)| match grad {
            none if !none.defined() => param.tensor().f_zeros_like()?.f_reshape([-1]),
            sparse if sparse.is_sparse() => sparse.f_to_dense(None, false)?.f_reshape([-1]),
            dense => dense.f_reshape([-1]),
        };
        let flat: Result<Vec<_>, _> = self.params.iter().zip(&grads).map(flat).collect();
        let flat = flat.map_err(TorchError::from)?;
        Ok(Tensor::f_cat(&flat, 0).map_err(TorchError::from)?)
    }

    fn copies(&self) -> Result<TensorList, OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        let copies: Result<Vec<_>, _> = self.params.iter().map(|param| param.tensor().f_detach_copy()).collect();
        Ok(TensorList::new(&copies.map_err(TorchError::from)?)?)
    }

    /// Moves the parameters by `t` times the direction.
    fn advance(&self, t: Number, direction: &Tensor) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        let (mut parts, mut start) = (Vec::new(), 0);
        for param in &self.params {
            let (size, len) = (param.tensor().size(), param.tensor().numel() as i64);
            let part = direction.f_narrow(0, start, len).and_then(|part| part.f_view(&size[..]));
            parts.push(part.map_err(TorchError::from)?);
            start += len;
        }
        Ok(foreach::add_(&self.list, &TensorList::new(&parts)?, t.value)?)
    }

    /// Whether the gradient is small enough, or not finite.
    fn is_at_end(&self, grad: &Tensor) -> Result<bool, OptimizerError> {
        let largest = largest(grad)?;
        Ok(largest <= self.options.tolerance_grad || !largest.value.is_finite())
    }

    /// Whether neither the parameters nor the loss still change.
    fn is_stuck(&self, memory: &Memory, loss: f64) -> Result<bool, OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        let tolerance = self.options.tolerance_change;
        Ok(largest(&times(&memory.d, memory.t)?)? <= tolerance || (loss - memory.prev_loss).abs() < tolerance)
    }
}

impl State {
    fn share(&self) -> Self {
        Self { memory: self.memory.as_ref().map(Memory::share), ..*self }
    }
}

impl Optimizer for Lbfgs {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        self.params.iter().map(|param| param.tensor().shallow_clone()).collect()
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.params.iter().map(Parameter::share).collect()
    }

    fn behavior(&self) -> Behavior {
        let mut behavior = Behavior::default();
        behavior.couples_parameters = true;
        behavior
    }

    fn num_groups(&self) -> usize {
        1
    }

    fn lr(&self, group: usize) -> Option<f64> {
        (group == 0).then_some(self.options.lr)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        if group > 0 {
            return Err(OptimizerError::NoSuchGroup { group, groups: 1 });
        }
        OptimizerError::check_lr(lr)?;
        self.options.lr = lr;
        Ok(())
    }

    /// [`OptimizerError::NeedsClosure`]: call [`step_with`](Lbfgs::step_with).
    fn step(&mut self) -> Result<(), OptimizerError> {
        Err(OptimizerError::NeedsClosure)
    }

    fn check_step(&self) -> Result<(), OptimizerError> {
        Err(OptimizerError::NeedsClosure)
    }

    fn gradients_used(&self) -> u64 {
        self.freed
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        self.freed += 1;
        Ok(self.list.clear_grads()?)
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        Some(self)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        Some(self)
    }
}
