//! Lookahead, around any optimizer.

use std::collections::{HashMap, HashSet};

use overdrive_core::{
    Activity, Behavior, Entry, Optimizer, OptimizerError, Parameter, Rows, RowsToLoad, Shapes, ShardedBy, StateDict,
    StateError, Stateful, TorchError, activity,
};
use overdrive_ffi::{TensorId, TensorList};
use tch::{Kind, Tensor};

use crate::foreach;
use crate::wrapper::pass_on_to_inner;

/// Lets an optimizer take a few steps, then moves separate slow weights part of the way towards its weights, and
/// restarts it from the slow weights.
///
/// The slow weights are copied from the parameters at the first step, so weights may be loaded before it. After loading
/// weights later, call [`params_changed`](Optimizer::params_changed), or the slow weights pull them back.
///
/// # Source
/// Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back", 2019.
#[derive(Debug)]
pub struct Lookahead<O> {
    inner: O,
    alpha: f64,
    k: u32,
    /// The parameters, which the paper calls the fast weights.
    fast: TensorList,
    /// `None` before the first step.
    slow: Option<TensorList>,
    steps: u32,
}

impl<O: Optimizer> Lookahead<O> {
    /// Wraps `inner`: after every `k` steps, the slow weights move by the fraction `alpha` towards its weights, which
    /// are then set to the slow weights. The paper has k = 5, alpha = 0.5.
    ///
    /// # Errors
    /// When `k` is 0, `alpha` is outside [0, 1], `inner` steps during the backward pass, is schedule-free or has its
    /// float32 masters on several ranks, or memory runs out.
    pub fn new(inner: O, k: u32, alpha: f64) -> Result<Self, OptimizerError> {
        let range = |option, found, expected| OptimizerError::InvalidOption { option, found, expected };
        if k == 0 {
            return Err(range("k", 0.0, "at least 1"));
        }
        if !(0.0..=1.0).contains(&alpha) {
            return Err(range("alpha", alpha, "at least 0 and at most 1"));
        }
        if inner.behavior().steps_in_backward {
            let reason = "it steps during the backward pass, and the slow weights would start a step late; build it \
                          with `build`";
            return Err(OptimizerError::DoesNotFit { part: "Lookahead", reason });
        }
        if inner.behavior().keeps_average {
            let reason = "it averages its own steps, and setting the parameters to the slow weights would begin that \
                          average anew: use it alone";
            return Err(OptimizerError::DoesNotFit { part: "Lookahead", reason });
        }
        // Fails where the float32 masters cannot be had.
        inner.trained()?;
        let fast = TensorList::new(&inner.params())?;
        Ok(Self { inner, alpha, k, fast, slow: None, steps: 0 })
    }

    /// The inner optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// The inner optimizer, to add parameter groups or change their options. Call `step` and load states on the
    /// wrapper. The slow weights of added parameters are copied from them at the next step.
    pub fn inner_mut(&mut self) -> &mut O {
        &mut self.inner
    }

    /// Makes slow weights for parameter groups that were added since the last step.
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

    /// Copies of the parameters; in float32 for 16-bit parameters that have float32 masters.
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

    /// Moves the slow weights by the fraction `alpha` towards the parameters, then sets the parameters to the slow
    /// weights.
    fn follow(&mut self, slow: &TensorList) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        foreach::lerp_(slow, &TensorList::new(&self.inner.trained()?)?, self.alpha)?;
        foreach::copy_(&self.fast, slow)?;
        self.inner.params_changed()?;
        // `params_changed` has copied rounded weights into the float32 masters: give them the exact slow weights.
        Ok(foreach::copy_(&TensorList::new(&self.inner.trained()?)?, slow)?)
    }

    /// The slow weights' names in the state.
    fn keys(&self) -> Vec<String> {
        let key = |(index, param): (usize, Parameter)| match param.name() {
            Some(name) => format!("slow.{name}"),
            None => format!("slow.{index}"),
        };
        self.inner.parameters().into_iter().enumerate().map(key).collect()
    }
}

/// The slow weights by parameter.
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

    /// The next step copies new slow weights from the parameters.
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

/// The inner optimizer's state under `inner`, the steps since the slow weights moved, and the slow weights under
/// `slow.NAME`, or `slow.NUMBER` for parameters without names; before the first step there are no slow weights. With an
/// inner optimizer that cannot save its state (tch's), saving fails with [`StateError::NotSaved`].
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
                    // The parameter's group was added since the last step.
                    None => self.copy(param)?,
                };
                state.insert(key, Entry::Tensor(slow));
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        state.check_shard((&self.inner as &dyn Optimizer).state_dict()?.shard())?;
        let steps = state.int("steps")?;
        let Some(steps) = u32::try_from(steps).ok().filter(|steps| *steps < self.k) else {
            let (expected, found) = (format!("at least 0 and below {}", self.k), steps.to_string());
            return Err(StateError::Mismatch { key: "steps".to_owned(), expected, found });
        };
        self.look_for_groups()?;
        let mut keys = self.keys();
        if keys.first().is_some_and(|key| state.get(key).is_err()) && state.get("slow.0").is_ok() {
            // The state was saved from an optimizer without names.
            keys = (0..keys.len()).map(|index| format!("slow.{index}")).collect();
        }
        let known: HashSet<&str> = keys.iter().map(String::as_str).collect();
        let is_known = |key: &str| key == "steps" || key.starts_with("inner.") || known.contains(key);
        if let Some((key, _)) = state.iter().find(|(key, _)| !is_known(key)) {
            return Err(StateError::Unexpected { key: key.to_owned() });
        }
        let slow = match state.iter().any(|(key, _)| known.contains(key)) {
            true => {
                // Copies on the parameters' devices: the saved tensors may be on another device.
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

    fn rows_to_load(&self, values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
        let shard = (&self.inner as &dyn Optimizer).state_dict()?.shard();
        let is_of_rows = shard.is_some_and(|shard| shard.ranks > 1 && shard.by == ShardedBy::Rows);
        if is_of_rows && shapes.keys().any(|key| key.starts_with("slow.")) {
            return Err(StateError::NotSaved {
                reason: "the slow weights of a `Lookahead` around rows are each rank's own, and another rank's would have \
                         the same shapes: resume with the ranks that saved them",
            });
        }
        let of_inner = |key: &str| key.strip_prefix("inner.").map(str::to_owned);
        let inner = shapes.iter().filter_map(|(key, shape)| Some((of_inner(key)?, shape.clone()))).collect();
        let inner = (&self.inner as &dyn Optimizer).rows_to_load(&values.nested("inner"), &inner)?;
        let own = shapes.iter().filter(|(key, _)| of_inner(key).is_none());
        let own = own.map(|(key, shape)| (key.clone(), Rows::all(shape)));
        Ok(own.chain(inner.into_iter().map(|(key, rows)| (format!("inner.{key}"), rows))).collect())
    }
}
