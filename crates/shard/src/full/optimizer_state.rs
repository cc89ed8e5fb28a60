//! Saving and loading the optimizer's state: of this rank's rows, or the whole.

use std::collections::HashMap;

use overdrive_core::{Entry, Optimizer, Parameter, StateDict, StateError, Stateful};
use overdrive_ffi::TensorId;
use tch::Tensor;

use super::FullyShardedOptimizer;
use super::layout::Layout;
use super::param::ShardedParam;
use super::state::{check_part, check_to, is_part, part};
use super::whole::{gathered, rows_of};
use crate::agree;
use crate::error::ShardError;

/// The part of this rank: the state of the optimizer inside under `own`, the number of ranks and this rank's. Loads such
/// a part, of the same rank of as many ranks, or a whole state, as
/// [`consolidate_state_dict`](FullyShardedOptimizer::consolidate_state_dict) and the optimizer inside over whole
/// parameters make it, of which it keeps its rows; ranks do not communicate. In a checkpoint, let each rank write its
/// own.
impl<O: Optimizer> Stateful for FullyShardedOptimizer<O> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = part(&self.ranks);
        state.insert_nested("own", (&self.inner as &dyn Optimizer).state_dict()?);
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let own = match is_part(state) {
            true => {
                check_part(state, &self.ranks)?;
                let is_known = |key: &str| key.starts_with("own.") || key.starts_with("fsdp.");
                if let Some((key, _)) = state.iter().find(|(key, _)| !is_known(key)) {
                    return Err(StateError::Unexpected { key: key.to_owned() });
                }
                state.nested("own")
            }
            false => self.rows(state)?,
        };
        self.kept(|inner| (inner as &mut dyn Optimizer).load_state_dict(&own))
    }

    fn differs_by_rank(&self) -> bool {
        self.ranks.all.size() > 1
    }
}

impl<O: Optimizer> FullyShardedOptimizer<O> {
    /// The whole optimizer's state on rank `to`, and `None` on the others: what the optimizer inside would have over the
    /// whole parameters, with copies of the tensors on the CPU. That optimizer can load it, and so can a
    /// `FullyShardedOptimizer` over any number of ranks. Every rank calls it.
    ///
    /// # Errors
    /// On every rank: [`ShardError::State`] or [`ShardError::OtherRank`] when the optimizer cannot save its state or has
    /// entries besides those of parameters and groups (`Lookahead`); [`ShardError::RanksDisagree`] when it has others on
    /// another rank. [`ShardError::Ddp`] when there is no rank `to`, or a rank has exited or does not call it within the
    /// group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks, and for the device.
    ///
    /// # Source
    /// `get_optimizer_state_dict(.., StateDictOptions(full_state_dict=True, cpu_offload=True))`
    pub fn consolidate_state_dict(&self, to: usize) -> Result<Option<StateDict>, ShardError> {
        let mut engine = self.shared.lock();
        let place = check_to(&mut engine, to)?;
        drop(engine);
        let params = self.inner.parameters();
        let layouts = self.layouts(&params);
        let entries = self.entries(&layouts);
        let tell = |entries: &Vec<(String, Entry, Option<usize>)>| {
            entries.iter().map(|(key, _, param)| (key.clone(), told(*param))).collect::<Vec<_>>()
        };
        let (entries, all) = agree::built(&self.ranks.all, "consolidating the state", entries, tell)?;
        agree::on_lines("the entries of the optimizer's state", &all)?;
        let rows = entries.iter().filter_map(|(_, entry, param)| match (entry, param) {
            (Entry::Tensor(tensor), Some(param)) => Some((&layouts[*param], tensor)),
            _ => None,
        });
        let mut wholes = gathered(&self.shared, rows, place)?.into_iter();
        let mut whole = StateDict::new();
        for (key, entry, param) in entries {
            let entry = match (entry, param) {
                (Entry::Tensor(_), Some(_)) => match wholes.next().flatten() {
                    Some(tensor) => Entry::Tensor(tensor),
                    None => continue,
                },
                (Entry::Tensor(tensor), None) => Entry::Tensor(tensor.f_to_device(tch::Device::Cpu)?.f_detach_copy()?),
                (other, _) => other,
            };
            whole.insert(key, entry);
        }
        Ok((self.ranks.all.rank() == to).then_some(whole))
    }

