//! The state of a 1-bit Adam, saved and put back.

use overdrive_core::{Entry, OptimizerError, StateDict, StateError, Stateful};
use tch::Tensor;

use super::OneBitAdam;

/// Each rank's own: the errors differ. With names of parameters (`param_names.N`), the state of others, or in another
/// order, is refused, because the averages are kept as one vector.
impl Stateful for OneBitAdam {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("step", Entry::Int(i64::try_from(self.steps).unwrap_or(i64::MAX)));
        state.insert("lr", Entry::Float(self.options.lr));
        state.insert("beta1", Entry::Float(self.options.betas.0));
        for (name, tensor) in self.tensors() {
            state.insert(name, Entry::Tensor(tensor.shallow_clone()));
        }
        for (index, name) in self.names.iter().enumerate() {
            state.insert(name_key(index), Entry::Text(name.clone()));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let found = state.int("step")?;
        let Ok(steps) = u64::try_from(found) else {
            let (key, expected) = ("step".to_owned(), "at least 0".to_owned());
            return Err(StateError::Mismatch { key, expected, found: found.to_string() });
        };
        let (lr, beta1) = (state.float("lr")?, state.float("beta1")?);
        let mismatch = |key: &str, expected: &str, found: f64| {
            Err(StateError::Mismatch { key: key.to_owned(), expected: expected.to_owned(), found: found.to_string() })
        };
        if OptimizerError::check_lr(lr).is_err() {
            return mismatch("lr", "a finite number of at least 0", lr);
        }
        if !(0.0..1.0).contains(&beta1) {
            return mismatch("beta1", "at least 0 and below 1", beta1);
        }
        let mut saved = Vec::new();
        for (name, own) in self.tensors() {
            saved.push((own.shallow_clone(), state.tensor(name, &own.size(), own.kind())?.shallow_clone()));
        }
        let mut known: Vec<String> =
            ["step", "lr", "beta1", "momentum", "squares", "own_error", "mean_error"].map(str::to_owned).into();
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
        (self.steps, self.options.lr, self.options.betas.0, self.frozen_root) = (steps, lr, beta1, None);
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        true
    }
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
