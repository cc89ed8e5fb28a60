//! Where the tensors of a part lie in its file.

use std::collections::BTreeMap;

use overdrive_core::{Entry, StateDict};
use safetensors::tensor::{Metadata, TensorInfo};
use tch::Tensor;

use crate::dtype::dtype_of;
use crate::error::CheckpointError;
use crate::manifest::Plain;
use crate::read::MAX_HEADER_BYTES;

/// A part that is about to be saved.
pub(crate) struct Layout {
    /// What a safetensors file begins with: the length of its JSON, and the JSON.
    pub header: Vec<u8>,
    /// The tensors in the order of the file, without gaps.
    pub tensors: Vec<Tensor>,
    /// What they take together.
    pub bytes: usize,
    pub values: BTreeMap<String, Plain>,
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
        let unsupported = |key: &str, expected, found: String| CheckpointError::Unsupported {
            part: part.to_owned(),
            key: key.to_owned(),
            expected,
            found,
        };
        if let Some((key, _)) = tensors.iter().find(|(_, tensor)| !tensor.defined()) {
            return Err(unsupported(key, "a tensor", "an undefined one".to_owned()));
        }
        // The widest elements first, so that each tensor is aligned without gaps; the sort keeps names in order.
        tensors.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.kind().elt_size_in_bytes()));

        let mut bytes = 0;
        let mut infos = Vec::new();
        for (key, tensor) in &tensors {
            let dtype = dtype_of(tensor.kind()).filter(|_| !tensor.is_sparse());
            let Some(dtype) = dtype else {
                // Not tch's `Debug`, which shows the values of some and panics over those of others.
                let layout = if tensor.is_sparse() { "a sparse" } else { "a" };
                let found = format!("{layout} {:?} tensor of shape {:?}", tensor.kind(), tensor.size());
                return Err(unsupported(key, "a dense dtype of safetensors", found));
            };
            if *key == "__metadata__" {
                return Err(unsupported(key, "another name: safetensors reserves it", (*key).to_owned()));
            }
            let end = bytes + tensor.numel() * tensor.kind().elt_size_in_bytes();
            let shape = tensor.size().into_iter().map(|side| side as usize).collect();
            infos.push(((*key).to_owned(), TensorInfo { dtype, shape, data_offsets: (bytes, end) }));
            bytes = end;
        }
        let header = header(infos).map_err(|error| unsupported("*", "a safetensors header", error))?;
        if header.len() as u64 > MAX_HEADER_BYTES {
            let expected = "names and shapes of at most 100 MB, which is what safetensors' readers take";
            return Err(unsupported("*", expected, format!("{} bytes", header.len())));
        }
        let tensors = tensors.into_iter().map(|(_, tensor)| tensor.detach()).collect();
        Ok(Self { header, tensors, bytes, values })
    }
}

fn header(infos: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, String> {
    let metadata = Metadata::new(None, infos).map_err(|error| error.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}
