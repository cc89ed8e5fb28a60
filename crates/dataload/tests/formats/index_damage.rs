//! Indexes that are damaged, or those of other shards, and damaged shards with a good index: nothing is silently wrong.

use std::fs;
use std::path::Path;

use overdrive_dataload::{
    DataError, Dataset, IterableDataset, ShardListDataset, StreamPosition, TfRecordWriter, WebDataset,
    WebDatasetWriter, WebSample,
};

use crate::indexes::{content, index_of, records, tar, tfrecord, web};
use crate::{fixture, names_file};

fn keys(dataset: &WebDataset) -> Vec<Option<String>> {
    dataset.stream([0]).map(|item| item.ok().map(|sample| sample.key().to_owned())).collect()
}

/// Writes an index, and asserts that it is refused by name, and that the stream does without.
fn assert_refused(shard: &Path, index: &[u8], part: &str, all: impl Fn() -> usize, list: impl Fn() -> DataError) {
    fs::write(index_of(shard), index).unwrap();
    let before = all();
    let text = names_file(&list(), index_of(shard).to_str().unwrap());
    assert!(text.contains(part), "{text} does not say {part}");
    fs::remove_file(index_of(shard)).unwrap();
    assert_eq!(all(), before);
}

#[test]
fn an_index_of_another_shard_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let shard = dir.path().join("web-001.tar");
    fs::copy(fixture("web-001.tar"), &shard).unwrap();
    let good = fs::read_to_string(fixture("index/web-001.idx")).unwrap();
    let lines: Vec<&str> = good.lines().collect();
    let of = |count: usize, lines: &[&str]| format!("v1.2 {count}\n{}\n", lines.join("\n")).into_bytes();
    let all = || {
        let samples: Vec<_> = web(&shard).stream([0]).map(Result::unwrap).collect();
        assert_eq!(samples.len(), 4);
        samples.len()
    };
    let refused = |index: &[u8], part: &str| {
        assert_refused(&shard, index, part, all, || ShardListDataset::new(web(&shard)).unwrap_err());
    };
    refused(&of(3, &[lines[1], lines[3], lines[4]]), "lacks the file \"train/0005.bin\" at byte 4096");
    refused(&of(3, &lines[2..]), "lacks the file \"train/0004.bin\" at byte 0");
    refused(&of(3, &lines[1..4]), "lacks the file \"train/0007.bin\" at byte");
    refused(&of(4, &lines[1..4]), "line 1: expected 4 samples, as it says, found 3");
    refused(&of(4, &[lines[2], lines[1], lines[3], lines[4]]), "line 3: expected an offset");
    refused(&of(5, &[lines[1], lines[1], lines[2], lines[3], lines[4]]), "line 3: expected an offset");
    refused(&of(4, &[lines[1], lines[2], lines[3], "bin 9223372036854774784 18446744073709551000 a/b.bin"]), "line 5");
    refused(&of(4, &[lines[1], lines[2], lines[3], "bin 12800 99999999 a/b.bin"]), "of a shard of 20480 bytes");
    refused(&of(4, &[lines[1], lines[2], lines[3], "bin 12801 1 a/b.bin"]), "a multiple of 512");
    // The last file of the last sample.
    let cut = lines[4].rsplit_once(" txt").unwrap().0;
    refused(&of(4, &[lines[1], lines[2], lines[3], cut]), "lacks the file \"train/0007.txt\"");
    refused(good.replace("0007.txt", "0007-txt").as_bytes(), "lacks the file \"train/0007.txt\"");
    refused(good.replace("v1.2", "v1.1").as_bytes(), "line 1: expected the index of a tar file");
    refused(good.replace(" train/0006.cls", "").as_bytes(), "line 4");
    refused(good.replace("train/0006.cls", "train/0016.cls").as_bytes(), "line 4: expected files of \"train/0006\"");
    refused(b"", "line 1");
    refused(b"\xff\xfe\0", "expected text");
    // Parts of the index of another shard.
    let other = dir.path().join("web-000.tar");
    fs::copy(fixture("web-000.tar"), &other).unwrap();
    web(&other).write_index(0).unwrap();
    refused(&fs::read(index_of(&other)).unwrap(), "web-001.tar.idx: expected the index of");
    let missing = ShardListDataset::new(web(&shard)).unwrap_err();
    assert!(names_file(&missing, "web-001.tar").contains("`overdrive-data index`"), "{missing}");
}

