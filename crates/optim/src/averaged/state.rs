//! Saving and loading averages: whole, or this rank's rows.

use std::collections::BTreeMap;
use std::ops::Range;

use overdrive_core::{Entry, Rows, RowsToLoad, Shapes, Shard, StateDict, StateError, Stateful};
use overdrive_ffi::TensorList;

use super::AveragedModel;
use crate::foreach;

/// The part of sharded weights that this rank averages.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) shard: Shard,
    /// By the parameter's name.
    pub(super) rows: BTreeMap<String, Rows>,
    pub(super) differs_by_rank: bool,
}

/// `n_averaged`, and the averages and buffers under `module.NAME`, as in PyTorch. A state whose averages have the dtype
/// of the model's weights (PyTorch's) loads as well.
///
/// Of sharded weights it is this rank's [part](StateDict::shard), its rows of each average. It loads its part or a
/// whole state, of which it keeps its rows. A checkpoint of each rank is also loaded by another number of ranks, and by
/// averages of whole weights.
impl Stateful for AveragedModel {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = self.shard().map_or_else(StateDict::new, StateDict::of_shard);
        state.insert("n_averaged", Entry::Int(self.n_averaged));
        for kept in [&self.averaged, &self.copied] {
            for (name, own) in kept.names.iter().zip(kept.own.to_vec()?) {
                match self.rows(name) {
                    Some(rows) => state.insert_rows(key(name), own, rows.clone()),
                    None => state.insert(key(name), Entry::Tensor(own)),
                }
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let _no_grad = tch::no_grad_guard();
        state.check_shard(self.shard())?;
        let n_averaged = state.int("n_averaged")?;
        if n_averaged < 0 {
            let (expected, found) = ("at least 0".to_owned(), n_averaged.to_string());
            return Err(StateError::Mismatch { key: "n_averaged".to_owned(), expected, found });
        }
        let (mut keys, mut lists) = (Vec::new(), Vec::new());
        for kept in [&self.averaged, &self.copied] {
            let mut saved = Vec::new();
            for (name, (own, model)) in kept.names.iter().zip(kept.own.to_vec()?.iter().zip(kept.model.to_vec()?)) {
                let (key, shape) = (key(name), own.size());
                let of = |kind| match self.rows(name) {
                    Some(rows) => state.tensor_rows(&key, &rows.whole, range(rows, &shape), kind),
                    None => Ok(state.tensor(&key, &shape, kind)?.shallow_clone()),
                };
                saved.push(of(model.kind()).or_else(|_| of(own.kind()))?);
                keys.push(key);
            }
            lists.push((&kept.own, TensorList::new(&saved)?));
        }
        state.refuse_unknown(&keys.iter().map(String::as_str).chain(["n_averaged"]).collect::<Vec<_>>())?;
        for (own, saved) in lists.into_iter().filter(|(own, _)| !own.is_empty()) {
            foreach::copy_(own, &saved)?;
        }
        self.n_averaged = n_averaged;
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        self.part.as_ref().is_some_and(|part| part.differs_by_rank)
    }

    fn rows_to_load(&self, _values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
        let mut needed: RowsToLoad = shapes.iter().map(|(key, shape)| (key.clone(), Rows::all(shape))).collect();
        for (name, own) in self.averaged.names.iter().zip(self.averaged.own.to_vec()?) {
            let key = key(name);
            let (Some(rows), Some(found)) = (self.rows(name), shapes.get(&key)) else { continue };
            if *found != rows.whole {
                let (expected, found) = (&rows.whole, format!("one of shape {found:?}"));
                return Err(StateError::Mismatch { key, expected: format!("a tensor of shape {expected:?}"), found });
            }
            needed.insert(key, range(rows, &own.size()));
        }
        Ok(needed)
    }
}

impl AveragedModel {
    fn shard(&self) -> Option<Shard> {
        self.part.as_ref().map(|part| part.shard)
    }

    fn rows(&self, name: &str) -> Option<&Rows> {
        self.part.as_ref()?.rows.get(name)
    }
}

fn key(name: &str) -> String {
    format!("module.{name}")
}

/// The rows of a whole tensor of which one of this shape is made.
fn range(rows: &Rows, own: &[i64]) -> Range<i64> {
    rows.first..rows.first + own.first().copied().unwrap_or(1)
}
