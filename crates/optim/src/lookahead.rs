//! Lookahead, around any optimizer.

use std::collections::{HashMap, HashSet};

use overdrive_core::{
    Activity, Behavior, Entry, Optimizer, OptimizerError, Parameter, StateDict, StateError, Stateful, TorchError,
    activity,
};
use overdrive_ffi::{TensorId, TensorList};
use tch::{Kind, Tensor};

use crate::foreach;
use crate::wrapper::pass_on_to_inner;

/// Lets an optimizer run ahead for a few steps, then moves slow weights part of the way after it and starts anew from
/// there.
///
/// The slow weights start where the parameters are at the first step, so weights may be loaded before. Weights that are
/// loaded later are told by [`params_changed`](Optimizer::params_changed), or else the slow weights pull them back.
///
/// # Source
/// Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back", 2019.
#[derive(Debug)]
pub struct Lookahead<O> {
    inner: O,
    alpha: f64,
    k: u32,
    fast: TensorList,
    /// None before the first step.
    slow: Option<TensorList>,
    steps: u32,
}

impl<O: Optimizer> Lookahead<O> {
    /// `inner`, whose weights after every `k` steps are slow ones moved by the share `alpha` of its way: 5 and 0.5 in the
    /// paper.
    ///
    /// # Errors
    /// When `k` is 0, `alpha` is outside [0, 1], `inner` steps during the backward pass, or memory runs out.
    pub fn new(inner: O, k: u32, alpha: f64) -> Result<Self, OptimizerError> {
        let range = |option, found, expected| OptimizerError::InvalidOption { option, found, expected };
        if k == 0 {
            return Err(range("k", 0.0, "at least 1"));
        }
        if !(0.0..=1.0).contains(&alpha) {
            return Err(range("alpha", alpha, "at least 0 and at most 1"));
        }
        if inner.behavior().steps_in_backward {
            let reason = "it steps during the backward pass, and the slow weights would start a step late; build it with `build`";
            return Err(OptimizerError::DoesNotFit { part: "Lookahead", reason });
        }
        let fast = TensorList::new(&inner.params())?;
        Ok(Self { inner, alpha, k, fast, slow: None, steps: 0 })
    }

    /// The optimizer inside.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// The same, to add parameter groups or to change their options; step and load this one, not the one inside. Slow weights
    /// of what is added start where it is at the next step.
    pub fn inner_mut(&mut self) -> &mut O {
        &mut self.inner
    }

    /// Groups may have been added since.
    fn look_for_groups(&mut self) -> Result<(), TorchError> {
        let params = self.inner.params();
        if params.len() == self.fast.len() {
            return Ok(());
        }
        let slow = self.slow.as_ref().map(|slow| slow_by_parameter(&self.fast, slow)).transpose()?;
        self.fast = TensorList::new(&params)?;
        if let Some(slow) = slow {
            let of =
                |(param, fresh): (&Tensor, Tensor)| slow.get(&TensorId::of(param)).map_or(fresh, Tensor::shallow_clone);
            let slow: Vec<Tensor> = params.iter().zip(self.copies()?.to_vec()?).map(of).collect();
            self.slow = Some(TensorList::new(&slow)?);
        }
        Ok(())
    }

    /// Copies of the parameters, float32 ones of 16-bit parameters where those have float32 masters.
    fn copies(&self) -> Result<TensorList, TorchError> {
        TensorList::new(&self.fast.to_vec()?.into_iter().map(|it| self.copy(it)).collect::<Result<Vec<_>, _>>()?)
    }

    fn copy(&self, param: Tensor) -> Result<Tensor, TorchError> {
        // `detach_copy` is differentiable: its result would hold the parameters' graph.
        let _no_grad = tch::no_grad_guard();
        Ok(match param.kind() {
            Kind::BFloat16 | Kind::Half if self.inner.behavior().keeps_copies => param.f_to_kind(Kind::Float)?,
            _ => param.f_detach_copy()?,
        })
    }

    /// Moves the slow weights after the fast ones, and starts these anew from there.
    fn follow(&mut self, slow: &TensorList) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        foreach::lerp_(slow, &TensorList::new(&self.inner.trained()?)?, self.alpha)?;
        foreach::copy_(&self.fast, slow)?;
        self.inner.params_changed()?;
        // Masters have followed the rounded weights.
        Ok(foreach::copy_(&TensorList::new(&self.inner.trained()?)?, slow)?)
    }

    /// How the state calls a slow weight.
    fn keys(&self) -> Vec<String> {
        let key = |(index, param): (usize, Parameter)| match param.name() {
            Some(name) => format!("slow.{name}"),
            None => format!("slow.{index}"),
        };
        self.inner.parameters().into_iter().enumerate().map(key).collect()
    }
}