#[test]
fn an_index_of_another_file_of_records_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let shard = dir.path().join("examples.tfrecord");
    fs::copy(fixture("examples.tfrecord"), &shard).unwrap();
    let good = fs::read_to_string(fixture("index/examples.tfrecord.idx")).unwrap();
    let all = || {
        let samples: Vec<_> = tfrecord(&shard).stream([0]).map(Result::unwrap).collect();
        assert_eq!(samples.len(), 6);
        samples.len()
    };
    let refused = |index: &str, part: &str| {
        assert_refused(&shard, index.as_bytes(), part, all, || ShardListDataset::new(tfrecord(&shard)).unwrap_err());
    };
    refused("", "ends at byte 0, of a file of 1212 bytes");
    refused(good.trim_end().rsplit_once('\n').unwrap().0, "ends at byte 963, of a file of 1212 bytes");
    refused(good.split_once('\n').unwrap().1, "line 1: expected a record of 16 bytes or more at byte 0");
    refused(&good.replace("336 189", "336 190"), "line 4: expected a record of 16 bytes or more at byte 526");
    refused(&good.replace("158 178\n", ""), "line 2");
    refused(&good.replace("0 158", "0 18446744073709551615"), "line 2");
    refused(&format!("{good}1212 18446744073709551615\n"), "line 7");
    refused("0 1\n", "line 1");
    refused("0 158 9\n", "line 1: expected the offset and the length of a record, found \"0 158 9\"");
    refused("v1.2 6\n", "line 1");
    let missing = ShardListDataset::new(tfrecord(&shard)).unwrap_err();
    assert!(names_file(&missing, "examples.tfrecord").contains("`overdrive-data index`"), "{missing}");
}

/// The tail fits, so only reading shows that these are other samples.
#[test]
fn samples_that_are_not_where_the_index_has_them_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, samples: &[(&str, usize)]| {
        let pattern = format!("{}/{name}-%d.tar", dir.path().display());
        let mut writer = WebDatasetWriter::builder(pattern).index(true).build().unwrap();
        samples.iter().for_each(|(key, bytes)| writer.write(key, &[("bin", vec![7; *bytes])]).unwrap());
        writer.finish().unwrap().remove(0)
    };
    let before = write("before", &[("a", 9), ("b", 9), ("c", 9)]);
    let named = |key: &str| Some(key.to_owned());
    for (samples, found, part) in [
        (&[("a", 1500), ("c", 9)][..], vec![None, None, named("c")], "\"a\", which ends at byte 2048"),
        (&[("a", 9), ("x", 9), ("c", 9)], vec![named("a"), None, named("c")], "another one, \"x\""),
        (&[("x", 9), ("b", 9), ("y", 9)], vec![None, named("b"), None], "another one, \"x\""),
    ] {
        let now = write("now", samples);
        fs::copy(index_of(&before), index_of(&now)).unwrap();
        assert_eq!(keys(&web(&now)), found);
        let error = web(&now).stream([0]).find_map(Result::err).unwrap();
        let text = names_file(&error, now.to_str().unwrap());
        assert!(text.contains(part) && text.contains("the index beside the shard"), "{text}");
        let list = ShardListDataset::new(web(&now)).unwrap();
        let by_number = (0..list.len()).map(|index| list.get(index).ok().map(|sample| sample.key().to_owned()));
        assert!(by_number.eq(found));
    }
    // Records.
    let write = |name: &str, lengths: &[usize]| {
        let mut writer = TfRecordWriter::with_index(dir.path().join(name)).unwrap();
        lengths.iter().for_each(|&bytes| writer.write(&vec![bytes as u8; bytes]).unwrap());
        writer.finish().unwrap()
    };
    let (before, now) = (write("before.tfrecord", &[10, 20, 30]), write("now.tfrecord", &[20, 10, 30]));
    fs::copy(index_of(&before), index_of(&now)).unwrap();
    for verify in [true, false] {
        let items: Vec<_> = tfrecord(&now).verify_crc(verify).stream([0]).collect();
        assert_eq!(items.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, false, true]);
        let text = names_file(items[0].as_ref().unwrap_err(), now.to_str().unwrap());
        assert!(text.contains("at byte 0: expected a sample that ends at byte 26"), "{text}");
    }
}

#[test]
fn with_an_index_only_the_damaged_sample_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let shard = tar(dir.path(), "tar", 6, 100);
    let good = fs::read(&shard).unwrap();
    let samples: Vec<_> = web(&shard).stream([0]).map(Result::unwrap).collect();
    let header = 512 * good.chunks(512).position(|block| block.starts_with(b"train/0002.cls")).unwrap();
    for position in (header..header + 512).step_by(7) {
        let mut bytes = good.clone();
        bytes[position] ^= 0x11;
        fs::write(&shard, &bytes).unwrap();
        let items: Vec<_> = web(&shard).stream([0]).collect();
        assert_eq!(items.len(), 6, "flipped at {position}");
        let whole =
            |(item, sample): (&Result<WebSample, _>, &WebSample)| item.as_ref().is_ok_and(|item| item == sample);
        let lost: Vec<usize> = (0..6).filter(|&i| !whole((&items[i], &samples[i]))).collect();
        assert_eq!(lost, [2], "flipped at {position}");
        assert!(items[2].is_err(), "flipped at {position}");
        // A resumed reader counts the error as the first one did.
        let damaged = web(&shard);
        let rest = damaged.stream_from([0], StreamPosition { shard: 0, sample: 4 }).map(Result::unwrap);
        assert!(rest.eq(samples[4..].iter().cloned()), "flipped at {position}");
    }
    let shard = records(dir.path(), "tfrecord", 6, 10);
    let good = fs::read(&shard).unwrap();
    let samples: Vec<_> = tfrecord(&shard).stream([0]).map(Result::unwrap).collect();
    for position in 0..good.len() {
        let mut bytes = good.clone();
        bytes[position] ^= 0x10;
        fs::write(&shard, &bytes).unwrap();
        let items: Vec<_> = tfrecord(&shard).stream([0]).collect();
        let lost = items.iter().filter(|item| item.is_err()).count();
        assert_eq!((items.len(), lost), (6, 1), "flipped at {position}");
        assert!(items.iter().flatten().all(|item| samples.contains(item)), "flipped at {position}");
    }
}

