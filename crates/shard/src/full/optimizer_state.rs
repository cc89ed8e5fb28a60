//! Saving and loading the optimizer's state: of this rank's rows, or the whole.

use std::collections::HashMap;

use overdrive_core::{Entry, Optimizer, Parameter, Rows, RowsToLoad, Shapes, Shard, StateDict, StateError, Stateful};
use overdrive_ffi::TensorId;
use tch::Tensor;

use super::FullyShardedOptimizer;
use super::layout::Layout;
use super::param::ShardedParam;
use super::state::{check_to, shard};
use super::whole::gathered;
use crate::agree;
use crate::error::ShardError;

/// This rank's [part](StateDict::shard): its rows of the tensors of
/// [`consolidate_state_dict`](FullyShardedOptimizer::consolidate_state_dict), and what is the same on all ranks. An
/// optimizer inside with entries besides those of parameters and groups (`Lookahead`) has its own state under `own`
/// instead, which the same rank of as many ranks loads.
///
/// Loads its part, or a whole state, as `consolidate_state_dict` and the optimizer inside over whole parameters make it, of
/// which it keeps its rows; ranks do not communicate. A checkpoint of each rank (`Writers::Each`) is also loaded by another
/// number of ranks, and by another way to shard, each rank reading the rows that it keeps.
impl<O: Optimizer> Stateful for FullyShardedOptimizer<O> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let layouts = self.layouts(&self.inner.parameters());
        let Some(entries) = self.entries(&layouts)? else { return self.own_state() };
        let mut state = StateDict::of_shard(shard(&self.ranks));
        for (key, entry, param) in entries {
            match (entry, param) {
                (Entry::Tensor(tensor), Some(param)) => state.insert_rows(key, tensor, layouts[param].rows_of_whole()),
                (entry, _) => state.insert(key, entry),
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let own = match state.get(OWN_RANKS) {
            Ok(_) => self.part_of(state)?,
            Err(_) => {
                state.check_shard(Some(shard(&self.ranks)))?;
                self.rows(state)?
            }
        };
        self.kept(|inner| (inner as &mut dyn Optimizer).load_state_dict(&own))
    }

    fn differs_by_rank(&self) -> bool {
        self.ranks.all.size() > 1
    }

    fn rows_to_load(&self, values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
        let params = self.inner.parameters();
        let (names, layouts) = (Names::of(&params, values), self.layouts(&params));
        let of = |(key, shape): (&String, &Vec<i64>)| {
            let param = key.strip_prefix("state.").map(|rest| names.param(rest));
            let rows = match param {
                Some(None) => return Err(StateError::Unexpected { key: key.clone() }),
                Some(Some(param)) if !shape.is_empty() => layouts[param].range_of(key, shape)?,
                // A count of steps, say.
                _ => Rows::all(shape),
            };
            Ok((key.clone(), rows))
        };
        shapes.iter().map(of).collect()
    }
}

const OWN_RANK: &str = "fsdp.rank";
const OWN_RANKS: &str = "fsdp.ranks";

impl<O: Optimizer> FullyShardedOptimizer<O> {
    /// The state of the optimizer inside under `own`, the number of ranks and this rank's.
    fn own_state(&self) -> Result<StateDict, StateError> {
        let Shard { rank, ranks, .. } = shard(&self.ranks);
        let mut state = StateDict::new();
        state.insert(OWN_RANK, Entry::Int(rank as i64));
        state.insert(OWN_RANKS, Entry::Int(ranks as i64));
        state.insert_nested("own", (&self.inner as &dyn Optimizer).state_dict()?);
        Ok(state)
    }

    /// What the optimizer inside has saved, of such a state.
    fn part_of(&self, state: &StateDict) -> Result<StateDict, StateError> {
        let (own, rank, ranks) = (shard(&self.ranks), state.int(OWN_RANK)?, state.int(OWN_RANKS)?);
        if (rank, ranks) != (own.rank as i64, own.ranks as i64) {
            let expected = format!("the part of {own}, because the optimizer inside has entries that are not parted");
            let found = format!("that of rank {rank} of {ranks}");
            return Err(StateError::Mismatch { key: OWN_RANK.to_owned(), expected, found });
        }
        let is_known = |key: &str| key.starts_with("own.") || key == OWN_RANK || key == OWN_RANKS;
        match state.iter().find(|(key, _)| !is_known(key)) {
            Some((key, _)) => Err(StateError::Unexpected { key: key.to_owned() }),
            None => Ok(state.nested("own")),
        }
    }

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
        let place = check_to(&mut engine, to, Ok(()))?;
        drop(engine);
        let params = self.inner.parameters();
        let layouts = self.layouts(&params);
        let entries = self.entries(&layouts).and_then(|entries| {
            let reason = "the optimizer inside has entries besides those of parameters and groups (as a wrapper has), which \
                          no whole state can be made of: save each rank's own part";
            entries.ok_or(StateError::NotSaved { reason })
        });
        let tell = |entries: &Vec<OfParam>| {
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

    /// The entries of the state inside, and the parameter of whose rows one is; `None` if there are others.
    fn entries(&self, layouts: &[Layout]) -> Result<Option<Vec<OfParam>>, StateError> {
        let state = (&self.inner as &dyn Optimizer).state_dict()?;
        let names = Names::of(&self.inner.parameters(), &state);
        let mut entries = Vec::new();
        for (key, entry) in state {
            let param = match key.strip_prefix("state.") {
                Some(rest) => names.param(rest).filter(|&param| is_of(&entry, &layouts[param].own_shape())),
                None if key.starts_with("param_groups.") => None,
                None => return Ok(None),
            };
            entries.push((key, entry, param));
        }
        Ok(Some(entries))
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
                (Entry::Tensor(tensor), Some(param)) if tensor.dim() > 0 => {
                    let (layout, kind) = (&layouts[param], tensor.kind());
                    Entry::Tensor(state.tensor_rows(key, &layout.shape, layout.own_range(), kind)?)
                }
                (entry, _) => entry.share(),
            };
            own.insert(key, entry);
        }
        Ok(own)
    }
}

type OfParam = (String, Entry, Option<usize>);

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
