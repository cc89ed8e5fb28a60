//! Reads the state dicts that `torch.save` has written, without running any code.

mod chunks;
mod dcp;
mod pickle;
mod reader;

use std::collections::HashMap;
use std::io::{Cursor, Read};
use std::path::Path;
use std::rc::Rc;

use overdrive_core::{Entry, StateDict};
use tch::{Kind, Tensor};

pub use self::dcp::load_dcp;
use self::pickle::{Holds, Pickle, StorageParts, TensorParts, Value};
use super::{Bad, FileError};

/// How files from before PyTorch 1.6 begin: the pickle of a magic number, and that of the version 1001.
const LEGACY: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.";
/// Names and texts together may be so much longer than the pickle: a small one could repeat long ones without end.
const LONGER: usize = 64;

/// Reads a `.pt` or `.pth` file of `torch.save`: a state dict, or containers of them. Names are joined by dots: of
/// `{"model": {"fc.weight": ..}, "epoch": 3}` the names are `model.fc.weight` and `epoch`, and
/// [`StateDict::nested`]`("model")` is the model's state. Items of lists and tuples are named by their place; `None` is
/// left out. Tensors are on the CPU.
///
/// # Errors
/// [`FileError::Refused`] for anything but tensors and plain containers; [`FileError::Damaged`]; [`FileError::Io`].
///
/// # Source
/// `torch.load(weights_only=True)`
#[doc(alias = "torch.load")]
pub fn load_pt(path: impl AsRef<Path>) -> Result<StateDict, FileError> {
    let path = path.as_ref();
    let bytes = std::fs::read(path).map_err(FileError::io("read", path))?;
    parse(&bytes).map_err(|bad| bad.at(path))
}

fn parse(bytes: &[u8]) -> Result<StateDict, Bad> {
    let (pickle, storages) = match bytes.strip_prefix(LEGACY) {
        Some(rest) => legacy(rest)?,
        None if bytes.starts_with(b"PK") => zipped(bytes)?,
        None => return damaged("it does not begin like a file of torch.save"),
    };
    let mut entries = Entries { state: StateDict::new(), storages, letters: LONGER * (pickle.length + 1024) };
    entries.insert(String::new(), pickle.value)?;
    Ok(entries.state)
}

/// Tensors over whole storages, by key.
type Storages = HashMap<Rc<str>, (Rc<StorageParts>, Tensor)>;

/// The format since PyTorch 1.6: a zip file with `data.pkl` and a file per storage, not compressed.
fn zipped(bytes: &[u8]) -> Result<(Pickle, Storages), Bad> {
    let wrong = |error: zip::result::ZipError| Bad::Damaged(error.to_string());
    let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).map_err(wrong)?;
    let pickles = archive.file_names().filter(|name| *name == "data.pkl" || name.ends_with("/data.pkl"));
    let [pickle] = &pickles.map(str::to_owned).collect::<Vec<_>>()[..] else {
        return damaged("it does not have one data.pkl");
    };
    let root = pickle.trim_end_matches("data.pkl");
    // Files from before PyTorch 1.12 do not have it.
    let order = Some(format!("{root}byteorder")).filter(|order| archive.file_names().any(|name| name == order));
    // Files in the archive could overlap, so that together they are larger than it.
    let mut left = bytes.len() as u64;
    let mut file = |name: &str| {
        let file = archive.by_name(name).map_err(|error| Bad::Damaged(format!("{name}: {error}")))?;
        if file.compression() != zip::CompressionMethod::Stored {
            return damaged(format!("{name} is compressed"));
        }
        let too_large = || Bad::Damaged(format!("{name} is larger than the file"));
        left = left.checked_sub(file.size()).ok_or_else(too_large)?;
        let (size, expected, mut data) = (file.size(), file.crc32(), Vec::new());
        file.take(size).read_to_end(&mut data).map_err(|error| Bad::Damaged(format!("{name}: {error}")))?;
        // 0 where PyTorch was told not to compute it (`torch.serialization.set_crc32_options`).
        match crc32fast::hash(&data) {
            found if expected == 0 || found == expected => Ok(data),
            found => damaged(format!("{name} has the checksum {found:08x} in place of {expected:08x}")),
        }
    };
    let value = pickle::read(&file(pickle)?, Holds::Tensors)?;
    if order.map(|order| file(&order)).transpose()?.is_some_and(|order| order != b"little") {
        return Err(Bad::Refused("numbers in big-endian order".to_owned()));
    }
    let mut storages = Storages::new();
    for storage in &value.storages {
        if !storages.contains_key(&storage.key) {
            let data = file(&format!("{root}data/{}", storage.key))?;
            storages.insert(storage.key.clone(), (storage.clone(), storage.tensor(&data)?));
        }
    }
    Ok((value, storages))
}

