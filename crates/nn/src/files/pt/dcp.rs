//! Reads the folders that `torch.distributed.checkpoint` has written, without running any code.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

use overdrive_core::{Entry, StateDict, TorchError};
use tch::{Device, Kind, Tensor};

use super::super::shards::is_beside;
use super::super::{Bad, FileError};
use super::chunks::{self, Extent};
use super::pickle::{self, Holds, Value};
use super::{LONGER, damaged, parse};

/// Reads the wanted entries of a folder of `torch.distributed.checkpoint.save` (`.metadata` and `*.distcp`), whole: of the
/// state dict that was saved, entries of inner dicts under names with dots. [`StateDict::nested`]`("model")` is then what
/// was saved as `"model"`. Tensors are on the CPU. Of what is not wanted, nothing is read, and it may be anything: an
/// optimizer's state of dtypes that tch lacks, say.
///
/// Shards of `fully_shard` and any other chunks are put together, so that a model or a `FullyShardedDataParallel` of any
/// number of ranks can load them; each rank has the wanted tensors whole meanwhile.
///
/// # Errors
/// [`FileError::Refused`] for classes that such metadata does not need, and chunks that were compressed;
/// [`FileError::Damaged`], also where chunks are missing or overlap, or a checksum is wrong; [`FileError::Io`]. Then
/// `dcp_to_torch_save` of
/// `torch.distributed.checkpoint.format_utils` makes a file for [`load_pt`](super::load_pt).
///
/// # Source
/// `torch.distributed.checkpoint.load`
#[doc(alias = "torch.distributed.checkpoint")]
pub fn load_dcp(folder: impl AsRef<Path>, wanted: impl Fn(&str) -> bool) -> Result<StateDict, FileError> {
    let folder = folder.as_ref();
    let path = folder.join(".metadata");
    let bytes = fs::read(&path).map_err(FileError::io("read", &path))?;
    let entries = entries(&bytes, &wanted).map_err(|bad| bad.at(&path))?;
    // Before memory is taken for any of it.
    let mut files = Files { folder, left: BTreeMap::new() };
    entries.values().flat_map(Saved::places).try_for_each(|place| files.take(place))?;
    let mut state = StateDict::new();
    for (name, saved) in entries {
        match saved {
            Saved::Tensor { kind, size, chunks } => {
                let options = (kind, Device::Cpu);
                let whole = Tensor::f_empty(&size[..], options).map_err(|error| FileError::Torch(error.into()))?;
                for chunk in chunks {
                    let file = folder.join(&*chunk.place.file);
                    let put = parse(&chunk.place.read(&file)?).and_then(|part| chunk.put(&part, &whole));
                    put.map_err(|bad| bad.at(&file))?;
                }
                state.insert(&*name, Entry::Tensor(whole));
            }
            Saved::Bytes(place) => {
                let file = folder.join(&*place.file);
                for (key, entry) in parse(&place.read(&file)?).map_err(|bad| bad.at(&file))? {
                    state.insert(if key.is_empty() { name.to_string() } else { format!("{name}.{key}") }, entry);
                }
            }
        }
    }
    Ok(state)
}

enum Saved {
    /// Its chunks are the whole tensor, and the places have at least as many bytes.
    Tensor { kind: Kind, size: Vec<i64>, chunks: Vec<Chunk> },
    /// A value that is not a tensor.
    Bytes(Place),
}

impl Saved {
    fn places(&self) -> impl Iterator<Item = &Place> {
        let (chunks, place) = match self {
            Self::Tensor { chunks, .. } => (&chunks[..], None),
            Self::Bytes(place) => (&[][..], Some(place)),
        };
        chunks.iter().map(|chunk| &chunk.place).chain(place)
    }
}

/// A part of a tensor.
struct Chunk {
    extent: Extent,
    place: Place,
}

/// A part of a file.
struct Place {
    file: Rc<str>,
    offset: u64,
    length: usize,
}

/// The files beside the metadata.
struct Files<'a> {
    folder: &'a Path,
    /// How many bytes of each are not taken yet. Places in a file do not overlap: together they are no larger than it.
    left: BTreeMap<Rc<str>, u64>,
}

impl Files<'_> {
    fn take(&mut self, place: &Place) -> Result<(), FileError> {
        let path = self.folder.join(&*place.file);
        if !self.left.contains_key(&place.file) {
            let bytes = fs::metadata(&path).map_err(FileError::io("look at", &path))?.len();
            self.left.insert(place.file.clone(), bytes);
        }
        let left = self.left.get_mut(&place.file).and_then(|left| {
            *left = left.checked_sub(place.length as u64)?;
            Some(())
        });
        left.ok_or_else(|| Bad::Damaged("it is cut off: the metadata say that it has more".to_owned()).at(&path))
    }
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
    /// Copies it to its place.
    fn put(&self, part: &StateDict, whole: &Tensor) -> Result<(), Bad> {
        let Extent { offsets, sizes } = &self.extent;
        let Ok(part) = part.tensor("", sizes, whole.kind()) else {
            return damaged("a chunk is not of the dtype and shape that the metadata say");
        };
        let torch = |error: tch::TchError| Bad::Torch(TorchError::from(error));
        let mut to = whole.shallow_clone();
        for (dim, (&offset, &size)) in offsets.iter().zip(sizes).enumerate() {
            to = to.f_narrow(dim as i64, offset, size).map_err(torch)?;
        }
        to.f_copy_(part).map_err(torch)
    }
}

