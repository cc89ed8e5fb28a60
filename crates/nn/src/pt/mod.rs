//! Reads the state dicts that `torch.save` has written, without running any code.

mod pickle;

use std::collections::HashMap;
use std::fs::File;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use overdrive_core::{Entry, StateDict, TorchError};
use tch::{Kind, Tensor};

use self::pickle::{StorageParts, TensorParts, Value};

/// Why a `.pt` file cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PtError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is cut off, or was not written by `torch.save`.
    #[error("it is no state dict of torch.save, or damaged: {0}")]
    Damaged(String),
    /// The file holds more than tensors and plain containers. Loading such a file in Python would run code.
    #[error("it holds {0}, which is neither a tensor nor a plain container: save `model.state_dict()` instead")]
    Refused(String),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// Reads a `.pt` or `.pth` file of `torch.save`: a state dict, or containers of them. Names are joined by dots: of
/// `{"model": {"fc.weight": ..}, "epoch": 3}` the names are `model.fc.weight` and `epoch`, and
/// [`StateDict::nested`]`("model")` is the model's state. Items of lists and tuples are named by their place.
///
/// # Errors
/// [`PtError::Refused`] for anything but tensors and plain containers; [`PtError::Damaged`]; [`PtError::Io`].
///
/// # Source
/// `torch.load(weights_only=True)`
#[doc(alias = "torch.load")]
pub fn load_pt(path: impl AsRef<Path>) -> Result<StateDict, PtError> {
    let path = path.as_ref();
    let read = || {
        let mut bytes = Vec::new();
        File::open(path)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|source| PtError::Io { path: path.to_owned(), source })?;
    let (value, tensors) = if bytes.starts_with(b"PK") { zipped(&bytes)? } else { legacy(&bytes)? };
    let mut state = StateDict::new();
    insert(&mut state, String::new(), value, &tensors)?;
    Ok(state)
}

/// Tensors over whole storages, by key.
type Storages = HashMap<Rc<str>, Tensor>;

/// The format since PyTorch 1.6: a zip file with `data.pkl` and a file per storage.
fn zipped(bytes: &[u8]) -> Result<(Value, Storages), PtError> {
    let damaged = |error: zip::result::ZipError| PtError::Damaged(error.to_string());
    let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).map_err(damaged)?;
    let names: Vec<String> = archive.file_names().map(str::to_owned).collect();
    let pickle = names.iter().find(|name| name.ends_with("/data.pkl") || *name == "data.pkl");
    let pickle = pickle.ok_or_else(|| PtError::Damaged("it has no data.pkl".to_owned()))?;
    let root = pickle.trim_end_matches("data.pkl").to_owned();
    let mut file = |name: &str| {
        let mut data = Vec::new();
        archive
            .by_name(name)
            .map_err(damaged)?
            .read_to_end(&mut data)
            .map_err(|error| PtError::Damaged(format!("{name}: {error}")))?;
        Ok::<_, PtError>(data)
    };
    let order = format!("{root}byteorder");
    if names.contains(&order) && file(&order)? != b"little" {
        return Err(PtError::Refused("numbers in big-endian order".to_owned()));
    }
    let (value, _) = pickle::read(&file(pickle)?)?;
    let mut storages = Storages::new();
    for storage in storages_of(&value) {
        if !storages.contains_key(&storage.key) {
            let data = file(&format!("{root}data/{}", storage.key))?;
            storages.insert(storage.key.clone(), storage.tensor(&data)?);
        }
    }
    Ok((value, storages))
}

/// The format before: pickles of a magic number, a version, facts about the system, the value and the storages' keys; then
/// the storages, each with its number of elements.
fn legacy(bytes: &[u8]) -> Result<(Value, Storages), PtError> {
    let mut rest = bytes;
    let mut next = || {
        let (value, length) = pickle::read(rest)?;
        rest = &rest[length..];
        Ok::<_, PtError>(value)
    };
    let (_magic, version, _system) = (next()?, next()?, next()?);
    if !matches!(version, Value::Int(1001)) {
        return Err(PtError::Damaged("it has another version than 1001".to_owned()));
    }
    let (value, keys) = (next()?, next()?);
    let Value::List(keys) = keys else { return Err(PtError::Damaged("it lists no storages".to_owned())) };
    let parts: HashMap<Rc<str>, Rc<StorageParts>> =
        storages_of(&value).into_iter().map(|storage| (storage.key.clone(), storage)).collect();
    let mut storages = Storages::new();
    for key in keys {
        let Value::Text(key) = key else { return Err(PtError::Damaged("a storage has no key".to_owned())) };
        let cut = || PtError::Damaged(format!("the storage {key} is cut off"));
        let Some(storage) = parts.get(&key) else {
            return Err(PtError::Damaged(format!("no tensor uses the storage {key}")));
        };
        let (count, after) = rest.split_first_chunk::<8>().ok_or_else(cut)?;
        if i64::from_le_bytes(*count) != storage.elements {
            return Err(PtError::Damaged(format!("the storage {key} has another number of elements than its tensors")));
        }
        let length = storage.bytes()?;
        let (data, after) = after.split_at_checked(length).ok_or_else(cut)?;
        storages.insert(key, storage.tensor(data)?);
        rest = after;
    }
    Ok((value, storages))
}

