use std::borrow::Cow;
use std::fs;
use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use overdrive_dataload::{
    Cancellation, DataError, Deferred, Example, Feature, IterableDataset, TfRecord, TfRecordDataset, TfRecordWriter,
    TfRecords,
};

use crate::{fixture, names_file, sample};

fn open(pattern: &str) -> TfRecordDataset {
    TfRecordDataset::open(fixture(pattern).to_str().unwrap()).unwrap()
}

fn read(bytes: &[u8]) -> TfRecords {
    TfRecords::from_bytes(bytes.to_vec(), Path::new("some.tfrecord")).unwrap()
}

fn expected(i: usize) -> Example<'static> {
    let names = [&b"a"[..], b"", b"c"].map(Cow::Borrowed).to_vec();
    Example::new()
        .with("image", Feature::Bytes(vec![sample(i).into()]))
        .with("names", Feature::Bytes(names))
        .with("label", Feature::Int64(vec![i as i64 - 2]))
        .with("counts", Feature::Int64(vec![i64::MIN, i64::MAX, 0, 300]))
        .with("weights", Feature::Float(vec![0.5 * i as f32, -1.25]))
        .with("nothing", Feature::Float(vec![]))
}

#[test]
fn files_that_python_wrote_read_back_with_equal_content() {
    for pattern in ["examples.tfrecord", "examples.tfrecord.gz"] {
        let dataset = open(pattern);
        let records: Vec<TfRecord> = dataset.stream([0]).collect::<Result<_, _>>().unwrap();
        assert_eq!(records.len(), 6);
        for (i, record) in records.iter().enumerate() {
            let example = record.example().unwrap();
            assert_eq!(example, expected(i));
            assert_eq!((example.bytes("image"), example.int64("label")), (Some(&*sample(i)), Some(i as i64 - 2)));
            assert_eq!((example.int64("counts"), example.bytes("label")), (None, None));
        }
    }
}

#[test]
fn written_records_read_back_and_resume() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a.tfrecord", "a.tfrecord.gz"] {
        let mut writer = TfRecordWriter::create(dir.path().join(name)).unwrap();
        assert!(!dir.path().join(name).exists());
        (0..6).for_each(|i| writer.write_example(&expected(i)).unwrap());
        writer.write(b"").unwrap();
        let dataset = TfRecordDataset::from_files([writer.finish().unwrap()]).unwrap();
        let whole: Vec<TfRecord> = dataset.stream([0]).map(Result::unwrap).collect();
        assert_eq!((whole.len(), whole[5].example().unwrap()), (7, expected(5)));
        let mut stream = dataset.stream([0]);
        for given in 0..=whole.len() {
            let rest: Vec<_> = dataset.stream_from([0], stream.position()).map(Result::unwrap).collect();
            assert_eq!(rest, whole[given..]);
            stream.next();
        }
    }
}

#[test]
fn a_cut_anywhere_is_an_error_unless_between_records() {
    let whole = fs::read(fixture("examples.tfrecord")).unwrap();
    let mut ends = vec![0];
    ends.extend(read(&whole).map(|record| record.unwrap()).map(|it| it.offset() + it.bytes().len() as u64 + 4));
    for cut in 0..whole.len() {
        let mut records = read(&whole[..cut]);
        match ends.iter().position(|&end| end == cut as u64) {
            // The format does not state the number of records.
            Some(complete) => assert_eq!(records.map(Result::unwrap).count(), complete),
            None => {
                let error = records.find_map(Result::err).unwrap_or_else(|| panic!("no error for a cut at {cut}"));
                names_file(&error, "some.tfrecord: at byte");
                assert!(records.next().is_none());
            }
        }
    }
}

#[test]
fn every_flipped_bit_is_found_and_only_its_record_is_lost() {
    let whole = fs::read(fixture("examples.tfrecord")).unwrap();
    let second = read(&whole).nth(1).unwrap().unwrap();
    let within = second.offset() as usize..second.offset() as usize + second.bytes().len() + 4;
    for position in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[position] ^= 0x10;
        let items: Vec<_> = read(&flipped).collect();
        // In a record as in its header.
        assert_eq!(items.iter().filter(|item| item.is_ok()).count(), 5, "flipped at {position}");
        if within.contains(&position) {
            let good: Vec<bool> = items.iter().map(Result::is_ok).collect();
            assert_eq!(good, [true, false, true, true, true, true]);
            let error = items.into_iter().find_map(Result::err).unwrap();
            assert!(matches!(error, DataError::Corrupt { offset, .. } if offset == second.offset()), "{error}");
            let unchecked = read(&flipped).verify_crc(false);
            assert_eq!(unchecked.map(Result::unwrap).count(), 6);
        }
    }
}

