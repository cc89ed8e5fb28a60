//! Errors and faults of a stream name the file, and the item as its format does.

use overdrive_dataload::{DataError, DataLoader, IterableDataset, OnError};

use crate::fixture;

/// The error of a stream of labels in which one in ten items is bad, and the key of its fault where bad items are
/// skipped.
fn bad_one(stream: impl IterableDataset<Sample = i64> + Clone + 'static, items: usize) -> (String, Option<String>) {
    let mut seen = Vec::new();
    for workers in [0, 2] {
        let build = |on_error| {
            let builder = DataLoader::stream(stream.clone()).batch_size(4).interleave(1).num_workers(workers);
            builder.on_error(on_error).collate(|samples: Vec<i64>| Ok(samples)).build().unwrap()
        };
        let error = build(OnError::Fail).iter().find_map(Result::err).unwrap();
        let skipping = build(OnError::Skip);
        assert_eq!(skipping.iter().map(|batch| batch.unwrap().len()).sum::<usize>(), items - 1);
        let [fault] = skipping.faults().try_into().unwrap();
        assert_eq!((error.key(), fault.error), (fault.key.as_deref(), error.to_string()));
        seen.push((error.to_string(), fault.key));
    }
    assert_eq!(seen[0], seen[1]);
    seen.remove(0)
}

#[cfg(feature = "webdataset")]
#[test]
fn tar_shards_are_named_by_file_and_key() {
    let dataset = overdrive_dataload::WebDataset::open(fixture("web-{000..002}.tar").to_str().unwrap()).unwrap();
    let labels = std::sync::Arc::new(dataset.map(|sample| match sample.key() {
        "train/0005" => Err(DataError::other("no good")),
        _ => Ok(0),
    }));
    let key = format!("{}, train/0005", fixture("web-001.tar").display());
    assert_eq!(bad_one(labels, 10), (format!("shard 1, item 1 ({key}): no good"), Some(key)));
}

#[cfg(feature = "webdataset")]
#[test]
fn a_damaged_or_missing_shard_is_named_once() {
    use std::fs;

    let dir = tempfile::tempdir().unwrap();
    let [good, cut] = ["good.tar", "cut.tar"].map(|name| dir.path().join(name));
    let bytes = fs::read(fixture("web-000.tar")).unwrap();
    fs::write(&good, &bytes).unwrap();
    fs::write(&cut, &bytes[..1024]).unwrap();
    let dataset = overdrive_dataload::WebDataset::from_files([&good, &cut]).unwrap();
    let text = |error: DataError| error.to_string();
    let build = || DataLoader::stream(dataset.clone()).interleave(1).collate(|all: Vec<_>| Ok(all.len())).build();
    let damaged = build().unwrap().iter().find_map(Result::err).map(text).unwrap();
    assert!(damaged.starts_with(&format!("shard 1, item 0: {}: ", cut.display())), "{damaged}");
    fs::remove_file(&good).unwrap();
    let gone = build().unwrap().iter().find_map(Result::err).map(text).unwrap();
    assert!(gone.starts_with(&format!("shard 0, item 0: {}: ", good.display())), "{gone}");
}

#[cfg(feature = "tfrecord")]
#[test]
fn records_are_named_by_file_and_byte() {
    let path = fixture("examples.tfrecord");
    let dataset = overdrive_dataload::TfRecordDataset::from_files([&path]).unwrap();
    let third = dataset.stream([0]).nth(2).unwrap().unwrap().offset();
    let labels = std::sync::Arc::new(dataset.map(|record| match record.example()?.int64("label") {
        Some(0) => Err(DataError::other("no good")),
        label => label.ok_or(DataError::EmptyBatch),
    }));
    let key = format!("{}, byte {third}", path.display());
    assert_eq!(bad_one(labels, 6), (format!("shard 0, item 2 ({key}): no good"), Some(key)));
}

#[cfg(feature = "parquet")]
#[test]
fn rows_are_named_by_file_row_group_and_number() {
    // Row 33 of all, with row groups of eight: the sixth row of the second row group of the second file.
    let bad = super::table::number(33) as i64;
    let rows = super::parquet::open("part-{0..2}").select(["int64"]).unwrap().map(move |row| match row.int("int64") {
        Some(number) if number == bad => Err(DataError::other("no good")),
        number => number.ok_or(DataError::EmptyBatch),
    });
    let key = format!("{}, row group 1, row 5", fixture("parquet/part-1.parquet").display());
    assert_eq!(bad_one(std::sync::Arc::new(rows), 60), (format!("shard 4, item 5 ({key}): no good"), Some(key)));
}

#[cfg(all(feature = "arrow", feature = "parquet"))]
#[test]
fn rows_are_named_by_file_record_batch_and_number() {
    let path = fixture("arrow/numbers.arrow");
    let bad = super::table::number(30) as i64;
    let rows = overdrive_dataload::ArrowDataset::from_files([&path]).unwrap().map(move |row| match row.int("int64") {
        Some(number) if number == bad => Err(DataError::other("no good")),
        number => number.ok_or(DataError::EmptyBatch),
    });
    let key = format!("{}, record batch 1, row 5", path.display());
    assert_eq!(bad_one(std::sync::Arc::new(rows), 60), (format!("shard 1, item 5 ({key}): no good"), Some(key)));
}
