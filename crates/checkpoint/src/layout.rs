//! The layout of a part's tensors in its file.

use std::collections::{BTreeMap, HashMap};

use overdrive_core::{Entry, StateDict};
use safetensors::tensor::TensorInfo;
use serde::ser::{Serialize, SerializeMap, Serializer};
use tch::Tensor;

use crate::dtype::dtype_of;
use crate::error::CheckpointError;
use crate::manifest::Plain;
use crate::read::MAX_HEADER_BYTES;

const METADATA: &str = "__metadata__";
/// The only key of the metadata that is not a tied name.
pub(crate) const FORMAT_KEY: &str = "format";

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
        let mut metadata = take_tied(&mut tensors);
        metadata.insert(FORMAT_KEY, "pt");
        // The widest elements first, so that each tensor is aligned without gaps; the sort keeps names in order.
        tensors.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.kind().elt_size_in_bytes()));

        let mut bytes = 0;
        let (mut infos, mut pieces) = (Vec::new(), Vec::new());
        for (key, tensor) in &tensors {
            let dtype = dtype_of(tensor.kind()).filter(|_| !tensor.is_sparse());
            let Some(dtype) = dtype else {
                // Not tch's `Debug`, which prints the values of some tensors and panics for others.
                let layout = if tensor.is_sparse() { "a sparse" } else { "a" };
                let found = format!("{layout} {:?} tensor of shape {:?}", tensor.kind(), tensor.size());
                return Err(unsupported(key, "a dense dtype of safetensors", found));
            };
            if *key == METADATA {
                return Err(unsupported(key, "another name: safetensors reserves it", (*key).to_owned()));
            }
            let end = bytes + tensor.numel() * tensor.kind().elt_size_in_bytes();
            let shape = tensor.size().into_iter().map(|side| side as usize).collect();
            infos.push((*key, TensorInfo { dtype, shape, data_offsets: (bytes, end) }));
            pieces.push(((*key).to_owned(), end - bytes));
            bytes = end;
        }
        let header = Header { metadata, infos }.bytes();
        let header = header.map_err(|error| unsupported("*", "a safetensors header", error.to_string()))?;
        if header.len() as u64 > MAX_HEADER_BYTES {
            let expected = "names and shapes of at most 100 MB, which is what safetensors' readers take";
            return Err(unsupported("*", expected, format!("{} bytes", header.len())));
        }
        let tensors = tensors.into_iter().map(|(_, tensor)| tensor.detach()).collect();
        Ok(Self { header, tensors, pieces, bytes, values })
    }
}

/// A safetensors header, with names in a deterministic order.
struct Header<'a> {
    /// `format` tells Python's libraries that torch may read the file. As in `safetensors.torch.save_model`, each tied
    /// name maps to the name under which the tensor is in the file.
    metadata: BTreeMap<&'a str, &'a str>,
    infos: Vec<(&'a str, TensorInfo)>,
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.infos.len() + 1))?;
        map.serialize_entry(METADATA, &self.metadata)?;
        for (key, info) in &self.infos {
            map.serialize_entry(key, info)?;
        }
        map.end()
    }
}

impl Header<'_> {
    fn bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut json = serde_json::to_vec(self)?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        Ok(header)
    }
}

/// Removes tensors with the same memory as an earlier one, and returns their names, each with the earlier name.
fn take_tied<'a>(tensors: &mut Vec<(&'a str, &'a Tensor)>) -> BTreeMap<&'a str, &'a str> {
    let mut seen: HashMap<usize, Vec<(&str, &Tensor)>> = HashMap::new();
    let mut tied = BTreeMap::new();
    tensors.retain(|&(key, tensor)| {
        // Scalars are not worth it, and an optimizer's step counts share one scalar only as long as they are equal.
        if key == FORMAT_KEY || tensor.is_sparse() || tensor.dim() == 0 || tensor.numel() == 0 {
            return true;
        }
        let there = seen.entry(tensor.data_ptr() as usize).or_default();
        // A view of the same bytes with another shape or dtype is not a tied tensor.
        let same = |other: &Tensor| tensor.kind() == other.kind() && tensor.f_is_set_to(other).unwrap_or(false);
        if let Some((kept, _)) = there.iter().find(|(_, other)| same(other)) {
            tied.insert(key, *kept);
            return false;
        }
        there.push((key, tensor));
        true
    });
    tied
}
