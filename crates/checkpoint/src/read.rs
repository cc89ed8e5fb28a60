//! Reading a checkpoint, every checksum of it, before anybody sees a tensor.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use overdrive_core::{Entry, StateDict};
use overdrive_ffi::HostBuffer;
use safetensors::tensor::Metadata;
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::dtype::kind_of;
use crate::error::{CheckpointError, Context};
use crate::manifest::{self, Manifest, checksum};

/// As safetensors' own readers.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;
const CHUNK: usize = 1 << 20;

/// A checkpoint in memory.
pub(crate) struct Saved {
    pub folder: PathBuf,
    pub step: u64,
    pub parts: BTreeMap<String, StateDict>,
    pub fields: BTreeMap<String, Value>,
}

/// Reads the checkpoint in a folder; that of `step`, where its name says so.
pub(crate) fn read(folder: &Path, step: Option<u64>) -> Result<Saved, CheckpointError> {
    let manifest = Manifest::read(folder)?;
    if let Some(step) = step.filter(|&step| step != manifest.step) {
        return Err(CheckpointError::damaged(&folder.join(manifest::FILE), "step", step, manifest.step));
    }
    let mut parts = BTreeMap::new();
    for (name, part) in manifest.parts {
        let mut state = StateDict::new();
        if let Some(file) = part.file {
            read_tensors(&folder.join(format!("{name}.safetensors")), &file, &mut state)?;
        }
        for (key, value) in part.values {
            state.insert(key, value.into_entry());
        }
        parts.insert(name, state);
    }
    Ok(Saved { folder: folder.to_path_buf(), step: manifest.step, parts, fields: manifest.fields })
}

fn read_tensors(path: &Path, expected: &manifest::File, state: &mut StateDict) -> Result<(), CheckpointError> {
    let damaged = |field: &str, expected: String, found: String| CheckpointError::damaged(path, field, expected, found);
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(damaged("the tensors", format!("a file of {} bytes", expected.bytes), "none".to_owned()));
        }
        other => other.when("open it", path)?,
    };
    let bytes = file.metadata().when("look at it", path)?.len();
    if bytes != expected.bytes {
        return Err(damaged("its size", format!("{} bytes", expected.bytes), format!("{bytes} bytes")));
    }
    let mut crc = crc32fast::Hasher::new();
    let mut take = |buffer: &mut [u8]| {
        buffer.chunks_mut(CHUNK).try_for_each(|chunk| {
            file.read_exact(chunk).when("read it", path)?;
            crc.update(chunk);
            Ok::<(), CheckpointError>(())
        })
    };
    let limit = MAX_HEADER_BYTES.min(bytes.saturating_sub(8));
    let mut length = [0; 8];
    if bytes < 8 {
        return Err(damaged("its size", "at least 8 bytes".to_owned(), format!("{bytes} bytes")));
    }
    take(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > limit {
        return Err(damaged("the header's length", format!("at most {limit}"), length.to_string()));
    }
    let mut header = vec![0; length as usize];
    take(&mut header)?;
    let mut body = HostBuffer::zeroed((bytes - 8 - length) as usize, false)?;
    take(body.as_mut_slice())?;
    let found = checksum(crc.finalize());
    if found != expected.crc32 {
        return Err(damaged("crc32 of the file", expected.crc32.clone(), found));
    }
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| damaged("the header", "that of a safetensors file".to_owned(), error.to_string()))?;
    if header.data_len() != body.len() {
        return Err(damaged("the header", format!("{} bytes of tensors", body.len()), header.data_len().to_string()));
    }
    insert_tensors(&header, body, state).map_err(|(key, expected, found)| damaged(&key, expected, found))
}

/// The tensors share the memory that the file was read to. The error is a key, what was expected and what was found.
fn insert_tensors(header: &Metadata, body: HostBuffer, state: &mut StateDict) -> Result<(), (String, String, String)> {
    let refused = |key: &str, error: tch::TchError| (key.to_owned(), "a tensor".to_owned(), error.to_string());
    let bytes = body.len() as i64;
    let body = body.into_tensor(Kind::Uint8, &[bytes]).map_err(|error| refused("the tensors", error))?;
    for (key, info) in header.tensors() {
        let kind = kind_of(info.dtype);
        let kind = kind.ok_or_else(|| (key.clone(), "a dtype that tch has".to_owned(), format!("{:?}", info.dtype)))?;
        let shape: Result<Vec<i64>, _> = info.shape.iter().map(|&side| i64::try_from(side)).collect();
        let shape = shape.map_err(|_| (key.clone(), "a shape below 2^63".to_owned(), format!("{:?}", info.shape)))?;
        let (start, end) = info.data_offsets;
        let tensor = body.f_narrow(0, start as i64, (end - start) as i64).and_then(|tensor| {
            // Where another program left a tensor that is not aligned.
            let tensor: Tensor = match start.is_multiple_of(kind.elt_size_in_bytes()) {
                true => tensor,
                false => tensor.f_to_dtype(Kind::Uint8, false, true)?,
            };
            match kind {
                // Any byte but 0 is true: a truth value of 2 must not come into being.
                Kind::Bool => tensor.f_to_kind(Kind::Bool)?.f_view(shape.as_slice()),
                _ => tensor.f_view_dtype(kind)?.f_view(shape.as_slice()),
            }
        });
        state.insert(key.clone(), Entry::Tensor(tensor.map_err(|error| refused(&key, error))?));
    }
    Ok(())
}
