//! Folders of `torch.distributed.checkpoint`: read as Python does, and damaged ones are errors.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_core::Entry;
use overdrive_nn::{FileError, StateDict, load_dcp, load_pt};
use tch::{Kind, Tensor};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dcp")
}

/// A copy that can be damaged.
fn copied() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

fn numbers(state: &StateDict, key: &str, shape: &[i64]) -> Vec<f32> {
    Vec::try_from(&state.tensor(key, shape, Kind::Float).unwrap().view([-1])).unwrap()
}

#[test]
fn shards_of_two_ranks_are_put_together() {
    let state = load_dcp(fixture(), |_| true).unwrap();
    assert_eq!(numbers(&state, "model.weight", &[3, 2]), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(numbers(&state, "model.bias", &[3]), [7.0, 8.0, 9.0]);
    assert_eq!((state.int("step").unwrap(), state.text("name").unwrap()), (3, "run"));
    assert!(matches!(state.get("count"), Ok(Entry::Tensor(count)) if count.equal(&Tensor::from(5i64))));
    assert_eq!(state.len(), 5);
    assert_eq!(state.nested("model").len(), 2, "what a model loads");
}

#[test]
fn only_what_is_wanted_is_read() {
    let folder = copied();
    // The first rank's shards are gone; the second has written what is the same on both.
    fs::remove_file(folder.path().join("__0_0.distcp")).unwrap();
    let told = load_dcp(folder.path(), |name| name.starts_with("model.")).unwrap_err();
    assert!(matches!(&told, FileError::Io { path, .. } if path.ends_with("__0_0.distcp")), "{told}");
    let state = load_dcp(folder.path(), |name| !name.starts_with("model.")).unwrap();
    assert_eq!((state.len(), state.int("step").unwrap()), (3, 3));
    assert_eq!(load_dcp(folder.path(), |_| false).unwrap().len(), 0);
}

/// Every cut and many flipped bytes: an error or a state, never a panic or a large allocation.
#[test]
fn damaged_folders_are_errors() {
    let folder = copied();
    let path = folder.path().join(".metadata");
    let whole = fs::read(&path).unwrap();
    for end in (0..whole.len()).step_by(7) {
        fs::write(&path, &whole[..end]).unwrap();
        let told = load_dcp(folder.path(), |_| true).unwrap_err();
        assert!(matches!(told, FileError::Damaged { .. } | FileError::Refused { .. }), "{end}: {told}");
    }
    for at in 0..whole.len() {
        let mut other = whole.clone();
        other[at] ^= 0xff;
        fs::write(&path, &other).unwrap();
        let _ = load_dcp(folder.path(), |_| true);
    }
    fs::write(&path, &whole).unwrap();
    let chunks = folder.path().join("__0_0.distcp");
    let bytes = fs::read(&chunks).unwrap();
    fs::write(&chunks, &bytes[..bytes.len() / 2]).unwrap();
    let told = load_dcp(folder.path(), |_| true).unwrap_err();
    assert!(matches!(told, FileError::Damaged { .. }), "{told}");
}

/// Other classes than those of metadata are refused by name, and those of metadata in a `.pt` file.
#[test]
fn classes_that_metadata_do_not_need_are_refused() {
    let folder = copied();
    let path = folder.path().join(".metadata");
    fs::write(&path, b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.").unwrap();
    let told = load_dcp(folder.path(), |_| true).unwrap_err();
    assert!(matches!(&told, FileError::Refused { what, .. } if what == "`posix.system`"), "{told}");
    // A file that leads out of the folder.
    let whole = fs::read(fixture().join(".metadata")).unwrap();
    let at = whole.windows(12).position(|it| it == b"__0_0.distcp").unwrap();
    let mut other = whole.clone();
    other[at..at + 12].copy_from_slice(b"../../x.dist");
    fs::write(&path, &other).unwrap();
    let told = load_dcp(folder.path(), |_| true).unwrap_err();
    assert!(matches!(&told, FileError::Damaged { what, .. } if what.contains("beside it")), "{told}");
    let legacy = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.}.";
    let pickle = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.]." as &[u8];
    let file = folder.path().join("state.pt");
    fs::write(&file, [&legacy[..], pickle].concat()).unwrap();
    let told = load_pt(&file).unwrap_err();
    assert!(matches!(&told, FileError::Refused { what, .. } if what.contains("Metadata")), "{told}");
}
