//! Checkpoints saved, loaded, damaged, interrupted and killed.

mod bad_input;
mod branches;
mod child;
mod consolidated;
mod differing;
mod group;
mod hostile;
mod kept;
mod kills;
mod partial;
mod passed_over;
mod ranks;
mod resharded;
mod round_trip;
mod shards;

use std::path::Path;

use overdrive_core::{Entry, StateDict, StateError, Stateful};
use tch::{Device, Kind, Tensor, nn};

/// A part that consists of its state, and refuses other names, shapes and dtypes.
#[derive(Debug)]
pub struct Plain(pub StateDict);

impl Plain {
    /// A part with these entries.
    pub fn new(entries: impl IntoIterator<Item = (&'static str, Entry)>) -> Self {
        let mut state = StateDict::new();
        entries.into_iter().for_each(|(key, entry)| state.insert(key, entry));
        Self(state)
    }
}

/// A copy with its own memory.
pub fn copy(state: &StateDict) -> StateDict {
    let mut copy = StateDict::new();
    for (key, entry) in state.iter() {
        let entry = match entry {
            Entry::Tensor(tensor) => Entry::Tensor(tensor.copy()),
            Entry::Bool(value) => Entry::Bool(*value),
            Entry::Int(value) => Entry::Int(*value),
            Entry::Float(value) => Entry::Float(*value),
            Entry::Text(value) => Entry::Text(value.clone()),
        };
        copy.insert(key, entry);
    }
    copy
}

impl Stateful for Plain {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        Ok(copy(&self.0))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        for (key, entry) in self.0.iter() {
            match entry {
                Entry::Tensor(own) => drop(state.tensor(key, &own.size(), own.kind())?),
                Entry::Int(_) => drop(state.int(key)?),
                Entry::Float(_) => drop(state.float(key)?),
                Entry::Bool(_) => drop(state.bool(key)?),
                Entry::Text(_) => drop(state.get(key)?),
            }
        }
        state.refuse_unknown(&self.0.iter().map(|(key, _)| key).collect::<Vec<_>>())?;
        self.0 = copy(state);
        Ok(())
    }
}

/// A model whose weights are all `value`.
pub fn model(value: f64) -> nn::VarStore {
    let vs = nn::VarStore::new(Device::Cpu);
    let _ = vs.root().var("weight", &[3, 4], nn::Init::Const(value));
    let _ = vs.root().var("bias", &[3], nn::Init::Const(value));
    vs
}

/// The value that all weights have.
pub fn value(vs: &nn::VarStore) -> f64 {
    let all = Tensor::cat(&vs.trainable_variables().iter().map(|weight| weight.reshape([-1])).collect::<Vec<_>>(), 0);
    assert_eq!(all.min(), all.max(), "partly loaded");
    all.max().to_kind(Kind::Double).double_value(&[])
}

/// Changes a checkpoint's manifest, and updates its checksum.
pub fn edit_manifest(step: &Path, edit: impl FnOnce(&mut serde_json::Value)) -> Result<(), Box<dyn std::error::Error>> {
    let path = step.join("manifest.json");
    let mut manifest = serde_json::from_slice(&std::fs::read(&path)?)?;
    edit(&mut manifest);
    manifest.as_object_mut().ok_or("no object")?.remove("crc32");
    let rest = format!("{}\n", &serde_json::to_string_pretty(&manifest)?[2..]);
    let crc32 = crc32fast::hash(rest.as_bytes());
    std::fs::write(path, format!("{{\"crc32\": \"{crc32:08x}\",\n{rest}"))?;
    Ok(())
}