    /// The layouts of the optimizer's parameters, in its order.
    fn layouts(&self, params: &[Parameter]) -> Vec<Layout> {
        let engine = self.shared.lock();
        let layout = |param: &ShardedParam| (TensorId::of(param.shard.tensor()), param.layout.clone());
        let known: HashMap<TensorId, Layout> = engine.params().map(layout).collect();
        params.iter().filter_map(|param| known.get(&TensorId::of(param.tensor())).cloned()).collect()
    }

    /// The entries of the state inside, and the parameter of whose rows one is.
    fn entries(&self, layouts: &[Layout]) -> Result<Vec<(String, Entry, Option<usize>)>, StateError> {
        let state = (&self.inner as &dyn Optimizer).state_dict()?;
        let names = Names::of(&self.inner.parameters(), &state);
        let mut entries = Vec::new();
        for (key, entry) in state {
            let param = match key.strip_prefix("state.") {
                Some(rest) => names.param(rest).filter(|&param| is_of(&entry, &layouts[param].own_shape())),
                None if key.starts_with("param_groups.") => None,
                None => {
                    let reason = "the optimizer inside has entries besides those of parameters and groups (as a wrapper \
                                  has), which no whole state can be made of: save each rank's own part";
                    return Err(StateError::NotSaved { reason });
                }
            };
            entries.push((key, entry, param));
        }
        Ok(entries)
    }

    /// This rank's rows of a whole state.
    fn rows(&self, state: &StateDict) -> Result<StateDict, StateError> {
        let params = self.inner.parameters();
        let layouts = self.layouts(&params);
        let names = Names::of(&params, state);
        let mut own = StateDict::new();
        for (key, entry) in state.iter() {
            let param = key.strip_prefix("state.").and_then(|rest| names.param(rest));
            let entry = match (entry, param) {
                (Entry::Tensor(tensor), Some(param)) if is_of(entry, &layouts[param].shape) => {
                    Entry::Tensor(rows_of(&layouts[param], tensor)?)
                }
                (Entry::Tensor(tensor), Some(param)) if tensor.dim() > 0 => {
                    let (expected, found) = (&layouts[param].shape, tensor.size());
                    let (expected, found) = (format!("a tensor of shape {expected:?}"), format!("{found:?}"));
                    return Err(StateError::Mismatch { key: key.to_owned(), expected, found });
                }
                (entry, _) => entry.share(),
            };
            own.insert(key, entry);
        }
        Ok(own)
    }
}

fn told(param: Option<usize>) -> String {
    param.map_or("the same on all ranks".to_owned(), |param| format!("rows of parameter {param}"))
}

fn is_of(entry: &Entry, shape: &[i64]) -> bool {
    matches!(entry, Entry::Tensor(tensor) if Tensor::size(tensor) == shape)
}

/// Which parameter an entry `NAME.SLOT` is of: by name where the state has names, by its number otherwise.
struct Names(HashMap<String, usize>);

impl Names {
    fn of(params: &[Parameter], state: &StateDict) -> Self {
        let are_named = state.iter().any(|(key, _)| key.starts_with("param_groups.") && key.contains(".param_names."));
        let name = |(index, param): (usize, &Parameter)| match param.name().filter(|_| are_named) {
            Some(name) => (name.to_owned(), index),
            None => (index.to_string(), index),
        };
        Self(params.iter().enumerate().map(name).collect())
    }

    fn param(&self, rest: &str) -> Option<usize> {
        // Both parts may have dots: the longest known name decides.
        rest.rmatch_indices('.').find_map(|(dot, _)| self.0.get(&rest[..dot]).copied())
    }
}