/// A sample without the selected extensions is passed over, so damage to it is no item.
#[test]
fn damage_to_a_sample_that_is_not_selected_moves_no_position() {
    let dir = tempfile::tempdir().unwrap();
    let shard = tar(dir.path(), "tar", 7, 100);
    let open = || web(&shard).select(["cls"]);
    let whole: Vec<_> = open().stream([0]).map(|sample| content(sample.unwrap())).collect();
    assert_eq!(whole.len(), 4, "every third sample has no label");
    let mut bytes = fs::read(&shard).unwrap();
    let header = 512 * bytes.chunks(512).position(|block| block.starts_with(b"train/0003.bin")).unwrap();
    bytes[header + 3] ^= 1;
    fs::write(&shard, &bytes).unwrap();
    let dataset = open();
    for sample in 0..=5 {
        let rest = dataset.stream_from([0], StreamPosition { shard: 0, sample }).map(|it| content(it.unwrap()));
        assert!(rest.eq(whole[whole.len().min(sample as usize)..].iter().cloned()), "from {sample}");
    }
}

#[test]
#[cfg(feature = "zstd")]
fn damage_in_a_frame_loses_only_its_samples() {
    let dir = tempfile::tempdir().unwrap();
    let shard = tar(dir.path(), "tar.zst", 30, 70_000);
    let samples: Vec<_> = web(&shard).stream([0]).map(Result::unwrap).collect();
    let good = fs::read(&shard).unwrap();
    for position in [40, good.len() / 2, good.len() - 200_000] {
        let mut bytes = good.clone();
        bytes[position] ^= 0x10;
        fs::write(&shard, &bytes).unwrap();
        let items: Vec<_> = web(&shard).stream([0]).collect();
        assert_eq!(items.len(), 30);
        let lost = items.iter().filter(|item| item.is_err()).count();
        assert!((1..=10).contains(&lost), "flipped at {position}: {lost} are lost");
        for (i, item) in items.iter().enumerate() {
            match item {
                Ok(item) => assert!(*item == samples[i], "{i}"),
                Err(error) => assert!(names_file(error, "0.tar.zst").contains("at byte"), "{error}"),
            }
        }
    }
}

#[test]
fn shards_that_cannot_have_an_index_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        fs::copy(fixture(name), dir.path().join(name)).unwrap();
        dir.path().join(name)
    };
    for name in [
        "web.tar.gz",
        #[cfg(feature = "zstd")]
        "web.tar.zst",
    ] {
        let error = web(&copy(name)).write_index(0).unwrap_err();
        assert!(names_file(&error, name).contains("in frames with a table of them"), "{error}");
    }
    let error = tfrecord(&copy("examples.tfrecord.gz")).write_index(0).unwrap_err();
    names_file(&error, "examples.tfrecord.gz");
    assert!(TfRecordWriter::with_index(dir.path().join("a.tfrecord.gz")).is_err());
    let pattern = |ending: &str| format!("{}/a-%d.{ending}", dir.path().display());
    for ending in ["tar.gz", "tgz"] {
        assert!(WebDatasetWriter::builder(pattern(ending)).index(true).build().is_err());
    }
    // Spaces separate the words of an index.
    let mut writer = WebDatasetWriter::builder(pattern("tar")).index(true).build().unwrap();
    assert!(matches!(writer.write("a b", &[("txt", "x")]), Err(DataError::InvalidOption { option: "index", .. })));
    let mut writer = WebDatasetWriter::builder(pattern("tar")).build().unwrap();
    writer.write("a b", &[("txt", "x")]).unwrap();
    let error = web(&writer.finish().unwrap()[0]).write_index(0).unwrap_err();
    assert!(error.to_string().contains("\"a b.txt\""), "{error}");
    // A damaged shard.
    let shard = copy("web-001.tar");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[4096] ^= 1;
    fs::write(&shard, &bytes).unwrap();
    assert!(names_file(&web(&shard).write_index(0).unwrap_err(), "web-001.tar").contains("at byte 4096"));
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_str().unwrap().contains(".idx")), "{left:?}");
}
