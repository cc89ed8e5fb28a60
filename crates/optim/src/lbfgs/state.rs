//! Saving and loading L-BFGS, under PyTorch's names.

use std::collections::VecDeque;

use overdrive_core::{Entry, OptimizerError, Parameter, StateDict, StateError, Stateful, TorchError};
use tch::{Device, Kind, Tensor};

use super::memory::{Memory, Pair};
use super::number::Number;
use super::options::LineSearch;
use super::{Lbfgs, State};

const STRONG_WOLFE: &str = "strong_wolfe";
const GROUP: &str = "param_groups.0";

/// The options are under `param_groups.0`. The rest belongs to the first parameter, as in PyTorch: `state.P.d` and so on,
/// where P is its name or 0; PyTorch's lists are numbered (`old_dirs.0`). Loading takes over the options.
impl Stateful for Lbfgs {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert_nested(GROUP, self.saved_options());
        state.insert_nested(&format!("state.{}", self.own_name()), self.state.saved());
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let options = self.loaded_options(state)?;
        let named = format!("state.{}", self.own_name());
        // A state that was saved without names.
        let prefix = if state.get(&format!("{named}.n_iter")).is_ok() { named } else { "state.0".to_owned() };
        let loaded = self.loaded(&prefix, state)?;
        (self.options, self.state) = (options, loaded);
        Ok(())
    }
}

fn mismatch(key: &str, expected: impl Into<String>, found: impl ToString) -> StateError {
    StateError::Mismatch { key: key.to_owned(), expected: expected.into(), found: found.to_string() }
}

impl Lbfgs {
    fn own_name(&self) -> &str {
        self.params.first().and_then(|param| param.name()).unwrap_or("0")
    }

    fn saved_options(&self) -> StateDict {
        let (mut state, options) = (StateDict::new(), &self.options);
        for (name, value) in [
            ("lr", options.lr),
            ("tolerance_grad", options.tolerance_grad),
            ("tolerance_change", options.tolerance_change),
        ] {
            state.insert(name, Entry::Float(value));
        }
        for (name, value) in
            [("max_iter", options.max_iter), ("max_eval", options.max_eval), ("history_size", options.history_size)]
        {
            state.insert(name, Entry::Int(value));
        }
        if options.line_search_fn == LineSearch::StrongWolfe {
            state.insert("line_search_fn", Entry::Text(STRONG_WOLFE.to_owned()));
        }
        state.insert("params", Entry::Int(self.params.len() as i64));
        for (index, name) in self.params.iter().filter_map(|param| param.name()).enumerate() {
            state.insert(format!("param_names.{index}"), Entry::Text(name.to_owned()));
        }
        state
    }

    fn loaded_options(&self, state: &StateDict) -> Result<super::options::LbfgsOptions, StateError> {
        let (group, key) = (state.nested(GROUP), |name: &str| format!("{GROUP}.{name}"));
        let known = ["lr", "tolerance_grad", "tolerance_change", "max_iter", "max_eval", "history_size", "params"];
        let is_known = |key: &str| known.contains(&key) || key == "line_search_fn" || key.starts_with("param_names.");
        if let Some((name, _)) = group.iter().find(|(name, _)| !is_known(name)) {
            return Err(StateError::Unexpected { key: key(name) });
        }
        let count = state.int(&key("params"))?;
        if count != self.params.len() as i64 {
            return Err(mismatch(&key("params"), format!("{} parameters", self.params.len()), count));
        }
        for (index, param) in self.params.iter().enumerate() {
            let key = key(&format!("param_names.{index}"));
            // The history is over all parameters in their order.
            if let (Some(own), Ok(saved)) = (param.name(), state.text(&key))
                && own != saved
            {
                return Err(mismatch(&key, format!("`{own}`, as in this optimizer"), saved));
            }
        }
        let mut options = self.options;
        options.lr = state.float(&key("lr"))?;
        options.tolerance_grad = state.float(&key("tolerance_grad"))?;
        options.tolerance_change = state.float(&key("tolerance_change"))?;
        options.max_iter = state.int(&key("max_iter"))?;
        options.max_eval = state.int(&key("max_eval"))?;
        options.history_size = state.int(&key("history_size"))?;
        options.line_search_fn = match state.text(&key("line_search_fn")) {
            Ok(STRONG_WOLFE) => LineSearch::StrongWolfe,
            Ok(other) => return Err(mismatch(&key("line_search_fn"), STRONG_WOLFE, other)),
            Err(StateError::Missing { .. }) => LineSearch::None,
            Err(error) => return Err(error),
        };
        match options.check() {
            Err(OptimizerError::InvalidOption { option, found, expected }) => {
                Err(mismatch(&key(option), expected, found))
            }
            _ => Ok(options),
        }
    }

