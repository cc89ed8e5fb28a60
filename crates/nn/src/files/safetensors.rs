//! One safetensors file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use overdrive_core::safetensors::{
    FORMAT_KEY, Layout, MAX_HEADER_BYTES, Unsupported, bytes_of, kind_of, parse_header, sizes_of, take_tied,
};
use overdrive_core::{Entry, StateDict};
use overdrive_ffi::HostBuffer;
use tch::Tensor;

use super::write::Written;
use super::{Bad, FileError};

/// Writes a state dict of tensors to a safetensors file, at once: an earlier file stays whole until the new one is.
///
/// Of names with the same tensor (tied weights) the file has the first; [`LoadStateDict`](crate::LoadStateDict) and
/// Python's `load_model` fill the others. `metadata` are free remarks; `format: pt`, which Python's libraries ask for, is
/// added.
///
/// # Errors
/// [`FileError::Unsupported`] for entries that are not tensors, and for dtypes that the format lacks;
/// [`FileError::Io`].
///
/// # Syncs
/// Waits for tensors on another device, and for the disk.
///
/// # Source
/// `safetensors.torch.save_model`
#[doc(alias = "save_file")]
#[doc(alias = "save_model")]
pub fn save_safetensors(path: impl AsRef<Path>, state: &StateDict, metadata: &[(&str, &str)]) -> Result<(), FileError> {
    let path = path.as_ref();
    write(path, tensors_of(path, state)?, metadata)?.publish()
}

/// The tensors of a state, tied ones once.
pub(super) fn tensors_of<'a>(path: &Path, state: &'a StateDict) -> Result<Vec<(&'a str, &'a Tensor)>, FileError> {
    let tensor = |(key, entry): (&'a str, &'a Entry)| {
        let found = match entry {
            Entry::Tensor(tensor) if tensor.defined() => return Ok((key, tensor)),
            Entry::Tensor(_) => "an undefined one",
            _ => "a plain value",
        };
        let (path, key, found) = (path.to_owned(), key.to_owned(), found.to_owned());
        Err(FileError::Unsupported { path, key, expected: "a tensor", found })
    };
    let mut tensors: Vec<_> = state.iter().map(tensor).collect::<Result<_, _>>()?;
    take_tied(&mut tensors);
    Ok(tensors)
}

/// Writes tensors under a temporary name.
pub(super) fn write(
    path: &Path,
    tensors: Vec<(&str, &Tensor)>,
    metadata: &[(&str, &str)],
) -> Result<Written, FileError> {
    let metadata: BTreeMap<&str, &str> = [(FORMAT_KEY, "pt")].iter().chain(metadata).copied().collect();
    let layout = Layout::of(tensors, &metadata).map_err(|Unsupported { key, expected, found }| {
        FileError::Unsupported { path: path.to_owned(), key, expected, found }
    })?;
    Written::new(path, |mut file| {
        file.write_all(&layout.header).map_err(FileError::io("write", path))?;
        for (_, tensor) in &layout.tensors {
            let mut buffer = HostBuffer::zeroed(bytes_of(tensor), false)?;
            buffer.copy_from(0, tensor)?;
            file.write_all(buffer.as_slice()).map_err(FileError::io("write", path))?;
        }
        Ok(())
    })
}

/// Reads a file.
pub(super) fn read(path: &Path) -> Result<StateDict, FileError> {
    let io = || FileError::io("read", path);
    let mut file = File::open(path).map_err(io())?;
    let bytes = file.metadata().map_err(io())?.len();
    let mut length = [0; 8];
    if bytes < 8 {
        return Err(Bad::Damaged(format!("it has {bytes} bytes, and no header")).at(path));
    }
    file.read_exact(&mut length).map_err(io())?;
    let (length, most) = (u64::from_le_bytes(length), MAX_HEADER_BYTES.min(bytes - 8));
    if length > most {
        return Err(Bad::Damaged(format!("its header has {length} bytes, at most {most} are possible")).at(path));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json).map_err(io())?;
    let header = parse_header(&json, bytes - 8 - length).map_err(|what| Bad::Damaged(what).at(path))?;
    let mut state = StateDict::new();
    for key in header.offset_keys() {
        let Some(info) = header.info(&key) else { continue };
        let damaged = |what: String| Bad::Damaged(format!("`{key}` {what}")).at(path);
        let kind = kind_of(info.dtype).ok_or_else(|| damaged(format!("is of {:?}, which tch lacks", info.dtype)))?;
        let sizes = sizes_of(info).ok_or_else(|| damaged(format!("has the shape {:?}", info.shape)))?;
        // Within the file's length, because the header fits it.
        let mut buffer = HostBuffer::zeroed(info.data_offsets.1 - info.data_offsets.0, false)?;
        file.read_exact(buffer.as_mut_slice()).map_err(io())?;
        let tensor = buffer.into_tensor(kind, &sizes).map_err(|error| damaged(format!("is wrong: {error}")))?;
        state.insert(key, Entry::Tensor(tensor));
    }
    Ok(state)
}
