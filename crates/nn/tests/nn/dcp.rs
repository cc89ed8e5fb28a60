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

/// The parts of a pickle of metadata.
mod pickle {
    pub fn text(text: &str) -> Vec<u8> {
        [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
    }

    pub fn int(number: i64) -> Vec<u8> {
        [&b"\x8a\x08"[..], &number.to_le_bytes()].concat()
    }

    pub fn global(name: &str) -> Vec<u8> {
        let (module, name) = name.rsplit_once('.').unwrap();
        format!("c{module}\n{name}\n").into_bytes()
    }

    pub fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
        [b"(", &items.concat()[..], b"t"].concat()
    }

    pub fn size(sizes: &[i64]) -> Vec<u8> {
        let sizes: Vec<_> = sizes.iter().map(|&side| int(side)).collect();
        [&global("torch.Size")[..], &tuple(&sizes), b"\x85R"].concat()
    }

    pub fn dict(pairs: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
        let pairs: Vec<u8> = pairs.iter().flat_map(|(key, value)| [&key[..], value].concat()).collect();
        [b"}(", &pairs[..], b"u"].concat()
    }

    pub fn object(class: &str, fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (text(name), value.clone())).collect();
        let class = global(&format!("torch.distributed.checkpoint.{class}"));
        [&class[..], b")\x81", &dict(&fields), b"b"].concat()
    }
}

/// A tensor in metadata: its dtype, its shape, and its chunks with offsets, sizes, and where each is in `data.distcp`.
struct Saved<'a> {
    dtype: &'a str,
    shape: &'a [i64],
    chunks: Vec<Chunk<'a>>,
}

type Chunk<'a> = (&'a [i64], &'a [i64], (i64, i64));

