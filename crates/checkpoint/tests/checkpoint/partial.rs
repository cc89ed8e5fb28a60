//! Reading some parts or tensors of a checkpoint, tied names, and the headers that other programs read.

use std::fs;
use std::path::Path;

use overdrive_checkpoint::{Checkpoint, CheckpointError, load, read_part};
use overdrive_core::{Entry, StateDict};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::{Plain, model, value};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const LARGE: i64 = 250_000;

fn full(value: f64) -> Tensor {
    Tensor::full([LARGE], value, (Kind::Float, Device::Cpu))
}

/// A small model, and an optimizer of two tensors of a megabyte each.
fn saved(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    let moments = Plain::new([
        ("a", Entry::Tensor(full(1.0))),
        ("b", Entry::Tensor(full(2.0))),
        ("empty", Entry::Tensor(Tensor::zeros([0], (Kind::Float, Device::Cpu)))),
        ("step", Entry::Int(7)),
    ]);
    let mut checkpoint = Checkpoint::builder(folder).build()?;
    checkpoint.save(1, &[("model", &model(3.0)), ("optimizer", &moments)])?;
    checkpoint.wait()?;
    Ok(checkpoint)
}

/// How many bytes this thread has read from files, as the kernel counts them.
#[cfg(target_os = "linux")]
fn bytes_read() -> Result<u64, Box<dyn std::error::Error>> {
    let io = fs::read_to_string("/proc/thread-self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: ")).ok_or("no rchar")?;
    Ok(line.trim().parse()?)
}

#[cfg(target_os = "linux")]
#[test]
fn only_the_parts_that_are_asked_for_are_read() -> Outcome {
    let folder = tempfile::tempdir()?;
    let checkpoint = saved(folder.path())?;
    let mut vs = model(0.0);
    let before = bytes_read()?;
    load(checkpoint.path(1), &mut [("model", &mut vs)])?;
    let read = bytes_read()? - before;
    assert!(read < 100_000, "{read} bytes for a model of 60");
    assert_eq!(value(&vs), 3.0);
    Ok(())
}

/// An optimizer may keep them, and a compiled step refuses tensors that share memory.
#[test]
fn each_tensor_is_read_into_its_own_memory() -> Outcome {
    let folder = tempfile::tempdir()?;
    let checkpoint = saved(folder.path())?;
    let moments = read_part(checkpoint.path(1), "optimizer", |_| true)?;
    let [a, b] = ["a", "b"].map(|name| moments.tensor(name, &[LARGE], Kind::Float));
    assert!(!overdrive_ffi::share_memory(a?, b?));
    Ok(())
}

#[cfg(target_os = "linux")]
#[test]
fn only_the_tensors_that_are_asked_for_are_read() -> Outcome {
    let folder = tempfile::tempdir()?;
    let checkpoint = saved(folder.path())?;
    let before = bytes_read()?;
    let state = read_part(checkpoint.path(1), "optimizer", |name| name == "b" || name == "step")?;
    let read = bytes_read()? - before;
    let tensor = 4 * LARGE as u64;
    assert!((tensor..tensor + 100_000).contains(&read), "{read} bytes for a tensor of {tensor}");
    assert_eq!((state.len(), state.int("step")?), (2, 7));
    assert!(state.tensor("b", &[LARGE], Kind::Float)?.equal(&full(2.0)));
    Ok(())
}

#[test]
fn only_damage_in_the_bytes_read_is_an_error() -> Outcome {
    let folder = tempfile::tempdir()?;
    let checkpoint = saved(folder.path())?;
    let path = checkpoint.path(1).join("optimizer.safetensors");
    let mut bytes = fs::read(&path)?;
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, &bytes)?;
    let read = |name: &str| read_part(checkpoint.path(1), "optimizer", |it| it == name);
    assert!(read("a")?.tensor("a", &[LARGE], Kind::Float)?.equal(&full(1.0)));
    assert_eq!(read("empty")?.tensor("empty", &[0], Kind::Float)?.numel(), 0);
    let error = read("b").unwrap_err();
    assert!(error.is_damage() && error.to_string().contains("crc32 of `b`"), "{error}");
    bytes[9] ^= 1;
    fs::write(&path, &bytes)?;
    assert!(read("a").unwrap_err().to_string().contains("crc32 of the header"));
    fs::remove_file(&path)?;
    load(checkpoint.path(1), &mut [("model", &mut model(0.0))])?;
    assert!(matches!(read_part(checkpoint.path(1), "none", |_| true), Err(CheckpointError::Parts { .. })));
    Ok(())
}

