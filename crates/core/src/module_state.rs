//! A module's weights as a state.

use std::collections::{HashMap, HashSet};

use overdrive_ffi::{Error as TorchError, TensorId};
use tch::Tensor;

use crate::marks::{MOVED, SHARDED};
use crate::module::{Module, ModuleState};
use crate::state::{Entry, StateDict, StateError};
use crate::walk::{Item, walk};

/// A module's state: every parameter and every persistent buffer by its names, tied ones under each.
///
/// # Errors
/// While SAM has moved the weights, and when two tensors have one name.
pub fn module_state<M: Module>(module: &M) -> Result<StateDict, StateError> {
    let entries = module_entries(module);
    check_in_place(&entries)?;
    check_names(&entries)?;
    let mut state = StateDict::new();
    for (name, tensor) in entries {
        state.insert(name, Entry::Tensor(tensor));
    }
    Ok(state)
}

/// Copies a state into a module's tensors, so that the model and its optimizer keep using them. Of tied tensors, one of
/// the names is enough.
///
/// # Errors
/// When an entry is missing, unknown, or has another shape or dtype, SAM has moved the weights, or two tensors have one
/// name; nothing has changed then.
pub fn load_module_state<M: Module>(module: &M, state: &StateDict) -> Result<(), StateError> {
    let entries = module_entries(module);
    // SAM's step would overwrite the loaded weights with those from before its ascent.
    check_in_place(&entries)?;
    check_names(&entries)?;
    let is_there = |name: &str| state.get(name).is_ok();
    let given: HashSet<TensorId> =
        entries.iter().filter(|(name, _)| is_there(name)).map(|(_, own)| TensorId::of(own)).collect();
    let needed = |(name, own): &&(String, Tensor)| is_there(name) || !given.contains(&TensorId::of(own));
    let needed: Vec<_> = entries.iter().filter(needed).collect();
    // Names before shapes, because they tell best that the state is another model's.
    needed.iter().try_for_each(|(name, _)| state.get(name).map(drop))?;
    state.check_shard(None)?;
    let mut pairs = Vec::new();
    for (name, own) in needed {
        pairs.push((own.shallow_clone(), state.tensor(name, &own.size(), own.kind())?));
    }
    state.refuse_unknown(&entries.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>())?;
    let _no_grad = tch::no_grad_guard();
    for (mut own, saved) in pairs {
        own.f_copy_(saved).map_err(TorchError::from)?;
    }
    Ok(())
}

/// The tensors of a module's state by name, tied ones under each.
pub fn module_entries<M: Module>(module: &M) -> Vec<(String, Tensor)> {
    let mut found = Vec::new();
    walk(module, &mut |item| match item {
        Item::Parameter { name, tensor } | Item::Buffer { name, tensor, persistent: true } => {
            found.push((name.to_owned(), tensor.shallow_clone()));
        }
        _ => {}
    });
    found
}

/// The states of all layers, each once.
pub fn layer_states<M: Module>(module: &M) -> Vec<&ModuleState> {
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    walk(module, &mut |item| {
        if let Item::State { state } = item
            && seen.insert(std::ptr::from_ref(state))
        {
            found.push(state);
        }
    });
    found
}

fn check_in_place(entries: &[(String, Tensor)]) -> Result<(), StateError> {
    if SHARDED.position(entries.iter().map(|(_, tensor)| tensor)).is_some() {
        let reason = "its parameters are sharded over ranks: save and load the `FullyShardedDataParallel`, or its \
                      `consolidate_state_dict`";
        return Err(StateError::NotSaved { reason });
    }
    let reason = "SAM's `ascend` has moved the weights: call `step` or `step_skipped` first, which move them back";
    match MOVED.position(entries.iter().map(|(_, tensor)| tensor)) {
        Some(_) => Err(StateError::NotSaved { reason }),
        None => Ok(()),
    }
}

/// An error if two tensors have one name, which a `visit` written by hand can give them: one would be lost.
fn check_names(entries: &[(String, Tensor)]) -> Result<(), StateError> {
    let mut known = HashMap::new();
    for (name, tensor) in entries {
        let id = TensorId::of(tensor);
        if *known.entry(name).or_insert(id) != id {
            let (expected, found) = ("the name of one tensor".to_owned(), "that of two in this module".to_owned());
            return Err(StateError::Mismatch { key: name.clone(), expected, found });
        }
    }
    Ok(())
}