/// The format before: pickles of facts about the system, the value and the storages' keys; then the storages, each with
/// its number of elements.
fn legacy(mut rest: &[u8]) -> Result<(Pickle, Storages), Bad> {
    let mut next = || {
        let pickle = pickle::read(rest, Holds::Tensors)?;
        rest = &rest[pickle.length..];
        Ok::<_, Bad>(pickle)
    };
    let (_system, value, keys) = (next()?, next()?, next()?);
    let Value::List(keys) = keys.value else { return damaged("it lists no storages") };
    let parts: HashMap<&Rc<str>, &Rc<StorageParts>> = value.storages.iter().map(|it| (&it.key, it)).collect();
    let mut storages = Storages::new();
    for key in keys {
        let Value::Text(key) = key else { return damaged("a storage has no key") };
        let cut = || Bad::Damaged(format!("the storage {key} is cut off"));
        let Some(&storage) = parts.get(&key) else { return damaged(format!("no tensor uses the storage {key}")) };
        let (count, after) = rest.split_first_chunk::<8>().ok_or_else(cut)?;
        if i64::from_le_bytes(*count) != storage.elements {
            return damaged(format!("the storage {key} has another number of elements than its tensors say"));
        }
        let (data, after) = after.split_at_checked(storage.bytes()?).ok_or_else(cut)?;
        rest = after;
        let tensor = storage.tensor(data)?;
        storages.insert(key, (storage.clone(), tensor));
    }
    Ok((value, storages))
}

impl StorageParts {
    fn bytes(&self) -> Result<usize, Bad> {
        let bytes = usize::try_from(self.elements).ok();
        let bytes = bytes.and_then(|elements| elements.checked_mul(self.kind.elt_size_in_bytes()));
        bytes.ok_or_else(|| Bad::Damaged(format!("the storage {} has {} elements", self.key, self.elements)))
    }

    /// A tensor of one dimension over the whole storage.
    fn tensor(&self, data: &[u8]) -> Result<Tensor, Bad> {
        let cut = || Bad::Damaged(format!("the storage {} is cut off", self.key));
        let data = data.get(..self.bytes()?).ok_or_else(cut)?;
        // Converted, because any byte but 0 is true, and a bool tensor must not hold a 2.
        let stored = if self.kind == Kind::Bool { Kind::Uint8 } else { self.kind };
        let tensor = Tensor::f_from_data_size(data, &[self.elements], stored);
        tensor.and_then(|tensor| tensor.f_to_kind(self.kind)).map_err(|error| Bad::Torch(error.into()))
    }
}

/// The state that is made of a value.
struct Entries {
    state: StateDict,
    storages: Storages,
    /// How long names and texts may still be.
    letters: usize,
}

impl Entries {
    /// Inserts the tensors and plain values under their dotted names.
    fn insert(&mut self, name: String, value: Value) -> Result<(), Bad> {
        let text = if let Value::Text(text) = &value { text.len() } else { 0 };
        let too_long = || Bad::Damaged("its names or texts are too long".to_owned());
        self.letters = self.letters.checked_sub(name.len() + text).ok_or_else(too_long)?;
        let within = |part: &str| if name.is_empty() { part.to_owned() } else { format!("{name}.{part}") };
        let entry = match value {
            Value::Tensor(tensor) => Entry::Tensor(self.view(&tensor)?),
            Value::Bool(value) => Entry::Bool(value),
            Value::Int(value) => Entry::Int(value),
            Value::Float(value) => Entry::Float(value),
            Value::Text(value) => Entry::Text(value.to_string()),
            // A state dict has no entry for what is not there.
            Value::None => return Ok(()),
            Value::List(values) | Value::Tuple(values) => {
                let mut values = values.into_iter().enumerate();
                return values.try_for_each(|(place, value)| self.insert(within(&place.to_string()), value));
            }
            Value::Dict(pairs) => {
                return pairs.into_iter().try_for_each(|(key, value)| match key {
                    Value::Text(text) => self.insert(within(&text), value),
                    Value::Int(number) => self.insert(within(&number.to_string()), value),
                    _ => Err(Bad::Refused("a dict with keys that are neither text nor numbers".to_owned())),
                });
            }
            Value::Global(global) => return Err(Bad::Refused(format!("`{global}`"))),
            Value::Class(class) => return Err(Bad::Refused(format!("{class:?}"))),
            Value::Other(name) => return Err(Bad::Refused(format!("`{name}`"))),
            Value::Kind(_) | Value::Storage(_) | Value::Mark | Value::Shared(_) => {
                return Err(Bad::Refused("a storage without a tensor".to_owned()));
            }
        };
        if self.state.get(&name).is_ok() {
            return damaged(format!("two of its values have the name `{name}`"));
        }
        self.state.insert(name, entry);
        Ok(())
    }

    fn view(&self, tensor: &TensorParts) -> Result<Tensor, Bad> {
        let TensorParts { storage, offset, size, stride } = tensor;
        let (parts, data) = match self.storages.get(&storage.key) {
            Some((parts, data)) => (parts, data),
            None => return damaged(format!("the storage {} is missing", storage.key)),
        };
        if (parts.kind, parts.elements) != (storage.kind, storage.elements) {
            return damaged(format!("the storage {} has two dtypes or sizes", storage.key));
        }
        let view = data.f_as_strided(&size[..], &stride[..], *offset);
        view.map_err(|error| Bad::Damaged(format!("a tensor reaches beyond its storage: {error}")))
    }
}

fn damaged<T>(what: impl Into<String>) -> Result<T, Bad> {
    Err(Bad::Damaged(what.into()))
}