/// The storages of all tensors in a value.
fn storages_of(value: &Value) -> Vec<Rc<StorageParts>> {
    match value {
        Value::Tensor(tensor) => vec![tensor.storage.clone()],
        Value::List(values) | Value::Tuple(values) => values.iter().flat_map(storages_of).collect(),
        Value::Dict(pairs) => pairs.iter().flat_map(|(_, value)| storages_of(value)).collect(),
        _ => Vec::new(),
    }
}

impl StorageParts {
    fn kind(&self) -> Result<Kind, PtError> {
        let name = self.kind.trim_start_matches("torch.").trim_start_matches("cuda.");
        Ok(match name {
            "FloatStorage" => Kind::Float,
            "DoubleStorage" => Kind::Double,
            "HalfStorage" => Kind::Half,
            "BFloat16Storage" => Kind::BFloat16,
            "LongStorage" => Kind::Int64,
            "IntStorage" => Kind::Int,
            "ShortStorage" => Kind::Int16,
            "CharStorage" => Kind::Int8,
            "ByteStorage" => Kind::Uint8,
            "BoolStorage" => Kind::Bool,
            "ComplexFloatStorage" => Kind::ComplexFloat,
            "ComplexDoubleStorage" => Kind::ComplexDouble,
            _ => return Err(PtError::Refused(format!("a tensor of {}", self.kind))),
        })
    }

    fn bytes(&self) -> Result<usize, PtError> {
        let bytes = usize::try_from(self.elements).ok().zip(Some(self.kind()?));
        let bytes = bytes.and_then(|(elements, kind)| elements.checked_mul(kind.elt_size_in_bytes()));
        bytes.ok_or_else(|| PtError::Damaged(format!("the storage {} has {} elements", self.key, self.elements)))
    }

    /// A tensor of one dimension over the whole storage.
    fn tensor(&self, data: &[u8]) -> Result<Tensor, PtError> {
        if data.len() < self.bytes()? {
            return Err(PtError::Damaged(format!("the storage {} is cut off", self.key)));
        }
        let data = &data[..self.bytes()?];
        Ok(Tensor::f_from_data_size(data, &[self.elements], self.kind()?).map_err(TorchError::from)?)
    }
}

/// Inserts the tensors and plain values under their dotted names.
fn insert(state: &mut StateDict, name: String, value: Value, storages: &Storages) -> Result<(), PtError> {
    let within = |part: &str| if name.is_empty() { part.to_owned() } else { format!("{name}.{part}") };
    match value {
        Value::Tensor(tensor) => state.insert(name, Entry::Tensor(view(&tensor, storages)?)),
        Value::Bool(value) => state.insert(name, Entry::Bool(value)),
        Value::Int(value) => state.insert(name, Entry::Int(value)),
        Value::Float(value) => state.insert(name, Entry::Float(value)),
        Value::Text(value) => state.insert(name, Entry::Text(value.to_string())),
        // A state dict has no entry for what is not there.
        Value::None => {}
        Value::List(values) | Value::Tuple(values) => {
            for (place, value) in values.into_iter().enumerate() {
                insert(state, within(&place.to_string()), value, storages)?;
            }
        }
        Value::Dict(pairs) => {
            for (key, value) in pairs {
                let key = match key {
                    Value::Text(text) => text.to_string(),
                    Value::Int(number) => number.to_string(),
                    _ => return Err(PtError::Refused("a dict with keys that are neither text nor numbers".to_owned())),
                };
                insert(state, within(&key), value, storages)?;
            }
        }
        Value::Global(global) => return Err(PtError::Refused(format!("{global}"))),
        Value::Storage(_) | Value::Mark | Value::Shared(_) => {
            return Err(PtError::Refused("a bare storage".to_owned()));
        }
    }
    Ok(())
}

fn view(tensor: &TensorParts, storages: &Storages) -> Result<Tensor, PtError> {
    let storage = storages.get(&tensor.storage.key);
    let storage = storage.ok_or_else(|| PtError::Damaged(format!("the storage {} is missing", tensor.storage.key)))?;
    let view = storage.f_as_strided(&tensor.size[..], &tensor.stride[..], tensor.offset);
    view.map_err(|error| PtError::Damaged(format!("a tensor reaches beyond its storage: {error}")))
}