/// Metadata of these tensors, whole.
fn metadata(tensors: &[(&str, Saved<'_>)]) -> Vec<u8> {
    use pickle::{dict, global, int, object, size, text};
    let (mut entries, mut places) = (Vec::new(), Vec::new());
    for (name, saved) in tensors {
        let chunk = |(offsets, sizes, _): &Chunk<'_>| {
            object("metadata.ChunkStorageMetadata", &[("offsets", size(offsets)), ("sizes", size(sizes))])
        };
        let chunks: Vec<Vec<u8>> = saved.chunks.iter().map(chunk).collect();
        let properties = object("metadata.TensorProperties", &[("dtype", global(&format!("torch.{}", saved.dtype)))]);
        let chunks = [b"](", &chunks.concat()[..], b"e"].concat();
        let fields = [("properties", properties), ("size", size(saved.shape)), ("chunks", chunks)];
        entries.push((text(name), object("metadata.TensorStorageMetadata", &fields)));
        for (offsets, _, (offset, length)) in &saved.chunks {
            let index = object("metadata.MetadataIndex", &[("fqn", text(name)), ("offset", size(offsets))]);
            let fields = [("relative_path", text("data.distcp")), ("offset", int(*offset)), ("length", int(*length))];
            places.push((index, object("filesystem._StorageInfo", &fields)));
        }
    }
    let fields = [("state_dict_metadata", dict(&entries)), ("storage_data", dict(&places))];
    [b"\x80\x02", &object("metadata.Metadata", &fields)[..], b"."].concat()
}

/// A folder whose `data.distcp` has these values one after another, each as torch.save would write it.
struct Folder(tempfile::TempDir, Vec<(i64, i64)>);

impl Folder {
    fn new(values: &[&[f32]]) -> Self {
        let (mut bytes, mut places) = (Vec::new(), Vec::new());
        for values in values {
            let pickle = super::hostile_pt::tensor(values.len() as i64, 0, &[values.len() as i64], &[1]);
            let data = values.iter().flat_map(|it| it.to_le_bytes()).collect();
            let saved = super::hostile_pt::zipped(&[b"\x80\x02", &pickle[..], b"."].concat(), &[data]);
            places.push((bytes.len() as i64, saved.len() as i64));
            bytes.extend(saved);
        }
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("data.distcp"), bytes).unwrap();
        Self(folder, places)
    }

    fn load(&self, metadata: &[u8], wanted: impl Fn(&str) -> bool) -> Result<StateDict, FileError> {
        fs::write(self.0.path().join(".metadata"), metadata).unwrap();
        load_dcp(self.0.path(), wanted)
    }

    fn damage(&self, tensors: &[(&str, Saved<'_>)]) -> String {
        match self.load(&metadata(tensors), |_| true) {
            Err(FileError::Damaged { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn each_element_is_in_one_chunk() {
    let folder = Folder::new(&[&[1.0, 2.0], &[3.0, 4.0]]);
    let (one, two) = (folder.1[0], folder.1[1]);
    let of = |shape: &'static [i64], chunks| [("weight", Saved { dtype: "float32", shape, chunks })];
    let state = folder.load(&metadata(&of(&[4], vec![(&[2], &[2], two), (&[0], &[2], one)])), |_| true).unwrap();
    assert_eq!(numbers(&state, "weight", &[4]), [1.0, 2.0, 3.0, 4.0]);
    // Elements that are there twice, so that others are not.
    let told = folder.damage(&of(&[4], vec![(&[0], &[2], one), (&[1], &[2], two)]));
    assert!(told.contains("overlap") && told.contains("[0] and [1]"), "{told}");
    let told = folder.damage(&of(&[4], vec![(&[0], &[2], one), (&[0], &[2], two)]));
    assert!(told.contains("twice"), "{told}");
    // Too few, and too many.
    let told = folder.damage(&of(&[5], vec![(&[0], &[2], one), (&[2], &[2], two)]));
    assert!(told.contains("4 elements"), "{told}");
    let told = folder.damage(&of(&[3], vec![(&[0], &[2], one), (&[1], &[2], two)]));
    assert!(told.contains("4 elements"), "{told}");
    let told = folder.damage(&of(&[3], vec![(&[0], &[2], one), (&[2], &[2], two)]));
    assert!(told.contains("beyond"), "{told}");
}

/// Places that are no part of a file, and sizes that need far more memory than the files have bytes.
#[test]
fn no_memory_is_taken_for_what_the_files_do_not_have() {
    let folder = Folder::new(&[&[1.0, 2.0]]);
    let (place, whole) = (folder.1[0], 1i64 << 34);
    let before = super::hostile_pt::peak();
    let of = |shape: &'static [i64], chunks| [("weight", Saved { dtype: "float32", shape, chunks })];
    // The metadata say that the file has 64 GiB.
    let told = folder.damage(&of(&[1 << 34], vec![(&[0], &[1 << 34], (0, 4 * whole))]));
    assert!(told.contains("cut off"), "{told}");
    let told = folder.damage(&of(&[2], vec![(&[0], &[2], (i64::MAX, place.1))]));
    assert!(told.contains("cut off"), "{told}");
    let told = folder.damage(&of(&[1 << 34], vec![(&[0], &[1 << 34], place)]));
    assert!(told.contains("bytes in the files"), "{told}");
    // The same bytes many times.
    let offsets: Vec<[i64; 1]> = (0..20_000).map(|number| [2 * number]).collect();
    let chunks = offsets.iter().map(|offset| (&offset[..], &[2i64][..], place)).collect();
    let told = folder.damage(&[("weight", Saved { dtype: "float32", shape: &[40_000], chunks })]);
    assert!(told.contains("cut off"), "{told}");
    assert!(super::hostile_pt::peak() - before < super::hostile_pt::MOST_GROWTH);
}

#[test]
fn flipped_bits_of_chunks_are_noticed() {
    let folder = copied();
    let path = folder.path().join("__0_0.distcp");
    let whole = fs::read(&path).unwrap();
    // The bias' first numbers.
    let at = whole.windows(8).position(|it| it == [7.0f32.to_le_bytes(), 8.0f32.to_le_bytes()].concat()).unwrap();
    let mut other = whole.clone();
    other[at] ^= 1;
    fs::write(&path, other).unwrap();
    let told = load_dcp(folder.path(), |_| true).unwrap_err();
    assert!(matches!(&told, FileError::Damaged { what, .. } if what.contains("checksum")), "{told}");
}

/// A small pickle whose objects double: by a state that is the object itself, and by two that are each other's.
#[test]
fn objects_that_are_their_own_state_do_not_grow() {
    let folder = Folder::new(&[&[1.0]]);
    let before = super::hostile_pt::peak();
    let object = |place: u8| {
        let class = pickle::global("torch.distributed.checkpoint.metadata.Metadata");
        [&class[..], b")\x81q", &[place]].concat()
    };
    let fill = b"}(X\x01\x00\x00\x00aN".iter().chain(b"ub").copied().collect::<Vec<u8>>();
    for mutual in [false, true] {
        let (first, second) = (object(0), object(1));
        let twice: &[u8] = if mutual { b"h\x00h\x01b0h\x01h\x00b0" } else { b"h\x00h\x00b0h\x01h\x01b0" };
        let bytes = [b"\x80\x02", &first[..], &fill, &second, &fill, &twice.repeat(60), b"."].concat();
        let told = folder.load(&bytes, |_| true).unwrap_err();
        assert!(matches!(told, FileError::Damaged { .. }), "{told}");
    }
    // A long name many times.
    let name = [&pickle::text(&"a".repeat(1_000_000))[..], b"q\x00"].concat();
    let index = |number: u32| {
        let class = pickle::global("torch.distributed.checkpoint.metadata.MetadataIndex");
        [
            &class[..],
            b")\x81}(X\x03\x00\x00\x00fqnh\x00X\x06\x00\x00\x00offset",
            &b"J"[..],
            &number.to_le_bytes(),
            b"\x85ubN",
        ]
        .concat()
    };
    let places = [b"}(", &(0..20_000).flat_map(index).collect::<Vec<_>>()[..], b"u"].concat();
    let fields = [("state_dict_metadata", b"}".to_vec()), ("storage_data", places)];
    let bytes = [b"\x80\x02", &name[..], b"0", &pickle::object("metadata.Metadata", &fields), b"."].concat();
    let told = folder.load(&bytes, |_| false).unwrap_err();
    assert!(matches!(&told, FileError::Damaged { what, .. } if what.contains("too long")), "{told}");
    assert!(super::hostile_pt::peak() - before < super::hostile_pt::MOST_GROWTH);
}

/// Of an optimizer beside a model, say.
#[test]
fn what_is_not_wanted_may_be_anything() {
    let folder = Folder::new(&[&[1.0, 2.0]]);
    let place = folder.1[0];
    let model = || ("model.weight", Saved { dtype: "float32", shape: &[2], chunks: vec![(&[0], &[2], place)] });
    let others: [(&str, Saved<'_>); 3] = [
        ("optim.codes", Saved { dtype: "uint16", shape: &[2], chunks: vec![(&[0], &[2], place)] }),
        (
            "optim.overlaps",
            Saved { dtype: "float32", shape: &[2], chunks: vec![(&[0], &[2], place), (&[1], &[1], place)] },
        ),
        ("optim.far", Saved { dtype: "float32", shape: &[2], chunks: vec![(&[0], &[2], (1 << 40, place.1))] }),
    ];
    for (name, saved) in others {
        let bytes = metadata(&[model(), (name, saved)]);
        let state = folder.load(&bytes, |name| name.starts_with("model.")).unwrap();
        assert_eq!((state.len(), numbers(&state, "model.weight", &[2])), (1, vec![1.0, 2.0]));
        let told = folder.load(&bytes, |_| true).unwrap_err();
        match name {
            "optim.codes" => assert!(
                matches!(&told, FileError::Refused { what, .. } if what == "`optim.codes` of the dtype `torch.uint16`"),
                "{told}"
            ),
            _ => assert!(matches!(told, FileError::Damaged { .. }), "{told}"),
        }
    }
}