/// The slow weights by their parameters.
fn slow_by_parameter(fast: &TensorList, slow: &TensorList) -> Result<HashMap<TensorId, Tensor>, TorchError> {
    Ok(fast.to_vec()?.iter().map(TensorId::of).zip(slow.to_vec()?).collect())
}

impl<O: Optimizer> Optimizer for Lookahead<O> {
    pass_on_to_inner!();

    fn behavior(&self) -> Behavior {
        let mut behavior = self.inner.behavior();
        behavior.keeps_copies = true;
        behavior
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.look_for_groups()?;
        if self.slow.is_none() {
            self.slow = Some(self.copies()?);
        }
        self.inner.step()?;
        self.steps = (self.steps + 1) % self.k;
        if let Some(slow) = self.slow.take() {
            let followed = if self.steps == 0 && !slow.is_empty() { self.follow(&slow) } else { Ok(()) };
            self.slow = Some(slow);
            followed?;
        }
        Ok(())
    }

    fn gradients_used(&self) -> u64 {
        self.inner.gradients_used()
    }

    fn used_found_inf(&self) -> Vec<Tensor> {
        self.inner.used_found_inf()
    }

    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        self.inner.step_skipped()
    }

    /// The slow weights start anew where the parameters are now.
    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        (self.slow, self.steps) = (None, 0);
        self.inner.params_changed()
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        self.inner.as_stateful().map(|_| self as &dyn Stateful)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        self.inner.as_stateful().is_some().then_some(self as &mut dyn Stateful)
    }
}

/// The inner optimizer's state under `inner`, the steps since the slow weights moved, and the slow weights under `slow`
/// and their names, or their numbers where they have none; before the first step there are none. An inner optimizer
/// without a state (tch's) is [`StateError::NotSaved`].
impl<O: Optimizer> Stateful for Lookahead<O> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert_nested("inner", (&self.inner as &dyn Optimizer).state_dict()?);
        state.insert("steps", Entry::Int(self.steps.into()));
        if let Some(slow) = &self.slow {
            let slow = slow_by_parameter(&self.fast, slow)?;
            for (key, param) in self.keys().into_iter().zip(self.inner.params()) {
                let slow = match slow.get(&TensorId::of(&param)) {
                    Some(slow) => slow.shallow_clone(),
                    // Of a group that was added since the last step.
                    None => self.copy(param)?,
                };
                state.insert(key, Entry::Tensor(slow));
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let steps = state.int("steps")?;
        let Some(steps) = u32::try_from(steps).ok().filter(|steps| *steps < self.k) else {
            let (expected, found) = (format!("at least 0 and below {}", self.k), steps.to_string());
            return Err(StateError::Mismatch { key: "steps".to_owned(), expected, found });
        };
        self.look_for_groups()?;
        let mut keys = self.keys();
        if keys.first().is_some_and(|key| state.get(key).is_err()) && state.get("slow.0").is_ok() {
            // Saved where parameters had no names.
            keys = (0..keys.len()).map(|index| format!("slow.{index}")).collect();
        }
        let known: HashSet<&str> = keys.iter().map(String::as_str).collect();
        let is_known = |key: &str| key == "steps" || key.starts_with("inner.") || known.contains(key);
        if let Some((key, _)) = state.iter().find(|(key, _)| !is_known(key)) {
            return Err(StateError::Unexpected { key: key.to_owned() });
        }
        let slow = match state.iter().any(|(key, _)| known.contains(key)) {
            true => {
                // The parameters' copies, where they are: the saved ones may be on another device.
                let (slow, mut saved) = (self.copies()?, Vec::new());
                for (key, own) in keys.iter().zip(slow.to_vec()?) {
                    saved.push(state.tensor(key, &own.size(), own.kind())?.shallow_clone());
                }
                let _no_grad = tch::no_grad_guard();
                foreach::copy_(&slow, &TensorList::new(&saved)?)?;
                Some(slow)
            }
            false => None,
        };
        (&mut self.inner as &mut dyn Optimizer).load_state_dict(&state.nested("inner"))?;
        (self.slow, self.steps) = (slow, steps);
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        (&self.inner as &dyn Optimizer).differs_by_rank()
    }
}
