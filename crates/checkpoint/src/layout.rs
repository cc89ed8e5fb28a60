//! The layout of a part's tensors in its file.

use std::collections::BTreeMap;

use overdrive_core::safetensors::{self, FORMAT_KEY, Unsupported, bytes_of, take_tied};
use overdrive_core::{Entry, Shard, StateDict};
use tch::Tensor;

use crate::error::CheckpointError;
use crate::manifest::{Plain, Rows};

/// A part that is about to be saved.
pub(crate) struct Layout {
    /// The beginning of a safetensors file: the length of its JSON, and the JSON.
    pub header: Vec<u8>,
    /// The tensors in the order of the file, without gaps.
    pub tensors: Vec<Tensor>,
    /// The tensors' names and sizes in bytes.
    pub pieces: Vec<(String, usize)>,
    /// The sum of the sizes.
    pub bytes: usize,
    pub values: BTreeMap<String, Plain>,
    /// Of tensors of which there are some rows.
    pub rows: BTreeMap<String, Rows>,
    /// Which part of the whole state of all ranks it is.
    pub shard: Option<Shard>,
}

impl Layout {
    pub fn of(part: &str, state: &StateDict) -> Result<Self, CheckpointError> {
        let mut values = BTreeMap::new();
        let mut tensors = Vec::new();
        for (key, entry) in state.iter() {
            match (entry, Plain::of(entry)) {
                (Entry::Tensor(tensor), _) => tensors.push((key, tensor)),
                (_, Some(plain)) => drop(values.insert(key.to_owned(), plain)),
                (_, None) => {}
            }
        }
        // As in `safetensors.torch.save_model`, each tied name maps to the name under which the tensor is in the file.
        let mut metadata = take_tied(&mut tensors);
        metadata.insert(FORMAT_KEY, "pt");
        let layout = safetensors::Layout::of(tensors, &metadata);
        let safetensors::Layout { header, tensors, bytes } =
            layout.map_err(|Unsupported { key, expected, found }| CheckpointError::Unsupported {
                part: part.to_owned(),
                key,
                expected,
                found,
            })?;
        let pieces = tensors.iter().map(|(key, tensor)| ((*key).to_owned(), bytes_of(tensor))).collect();
        let tensors = tensors.into_iter().map(|(_, tensor)| tensor.detach()).collect();
        let of = |key: &str| state.rows(key).map(|it| Rows { first: it.first, whole: it.whole.clone() });
        let rows = state.iter().filter_map(|(key, _)| Some((key.to_owned(), of(key)?))).collect();
        Ok(Self { header, tensors, pieces, bytes, values, rows, shard: state.shard() })
    }
}
