use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use overdrive_dataload::{DataError, Dataset, LmdbDataset, LmdbWriter};

use crate::lmdb::entries;
use crate::{fixture, names_file, sample};

/// Large and small values, not in order.
fn content() -> Vec<(Vec<u8>, Vec<u8>)> {
    let key = |i: usize| format!("{:05}", i * 7919 % 1000).into_bytes();
    (0..200).map(|i| (key(i), if i % 50 == 7 { vec![i as u8; 40_000] } else { sample(i % 9) })).collect()
}

fn sorted() -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut all = content();
    all.sort();
    all
}

fn write(path: &Path, subdir: bool, checksums: bool, commit_every: usize) {
    let builder = LmdbWriter::builder(path).subdir(subdir).checksums(checksums).commit_every(commit_every);
    let mut writer = builder.create().unwrap();
    content().iter().for_each(|(key, value)| writer.write(key, value).unwrap());
    let file = if subdir { path.join("data.mdb") } else { path.to_owned() };
    assert!(!file.exists());
    assert_eq!(writer.finish().unwrap(), file);
    assert!(file.exists());
}

#[test]
fn written_entries_read_back() {
    let dir = tempfile::tempdir().unwrap();
    for (number, (subdir, checksums, commit_every)) in
        [(false, false, 10_000), (true, false, 1), (false, true, 7), (true, true, 10_000)].into_iter().enumerate()
    {
        let path = dir.path().join(number.to_string());
        write(&path, subdir, checksums, commit_every);
        let dataset = LmdbDataset::open(&path).unwrap();
        assert_eq!(dataset.has_checksums(), checksums);
        assert_eq!(entries(&dataset), sorted());
        let index = dir.path().join("index");
        for _ in 0..2 {
            let dataset = LmdbDataset::builder(&path).index_file(&index).open().unwrap();
            assert_eq!((dataset.has_checksums(), dataset.len()), (checksums, 200));
            assert_eq!(entries(&dataset), sorted());
        }
    }
    let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["0", "1", "2", "3", "index"]);
}

#[test]
fn a_database_outgrows_its_first_map() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.mdb");
    let value = |i: u8| vec![i; 30 << 20];
    let mut writer = LmdbWriter::builder(&path).create().unwrap();
    (0..3).for_each(|i| writer.write(&[b'a' + i], &value(i)).unwrap());
    writer.finish().unwrap();
    let dataset = LmdbDataset::open(&path).unwrap();
    for i in 0..3 {
        assert!(dataset.with_value(i.into(), |found| found == value(i)).unwrap());
    }
}

#[test]
fn an_earlier_database_stays_until_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.mdb");
    write(&path, false, false, 10);
    // The temporary file of an interrupted run is replaced.
    fs::copy(&path, dir.path().join("a.mdb.part")).unwrap();
    let mut writer = LmdbWriter::builder(&path).create().unwrap();
    writer.write(b"new", b"value").unwrap();
    assert_eq!(LmdbDataset::open(&path).unwrap().len(), 200);
    writer.finish().unwrap();
    assert_eq!(entries(&LmdbDataset::open(&path).unwrap()), [(b"new".to_vec(), b"value".to_vec())]);
    // A key that an earlier transaction wrote.
    let mut writer = LmdbWriter::builder(&path).commit_every(1).create().unwrap();
    writer.write(b"a", b"1").unwrap();
    let error = writer.write(b"a", b"2").unwrap_err();
    assert!(matches!(error, DataError::InvalidOption { option: "key", .. }), "{error}");
}

#[test]
fn checksums_find_every_flipped_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("some.mdb");
    let mut writer = LmdbWriter::builder(&path).checksums(true).create().unwrap();
    let expected: Vec<_> = (0..6).map(|i| (format!("key-{i}").into_bytes(), sample(i * 40 + 1))).collect();
    expected.iter().for_each(|(key, value)| writer.write(key, value).unwrap());
    writer.finish().unwrap();
    let good = fs::read(&path).unwrap();
    let found = |damaged: &[u8]| -> Result<_, DataError> {
        fs::write(&path, damaged).unwrap();
        let dataset = LmdbDataset::open(&path)?;
        let all: Result<Vec<_>, _> = (0..dataset.len()).map(|index| dataset.get(index)).collect();
        let all = all?.into_iter().map(|sample| (sample.key().to_vec(), sample.into_value())).collect::<Vec<_>>();
        Ok((dataset.has_checksums(), all))
    };
    let mark = good.windows(10).position(|window| window == b"__crc32c__").unwrap();
    let mut errors = 0;
    for at in (0..good.len()).filter(|&at| good[at] != 0 && at % 3 == 0 || at % 4096 < 160) {
        let mut damaged = good.clone();
        damaged[at] ^= 0x20;
        match found(&damaged) {
            Err(error) => {
                names_file(&error, "some.mdb");
                errors += 1;
            }
            // A byte in unused space.
            Ok((true, all)) => assert_eq!(all, expected, "flipped at {at}"),
            // The key of the checksums was changed, or a meta page's transaction number selects the state before they
            // were written.
            Ok((false, _)) => {
                let older = at < 8192 && (144..152).contains(&(at % 4096));
                assert!(older || (mark..mark + 10).contains(&at), "flipped at {at}");
            }
        }
    }
    let content: usize = expected.iter().map(|(_, value)| value.len()).sum();
    assert!(errors > content / 4, "{errors} errors");

    let place = good.windows(4020).position(|window| window == sample(201)).unwrap();
    let mut damaged = good.clone();
    damaged[place] ^= 1;
    fs::write(&path, &damaged).unwrap();
    let error = LmdbDataset::open(&path).unwrap().get(5).unwrap_err();
    assert!(names_file(&error, "some.mdb").contains("\"key-5\""), "{error}");
    assert!(matches!(error, DataError::CorruptEntry { .. }));
    let unchecked = LmdbDataset::builder(&path).verify_crc(false).open().unwrap();
    assert!(!unchecked.has_checksums());
    assert_ne!(unchecked.get(5).unwrap().value(), sample(201));
}

/// Needs a Python with the package `lmdb`; `OVERDRIVE_PYTHON` sets the interpreter.
#[test]
fn python_reads_what_is_written() {
    let python = env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    if !Command::new(&python).args(["-c", "import lmdb"]).output().is_ok_and(|output| output.status.success()) {
        println!("skipped: no Python with the package lmdb");
        return;
    }
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let expected: Vec<_> = sorted().iter().map(|(key, value)| format!("{} {}", hex(key), hex(value))).collect();
    let dir = tempfile::tempdir().unwrap();
    for (name, subdir, checksums) in [("file", false, false), ("folder", true, true)] {
        let path = dir.path().join(name);
        write(&path, subdir, checksums, 50);
        let script = fixture("lmdb").join("read.py");
        let output = Command::new(&python).arg(script).arg(&path).args(subdir.then_some("subdir")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let checksums_key = hex(b"__crc32c__");
        let found: Vec<_> = text.lines().filter(|line| !line.starts_with(&checksums_key)).collect();
        assert_eq!((found.len(), text.lines().count()), (200, 200 + usize::from(checksums)));
        assert_eq!(found, expected);
    }
}
