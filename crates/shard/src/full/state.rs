//! Saving and loading parameters: this rank's rows, or the whole.

use overdrive_core::{Entry, StateDict, StateError, Stateful, TorchError};
use overdrive_ddp::DdpError;
use overdrive_ffi::bump_version;
use tch::Tensor;

use super::FullyShardedDataParallel;
use super::engine::Engine;
use super::meeting::Event;
use super::param::ShardedParam;
use super::ranks::Ranks;
use super::whole::{gathered, rows_of};
use crate::agree;
use crate::error::ShardError;

const RANK: &str = "fsdp.rank";
const RANKS: &str = "fsdp.ranks";
const PARAMS: &str = "params.";

/// The name under which a parameter is saved.
fn key(param: &ShardedParam, index: usize) -> String {
    param.shard.name().map_or_else(|| index.to_string(), str::to_owned)
}

/// Refuses a part that another rank has saved, or one of another number of ranks.
pub(super) fn check_part(state: &StateDict, ranks: &Ranks) -> Result<(), StateError> {
    let (rank, ranks) = (ranks.parts.rank(), ranks.parts.size());
    let found = (state.int(RANK)?, state.int(RANKS)?);
    if found == (rank as i64, ranks as i64) {
        return Ok(());
    }
    let expected = format!(
        "the part of rank {rank} of {ranks}; for another number of ranks, load what `consolidate_state_dict` has made"
    );
    let found = format!("that of rank {} of {}", found.0, found.1);
    Err(StateError::Mismatch { key: RANK.to_owned(), expected, found })
}

pub(super) fn is_part(state: &StateDict) -> bool {
    state.get(RANKS).is_ok()
}

/// A part's state, without anything in it.
pub(super) fn part(ranks: &Ranks) -> StateDict {
    let mut state = StateDict::new();
    state.insert(RANK, Entry::Int(ranks.parts.rank() as i64));
    state.insert(RANKS, Entry::Int(ranks.parts.size() as i64));
    state
}

/// This rank's rows under `params`, the number of ranks and this rank's. Loads such a part, of the same rank of as many
/// ranks, or the whole parameters, as [`consolidate_state_dict`](Self::consolidate_state_dict) makes them and a plain
/// model saves them, of which it keeps its rows; ranks do not communicate. In a checkpoint, let each rank write its own.
/// Buffers of the model are not part of it. Optimizers that keep copies of parameters have to be told by
/// [`params_changed`](overdrive_core::Optimizer::params_changed), unless their state is loaded too.
impl Stateful for FullyShardedDataParallel {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = part(&self.ranks);
        let engine = self.shared.lock();
        for (index, param) in engine.params().enumerate() {
            let shard = param.shard.tensor().f_detach().map_err(TorchError::from)?;
            state.insert(format!("{PARAMS}{}", key(param, index)), Entry::Tensor(shard));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let mut engine = self.shared.lock();
        let is_part = is_part(state);
        let mut known = Vec::new();
        if is_part {
            check_part(state, &self.ranks)?;
            known.extend([RANK.to_owned(), RANKS.to_owned()]);
        }
        let mut pairs: Vec<(Tensor, Tensor)> = Vec::new();
        for (index, param) in engine.params().enumerate() {
            let (shard, name) = (param.shard.tensor(), key(param, index));
            let name = if is_part { format!("{PARAMS}{name}") } else { name };
            let rows = match is_part {
                true => state.tensor(&name, &shard.size(), shard.kind())?.shallow_clone(),
                false => rows_of(&param.layout, state.tensor(&name, &param.layout.shape, shard.kind())?)?,
            };
            pairs.push((shard.shallow_clone(), rows));
            known.push(name);
        }
        state.refuse_unknown(&known.iter().map(String::as_str).collect::<Vec<_>>())?;
        let _no_grad = tch::no_grad_guard();
        engine.order.cut();
        // What was gathered has the old values; a gather that fails is an error of the next exchange.
        let _ = engine.free_all();
        for (mut shard, rows) in pairs {
            shard.f_copy_(&rows).map_err(TorchError::from)?;
        }
        engine.params().for_each(|param| bump_version(param.whole()));
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        self.ranks.all.size() > 1
    }
}

impl FullyShardedDataParallel {
    /// The whole parameters on rank `to`, and `None` on the others: what the plain model would save, buffers left out,
    /// with copies of the tensors on the CPU. That model can load it, and so can a `FullyShardedDataParallel` over any
    /// number of ranks. Every rank calls it.
    ///
    /// # Errors
    /// [`ShardError::Ddp`] when there is no rank `to`, or a rank has exited or does not call it within the group's
    /// timeout; [`ShardError::RanksDisagree`] when ranks name different ones; libtorch's on the rank where memory runs out,
    /// and [`ShardError::OtherRank`] on the others.
    ///
    /// # Syncs
    /// Waits for all ranks, and for the device.
    ///
    /// # Source
    /// `get_model_state_dict(.., StateDictOptions(full_state_dict=True, cpu_offload=True))`
    pub fn consolidate_state_dict(&self, to: usize) -> Result<Option<StateDict>, ShardError> {
        let mut engine = self.shared.lock();
        let place = check_to(&mut engine, to)?;
        let of = |(index, param): (usize, &ShardedParam)| {
            (key(param, index), param.layout.clone(), param.shard.tensor().shallow_clone())
        };
        let params: Vec<_> = engine.params().enumerate().map(of).collect();
        drop(engine);
        let wholes = gathered(&self.shared, params.iter().map(|(_, layout, rows)| (layout, rows)), place)?;
        let mut whole = StateDict::new();
        for ((key, ..), tensor) in params.into_iter().zip(wholes) {
            if let Some(tensor) = tensor {
                whole.insert(key, Entry::Tensor(tensor));
            }
        }
        Ok((self.ranks.all.rank() == to).then_some(whole))
    }
}

/// Agrees on the rank to consolidate to. Its place among those over which parameters are partitioned.
pub(super) fn check_to(engine: &mut Engine, to: usize) -> Result<usize, ShardError> {
    let (group, size) = (engine.ranks.all.clone(), engine.ranks.all.size());
    let own = match to < size {
        true => Ok(()),
        false => Err(DdpError::InvalidRank { what: "the rank to consolidate to", rank: to, size }.into()),
    };
    engine.agree(Event::Save, own)?;
    let place = engine.ranks.parts.rank();
    let all = agree::all_have(&group, Event::Save.what(), Ok::<_, ShardError>((to.to_string(), place)));
    let (named, places): (Vec<String>, Vec<usize>) = engine.link.watch(all)?.into_iter().unzip();
    agree::on_text("the rank to consolidate to", &named)?;
    Ok(places[to])
}
