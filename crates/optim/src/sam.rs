//! Sharpness-aware minimization, around any optimizer.

use overdrive_core::{
    Activity, Behavior, MOVED, Marked, Optimizer, OptimizerError, SHARDED_GRADIENTS, StateDict, StateError, Stateful,
    TorchError, activity,
};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Kind, Tensor};

use crate::foreach;
use crate::wrapper::pass_on_to_inner;

static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
/// Guards against a division by zero.
const EPS: f64 = 1e-12;

/// SAM: steps by the gradient at a nearby point with a higher loss (`rho` along the gradient), which takes two backward
/// passes per step.
///
/// ```
/// # use overdrive_core::Optimizer;
/// # use overdrive_optim::{Sam, Sgd};
/// # use tch::{Device, Kind, Tensor};
/// # fn main() -> Result<(), overdrive_core::OptimizerError> {
/// # let weight = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// # let loss = || weight.square().sum(Kind::Float);
/// let mut opt = Sam::new(Sgd::builder([weight.shallow_clone()]).lr(0.1).build()?, 0.05)?;
/// loss().backward();
/// opt.ascend()?; // moves by `rho` along the gradient; frees the gradients
/// loss().backward();
/// opt.step()?; // moves back, then steps with the new gradients
/// opt.zero_grad()?;
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", 2021. Its adaptive form: Kwon et
/// al., "ASAM", 2021, as in <https://github.com/davda54/sam>.
#[derive(Debug)]
#[doc(alias = "SAM")]
pub struct Sam<O> {
    inner: O,
    rho: f64,
    adaptive: bool,
    params: TensorList,
    /// Copies of the parameters before the ascent, and their mark in `MOVED`.
    before: Option<(TensorList, Marked)>,
    ascents: u64,
    /// Overflow flags of the gradients used by ascents since the last step.
    found_inf: Vec<Tensor>,
}

impl<O: Optimizer> Sam<O> {
    /// Wraps `inner`; `rho` is the distance by which [`ascend`](Self::ascend) moves, 0.05 in the paper.
    ///
    /// # Errors
    /// When `rho` is negative or not finite, `inner` steps during the backward pass, or memory runs out.
    pub fn new(inner: O, rho: f64) -> Result<Self, OptimizerError> {
        if inner.behavior().steps_in_backward {
            let reason = "it would step during the first of the two backward passes; build it with `build`";
            return Err(OptimizerError::DoesNotFit { part: "SAM", reason });
        }
        OptimizerError::check_range("rho", rho, 0.0..f64::INFINITY, "a finite number of at least 0")?;
        let params = TensorList::new(&inner.params())?;
        Ok(Self { inner, rho, adaptive: false, params, before: None, ascents: 0, found_inf: Vec::new() })
    }

    /// Whether to measure the distance relative to each parameter's size (ASAM), so that scaling a layer up and the next
    /// one down changes nothing; default false. It needs a larger `rho`: 0.5 in ASAM's paper, 2 in the implementation
    /// named above.
    #[doc(alias = "ASAM")]
    pub fn adaptive(mut self, adaptive: bool) -> Self {
        self.adaptive = adaptive;
        self
    }

