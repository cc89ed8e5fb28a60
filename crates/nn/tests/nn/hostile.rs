//! Damaged and malicious safetensors files, and indexes that do not agree with theirs.

use std::fs;
use std::path::Path;

use overdrive_core::Entry;
use overdrive_nn::{FileError, StateDict, load_safetensors, save_safetensors, save_sharded};
use tch::{Device, Kind, Tensor};

fn state() -> StateDict {
    let mut state = StateDict::new();
    for (name, kind) in [("a", Kind::Float), ("b", Kind::Int64), ("c", Kind::Bool), ("d", Kind::BFloat16)] {
        state.insert(name, Entry::Tensor(Tensor::ones([2, 3], (kind, Device::Cpu))));
    }
    state
}

/// A file with this header and so many bytes after it.
fn file(header: &str, body: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![1; body]].concat()
}

/// What is said of a file that is damaged.
fn damage(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    fs::write(&path, bytes).unwrap();
    damage_of(&path)
}

fn damage_of(path: &Path) -> String {
    match load_safetensors(path) {
        Err(error @ FileError::Damaged { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn headers_that_lie_are_an_error() {
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |first: &str, second: &str| {
        let info =
            |name: &str, offsets: &str| format!(r#""{name}":{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}"#);
        format!("{{{},{}}}", info("x", first), info("y", second))
    };
    let good = one("F32", "[2]", "[0,8]");
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("good.safetensors"), file(&good, 8)).unwrap();
    assert_eq!(load_safetensors(folder.path().join("good.safetensors")).unwrap().len(), 1);
    let twice = one("U8", "[4]", "[0,4]").replace(r#"}}"#, r#"},"x":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}"#);
    for (bytes, said) in [
        (Vec::new(), "has 0 bytes"),
        (vec![1; 7], "has 7 bytes"),
        (file(&good, 7), "need 8 bytes, but 7"),
        (file(&good, 9), "need 8 bytes, but 9"),
        (file("", 0), "EOF"),
        (file("[]", 0), "an object of tensors"),
        (file(r#"{"x":1}"#, 0), "struct TensorInfo"),
        (file("{\"\u{0}\":1}", 0), "control character"),
        (file(&two("[0,4]", "[2,6]"), 6), "offset"),
        (file(&two("[0,4]", "[0,4]"), 4), "offset"),
        (file(&two("[0,4]", "[5,9]"), 9), "offset"),
        (file(&one("U8", "[4]", "[4,8]"), 8), "offset"),
        (file(&one("U8", "[4]", "[4,0]"), 4), "offset"),
        (file(&one("U8", "[4]", "[0,18446744073709551615]"), 4), ""),
        (file(&one("U8", "[4]", "[0,18446744073709551616]"), 4), ""),
        (file(&one("U8", "[4]", "[-4,0]"), 4), ""),
        (file(&one("F32", "[4]", "[0,4]"), 4), ""),
        (file(&one("F31", "[1]", "[0,4]"), 4), "unknown variant `F31`"),
        (file(&one("U64", "[1]", "[0,8]"), 8), "`x` is of U64, which tch lacks"),
        (file(&one("F32", "[4294967296,4294967296]", "[0,0]"), 0), "verflow"),
        (file(&one("F32", "[9223372036854775807,4]", "[0,0]"), 0), "verflow"),
        (file(&one("F32", "[0,18446744073709551615]", "[0,0]"), 0), "has the shape"),
        (file(&one("F32", "[0,4294967296,4294967296]", "[0,0]"), 0), "has the shape"),
        (file(&one("BOOL", "[1]", "[0,1]"), 1).into_iter().chain([0]).collect(), "need 1 bytes"),
        (file(&twice, 4), "`x` is there twice"),
    ] {
        let found = damage(&bytes);
        assert!(found.contains(said), "{said:?} is not in {found:?}");
        assert!(found.contains("x.safetensors is damaged"), "{found}");
    }
    let mut two_is_no_bool = file(&one("BOOL", "[1]", "[0,1]"), 0);
    two_is_no_bool.push(2);
    assert!(damage(&two_is_no_bool).contains("0 or 1"));
    for length in [9, 1 << 20, 100_000_000, 100_000_001, u64::MAX / 2, u64::MAX] {
        assert!(damage(&[&length.to_le_bytes()[..], b"{}"].concat()).contains(&format!("header has {length} bytes")));
    }
}

#[test]
fn files_cut_off_anywhere_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    save_safetensors(&path, &state(), &[]).unwrap();
    let bytes = fs::read(&path).unwrap();
    for length in (0..bytes.len()).step_by(3) {
        fs::write(&path, &bytes[..length]).unwrap();
        damage_of(&path);
    }
}

#[test]
fn mutated_files_are_an_error_or_a_state() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    save_safetensors(&path, &state(), &[("note", "x")]).unwrap();
    let bytes = fs::read(&path).unwrap();
    let mut random = fastrand::Rng::with_seed(3);
    let (mut read, mut damaged) = (0, 0);
    for _ in 0..2000 {
        let mut bytes = bytes.clone();
        for _ in 0..=random.usize(..3) {
            let at = random.usize(..bytes.len());
            match random.usize(..4) {
                0 => bytes[at] ^= 1 << random.u32(..8),
                1 => bytes[at] = b'0' + random.u8(..10),
                2 => drop(bytes.remove(at)),
                _ => bytes.insert(at, random.u8(..)),
            }
        }
        fs::write(&path, bytes).unwrap();
        match load_safetensors(&path) {
            Ok(_) => read += 1,
            Err(FileError::Damaged { .. }) => damaged += 1,
            Err(error) => panic!("{error:?}"),
        }
    }
    assert!(read > 10 && damaged > 1000, "{read} read, {damaged} damaged");
}

/// A folder with one shard for each of a, b, c and d, and an index that was changed.
fn changed_index(change: impl Fn(&str) -> String) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    save_sharded(folder.path(), &state(), 1).unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    assert_eq!(load_safetensors(&index).unwrap().len(), 4);
    let changed = change(&text);
    assert_ne!(changed, text);
    fs::write(&index, changed).unwrap();
    let found = damage_of(folder.path());
    (folder, found)
}

#[test]
fn an_index_that_leaves_the_folder_is_refused() {
    let outside = tempfile::tempdir().unwrap();
    save_safetensors(outside.path().join("evil.safetensors"), &state(), &[]).unwrap();
    let absolute = outside.path().join("evil.safetensors").display().to_string();
    for name in
        ["../evil.safetensors", "./model-00001-of-00004.safetensors", "sub/x.safetensors", "..", ".", "", &absolute]
    {
        let (_folder, found) = changed_index(|text| text.replacen("model-00001-of-00004.safetensors", name, 1));
        assert!(found.contains(&format!("{name:?} is not the name of a file beside it")), "{found}");
    }
}

#[test]
fn an_index_that_disagrees_with_its_files_is_an_error() {
    let (first, second) = ("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors");
    let (_folder, found) = changed_index(|text| text.replace(second, first));
    assert!(found.contains(r#"`b` should be in "model-00001-of-00004.safetensors", but is not"#), "{found}");
    let (_folder, found) = changed_index(|text| text.replace("\"a\"", "\"A\""));
    assert!(found.contains("`a` of \"model-00001-of-00004.safetensors\" is not in the index"), "{found}");
    let (_folder, found) = changed_index(|text| text.replace("\"weight_map\"", "\"weights\""));
    assert!(found.contains("weight_map"), "{found}");
    let (_folder, found) = changed_index(|text| text[..text.len() / 2].to_owned());
    assert!(found.contains("EOF"), "{found}");
}

#[test]
fn a_tensor_in_two_files_or_a_missing_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    save_sharded(folder.path(), &state(), 1).unwrap();
    let shard = |number: usize| folder.path().join(format!("model-0000{number}-of-00004.safetensors"));
    let mut both = StateDict::new();
    for name in ["a", "b"] {
        both.insert(name, Entry::Tensor(Tensor::ones([1], (Kind::Float, Device::Cpu))));
    }
    let first = fs::read(shard(1)).unwrap();
    save_safetensors(shard(1), &both, &[]).unwrap();
    let found = damage_of(folder.path());
    assert!(found.contains("`b` should be in \"model-00002-of-00004.safetensors\", but is in"), "{found}");
    fs::write(shard(1), first).unwrap();
    assert_eq!(load_safetensors(folder.path()).unwrap().len(), 4);
    fs::remove_file(shard(3)).unwrap();
    match load_safetensors(folder.path()) {
        Err(FileError::Io { path, .. }) => assert_eq!(path, shard(3)),
        other => panic!("{other:?}"),
    }
}