/// A file of another program, without checksums of its tensors.
#[test]
fn a_file_with_one_checksum_is_read_as_a_whole() -> Outcome {
    let folder = tempfile::tempdir()?;
    let checkpoint = saved(folder.path())?;
    crate::edit_manifest(&checkpoint.path(1), |manifest| {
        manifest["parts"]["optimizer"]["file"].as_object_mut().map(|file| file.remove("pieces"));
    })?;
    let state = read_part(checkpoint.path(1), "optimizer", |name| name == "a")?;
    assert_eq!(state.len(), 1);
    assert!(state.tensor("a", &[LARGE], Kind::Float)?.equal(&full(1.0)));
    Ok(())
}

fn header(path: &Path) -> Result<Value, Box<dyn std::error::Error>> {
    let bytes = fs::read(path)?;
    let length = u64::from_le_bytes(bytes[..8].try_into()?) as usize;
    Ok(serde_json::from_slice(&bytes[8..8 + length])?)
}

#[test]
fn the_headers_metadata_has_the_format_pt() -> Outcome {
    let folder = tempfile::tempdir()?;
    let checkpoint = saved(folder.path())?;
    let header = header(&checkpoint.path(1).join("model.safetensors"))?;
    assert_eq!(header["__metadata__"], serde_json::json!({ "format": "pt" }));
    Ok(())
}

/// `b`, `c` and `d` are one tensor; `e` is another view of its memory. `f` and `g` are one scalar.
fn tied(value: f64) -> StateDict {
    let tensor = Tensor::full([2, 300], value, (Kind::Float, Device::Cpu));
    let mut state = StateDict::new();
    state.insert("a", Entry::Tensor(&tensor * 2.0));
    for name in ["b", "c", "d"] {
        state.insert(name, Entry::Tensor(tensor.shallow_clone()));
    }
    state.insert("e", Entry::Tensor(tensor.view([300, 2])));
    let number = Tensor::from(value as f32);
    for name in ["f", "g"] {
        state.insert(name, Entry::Tensor(number.shallow_clone()));
    }
    state
}

/// Returns its tensors without copies, and loads any state.
struct Tied(StateDict);

impl overdrive_core::Stateful for Tied {
    fn state_dict(&self) -> Result<StateDict, overdrive_core::StateError> {
        let mut state = StateDict::new();
        for (key, entry) in self.0.iter() {
            if let Entry::Tensor(tensor) = entry {
                state.insert(key, Entry::Tensor(tensor.shallow_clone()));
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), overdrive_core::StateError> {
        self.0 = crate::copy(state);
        Ok(())
    }
}

#[test]
fn tied_tensors_are_written_once_and_loaded_under_each_name() -> Outcome {
    for background in [true, false] {
        let folder = tempfile::tempdir()?;
        let mut checkpoint = Checkpoint::builder(folder.path()).background(background).build()?;
        checkpoint.save(1, &[("model", &Tied(tied(5.0)))])?;
        checkpoint.wait()?;
        let header = header(&checkpoint.path(1).join("model.safetensors"))?;
        assert_eq!(header["__metadata__"], serde_json::json!({ "format": "pt", "c": "b", "d": "b" }));
        let mut names: Vec<_> = header.as_object().ok_or("no object")?.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["__metadata__", "a", "b", "e", "f", "g"]);

        let mut back = Tied(StateDict::new());
        load(checkpoint.path(1), &mut [("model", &mut back)])?;
        assert_eq!(back.0.len(), 7);
        for (name, entry) in tied(5.0).iter() {
            let Entry::Tensor(tensor) = entry else { return Err("no tensor".into()) };
            assert!(back.0.tensor(name, &tensor.size(), Kind::Float)?.equal(tensor), "{name}");
        }
        let alone = read_part(checkpoint.path(1), "model", |name| name == "d")?;
        assert_eq!(alone.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["d"]);
        assert!(alone.tensor("d", &[2, 300], Kind::Float)?.equal(&Tensor::full(
            [2, 300],
            5.0,
            (Kind::Float, Device::Cpu)
        )));
    }
    Ok(())
}

#[test]
fn tied_weights_stay_tied() -> Outcome {
    let folder = tempfile::tempdir()?;
    let tied = |value| {
        let vs = model(value);
        let weight = vs.variables()["weight"].shallow_clone();
        vs.variables_.lock().unwrap().named_variables.insert("head".to_owned(), weight);
        vs
    };
    let mut checkpoint = Checkpoint::builder(folder.path()).build()?;
    checkpoint.save(1, &[("model", &tied(4.0))])?;
    let mut vs = tied(0.0);
    checkpoint.load(1, &mut [("model", &mut vs)])?;
    let variables = vs.variables();
    assert!(variables["head"].is_set_to(&variables["weight"]));
    assert_eq!(value(&vs), 4.0);
    Ok(())
}