/// Places in files, by the name of the entry and, for a tensor's chunk, by its offset.
type Places = BTreeMap<(Rc<str>, Option<Vec<i64>>), Place>;

/// The wanted entries of the metadata. What others are made of does not matter.
fn entries(bytes: &[u8], wanted: &dyn Fn(&str) -> bool) -> Result<BTreeMap<Rc<str>, Saved>, Bad> {
    let value = pickle::read(bytes, Holds::Metadata)?.value;
    // A long name could be used many times.
    let mut letters = LONGER * (bytes.len() + 1024);
    let mut name_of = |value: &Value| {
        let name = text(value)?;
        let too_long = || Bad::Damaged("its names are too long".to_owned());
        letters = letters.checked_sub(name.len()).ok_or_else(too_long)?;
        Ok::<_, Bad>(name)
    };
    let (mut places, mut entries) = (Places::new(), BTreeMap::new());
    for (index, info) in dict(field(&value, "storage_data")?)? {
        let name = name_of(field(index, "fqn")?)?;
        if !wanted(&name) {
            continue;
        }
        let offset = match field(index, "offset") {
            Ok(Value::None) | Err(_) => None,
            Ok(sizes) => Some(numbers(sizes)?),
        };
        let place = Place::of(&name, info)?;
        if places.insert((name.clone(), offset), place).is_some() {
            return damaged(format!("it says twice where a part of `{name}` is"));
        }
    }
    for (name, saved) in dict(field(&value, "state_dict_metadata")?)? {
        let name = name_of(name)?;
        if !wanted(&name) {
            continue;
        }
        let saved = Saved::of(&name, saved, &mut places)?;
        if entries.insert(name.clone(), saved).is_some() {
            return damaged(format!("it has `{name}` twice"));
        }
    }
    Ok(entries)
}

impl Place {
    fn of(name: &str, info: &Value) -> Result<Self, Bad> {
        if field(info, "transform_descriptors").is_ok_and(|it| !matches!(it, Value::None)) {
            let what = format!("chunks of `{name}` that an extension has changed (`transform_descriptors`)");
            return Err(Bad::Refused(what));
        }
        let file = text(field(info, "relative_path")?)?;
        if !is_beside(&file) {
            return damaged(format!("{file:?} is not the name of a file beside it"));
        }
        let offset = u64::try_from(int(field(info, "offset")?)?);
        let length = usize::try_from(int(field(info, "length")?)?);
        match (offset, length) {
            (Ok(offset), Ok(length)) => Ok(Self { file, offset, length }),
            _ => damaged(format!("a place of `{name}` below 0")),
        }
    }
}

impl Saved {
    fn of(name: &Rc<str>, saved: &Value, places: &mut Places) -> Result<Self, Bad> {
        // Each is used once.
        let mut place = |offset: Option<Vec<i64>>| {
            let missing = || Bad::Damaged(format!("it does not say where all of `{name}` is"));
            places.remove(&(name.clone(), offset)).ok_or_else(missing)
        };
        let Ok(chunks) = field(saved, "chunks") else { return Ok(Self::Bytes(place(None)?)) };
        let size = numbers(field(saved, "size")?)?;
        let kind = kind_of(name, field(saved, "properties")?)?;
        let mut extents = Vec::new();
        for chunk in items(chunks)? {
            let (offsets, sizes) = (numbers(field(chunk, "offsets")?)?, numbers(field(chunk, "sizes")?)?);
            let extent = Extent { offsets, sizes };
            if !extent.is_within(&size) {
                return damaged(format!("a chunk of `{name}` reaches beyond it"));
            }
            // Ranks without rows have empty chunks, which are not in the files.
            if !extent.sizes.contains(&0) {
                extents.push(extent);
            }
        }
        chunks::check(name, &size, &extents.iter().collect::<Vec<_>>())?;
        let chunk = |extent: Extent| Ok(Chunk { place: place(Some(extent.offsets.clone()))?, extent });
        let chunks = extents.into_iter().map(chunk).collect::<Result<Vec<_>, Bad>>()?;
        let there = chunks.iter().fold(0, |sum: usize, chunk| sum.saturating_add(chunk.place.length));
        let elements = chunks::elements(&size).and_then(|elements| usize::try_from(elements).ok());
        let bytes = elements.and_then(|elements| elements.checked_mul(kind.elt_size_in_bytes()));
        match bytes.is_some_and(|bytes| bytes <= there) {
            true => Ok(Self::Tensor { kind, size, chunks }),
            false => damaged(format!("the chunks of `{name}` of shape {size:?} have {there} bytes in the files")),
        }
    }
}

/// The dtype is the first of the properties.
fn kind_of(name: &str, properties: &Value) -> Result<Kind, Bad> {
    let first = match field(properties, "dtype") {
        Ok(dtype) => Some(dtype),
        Err(_) => items(field(properties, "state")?)?.first(),
    };
    match first {
        Some(Value::Kind(kind)) => Ok(*kind),
        Some(Value::Other(dtype)) => Err(Bad::Refused(format!("`{name}` of the dtype `{dtype}`"))),
        _ => damaged(format!("`{name}` does not have a dtype")),
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

fn text(value: &Value) -> Result<Rc<str>, Bad> {
    if let Value::Text(text) = value { Ok(text.clone()) } else { damaged("something in place of a text") }
}
