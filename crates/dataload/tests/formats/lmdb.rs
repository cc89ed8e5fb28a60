use std::fs;
use std::io::Write;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;
use overdrive_dataload::{DataError, DataLoader, Dataset, LmdbDataset, LmdbSample};
use tempfile::TempDir;

use crate::{fixture, names_file, sample};

/// The page size of every fixture.
const PAGE: usize = 4096;

pub fn database(name: &str) -> PathBuf {
    fixture("lmdb").join(name)
}

pub fn entries(dataset: &LmdbDataset) -> Vec<(Vec<u8>, Vec<u8>)> {
    let entry = |sample: LmdbSample| (sample.key().to_vec(), sample.into_value());
    (0..dataset.len()).map(|index| entry(dataset.get(index).unwrap())).collect()
}

/// A file with these bytes, in a folder that is deleted when the first value is dropped.
pub fn file(bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("some.mdb");
    fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn open_error(path: impl Into<PathBuf>, name: &str) -> String {
    names_file(&LmdbDataset::open(path).unwrap_err(), name)
}

#[test]
fn databases_that_python_wrote_read_back_with_equal_content() {
    let dataset = LmdbDataset::open(database("values.mdb")).unwrap();
    let mut expected: Vec<(Vec<u8>, Vec<u8>)> =
        (0..300).map(|i| (format!("{i:08}").into_bytes(), format!("value {i}").into_bytes())).collect();
    expected.push((vec![b'k'; 511], b"the longest key".to_vec()));
    for size in [0, 1, 4096, 40000] {
        expected.push((format!("size-{size:05}").into_bytes(), (0..size).map(|j| (j * 7) as u8).collect()));
    }
    assert_eq!(entries(&dataset), expected);
    assert!(dataset.keys().eq(expected.iter().map(|(key, _)| &**key)));
    assert!(!dataset.has_checksums());
    assert_eq!(dataset.index_of(b"size-40000"), Some(304));
    assert_eq!((dataset.index_of(b"size"), dataset.key_bytes(305)), (None, None));
    assert_eq!(dataset.with_value(304, <[u8]>::len).unwrap(), 40000);
    assert!(matches!(dataset.get(305), Err(DataError::IndexOutOfRange { index: 305, len: 305 })));

    // By its folder, or by the file in it.
    for name in ["folder", "folder/data.mdb"] {
        let dataset = LmdbDataset::open(database(name)).unwrap();
        let expected: Vec<_> = (0..6).map(|i| (i.to_string().into_bytes(), sample(i + 2))).collect();
        assert_eq!(entries(&dataset), expected);
    }
    assert!(LmdbDataset::open(database("empty.mdb")).unwrap().is_empty());
    assert_eq!(entries(&LmdbDataset::open(database("one.mdb")).unwrap()), [(b"only".to_vec(), sample(5))]);
    let left: Vec<_> = fs::read_dir(database("folder")).unwrap().collect();
    assert_eq!(left.len(), 1, "no lock file: {left:?}");
}

#[test]
fn named_databases() {
    let open = |name: &str| LmdbDataset::builder(database("named.mdb")).database(name).open();
    let expected: Vec<_> = (0..5).map(|i| (i.to_string().into_bytes(), sample(i))).collect();
    assert_eq!(entries(&open("train").unwrap()), expected);
    assert_eq!(entries(&open("test").unwrap()), [(b"0".to_vec(), b"only".to_vec())]);
    for name in ["twice", "numbers"] {
        assert!(names_file(&open(name).unwrap_err(), "named.mdb").contains("plain keys"));
    }
    for error in [open("val").unwrap_err(), LmdbDataset::open(database("named.mdb")).unwrap_err()] {
        let text = names_file(&error, "named.mdb");
        assert!(text.contains(r#""numbers", "test", "train", "twice""#), "{text}");
    }
    assert!(matches!(open("train\0"), Err(DataError::InvalidOption { .. })));
}

#[test]
fn workers_of_a_loader_share_a_database() {
    let dataset = LmdbDataset::builder(database("values.mdb")).read_ahead(false).open().unwrap();
    let texts: Vec<usize> =
        (0..dataset.len()).filter(|&i| !dataset.key_bytes(i).unwrap().starts_with(b"size")).collect();
    let expected: Vec<_> = texts.iter().map(|&i| dataset.get(i).unwrap().into_value()).collect();
    let dataset = dataset.subset(texts).unwrap().map(|sample| Ok(sample.into_value()));
    let listed = |samples: Vec<Vec<u8>>| Ok(samples);
    let loader = DataLoader::builder(dataset).batch_size(7).num_workers(4).collate(listed).build().unwrap();
    for epoch in 0..20 {
        let found: Vec<Vec<u8>> = loader.epoch(epoch).flat_map(Result::unwrap).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn an_index_replaces_the_scan_until_the_database_changes() {
    let (dir, path) = file(&fs::read(database("values.mdb")).unwrap());
    let index = dir.path().join("index");
    let open = || LmdbDataset::builder(&path).index_file(&index).open();
    let expected = entries(&open().unwrap());
    let written = fs::read(&index).unwrap();
    assert_eq!(entries(&open().unwrap()), expected);

    // Any kind of damage makes the index be written again.
    let cuts = (20..written.len()).step_by(97).map(|cut| written[..cut].to_vec());
    let flips = (8..written.len()).step_by(89).map(|at| {
        let mut flipped = written.clone();
        flipped[at] ^= 0x04;
        flipped
    });
    for damaged in cuts.chain(flips) {
        fs::write(&index, damaged).unwrap();
        assert_eq!(entries(&open().unwrap()), expected);
        assert_eq!(fs::read(&index).unwrap(), written);
    }
    // Another file under the same name.
    fs::write(&path, fs::read(database("one.mdb")).unwrap()).unwrap();
    assert_eq!(entries(&open().unwrap()).len(), 1);
    assert_ne!(fs::read(&index).unwrap(), written);
    // Another database in the file.
    let named = |name: &str| LmdbDataset::builder(database("named.mdb")).database(name).index_file(&index).open();
    assert_eq!((named("train").unwrap().len(), named("test").unwrap().len()), (5, 1));

    // A file that is not an index is not overwritten.
    fs::write(&index, "my notes").unwrap();
    names_file(&open().unwrap_err(), "index: at byte 0");
    assert_eq!(fs::read(&index).unwrap(), b"my notes");
    // An index is never compressed; a compressed file is refused, since it could decompress to any size.
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(&written).unwrap();
    fs::write(&index, packed.finish().unwrap()).unwrap();
    assert!(names_file(&open().unwrap_err(), "index: at byte 0").contains("compressed data"));
    let nowhere = LmdbDataset::builder(&path).index_file(dir.path().join("none/index")).open();
    assert!(matches!(nowhere, Err(DataError::Io { .. })));
}

#[test]
fn a_cut_anywhere_is_an_error() {
    for name in ["values.mdb", "one.mdb", "empty.mdb", "named.mdb"] {
        let whole = fs::read(database(name)).unwrap();
        for cut in (0..whole.len()).step_by(512).chain([1, 100, whole.len() - 1]) {
            let (_dir, path) = file(&whole[..cut]);
            open_error(&path, "some.mdb: at byte");
        }
    }
    assert!(matches!(LmdbDataset::open(database("none.mdb")), Err(DataError::Io { .. })));
    assert!(matches!(LmdbDataset::open(fixture("parquet")), Err(DataError::Io { .. })));
    names_file(&LmdbDataset::open(fixture("web-000.tar")).unwrap_err(), "at byte 16");
}

/// `one.mdb` with these bytes at an offset of its current meta page.
fn with_meta(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut whole = fs::read(database("one.mdb")).unwrap();
    let transaction = |page: usize| u64::from_le_bytes(whole[page * PAGE + 144..][..8].try_into().unwrap());
    let meta = if transaction(1) > transaction(0) { PAGE } else { 0 };
    whole[meta + at..][..bytes.len()].copy_from_slice(bytes);
    whole
}

#[test]
fn absurd_numbers_are_errors_with_their_offset() {
    let huge = u64::MAX.to_le_bytes();
    // Page flags, magic number, version, page size, depth, entries, root, last page.
    for (at, bytes) in [
        (10, &[0, 0][..]),
        (16, b"LMDB"),
        (20, &[2]),
        (40, &[0; 4]),
        (40, &[1, 16]),
        (40, &[0, 0, 1, 0]),
        (40, &[0, 0x20]),
        (94, &[0]),
        (94, &[2]),
        (94, &[33]),
        (120, &[2]),
        (120, &huge),
        (128, &[1]),
        (128, &[200]),
        (128, &huge),
        (136, &[200]),
        (136, &huge),
        (136, &huge[1..]),
    ] {
        let (_dir, path) = file(&with_meta(at, bytes));
        let error = LmdbDataset::open(&path).expect_err(&format!("{bytes:?} at {at}"));
        assert!(matches!(error, DataError::Corrupt { .. }), "{error}");
        names_file(&error, "some.mdb: at byte");
    }
    for flags in [2, 4, 8, 0x10, 0x80] {
        let (_dir, path) = file(&with_meta(92, &[flags]));
        assert!(matches!(LmdbDataset::open(&path), Err(DataError::Layout { .. })), "{flags:#x}");
    }
    // The declared map size is ignored.
    let (_dir, path) = file(&with_meta(32, &huge));
    assert_eq!(entries(&LmdbDataset::open(&path).unwrap()).len(), 1);
}

/// The offset of the only leaf of `one.mdb`.
fn leaf(whole: &[u8]) -> usize {
    (2 * PAGE..whole.len()).step_by(PAGE).find(|&page| whole[page + 10] == 2).unwrap()
}

#[test]
fn references_out_of_the_file_are_found_first() {
    let good = fs::read(database("values.mdb")).unwrap();
    let pages = || (2 * PAGE..good.len()).step_by(PAGE);
    let branch = pages().find(|&page| good[page + 10] == 1).unwrap();
    let big = leaf(&good);
    // A child's page number, the count of nodes, a node's offset, a node's key, the page's own number.
    let node = branch + usize::from(u16::from_le_bytes([good[branch + 16], good[branch + 17]]));
    for (at, bytes) in [
        (node, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff][..]),
        (node, &[0, 0]),
        (branch + 12, &[0xff, 0x0f]),
        (branch + 12, &[18, 0]),
        (branch + 16, &[0xff, 0x0f]),
        (branch + 16, &[0xfe, 0xff]),
        (branch + 16, &[0, 0]),
        (node + 6, &[0xff, 0xff]),
        (branch, &[0xff]),
        (big + 10, &[1]),
        (big + 10, &[0x22]),
        (big + 14, &[0xff, 0xff]),
    ] {
        let mut damaged = good.clone();
        damaged[at..][..bytes.len()].copy_from_slice(bytes);
        let (_dir, path) = file(&damaged);
        names_file(&LmdbDataset::open(&path).expect_err(&format!("{bytes:?} at {at}")), "some.mdb: at byte");
    }
    // The tree's root as its own child.
    let mut circle = good.clone();
    circle[node..][..2].copy_from_slice(&((branch / PAGE) as u16).to_le_bytes());
    let (_dir, path) = file(&circle);
    open_error(&path, "some.mdb: at byte");
}

#[test]
fn every_flipped_byte_is_an_error_or_other_data() {
    let whole = fs::read(database("one.mdb")).unwrap();
    let (_dir, path) = file(&whole);
    let value = whole.windows(100).position(|window| window == sample(5)).unwrap();
    for at in (0..whole.len()).filter(|&at| whole[at] != 0 || at % 8 == 0) {
        let mut flipped = whole.clone();
        flipped[at] ^= [0x01, 0x80, 0xff][at % 3];
        fs::write(&path, flipped).unwrap();
        let found = LmdbDataset::open(&path).map(|dataset| entries(&dataset));
        // The format has no checksum of values.
        if (value..value + 100).contains(&at) {
            assert_ne!(found.unwrap()[0].1, sample(5));
        }
    }
}
