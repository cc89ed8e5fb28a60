//! Files of weights, and the messages about keys that do not fit, compared with PyTorch's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use overdrive_core::Entry;
use overdrive_nn::*;
use serde::Deserialize;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::record::{Found, Given};

/// A file, and what Python has found in it.
#[derive(Deserialize)]
struct Theirs {
    path: PathBuf,
    entries: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct TheirTensor {
    dtype: String,
    shape: Vec<i64>,
    stride: Vec<i64>,
}

fn kind_of(dtype: &str) -> Result<Kind> {
    Ok(match dtype.trim_start_matches("torch.") {
        "float64" => Kind::Double,
        "float32" => Kind::Float,
        "float16" => Kind::Half,
        "bfloat16" => Kind::BFloat16,
        "int64" => Kind::Int64,
        "int32" => Kind::Int,
        "int16" => Kind::Int16,
        "int8" => Kind::Int8,
        "uint8" => Kind::Uint8,
        "bool" => Kind::Bool,
        "complex64" => Kind::ComplexFloat,
        "complex128" => Kind::ComplexDouble,
        other => bail!("{other}?"),
    })
}

/// Compares a state with Python's, and adds the tensors' bytes to `found`.
fn compare(found: &mut Found, name: &str, state: &StateDict, theirs: &Theirs) -> Result<()> {
    let (own, expected): (Vec<&str>, Vec<&String>) =
        (state.iter().map(|it| it.0).collect(), theirs.entries.keys().collect());
    ensure!(own == expected, "{name}: {own:?} and not {expected:?}");
    for (key, entry) in state.iter() {
        let said = &theirs.entries[key];
        let is_same = match entry {
            Entry::Tensor(tensor) => {
                let said = TheirTensor::deserialize(said).with_context(|| format!("{name}: {key}"))?;
                let flat = tensor.f_contiguous()?.f_reshape([-1i64])?;
                found.insert(format!("{name}.{key}"), &flat.f_view_dtype(Kind::Uint8)?);
                tensor.kind() == kind_of(&said.dtype)? && tensor.size() == said.shape && tensor.stride() == said.stride
            }
            Entry::Bool(value) => said.as_bool() == Some(*value),
            Entry::Int(value) => said.as_i64() == Some(*value),
            Entry::Float(value) => said.as_f64() == Some(*value),
            Entry::Text(value) => said.as_str() == Some(value),
        };
        ensure!(is_same, "{name}: {key} is not {said}");
    }
    Ok(())
}

pub fn pt_files(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (name, theirs) in given.value::<BTreeMap<String, Theirs>>("files")? {
        let state = load_pt(&theirs.path).with_context(|| name.clone())?;
        compare(&mut found, &name, &state, &theirs)?;
    }
    Ok(found)
}

pub fn pt_refused(given: &Given<'_>) -> Result<Found> {
    let (mut found, mut refused) = (Found::default(), 0i64);
    for (path, name) in given.value::<BTreeMap<PathBuf, String>>("files")? {
        match load_pt(&path) {
            Err(FileError::Refused { what, .. }) => {
                ensure!(what == format!("`{name}`"), "{}: {what}", path.display());
                refused += 1;
            }
            other => bail!("{}: {other:?}", path.display()),
        }
    }
    ensure!(!given.value::<PathBuf>("marker")?.exists(), "the code in a file was run");
    found.insert("refused", &Tensor::from(refused));
    Ok(found)
}

/// As in Python.
#[derive(Debug, Module)]
struct Net {
    fc1: Linear,
    norm: BatchNorm1d,
    blocks: Sequential,
}

impl Net {
    fn new() -> Result<Self> {
        let blocks = sequential![Linear::builder(3, 3).bias(false).build()?, Linear::new(3, 2)?];
        Ok(Self { fc1: Linear::new(4, 3)?, norm: BatchNorm1d::new(3)?, blocks })
    }
}

/// What Python has written of a state.
#[derive(Deserialize)]
struct Said {
    strict: bool,
    /// Shapes, and plain values.
    entries: BTreeMap<String, Value>,
    message: Option<String>,
    missing: Vec<String>,
    unexpected: Vec<String>,
}

fn state_of(entries: &BTreeMap<String, Value>) -> Result<StateDict> {
    let mut state = StateDict::new();
    for (key, value) in entries {
        let kind = if key.contains("tracked") { Kind::Int64 } else { Kind::Float };
        let entry = match value {
            Value::Array(_) => Entry::Tensor(Tensor::zeros(Vec::<i64>::deserialize(value)?, (kind, Device::Cpu))),
            Value::String(text) => Entry::Text(text.clone()),
            Value::Bool(value) => Entry::Bool(*value),
            value => match value.as_i64() {
                Some(value) => Entry::Int(value),
                None => Entry::Float(value.as_f64().context("a number")?),
            },
        };
        state.insert(key.clone(), entry);
    }
    Ok(state)
}

pub fn load_state_dict(given: &Given<'_>) -> Result<Found> {
    let (mut found, mut agreed) = (Found::default(), 0i64);
    for (name, said) in given.value::<BTreeMap<String, Said>>("states")? {
        let net = Net::new()?;
        let before = net.state_dict()?.copied()?;
        let state = state_of(&said.entries)?;
        match (LoadStateDict::new(&state).strict(said.strict).into(&net), &said.message) {
            (Ok(keys), None) => {
                ensure!(keys.missing_keys == said.missing, "{name}: missing {:?}", keys.missing_keys);
                ensure!(keys.unexpected_keys == said.unexpected, "{name}: unexpected {:?}", keys.unexpected_keys);
            }
            (Err(error), Some(message)) => {
                ensure!(error.to_string() == *message, "{name}:\n{error}\nand not\n{message}");
                for (key, tensor) in module_entries(&net) {
                    let was = before.tensor(&key, &tensor.size(), tensor.kind())?;
                    ensure!(tensor == *was, "{name}: {key} has changed");
                }
            }
            (own, theirs) => bail!("{name}: {own:?} here, {theirs:?} in Python"),
        }
        agreed += 1;
    }
    found.insert("states", &Tensor::from(agreed));
    Ok(found)
}

#[derive(Deserialize)]
struct Shards {
    folder: PathBuf,
    files: Vec<String>,
    index: Value,
}

pub fn safetensors(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (name, theirs) in given.value::<BTreeMap<String, Theirs>>("files")? {
        compare(&mut found, &name, &load_safetensors(&theirs.path)?, &theirs)?;
    }
    let own = tempfile::tempdir()?;
    let bare: PathBuf = given.value("bare")?;
    let state = load_safetensors(&bare)?;
    for (key, entry) in state.iter() {
        let Entry::Tensor(tensor) = entry else { bail!("{key} is no tensor") };
        ensure!(*tensor == given.tensor(&format!("state.{key}"))?, "{key} differs");
    }
    let path = own.path().join("bare.safetensors");
    save_safetensors(&path, &state, &[])?;
    ensure!(std::fs::read(&path)? == std::fs::read(&bare)?, "the bytes of the file are not Python's");
    // All files go into one folder, so those of the case before are removed.
    let folder = own.path().join("shards");
    for (most, theirs) in given.value::<BTreeMap<u64, Shards>>("shards")? {
        save_sharded(&folder, &state, most)?;
        check_shards(&folder, &theirs).with_context(|| format!("{most} bytes"))?;
        for folder in [&folder, &theirs.folder] {
            let read = load_safetensors(folder)?;
            let is_same = |(a, b): ((&str, &Entry), (&str, &Entry))| match (a, b) {
                ((a, Entry::Tensor(x)), (b, Entry::Tensor(y))) => a == b && x == y,
                _ => false,
            };
            ensure!(read.len() == state.len() && read.iter().zip(state.iter()).all(is_same), "{most}: other tensors");
        }
    }
    Ok(found)
}

/// Whether a folder has Python's files.
fn check_shards(folder: &Path, theirs: &Shards) -> Result<()> {
    let mut names: Vec<String> = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        names.push(entry?.file_name().into_string().ok().context("a name that is not text")?);
    }
    names.sort();
    let index = "model.safetensors.index.json";
    if theirs.files.len() > 1 {
        let text = std::fs::read(folder.join(index))?;
        ensure!(serde_json::from_slice::<Value>(&text)? == theirs.index, "another index: {}", String::from_utf8(text)?);
        names.retain(|name| name != index);
    }
    ensure!(names == theirs.files, "{names:?} and not {:?}", theirs.files);
    for name in &names {
        let is_same = std::fs::read(folder.join(name))? == std::fs::read(theirs.folder.join(name))?;
        ensure!(is_same, "the bytes of {name} are not Python's");
    }
    Ok(())
}
