//! Reads the folders that `torch.distributed.checkpoint` has written, without running any code.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use overdrive_core::{Entry, StateDict, TorchError};
use tch::{Device, Kind, Tensor};

use super::super::shards::is_beside;
use super::super::{Bad, FileError};
use super::pickle::{self, Holds, Value};
use super::{damaged, parse};

/// Reads the wanted entries of a folder of `torch.distributed.checkpoint.save` (`.metadata` and `*.distcp`), whole: of the
/// state dict that was saved, entries of inner dicts under names with dots. [`StateDict::nested`]`("model")` is then what
/// was saved as `"model"`. Tensors are on the CPU. Of what is not wanted, nothing is read.
///
/// Shards of `fully_shard` and any other chunks are put together, so that a model or a `FullyShardedDataParallel` of any
/// number of ranks can load them; each rank has the wanted tensors whole meanwhile.
///
/// # Errors
/// [`FileError::Refused`] for classes that such metadata does not need, and chunks that were compressed;
/// [`FileError::Damaged`], also where a chunk is missing; [`FileError::Io`]. Then `dcp_to_torch_save` of
/// `torch.distributed.checkpoint.format_utils` makes a file for [`load_pt`](super::load_pt).
///
/// # Source
/// `torch.distributed.checkpoint.load`
#[doc(alias = "torch.distributed.checkpoint")]
pub fn load_dcp(folder: impl AsRef<Path>, wanted: impl Fn(&str) -> bool) -> Result<StateDict, FileError> {
    let folder = folder.as_ref();
    let path = folder.join(".metadata");
    let bytes = fs::read(&path).map_err(FileError::io("read", &path))?;
    let metadata = Metadata::parse(&bytes).map_err(|bad| bad.at(&path))?;
    let mut state = StateDict::new();
    for (name, saved) in metadata.entries {
        if !wanted(&name) {
            continue;
        }
        match saved {
            Saved::Tensor { kind, size, chunks } => {
                // Before memory is taken for it.
                let there = chunks.iter().fold(0, |sum: usize, chunk| sum.saturating_add(chunk.place.length));
                let bytes = size
                    .iter()
                    .try_fold(kind.elt_size_in_bytes(), |bytes, &side| bytes.checked_mul(usize::try_from(side).ok()?));
                if bytes.is_none_or(|bytes| bytes > there) {
                    return Err(Bad::Damaged(format!("chunks of `{name}` of shape {size:?} are missing")).at(&path));
                }
                let options = (kind, Device::Cpu);
                let whole = Tensor::f_zeros(&size[..], options).map_err(|error| FileError::Torch(error.into()))?;
                let mut left = whole.numel() as i64;
                for chunk in chunks {
                    let file = folder.join(&chunk.place.file);
                    let found = parse(&chunk.place.read(&file)?).and_then(|part| chunk.put(&part, &whole));
                    left -= found.map_err(|bad| bad.at(&file))?;
                }
                if left != 0 {
                    let what = format!("the chunks of `{name}` do not make it up: {left} elements are left");
                    return Err(Bad::Damaged(what).at(&path));
                }
                state.insert(name, Entry::Tensor(whole));
            }
            Saved::Bytes(place) => {
                let file = folder.join(&place.file);
                for (key, entry) in parse(&place.read(&file)?).map_err(|bad| bad.at(&file))? {
                    state.insert(if key.is_empty() { name.clone() } else { format!("{name}.{key}") }, entry);
                }
            }
        }
    }
    Ok(state)
}

/// What the folder has.
struct Metadata {
    entries: BTreeMap<String, Saved>,
}

enum Saved {
    Tensor {
        kind: Kind,
        size: Vec<i64>,
        chunks: Vec<Chunk>,
    },
    /// A value that is not a tensor.
    Bytes(Place),
}

/// A part of a tensor.
struct Chunk {
    offsets: Vec<i64>,
    sizes: Vec<i64>,
    place: Place,
}

/// A part of a file.
#[derive(Clone)]
struct Place {
    file: String,
    offset: u64,
    length: usize,
}

impl Place {
    fn read(&self, path: &Path) -> Result<Vec<u8>, FileError> {
        let file = File::open(path).map_err(FileError::io("open", path))?;
        let bytes = file.metadata().map_err(FileError::io("look at", path))?.len();
        if self.offset.checked_add(self.length as u64).is_none_or(|end| end > bytes) {
            return Err(Bad::Damaged("it is cut off".to_owned()).at(path));
        }
        let mut buffer = vec![0; self.length];
        file.read_exact_at(&mut buffer, self.offset).map_err(FileError::io("read", path))?;
        Ok(buffer)
    }
}

