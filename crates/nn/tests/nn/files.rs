//! Safetensors files, written and read.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use overdrive_core::Entry;
use overdrive_nn::{
    Embedding, FileError, Linear, LoadStateDict, Module, NnError, StateDict, Stateful, init, load_safetensors,
    save_safetensors, save_sharded,
};
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 10] = [
    Kind::Bool,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
];

fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn assert_equal(found: &StateDict, expected: &StateDict) {
    assert_eq!(found.len(), expected.len());
    for (name, entry) in expected.iter() {
        let Entry::Tensor(tensor) = entry else { panic!("{name}") };
        assert_eq!(found.tensor(name, &tensor.size(), tensor.kind()).unwrap(), tensor, "{name}");
    }
}

/// Two names for one weight, as in language models.
#[derive(Debug, Module)]
struct Tied {
    embedding: Embedding,
    head: Linear,
}

impl Tied {
    fn new() -> Result<Self, NnError> {
        let mut tied = Self { embedding: Embedding::new(5, 3)?, head: Linear::new(3, 5)? };
        tied.head.weight = tied.embedding.weight.tie();
        Ok(tied)
    }
}

#[test]
fn every_dtype_and_shape_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = StateDict::new();
    let values = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]);
    for kind in KINDS {
        state.insert(format!("{kind:?}.all"), Entry::Tensor(values.to_kind(kind)));
        state.insert(format!("{kind:?}.transposed"), Entry::Tensor(values.to_kind(kind).transpose(0, 1)));
        state.insert(format!("{kind:?}.slice"), Entry::Tensor(values.to_kind(kind).slice(1, 1, None, 2)));
        state.insert(format!("{kind:?}.empty"), Entry::Tensor(Tensor::zeros([2, 0, 3], (kind, Device::Cpu))));
        state.insert(format!("{kind:?}.scalar"), Entry::Tensor(values.to_kind(kind).get(1).get(2)));
    }
    let path = folder.path().join("all.safetensors");
    save_safetensors(&path, &state, &[]).unwrap();
    assert_equal(&load_safetensors(&path).unwrap(), &state);
    save_sharded(folder.path().join("made/now"), &state, 100).unwrap();
    assert_equal(&load_safetensors(folder.path().join("made/now")).unwrap(), &state);
    save_sharded(folder.path().join("empty"), &StateDict::new(), 100).unwrap();
    assert!(load_safetensors(folder.path().join("empty")).unwrap().is_empty());
}

#[test]
fn the_metadata_is_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    save_safetensors(&path, &Linear::new(2, 1).unwrap().state_dict().unwrap(), &[("epoch", "3")]).unwrap();
    let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
    assert!(text.contains(r#""__metadata__":{"epoch":"3","format":"pt"}"#), "{text}");
}

#[test]
fn an_error_leaves_the_earlier_file_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let good = Linear::new(2, 1).unwrap().state_dict().unwrap();
    save_safetensors(&path, &good, &[]).unwrap();
    let before = fs::read(&path).unwrap();
    let sparse = Tensor::eye(2, (Kind::Float, Device::Cpu)).to_sparse_sparse_dim(2);
    for (entry, found) in [
        (Entry::Int(3), "`key`: expected a tensor, found a plain value"),
        (Entry::Tensor(Tensor::new()), "`key`: expected a tensor, found an undefined one"),
        (
            Entry::Tensor(sparse),
            "`key`: expected a dense dtype of safetensors, found a sparse Float tensor of shape [2, 2]",
        ),
        (
            Entry::Tensor(Tensor::zeros([2], (Kind::ComplexDouble, Device::Cpu))),
            "`key`: expected a dense dtype of safetensors, found a ComplexDouble tensor of shape [2]",
        ),
    ] {
        let mut state = good.copied().unwrap();
        state.insert("key", entry);
        let error = save_safetensors(&path, &state, &[]).unwrap_err();
        assert!(error.to_string().ends_with(found), "{error}");
        assert!(save_sharded(folder.path(), &state, 4).is_err());
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(names(folder.path()), set(&["x.safetensors"]));
    }
    // A folder cannot be replaced by a file.
    fs::create_dir(folder.path().join("taken")).unwrap();
    assert!(matches!(save_safetensors(folder.path().join("taken"), &good, &[]), Err(FileError::Io { .. })));
    assert!(matches!(save_safetensors(folder.path().join("no/x"), &good, &[]), Err(FileError::Io { .. })));
    assert_eq!(names(folder.path()), set(&["taken", "x.safetensors"]));
    assert!(matches!(load_safetensors(folder.path().join("taken")), Err(FileError::Io { .. })));
}

#[test]
fn shards_of_an_earlier_state_are_removed_and_other_files_stay() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let others =
        ["config.json", "model.safetensors.bak", "model-1-of-2.safetensors", "other-00001-of-00002.safetensors"];
    others.iter().for_each(|name| fs::write(folder.join(name), "x").unwrap());
    let state = Linear::new(2, 3).unwrap().state_dict().unwrap();
    let kept = |more: &[&str]| set(&[&others[..], more].concat());
    save_sharded(folder, &state, 12).unwrap();
    let sharded =
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"];
    assert_eq!(names(folder), kept(&sharded));
    save_sharded(folder, &state, 1000).unwrap();
    assert_eq!(names(folder), kept(&["model.safetensors"]));
    assert_equal(&load_safetensors(folder).unwrap(), &state);
    save_sharded(folder, &state, 0).unwrap();
    assert_eq!(names(folder), kept(&sharded));
    let index = fs::read_to_string(folder.join(sharded[2])).unwrap();
    let expected = "{\n  \"metadata\": {\n    \"total_size\": 36\n  },\n  \"weight_map\": {\n    \
                    \"bias\": \"model-00001-of-00002.safetensors\",\n    \
                    \"weight\": \"model-00002-of-00002.safetensors\"\n  }\n}";
    assert_eq!(index, expected);
}

#[test]
fn tied_weights_are_written_once_and_loaded_under_both_names() {
    let folder = tempfile::tempdir().unwrap();
    let (saved, loaded) = (Tied::new().unwrap(), Tied::new().unwrap());
    let state = saved.state_dict().unwrap();
    assert_eq!(state.len(), 3);
    for most in [4, 1000] {
        save_sharded(folder.path(), &state, most).unwrap();
        let state = load_safetensors(folder.path()).unwrap();
        let found: Vec<&str> = state.iter().map(|(name, _)| name).collect();
        assert_eq!(found, ["embedding.weight", "head.bias"]);
        init::zeros_(&loaded.head.weight).unwrap();
        let keys = LoadStateDict::new(&state).into(&loaded).unwrap();
        assert!(keys.missing_keys.is_empty() && keys.unexpected_keys.is_empty());
        assert_eq!(*loaded.head.weight, *saved.embedding.weight);
        let mut by_trait = Tied::new().unwrap();
        by_trait.load_state_dict(&state).unwrap();
        assert_eq!(*by_trait.head.weight, *saved.embedding.weight);
    }
}