#[test]
fn records_behind_a_bad_length_are_found_again() {
    let mut bytes = fs::read(fixture("examples.tfrecord")).unwrap();
    let headers: Vec<usize> = read(&bytes).map(|record| record.unwrap().offset() as usize - 12).collect();
    bytes[headers[1]] ^= 1;
    // The end of the fourth record and the start of the fifth are gone.
    bytes.drain(headers[4] - 3..headers[4] + 9);
    let items: Vec<_> = read(&bytes).collect();
    let found: Vec<_> = items.iter().map(|item| item.as_ref().ok().map(|it| it.example().unwrap())).collect();
    let expected = [0, 2, 5].map(|i| Some(expected(i)));
    let [first, third, last] = expected;
    assert_eq!(found, [first, None, third, None, None, last]);
    let lost = headers[2] - headers[1];
    let note = format!("the next record is at byte {}, and the {lost} bytes before it are lost", headers[2]);
    assert!(items[1].as_ref().unwrap_err().to_string().contains(&note), "{:?}", items[1]);
    // A resumed reader counts the errors as the first one did, also in a compressed file.
    let dir = tempfile::tempdir().unwrap();
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(&bytes).unwrap();
    for (name, bytes) in [("a.tfrecord", &bytes), ("a.tfrecord.gz", &packed.finish().unwrap())] {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let dataset = TfRecordDataset::from_files([path]).unwrap();
        let text =
            |item: Result<TfRecord, DataError>| item.map_or_else(|it| it.to_string(), |it| it.offset().to_string());
        let whole: Vec<String> = dataset.stream([0]).map(text).collect();
        assert_eq!(whole.len(), 6);
        let mut stream = dataset.stream([0]);
        for given in 0..=whole.len() {
            let rest: Vec<String> = dataset.stream_from([0], stream.position()).map(text).collect();
            assert_eq!(rest, whole[given..], "{name}");
            stream.next();
        }
    }
    // Where no record follows, the error says so.
    let mut last = fs::read(fixture("examples.tfrecord")).unwrap();
    last[headers[5]] ^= 1;
    let error = read(&last).last().unwrap().unwrap_err().to_string();
    assert!(error.contains("how many are lost is unknown"), "{error}");
}

#[test]
fn records_behind_one_that_is_too_large_follow_it() {
    for name in ["examples.tfrecord", "examples.tfrecord.gz"] {
        let sizes: Vec<usize> = open(name).stream([0]).map(|record| record.unwrap().bytes().len()).collect();
        let limit = sizes[4] as u64;
        assert!(sizes[5] as u64 > limit && sizes[..4].iter().all(|&size| size as u64 <= limit));
        let mut stream =
            open(name).max_record_bytes(limit - 1).stream([0]).map(|item| item.is_ok()).collect::<Vec<_>>();
        assert_eq!(stream.split_off(4), [false, false], "{name}");
        assert_eq!(stream, [true; 4], "{name}");
    }
}

#[test]
fn absurd_lengths_take_no_memory() {
    let length = |bytes: u64| [&bytes.to_le_bytes()[..], &[0; 20]].concat();
    for bytes in [17, 1 << 20, 1 << 40, u64::MAX - 3, u64::MAX] {
        let mut records = read(&length(bytes)).verify_crc(false);
        names_file(&records.next().unwrap().unwrap_err(), "some.tfrecord");
        assert!(records.next().is_none());
    }
    assert!(read(&length(1)).next().unwrap().unwrap_err().to_string().contains("checksum"));
    let limited = open("examples.tfrecord").max_record_bytes(10);
    assert!(matches!(limited.stream([0]).next(), Some(Err(DataError::TooLarge { limit: 10, .. }))));
}

#[test]
fn a_record_that_is_not_an_example_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = TfRecordWriter::create(dir.path().join("text.tfrecord")).unwrap();
    writer.write(b"no example").unwrap();
    let dataset = TfRecordDataset::from_files([writer.finish().unwrap()]).unwrap();
    let record = dataset.stream([0]).next().unwrap().unwrap();
    let text = names_file(&record.example().unwrap_err(), "text.tfrecord");
    assert!(text.contains("record at byte 12"), "{text}");
    assert!(matches!(TfRecordDataset::open("none-{0..3}.tfrecord"), Err(DataError::Io { .. })));
}

#[test]
fn skipping_records_stops_when_cancelled() {
    for name in ["examples.tfrecord", "examples.tfrecord.gz"] {
        let dataset = open(name);
        let cancelled = Cancellation::new();
        let from = |position| dataset.open_deferred(0, position, &cancelled).unwrap();
        let sample = from(2).next().unwrap().and_then(Deferred::get).unwrap();
        assert!(sample.example().unwrap() == expected(2));
        let mut begun = from(0);
        assert!(begun.next().unwrap().is_ok());
        cancelled.cancel();
        assert!(from(2).next().is_none());
        assert!(matches!(begun.next(), Some(Err(DataError::Cancelled))));
    }
}

#[test]
fn a_length_that_begins_like_gzip_is_a_length() {
    // 0x8b1f, and gzip's first two bytes are 1f 8b.
    let dir = tempfile::tempdir().unwrap();
    let mut writer = TfRecordWriter::create(dir.path().join("a.tfrecord")).unwrap();
    [35_615, 3].into_iter().for_each(|bytes| writer.write(&vec![7; bytes]).unwrap());
    let dataset = TfRecordDataset::from_files([writer.finish().unwrap()]).unwrap();
    let lengths: Vec<usize> = dataset.stream([0]).map(|record| record.unwrap().bytes().len()).collect();
    assert_eq!(lengths, [35_615, 3]);
}