    /// Moves the parameters by `rho` along their gradient (all of them as one vector), and frees the gradients.
    ///
    /// If called again before [`step`](Optimizer::step), it moves on from the present point; `step` returns to the
    /// original one. If a gradient is infinite or NaN, nothing moves, so that the second pass puts no NaN into batch
    /// norm statistics; a `GradScaler` then skips the step.
    ///
    /// # Errors
    /// When another optimizer's `ascend` has moved a parameter, or libtorch fails.
    ///
    /// # Syncs
    /// No.
    pub fn ascend(&mut self) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        if self.before.is_none() {
            let params = self.inner.params();
            // Groups may have been added since.
            if params.len() != self.params.len() {
                self.params = TensorList::new(&params)?;
            }
            if let Some(index) = MOVED.position(&params) {
                let reason = "another optimizer's `ascend` has moved it: call that optimizer's `step` first";
                return Err(OptimizerError::parameter(&self.inner.parameters()[index], index, reason));
            }
            if let Some(index) = SHARDED_GRADIENTS.position(&params) {
                let reason = "its gradient is on one rank alone, so that each rank would climb by the norm of its part: \
                              average gradients by a `DistributedDataParallel`";
                return Err(OptimizerError::parameter(&self.inner.parameters()[index], index, reason));
            }
            let copies = params.iter().map(Tensor::f_detach_copy).collect::<Result<Vec<_>, _>>();
            let copies = TensorList::new(&copies.map_err(TorchError::from)?)?;
            self.before = Some((copies, MOVED.mark(params)));
        }
        self.ascents += 1;
        let grads = self.params.grads()?;
        if !grads.list.is_empty() {
            let found_inf = self.climb(&self.params.select(&grads.defined)?, &grads.list)?;
            self.found_inf.push(found_inf);
        }
        Ok(self.params.clear_grads()?)
    }

    /// Returns a flag on the first gradient's device: 1 when a gradient is not finite.
    fn climb(&self, params: &TensorList, grads: &TensorList) -> Result<Tensor, TorchError> {
        let sizes = self.adaptive.then(|| sizes(params)).transpose()?;
        let norms = match &sizes {
            Some(sizes) => foreach::norm(&foreach::mul(sizes, grads)?, 2.0)?,
            None => foreach::norm(grads, 2.0)?,
        };
        let norms = norms.to_vec()?;
        let device = norms[0].device();
        let here = |norm: &Tensor| norm.f_to_device_(device, Kind::Double, device.is_cuda(), false);
        let norm = Tensor::f_stack(&norms.iter().map(here).collect::<Result<Vec<_>, _>>()?, 0)?.f_norm()?;
        let is_finite = norm.f_isfinite()?;
        let factor = ADD.tensor(&[Arg::Tensor(&norm), Arg::Double(EPS)])?.f_reciprocal()?;
        let factor = MUL.tensor(&[Arg::Tensor(&factor), Arg::Double(self.rho)])?;
        // A factor of 0 is not enough, because infinity times 0 is NaN: the gradients are replaced by 0 below, too.
        let nowhere = factor.f_zeros_like()?;
        let factor = factor.f_where_self(&is_finite, &nowhere)?;
        let sizes = sizes.map(|sizes| sizes.to_vec()).transpose()?;
        for (index, (param, grad)) in params.to_vec()?.iter_mut().zip(grads.to_vec()?).enumerate() {
            let near = |value: &Tensor, kind| value.f_to_device_(param.device(), kind, device.is_cuda(), false);
            let (factor, is_finite) = (near(&factor, param.kind())?, near(&is_finite, Kind::Bool)?);
            let grad = grad.f_where_self(&is_finite, &near(&nowhere, param.kind())?)?;
            let grad =
                sizes.as_ref().map_or(Ok(grad.shallow_clone()), |sizes| sizes[index].f_square()?.f_mul(&grad))?;
            let _ = param.f_addcmul_(&grad, &factor)?;
        }
        is_finite.f_logical_not()?.f_to_kind(Kind::Float).map_err(TorchError::from)
    }

    /// The inner optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// The inner optimizer, to add parameter groups or change their options. Call `step` and load states on the
    /// wrapper. Add groups after a step: parameters added between an ascent and its step have not been moved, and their
    /// gradients are the sum of both passes.
    pub fn inner_mut(&mut self) -> &mut O {
        &mut self.inner
    }
}

/// The parameters' absolute values.
fn sizes(params: &TensorList) -> Result<TensorList, TorchError> {
    let sizes = params.to_vec()?.iter().map(Tensor::f_abs).collect::<Result<Vec<_>, _>>();
    TensorList::new(&sizes.map_err(TorchError::from)?)
}

impl<O> Sam<O> {
    /// Sets the parameters back to their values before the ascent.
    fn descend(&mut self) -> Result<(), TorchError> {
        if let Some((before, _)) = self.before.as_ref().filter(|(before, _)| !before.is_empty()) {
            let _no_grad = tch::no_grad_guard();
            foreach::copy_(&self.params, before)?;
        }
        self.before = None;
        self.found_inf.clear();
        Ok(())
    }

    fn check_in_place(&self) -> Result<(), StateError> {
        let reason = "`ascend` has moved the parameters: call `step` or `step_skipped` first, which move them back";
        if self.before.is_some() { Err(StateError::NotSaved { reason }) } else { Ok(()) }
    }
}

/// Sets the parameters back if dropped between an ascent and its step (after an error, say).
impl<O> Drop for Sam<O> {
    fn drop(&mut self) {
        // `drop` cannot return an error.
        let _ = self.descend();
    }
}

impl<O: Optimizer> Optimizer for Sam<O> {
    pass_on_to_inner!();

    fn behavior(&self) -> Behavior {
        let mut behavior = self.inner.behavior();
        behavior.moves_parameters = true;
        behavior
    }

    /// Sets the parameters back to where they were before [`ascend`](Sam::ascend), then steps the inner optimizer.
    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.descend()?;
        self.inner.step()
    }

    /// Sets the parameters back to where they were before [`ascend`](Sam::ascend), without a step.
    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        self.descend()?;
        self.inner.step_skipped()
    }

    fn gradients_used(&self) -> u64 {
        self.ascents + self.inner.gradients_used()
    }

    fn used_found_inf(&self) -> Vec<Tensor> {
        self.found_inf.iter().map(Tensor::shallow_clone).collect()
    }

    /// Forgets an ascent without moving back: the parameters have just been set.
    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        self.before = None;
        self.found_inf.clear();
        self.inner.params_changed()
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        self.inner.as_stateful().map(|_| self as &dyn Stateful)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        self.inner.as_stateful().is_some().then_some(self as &mut dyn Stateful)
    }
}

/// The inner optimizer's state. Between an ascent and its step, saving and loading fail ([`StateError::NotSaved`]),
/// because the parameters are moved: call `step` or [`step_skipped`](Optimizer::step_skipped) first.
impl<O: Optimizer> Stateful for Sam<O> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        self.check_in_place()?;
        (&self.inner as &dyn Optimizer).state_dict()
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        self.check_in_place()?;
        (&mut self.inner as &mut dyn Optimizer).load_state_dict(state)
    }

    fn differs_by_rank(&self) -> bool {
        (&self.inner as &dyn Optimizer).differs_by_rank()
    }
}
