//! Lookahead, around any optimizer.

use overdrive_core::{Activity, Entry, Optimizer, OptimizerError, StateDict, StateError, Stateful, activity};
use overdrive_ffi::TensorList;
use tch::Tensor;

use crate::foreach;
use crate::wrapper::pass_on_to_inner;

/// Lets an optimizer run ahead for a few steps, then moves slow weights part of the way after it and starts anew from
/// there.
///
/// # Source
/// Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back", 2019.
#[derive(Debug)]
pub struct Lookahead<O> {
    inner: O,
    alpha: f64,
    k: u32,
    fast: TensorList,
    slow: TensorList,
    steps: u32,
}

impl<O: Optimizer> Lookahead<O> {
    /// `inner`, whose weights after every `k` steps are slow ones moved by the share `alpha` of its way: 5 and 0.5 in the
    /// paper. The slow weights start where the parameters are now.
    ///
    /// # Errors
    /// When `k` is 0, `alpha` is outside [0, 1], or memory runs out.
    pub fn new(inner: O, k: u32, alpha: f64) -> Result<Self, OptimizerError> {
        let range = |option, found, expected| OptimizerError::InvalidOption { option, found, expected };
        if k == 0 {
            return Err(range("k", 0.0, "at least 1"));
        }
        if !(0.0..=1.0).contains(&alpha) {
            return Err(range("alpha", alpha, "at least 0 and at most 1"));
        }
        let params = inner.params();
        let fast = TensorList::new(&params)?;
        let slow = params.iter().map(Tensor::f_detach_copy).collect::<Result<Vec<_>, _>>();
        let slow = TensorList::new(&slow.map_err(overdrive_core::TorchError::from)?)?;
        Ok(Self { inner, alpha, k, fast, slow, steps: 0 })
    }

    /// The optimizer inside.
    pub fn inner(&self) -> &O {
        &self.inner
    }
}

impl<O: Optimizer> Optimizer for Lookahead<O> {
    pass_on_to_inner!();

    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.inner.step()?;
        self.steps = (self.steps + 1) % self.k;
        if self.steps == 0 && !self.fast.is_empty() {
            let _no_grad = tch::no_grad_guard();
            foreach::lerp_(&self.slow, &self.fast, self.alpha)?;
            foreach::copy_(&self.fast, &self.slow)?;
            // Float32 masters inside would bring the fast weights back.
            self.inner.params_changed()?;
        }
        Ok(())
    }
}

/// The inner optimizer's state under `inner`, the slow weights under `slow`, and the steps since they moved.
impl<O: Optimizer + Stateful> Stateful for Lookahead<O> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert_nested("inner", self.inner.state_dict()?);
        state.insert("steps", Entry::Int(self.steps.into()));
        for (index, slow) in self.slow.to_vec()?.into_iter().enumerate() {
            state.insert(format!("slow.{index}"), Entry::Tensor(slow));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let steps = state.int("steps")?;
        let Some(steps) = u32::try_from(steps).ok().filter(|steps| *steps < self.k) else {
            let (expected, found) = (format!("at least 0 and below {}", self.k), steps.to_string());
            return Err(StateError::Mismatch { key: "steps".to_owned(), expected, found });
        };
        let mut saved = Vec::new();
        for (index, own) in self.slow.to_vec()?.iter().enumerate() {
            saved.push(state.tensor(&format!("slow.{index}"), &own.size(), own.kind())?.shallow_clone());
        }
        let known = |key: &str| key == "steps" || key.starts_with("inner.") || saved_index(key) < saved.len();
        if let Some((key, _)) = state.iter().find(|(key, _)| !known(key)) {
            return Err(StateError::Unexpected { key: key.to_owned() });
        }
        self.inner.load_state_dict(&state.nested("inner"))?;
        if !saved.is_empty() {
            let _no_grad = tch::no_grad_guard();
            foreach::copy_(&self.slow, &TensorList::new(&saved)?)?;
        }
        self.steps = steps;
        Ok(())
    }
}

/// Which of the slow weights an entry is; beyond all of them when it is none.
fn saved_index(key: &str) -> usize {
    key.strip_prefix("slow.").and_then(|index| index.parse().ok()).unwrap_or(usize::MAX)
}
