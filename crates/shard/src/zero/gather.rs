//! The whole state, gathered on one rank.

use overdrive_core::{Entry, Optimizer, StateDict, StateError, Stateful};
use overdrive_ddp::{DdpError, ProcessGroup};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::agree;
use crate::error::ShardError;
use crate::ownership::{Own, Ownership};

const GATHERING: &str = "consolidating the state";

/// An entry of a state as it is announced; a tensor's values follow.
#[derive(Serialize, Deserialize)]
enum Told {
    Tensor { kind: String, shape: Vec<i64> },
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

/// The whole state on rank `to`. Every rank announces its entries; then tensors go to `to`, one after the other.
pub(super) fn whole<O: Optimizer>(
    group: &ProcessGroup,
    ownership: &Ownership,
    own: Option<&Own<O>>,
    to: usize,
) -> Result<Option<StateDict>, ShardError> {
    let _no_grad = tch::no_grad_guard();
    let entries = own_entries(ownership, own).map_err(ShardError::from);
    let entries = entries.and_then(|entries| match to < group.size() {
        true => Ok(entries.ok_or(UNKNOWN)?),
        false => Err(DdpError::InvalidRank { what: "the rank to consolidate to", rank: to, size: group.size() }.into()),
    });
    let tell = |entries: &Vec<(String, Entry)>| (to.to_string(), entries.iter().map(told).collect::<Vec<_>>());
    let (entries, all) = agree::built(group, GATHERING, entries, tell)?;
    let (ranks, all): (Vec<String>, Vec<Vec<(String, Told)>>) = all.into_iter().unzip();
    agree::on_text("the rank to consolidate to", &ranks)?;
    // On every rank, before the first is sent.
    for (_, told) in all.iter().flatten() {
        if let Told::Tensor { kind, .. } = told {
            kind_of(kind)?;
        }
    }
    if group.rank() != to {
        for (_, entry) in &entries {
            if let Entry::Tensor(tensor) = entry
                && tensor.numel() > 0
            {
                let bytes = tensor.f_detach()?.f_contiguous()?.f_view([-1])?.f_view_dtype(Kind::Uint8)?;
                group.send(&bytes.f_to_device(group.device())?, to, 0)?;
            }
        }
        return Ok(None);
    }
    let mut state = StateDict::new();
    for (key, entry) in entries {
        state.insert(key, on_host(entry)?);
    }
    for (rank, told) in all.into_iter().enumerate().filter(|(rank, _)| *rank != to) {
        for (key, told) in told {
            state.insert(key, received(group, rank, told)?);
        }
    }
    ownership.tell_parameters(&mut state);
    Ok(Some(state))
}

/// The entries of this rank's state under the names that they have in the whole one; `None` if the optimizer inside has
/// others.
pub(super) fn own_entries<O: Optimizer>(
    ownership: &Ownership,
    own: Option<&Own<O>>,
) -> Result<Option<Vec<(String, Entry)>>, StateError> {
    let Some(own) = own else { return Ok(Some(Vec::new())) };
    let are_named = ownership.names().is_some();
    let mut entries = Vec::new();
    for (key, entry) in (&own.inner as &dyn Optimizer).state_dict()? {
        if let Some((number, field)) = numbered(&key, "param_groups.") {
            let Some(of_all) = own.groups.get(number) else { return Ok(None) };
            if field != "params" && !field.starts_with("param_names.") {
                entries.push((format!("param_groups.{of_all}.{field}"), entry));
            }
        } else if are_named && key.starts_with("state.") {
            entries.push((key, entry));
        } else if let Some((place, slot)) = numbered(&key, "state.") {
            let Some(of_all) = own.params.get(place) else { return Ok(None) };
            entries.push((format!("state.{of_all}.{slot}"), entry));
        } else {
            return Ok(None);
        }
    }
    Ok(Some(entries))
}

const UNKNOWN: StateError = StateError::NotSaved {
    reason: "the optimizer inside has entries besides those of parameters and groups (as a wrapper has), which no whole \
             state can be made of: save each rank's own part",
};

/// The number and the rest of a key such as `state.3.exp_avg`.
fn numbered<'a>(key: &'a str, prefix: &str) -> Option<(usize, &'a str)> {
    let (number, rest) = key.strip_prefix(prefix)?.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

fn told((key, entry): &(String, Entry)) -> (String, Told) {
    let told = match entry {
        Entry::Tensor(tensor) => Told::Tensor { kind: format!("{:?}", tensor.kind()), shape: tensor.size() },
        Entry::Bool(value) => Told::Bool(*value),
        Entry::Int(value) => Told::Int(*value),
        Entry::Float(value) => Told::Float(*value),
        Entry::Text(value) => Told::Text(value.clone()),
    };
    (key.clone(), told)
}

fn on_host(entry: Entry) -> Result<Entry, ShardError> {
    Ok(match entry {
        Entry::Tensor(tensor) => Entry::Tensor(tensor.f_to_device(Device::Cpu)?.f_detach_copy()?),
        other => other,
    })
}

fn received(group: &ProcessGroup, from: usize, told: Told) -> Result<Entry, ShardError> {
    Ok(match told {
        Told::Tensor { kind, shape } => {
            let kind = kind_of(&kind)?;
            let numel: i64 = shape.iter().product();
            let length = numel * kind.elt_size_in_bytes() as i64;
            let mut bytes = Tensor::f_empty([length], (Kind::Uint8, group.device()))?;
            if length > 0 {
                group.recv(&mut bytes, Some(from), 0)?;
            }
            Entry::Tensor(bytes.f_to_device(Device::Cpu)?.f_view_dtype(kind)?.f_view(&shape[..])?)
        }
        Told::Bool(value) => Entry::Bool(value),
        Told::Int(value) => Entry::Int(value),
        Told::Float(value) => Entry::Float(value),
        Told::Text(value) => Entry::Text(value),
    })
}

/// The dtype of this name; tch does not read them.
fn kind_of(name: &str) -> Result<Kind, StateError> {
    const KINDS: [Kind; 14] = [
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Half,
        Kind::Float,
        Kind::Double,
        Kind::Bool,
        Kind::BFloat16,
        Kind::ComplexFloat,
        Kind::ComplexDouble,
        Kind::Float8e5m2,
        Kind::Float8e4m3fn,
    ];
    let found = KINDS.into_iter().find(|kind| format!("{kind:?}") == name);
    found.ok_or(StateError::NotSaved { reason: "a tensor of its state has a dtype that is not sent to other ranks" })
}
