//! Sharpness-aware minimisation, around any optimizer.

use overdrive_core::{
    Activity, Behavior, Optimizer, OptimizerError, StateDict, StateError, Stateful, TorchError, activity,
};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::{Kind, Tensor};

use crate::foreach;
use crate::wrapper::pass_on_to_inner;

static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
/// Against a division by zero.
const EPS: f64 = 1e-12;

/// Steps along the gradient of the worst loss nearby: two backward passes a step.
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
/// opt.ascend()?; // to the worst point nearby; frees the gradients
/// loss().backward();
/// opt.step()?; // back, and down from where it was
/// opt.zero_grad()?;
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", 2021.
#[derive(Debug)]
#[doc(alias = "SAM")]
pub struct Sam<O> {
    inner: O,
    rho: f64,
    params: TensorList,
    /// The parameters before the ascent.
    before: Option<TensorList>,
}

impl<O: Optimizer> Sam<O> {
    /// `inner`, and how far the worst point nearby may be: 0.05 in the paper.
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
        Ok(Self { inner, rho, params, before: None })
    }

    /// Moves the parameters up along their gradients, taken as one vector, by `rho`, and frees the gradients.
    ///
    /// Called again before the [`step`](Optimizer::step), it goes on from where it is; the step goes back all the way.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// No.
    pub fn ascend(&mut self) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        let grads = self.params.grads()?;
        if self.before.is_none() {
            let copies = self.params.to_vec()?.iter().map(Tensor::f_detach_copy).collect::<Result<Vec<_>, _>>();
            self.before = Some(TensorList::new(&copies.map_err(TorchError::from)?)?);
        }
        if !grads.list.is_empty() {
            self.climb(&self.params.select(&grads.defined)?, &grads.list)?;
        }
        Ok(self.params.clear_grads()?)
    }

    fn climb(&self, params: &TensorList, grads: &TensorList) -> Result<(), TorchError> {
        let norms = foreach::norm(grads, 2.0)?.to_vec()?;
        let device = norms[0].device();
        let here = |norm: &Tensor| norm.f_to_device_(device, Kind::Double, device.is_cuda(), false);
        let norm = Tensor::f_stack(&norms.iter().map(here).collect::<Result<Vec<_>, _>>()?, 0)?.f_norm()?;
        let factor = ADD.tensor(&[Arg::Tensor(&norm), Arg::Double(EPS)])?.f_reciprocal()?;
        let factor = MUL.tensor(&[Arg::Tensor(&factor), Arg::Double(self.rho)])?;
        for (param, grad) in params.to_vec()?.iter_mut().zip(grads.to_vec()?) {
            let factor = factor.f_to_device_(param.device(), param.kind(), device.is_cuda(), false)?;
            let _ = param.f_addcmul_(&grad, &factor)?;
        }
        Ok(())
    }

    /// The optimizer inside.
    pub fn inner(&self) -> &O {
        &self.inner
    }
}

impl<O: Optimizer> Sam<O> {
    /// Takes the parameters back to where they were before the ascent.
    fn descend(&mut self) -> Result<(), TorchError> {
        if let Some(before) = self.before.as_ref().filter(|before| !before.is_empty()) {
            let _no_grad = tch::no_grad_guard();
            foreach::copy_(&self.params, before)?;
        }
        self.before = None;
        Ok(())
    }
}

impl<O: Optimizer> Optimizer for Sam<O> {
    pass_on_to_inner!();

    fn behavior(&self) -> Behavior {
        let mut behavior = self.inner.behavior();
        behavior.moves_parameters = true;
        behavior
    }

    /// The inner step, from where the parameters were before [`ascend`](Sam::ascend).
    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.descend()?;
        self.inner.step()
    }

    /// Back to where the parameters were before [`ascend`](Sam::ascend), and no step.
    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        self.descend()?;
        self.inner.step_skipped()
    }

    /// Forgets an ascent: the parameters are where they are to be.
    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        self.before = None;
        self.inner.params_changed()
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        self.inner.as_stateful().map(|_| self as &dyn Stateful)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        self.inner.as_stateful().is_some().then_some(self as &mut dyn Stateful)
    }
}

/// The inner optimizer's. Between an ascent and its step there is none to save ([`StateError::NotSaved`]), because the
/// parameters are elsewhere. Loading forgets an ascent: load the parameters too.
impl<O: Optimizer> Stateful for Sam<O> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        if self.before.is_some() {
            let reason = "the parameters are at the worst point nearby, after `ascend`: step first";
            return Err(StateError::NotSaved { reason });
        }
        (&self.inner as &dyn Optimizer).state_dict()
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        (&mut self.inner as &mut dyn Optimizer).load_state_dict(state)?;
        // Or else the next step would go back to what the parameters were before they were loaded.
        self.before = None;
        Ok(())
    }
}