impl Chunk {
    /// Copies it to its place; returns how many elements it has.
    fn put(&self, part: &StateDict, whole: &Tensor) -> Result<i64, Bad> {
        let Ok(part) = part.tensor("", &self.sizes, whole.kind()) else {
            return damaged("a chunk is not of the dtype and shape that the metadata say");
        };
        let torch = |error: tch::TchError| Bad::Torch(TorchError::from(error));
        let mut to = whole.shallow_clone();
        for (dim, (&offset, &size)) in self.offsets.iter().zip(&self.sizes).enumerate() {
            to = to.f_narrow(dim as i64, offset, size).map_err(torch)?;
        }
        to.f_copy_(part).map_err(torch)?;
        Ok(part.numel() as i64)
    }
}

impl Metadata {
    fn parse(bytes: &[u8]) -> Result<Self, Bad> {
        let value = pickle::read(bytes, Holds::Metadata)?.value;
        let mut places = BTreeMap::new();
        for (index, info) in dict(field(&value, "storage_data")?)? {
            if field(info, "transform_descriptors").is_ok_and(|it| !matches!(it, Value::None)) {
                return Err(Bad::Refused("chunks that an extension has changed (`transform_descriptors`)".to_owned()));
            }
            let file = text(field(info, "relative_path")?)?;
            if !is_beside(&file) {
                return damaged(format!("{file:?} is not the name of a file beside it"));
            }
            let offset = u64::try_from(int(field(info, "offset")?)?);
            let length = usize::try_from(int(field(info, "length")?)?);
            let (Ok(offset), Ok(length)) = (offset, length) else { return damaged("a place below 0") };
            // A tensor's chunk is known by its offset.
            let at = match field(index, "offset") {
                Ok(Value::None) | Err(_) => None,
                Ok(sizes) => Some(numbers(sizes)?),
            };
            places.insert((text(field(index, "fqn")?)?, at), Place { file, offset, length });
        }
        let mut entries = BTreeMap::new();
        for (name, saved) in dict(field(&value, "state_dict_metadata")?)? {
            let name = text(name)?;
            let place = |at: Option<Vec<i64>>| {
                let missing = || Bad::Damaged(format!("it does not say where `{name}` is"));
                places.get(&(name.clone(), at)).cloned().ok_or_else(missing)
            };
            let saved = match field(saved, "chunks") {
                Ok(chunks) => {
                    let size = numbers(field(saved, "size")?)?;
                    let chunk = |chunk: &Value| {
                        let (offsets, sizes) = (numbers(field(chunk, "offsets")?)?, numbers(field(chunk, "sizes")?)?);
                        let fits = offsets.len() == size.len() && sizes.len() == size.len();
                        let within = |at: usize| {
                            offsets[at] >= 0 && sizes[at] >= 0 && offsets[at].checked_add(sizes[at]) <= Some(size[at])
                        };
                        if !fits || !(0..size.len()).all(within) {
                            return damaged(format!("a chunk of `{name}` reaches beyond it"));
                        }
                        let place = place(Some(offsets.clone()))?;
                        Ok(Chunk { offsets, sizes, place })
                    };
                    // Ranks without rows have empty chunks, which are not in the files.
                    let is_there = |chunk: &&Value| {
                        let sizes = field(chunk, "sizes").and_then(numbers);
                        !sizes.is_ok_and(|sizes| sizes.contains(&0))
                    };
                    let chunks = items(chunks)?.iter().filter(is_there).map(chunk).collect::<Result<_, Bad>>()?;
                    let kind = kind_of(field(saved, "properties")?)?;
                    Saved::Tensor { kind, size, chunks }
                }
                Err(_) => Saved::Bytes(place(None)?),
            };
            entries.insert(name, saved);
        }
        Ok(Self { entries })
    }
}

/// The dtype is the first of the properties.
fn kind_of(properties: &Value) -> Result<Kind, Bad> {
    let first = match field(properties, "dtype") {
        Ok(dtype) => Some(dtype),
        Err(_) => items(field(properties, "state")?)?.first(),
    };
    match first {
        Some(Value::Kind(kind)) => Ok(*kind),
        _ => damaged("a tensor without a dtype"),
    }
}

fn dict(value: &Value) -> Result<&[(Value, Value)], Bad> {
    if let Value::Dict(pairs) = value { Ok(pairs) } else { damaged("something in place of a dict") }
}

fn field<'a>(object: &'a Value, name: &str) -> Result<&'a Value, Bad> {
    let is_it = |(key, _): &&(Value, Value)| matches!(key, Value::Text(text) if &**text == name);
    match dict(object)?.iter().find(is_it) {
        Some((_, value)) => Ok(value),
        None => damaged(format!("it does not have `{name}`")),
    }
}

fn items(value: &Value) -> Result<&[Value], Bad> {
    match value {
        Value::List(items) | Value::Tuple(items) => Ok(items),
        _ => damaged("something in place of a list"),
    }
}

fn int(value: &Value) -> Result<i64, Bad> {
    if let Value::Int(number) = value { Ok(*number) } else { damaged("something in place of a number") }
}

fn numbers(value: &Value) -> Result<Vec<i64>, Bad> {
    items(value)?.iter().map(int).collect()
}

fn text(value: &Value) -> Result<String, Bad> {
    if let Value::Text(text) = value { Ok(text.to_string()) } else { damaged("something in place of a text") }
}
