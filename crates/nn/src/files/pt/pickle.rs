//! The values of a pickle of `torch.save`: plain containers and tensors. Any other class or function is refused by name;
//! nothing is run.

use std::rc::Rc;

use tch::Kind;

use super::super::Bad;
use super::damaged;
use super::reader::Reader;

/// A value of a pickle.
#[derive(Clone, Debug)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Rc<str>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Tensor(Rc<TensorParts>),
    /// A tensor's memory.
    Storage(Rc<StorageParts>),
    /// The class of a storage.
    Kind(Kind),
    /// One of the functions that state dicts need.
    Global(Global),
    /// A class of the metadata of `torch.distributed.checkpoint`; its objects are dicts of their fields.
    Class(Class),
    /// Something else that is named in such metadata, a dtype that tch lacks for instance; it is not used.
    Other(Rc<str>),
    /// Where a container begins.
    Mark,
    /// A container, by its place in the list of those. So values are small and flat while the pickle is read, and a
    /// container can be stored in the memo before it is filled, as pickle does.
    Shared(usize),
}

/// What a tensor is made of.
#[derive(Debug)]
pub(super) struct TensorParts {
    pub storage: Rc<StorageParts>,
    pub offset: i64,
    pub size: Vec<i64>,
    pub stride: Vec<i64>,
}

/// A tensor's memory.
#[derive(Debug)]
pub(super) struct StorageParts {
    pub kind: Kind,
    pub key: Rc<str>,
    pub elements: i64,
}

/// The functions that state dicts need.
#[derive(Clone, Copy, Debug)]
pub(super) enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Size,
}

impl Global {
    const ALL: [(&'static str, Self); 4] = [
        ("collections.OrderedDict", Self::OrderedDict),
        ("torch._utils._rebuild_tensor_v2", Self::RebuildTensor),
        ("torch._utils._rebuild_parameter", Self::RebuildParameter),
        ("torch.Size", Self::Size),
    ];
}

impl std::fmt::Display for Global {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(Self::ALL[*self as usize].0)
    }
}

/// A class or function of which a folder of `torch.distributed.checkpoint` has objects; only their fields are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(&'static str);

impl Class {
    const ALL: [&'static str; 12] = [
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
    ];

    fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|own| *own == name).map(Self)
    }
}

/// The dtypes that metadata names.
const DTYPES: [(&str, Kind); 15] = [
    ("torch.float32", Kind::Float),
    ("torch.float64", Kind::Double),
    ("torch.float16", Kind::Half),
    ("torch.bfloat16", Kind::BFloat16),
    ("torch.int64", Kind::Int64),
    ("torch.int32", Kind::Int),
    ("torch.int16", Kind::Int16),
    ("torch.int8", Kind::Int8),
    ("torch.uint8", Kind::Uint8),
    ("torch.bool", Kind::Bool),
    ("torch.complex64", Kind::ComplexFloat),
    ("torch.complex128", Kind::ComplexDouble),
    ("torch.float8_e5m2", Kind::Float8e5m2),
    ("torch.float8_e4m3fn", Kind::Float8e4m3fn),
    ("torch.float8_e4m3fnuz", Kind::Float8e4m3fnuz),
];

/// What a pickle may hold besides containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    Tensors,
    /// The metadata of `torch.distributed.checkpoint`.
    Metadata,
}

impl Value {
    /// The class or function of this name, if it is one that such a pickle needs.
    pub fn named(name: &str, holds: Holds) -> Result<Self, Bad> {
        if holds == Holds::Metadata {
            if let Some(class) = Class::of(name) {
                return Ok(Self::Class(class));
            }
            if let Some((_, kind)) = DTYPES.iter().find(|(own, _)| *own == name) {
                return Ok(Self::Kind(*kind));
            }
            // Of an entry that is not wanted, perhaps; calls of it are refused.
            if name.strip_prefix("torch.").is_some_and(|rest| !rest.contains('.')) {
                return Ok(Self::global(name).unwrap_or_else(|_| Self::Other(name.into())));
            }
        }
        Self::global(name)
    }

    /// The class or function of this name, if it is one that state dicts need.
    fn global(name: &str) -> Result<Self, Bad> {
        if let Some((_, global)) = Global::ALL.iter().find(|(own, _)| *own == name) {
            return Ok(Self::Global(*global));
        }
        let kind = name.strip_prefix("torch.").map(|name| name.strip_prefix("cuda.").unwrap_or(name));
        Ok(Self::Kind(match kind.unwrap_or_default() {
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
            _ => return Err(Bad::Refused(format!("`{name}`"))),
        }))
    }
}

/// One pickle.
pub(super) struct Pickle {
    pub value: Value,
    /// The storages of all tensors.
    pub storages: Vec<Rc<StorageParts>>,
    /// How many bytes it takes.
    pub length: usize,
}

/// Values may be nested so deep.
const DEEPEST: usize = 100;
/// There may be so many more values than bytes. A small pickle whose containers hold each other many times would be
/// endless.
const MORE: usize = 16;

/// Reads one pickle from the beginning of `bytes`.
pub(super) fn read(bytes: &[u8], holds: Holds) -> Result<Pickle, Bad> {
    let (value, reader) = Reader::read(bytes, holds)?;
    let length = reader.at();
    let mut tree = Tree { containers: reader.into_containers(), storages: Vec::new(), left: MORE * (length + 64) };
    let value = tree.resolve(&value, 0)?;
    Ok(Pickle { value, storages: tree.storages, length })
}

/// Puts containers in place of references to them.
struct Tree {
    containers: Vec<Value>,
    storages: Vec<Rc<StorageParts>>,
    /// How many values there may still be.
    left: usize,
}

impl Tree {
    fn resolve(&mut self, value: &Value, depth: usize) -> Result<Value, Bad> {
        self.left = self.left.checked_sub(1).ok_or_else(|| Bad::Damaged("it holds too many values".to_owned()))?;
        let place = match value {
            Value::Shared(place) => place,
            Value::Mark => return damaged("it holds a mark in place of a value"),
            plain => {
                if let Value::Tensor(tensor) = plain {
                    self.storages.push(tensor.storage.clone());
                }
                return Ok(plain.clone());
            }
        };
        if depth == DEEPEST {
            return damaged("it holds containers within containers without end");
        }
        // Taken out, so that it can be read while others are resolved: it cannot hold itself.
        let container = std::mem::replace(&mut self.containers[*place], Value::Mark);
        let resolved = self.resolve_items(&container, depth + 1);
        self.containers[*place] = container;
        resolved
    }

    fn resolve_items(&mut self, container: &Value, depth: usize) -> Result<Value, Bad> {
        let mut all =
            |values: &[Value]| values.iter().map(|value| self.resolve(value, depth)).collect::<Result<_, _>>();
        Ok(match container {
            Value::List(values) => Value::List(all(values)?),
            Value::Tuple(values) => Value::Tuple(all(values)?),
            Value::Dict(pairs) => {
                let pair = |(key, value): &(Value, Value)| Ok((self.resolve(key, depth)?, self.resolve(value, depth)?));
                Value::Dict(pairs.iter().map(pair).collect::<Result<_, Bad>>()?)
            }
            _ => return damaged("it holds a container that holds itself"),
        })
    }
}