    fn loaded(&self, prefix: &str, state: &StateDict) -> Result<State, StateError> {
        let own = state.nested(prefix);
        if own.len() + state.nested(GROUP).len() < state.len() {
            let is_strange = |key: &&str| !key.starts_with(prefix) && !key.starts_with(GROUP);
            let key = state.iter().map(|(key, _)| key).find(is_strange).unwrap_or(prefix);
            return Err(StateError::Unexpected { key: key.to_owned() });
        }
        let count = |name: &str| match state.int(&format!("{prefix}.{name}"))? {
            count if count < 0 => Err(mismatch(&format!("{prefix}.{name}"), "at least 0", count)),
            count => Ok(count),
        };
        let (func_evals, n_iter) = (count("func_evals")?, count("n_iter")?);
        let memory = (n_iter > 0).then(|| self.loaded_memory(prefix, state)).transpose()?;
        let pairs = memory.as_ref().map_or(0, |memory| memory.history.len());
        match own.iter().find(|(name, _)| !is_known(name, pairs)) {
            Some((name, _)) => Err(StateError::Unexpected { key: format!("{prefix}.{name}") }),
            None => Ok(State { func_evals, n_iter, memory }),
        }
    }

    fn loaded_memory(&self, prefix: &str, state: &StateDict) -> Result<Memory, StateError> {
        let _no_grad = tch::no_grad_guard();
        let first = self.params.first().map(Parameter::tensor);
        let (kind, device) = first.map_or((Kind::Float, Device::Cpu), |first| (first.kind(), first.device()));
        let len: usize = self.params.iter().map(|param| param.tensor().numel()).sum();
        let key = |name: &str| format!("{prefix}.{name}");
        let vector = |name: &str| -> Result<Tensor, StateError> {
            let saved = state.tensor(&key(name), &[len as i64], kind)?;
            Ok(saved.f_detach_copy().and_then(|copy| copy.f_to_device(device)).map_err(TorchError::from)?)
        };
        // PyTorch has numbers and tensors of one.
        let number = |name: &str| match state.get(&key(name))? {
            Entry::Tensor(_) => Ok(Number::read(state.tensor(&key(name), &[], kind)?)?),
            _ => Ok::<_, StateError>(state.float(&key(name))?.into()),
        };
        let mut history = VecDeque::new();
        while state.get(&key(&format!("ro.{}", history.len()))).is_ok() {
            let at = |list: &str| format!("{list}.{}", history.len());
            let (old_dir, old_stp) = (vector(&at("old_dirs"))?, vector(&at("old_stps"))?);
            let ro = Number::of_kind(number(&at("ro"))?.value, kind);
            history.push_back(Pair { old_dir, old_stp, ro });
        }
        let (d, prev_flat_grad, t) = (vector("d")?, vector("prev_flat_grad")?, number("t")?);
        let (h_diag, prev_loss) = (number("H_diag")?, number("prev_loss")?.value);
        Ok(Memory { d, t, history, h_diag, prev_flat_grad, prev_loss })
    }
}

/// Whether the state has such an entry, for a history of so many pairs.
fn is_known(name: &str, pairs: usize) -> bool {
    let is_listed = |list: &str| (0..pairs).any(|index| name == format!("{list}.{index}"));
    let names = ["d", "t", "H_diag", "prev_flat_grad", "prev_loss", "func_evals", "n_iter"];
    // `al` is scratch space of PyTorch's.
    names.contains(&name) || name.starts_with("al.") || ["old_dirs", "old_stps", "ro"].into_iter().any(is_listed)
}

impl State {
    fn saved(&self) -> StateDict {
        let mut state = StateDict::new();
        state.insert("func_evals", Entry::Int(self.func_evals));
        state.insert("n_iter", Entry::Int(self.n_iter));
        let Some(memory) = &self.memory else { return state };
        state.insert("d", Entry::Tensor(memory.d.shallow_clone()));
        state.insert("prev_flat_grad", Entry::Tensor(memory.prev_flat_grad.shallow_clone()));
        state.insert("t", Entry::Float(memory.t.value));
        state.insert("H_diag", Entry::Float(memory.h_diag.value));
        state.insert("prev_loss", Entry::Float(memory.prev_loss));
        for (index, pair) in memory.history.iter().enumerate() {
            state.insert(format!("old_dirs.{index}"), Entry::Tensor(pair.old_dir.shallow_clone()));
            state.insert(format!("old_stps.{index}"), Entry::Tensor(pair.old_stp.shallow_clone()));
            state.insert(format!("ro.{index}"), Entry::Float(pair.ro.value));
        }
        state
    }
}
