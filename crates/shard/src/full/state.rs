//! Saving and loading parameters: this rank's rows, or the whole.

use std::collections::HashMap;

use overdrive_core::{Entry, Rows, RowsToLoad, Shapes, Shard, ShardedBy, StateDict, StateError, Stateful, TorchError};
use overdrive_ddp::DdpError;
use overdrive_ffi::bump_version;
use tch::{Device, Tensor};

use super::FullyShardedDataParallel;
use super::engine::Engine;
use super::meeting::Event;
use super::param::ShardedParam;
use super::ranks::Ranks;
use super::whole::gathered;
use crate::agree;
use crate::error::ShardError;

/// The name under which a parameter is saved.
fn key(param: &ShardedParam, index: usize) -> String {
    param.shard.name().map_or_else(|| index.to_string(), str::to_owned)
}

/// Which part of whole states this rank has.
pub(super) fn shard(ranks: &Ranks) -> Shard {
    Shard { rank: ranks.parts.rank(), ranks: ranks.parts.size(), by: ShardedBy::Rows }
}

/// This rank's [part](StateDict::shard): its rows of each parameter. Loads its part, or the whole parameters, as
/// [`consolidate_state_dict`](Self::consolidate_state_dict) makes them and a plain model saves them, of which it keeps its
/// rows; ranks do not communicate. A checkpoint of each rank (`Writers::Each`) is also loaded by another number of ranks and
/// by a plain model, each rank reading the rows that it keeps.
/// The model's buffers are part of it, whole: each rank's own, such as running statistics. Where they differ, another number
/// of ranks loads them from a checkpoint only if it says whose (`from_rank_0`). Optimizers that keep copies of parameters have to be told by
/// [`params_changed`](overdrive_core::Optimizer::params_changed), unless their state is loaded too.
impl Stateful for FullyShardedDataParallel {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::of_shard(shard(&self.ranks));
        let engine = self.shared.lock();
        for (index, param) in engine.params().enumerate() {
            let rows = param.shard.tensor().f_detach().map_err(TorchError::from)?;
            state.insert_rows(key(param, index), rows, param.layout.rows_of_whole());
        }
        for (name, buffer) in &self.buffers {
            state.insert(name, Entry::Tensor(buffer.f_detach().map_err(TorchError::from)?));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        state.check_shard(Some(shard(&self.ranks)))?;
        let mut engine = self.shared.lock();
        let mut known = Vec::new();
        let mut pairs: Vec<(Tensor, Tensor)> = Vec::new();
        let mut buffers: Vec<(Tensor, Tensor)> = Vec::new();
        for (index, param) in engine.params().enumerate() {
            let (shard, name, layout) = (param.shard.tensor(), key(param, index), &param.layout);
            let rows = state.tensor_rows(&name, &layout.shape, layout.own_range(), shard.kind())?;
            pairs.push((shard.shallow_clone(), rows));
            known.push(name);
        }
        for (name, own) in &self.buffers {
            let saved = state.tensor(name, &own.size(), own.kind())?;
            buffers.push((own.shallow_clone(), saved.shallow_clone()));
            known.push(name.clone());
        }
        state.refuse_unknown(&known.iter().map(String::as_str).collect::<Vec<_>>())?;
        let _no_grad = tch::no_grad_guard();
        engine.order.cut();
        // What was gathered has the old values; a gather that fails is an error of the next exchange.
        let _ = engine.free_all();
        for (mut own, saved) in pairs.into_iter().chain(buffers) {
            own.f_copy_(&saved).map_err(TorchError::from)?;
        }
        engine.params().for_each(|param| bump_version(param.whole()));
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        self.ranks.all.size() > 1
    }

    fn rows_to_load(&self, _values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
        let engine = self.shared.lock();
        let own: HashMap<String, &ShardedParam> =
            engine.params().enumerate().map(|(index, param)| (key(param, index), param)).collect();
        let of = |(key, shape): (&String, &Vec<i64>)| {
            if self.buffers.iter().any(|(name, _)| name == key) {
                return Ok((key.clone(), Rows::all(shape)));
            }
            let param = own.get(key).ok_or_else(|| StateError::Unexpected { key: key.clone() })?;
            Ok((key.clone(), param.layout.range_of(key, shape)?))
        };
        shapes.iter().map(of).collect()
    }
}

impl FullyShardedDataParallel {
    /// The whole parameters and the buffers of rank `to` on that rank, and `None` on the others: what the plain model would
    /// save, with copies of the tensors on the CPU. That model can load it, and so can a `FullyShardedDataParallel` over any
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
        let rows = engine.params().try_for_each(|param| param.rows().map(drop));
        let place = check_to(&mut engine, to, rows)?;
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
        if self.ranks.all.rank() != to {
            return Ok(None);
        }
        for (name, buffer) in &self.buffers {
            let copy = buffer.f_detach()?.f_to_device(Device::Cpu)?.f_to_dtype(buffer.kind(), false, true)?;
            whole.insert(name, Entry::Tensor(copy));
        }
        Ok(Some(whole))
    }
}

/// Agrees on the rank to consolidate to, and on whether all have their rows. Returns its place among those over which
/// parameters are partitioned.
pub(super) fn check_to(engine: &mut Engine, to: usize, rows: Result<(), ShardError>) -> Result<usize, ShardError> {
    let (group, size) = (engine.ranks.all.clone(), engine.ranks.all.size());
    let own = match to < size {
        true => rows,
        false => Err(DdpError::InvalidRank { what: "the rank to consolidate to", rank: to, size }.into()),
    };
    engine.agree(Event::Save, own)?;
    let place = engine.ranks.parts.rank();
    let all = agree::all_have(&group, Event::Save.what(), Ok::<_, ShardError>((to.to_string(), place)));
    let (named, places): (Vec<String>, Vec<usize>) = engine.link.watch(all)?.into_iter().unzip();
    agree::on_text("the rank to consolidate to", &named)?;
    Ok(places[to])
}
