//! Saves and loads the state of a 1-bit Adam.

use overdrive_core::{Entry, OptimizerError, StateDict, StateError, Stateful};
use tch::Tensor;

use super::{OneBitAdam, OneBitAdamOptions};

const FLOATS: [&str; 5] = ["lr", "beta1", "beta2", "eps", "weight_decay"];

/// Each rank has a different state, because the rounding errors differ. If the parameters have names (`param_names.N`),
/// the state of other parameters, or of another order, is refused: the averages are kept as one vector.
impl Stateful for OneBitAdam {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("step", Entry::Int(i64::try_from(self.steps).unwrap_or(i64::MAX)));
        let OneBitAdamOptions { lr, betas: (beta1, beta2), eps, weight_decay, freeze_step } = self.options;
        for (option, value) in FLOATS.into_iter().zip([lr, beta1, beta2, eps, weight_decay]) {
            state.insert(option, Entry::Float(value));
        }
        state.insert("freeze_step", Entry::Int(i64::try_from(freeze_step).unwrap_or(i64::MAX)));
        for (name, tensor) in self.tensors() {
            state.insert(name, Entry::Tensor(tensor.shallow_clone()));
        }
        for (index, name) in self.names.iter().enumerate() {
            state.insert(name_key(index), Entry::Text(name.clone()));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let steps = natural(state, "step")?;
        let [lr, beta1, beta2, eps, weight_decay] = FLOATS.map(|option| state.float(option));
        let (betas, freeze_step) = ((beta1?, beta2?), natural(state, "freeze_step")?);
        let options = OneBitAdamOptions { lr: lr?, betas, eps: eps?, weight_decay: weight_decay?, freeze_step };
        if let Err(OptimizerError::InvalidOption { option, found, expected }) = options.check() {
            let (key, expected) = (option.to_owned(), expected.to_owned());
            return Err(StateError::Mismatch { key, expected, found: found.to_string() });
        }
        let mut saved = Vec::new();
        for (name, own) in self.tensors() {
            saved.push((own.shallow_clone(), state.tensor(name, &own.size(), own.kind())?.shallow_clone()));
        }
        let mut known: Vec<String> =
            ["step", "freeze_step", "momentum", "squares", "own_error", "mean_error"].map(str::to_owned).into();
        known.extend(FLOATS.map(str::to_owned));
        if !self.names.is_empty() && state.get(&name_key(0)).is_ok() {
            for (index, name) in self.names.iter().enumerate() {
                let (key, found) = (name_key(index), state.text(&name_key(index))?);
                if found != name {
                    return Err(StateError::Mismatch {
                        key,
                        expected: format!("`{name}`"),
                        found: format!("`{found}`"),
                    });
                }
                known.push(key);
            }
        }
        state.refuse_unknown(&known.iter().map(String::as_str).collect::<Vec<_>>())?;
        let _no_grad = tch::no_grad_guard();
        for (mut own, saved) in saved {
            own.f_copy_(&saved).map_err(overdrive_core::TorchError::from)?;
        }
        (self.steps, self.options, self.frozen_root) = (steps, options, None);
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        true
    }
}

fn natural(state: &StateDict, key: &str) -> Result<u64, StateError> {
    let found = state.int(key)?;
    let (key, expected) = (key.to_owned(), "at least 0".to_owned());
    u64::try_from(found).map_err(|_| StateError::Mismatch { key, expected, found: found.to_string() })
}

fn name_key(index: usize) -> String {
    format!("param_names.{index}")
}

impl OneBitAdam {
    fn tensors(&self) -> [(&'static str, &Tensor); 4] {
        let Self { momentum, squares, signed, .. } = self;
        [("momentum", momentum), ("squares", squares), ("own_error", &signed.own), ("mean_error", &signed.mean)]
    }
}
