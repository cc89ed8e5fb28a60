//! Writing MDS: read by this crate and by Mosaic's streaming.

use std::fs;
use std::path::Path;

use overdrive_dataload::{Dataset, IterableDataset, MdsDataset, MdsValue, MdsWriter, ShardListDataset};

use crate::{fixture, sample};

const COLUMNS: [(&str, &str); 7] = [
    ("text", "str"),
    ("class", "int"),
    ("small", "uint8"),
    ("bytes", "bytes"),
    ("weight", "float32"),
    ("info", "json"),
    ("half", "float16"),
];

/// Writes 50 samples in shards of at most 2,000 bytes.
fn write(folder: &Path) {
    let mut writer = MdsWriter::create(folder, &COLUMNS).unwrap().shard_bytes(2000);
    for i in 0..50_usize {
        let (text, info) = (format!("text ü {i}"), format!("{{\"id\": {i}}}"));
        let (bytes, number) = (sample(i % 9), i as f64);
        let values = [
            MdsValue::Str(&text),
            MdsValue::Int(3 - i as i64),
            MdsValue::Int(5 * i as i64),
            MdsValue::Bytes(&bytes),
            MdsValue::Float(number / 8.0),
            MdsValue::Str(&info),
            MdsValue::Float(-number),
        ];
        writer.write(&values).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn what_is_written_is_read_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let dataset = MdsDataset::open(dir.path()).unwrap();
    assert!(dataset.shards() > 3 && dataset.samples() == 50, "{} shards", dataset.shards());
    assert_eq!(dataset.columns().collect::<Vec<_>>(), ["bytes", "class", "half", "info", "small", "text", "weight"]);
    let list = ShardListDataset::new(dataset.clone()).unwrap();
    let files = dataset.files().map(|file| fs::metadata(file).unwrap().len()).collect::<Vec<_>>();
    assert!(files.iter().all(|&bytes| bytes <= 2000), "{files:?}");
    for i in (0..50).rev() {
        let found = list.get(i).unwrap();
        assert!(matches!(found.get("text").unwrap(), MdsValue::Str(text) if text == format!("text ü {i}")));
        assert!(matches!(found.get("class").unwrap(), MdsValue::Int(class) if class == 3 - i as i64));
        assert!(matches!(found.get("small").unwrap(), MdsValue::Int(small) if small == 5 * i as i64));
        assert!(matches!(found.get("weight").unwrap(), MdsValue::Float(weight) if weight == i as f64 / 8.0));
        assert!(matches!(found.get("half").unwrap(), MdsValue::Float(half) if half == -(i as f64)));
        assert!(matches!(found.get("info").unwrap(), MdsValue::Json(info) if info["id"] == i));
        assert_eq!(found.raw("bytes"), Some(&*sample(i % 9)));
    }
}

#[test]
fn what_cannot_be_written_is_refused_by_column() {
    let dir = tempfile::tempdir().unwrap();
    let create = |columns: &[(&str, &str)]| MdsWriter::create(dir.path().join("new"), columns).err();
    for (columns, part) in [
        (&[("raw", "pil")][..], "\"raw\""),
        (&[("x", "pkl")], "found pkl"),
        (&[("x", "ndarray:int8")], "ndarray"),
        (&[], "at least one"),
        (&[("x", "int"), ("x", "str")], "another name"),
    ] {
        let error = create(columns).unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
    let mut writer = MdsWriter::create(dir.path().join("new"), &[("a", "int8"), ("b", "json")]).unwrap();
    for (values, part) in [
        (&[MdsValue::Int(128), MdsValue::Str("1")][..], "int8 in the column \"a\", found 128"),
        (&[MdsValue::Int(-129), MdsValue::Str("1")], "found -129"),
        (&[MdsValue::Float(1.0), MdsValue::Str("1")], "\"a\""),
        (&[MdsValue::Int(1), MdsValue::Str("{")], "json in the column \"b\""),
        (&[MdsValue::Int(1)], "2, one a column"),
    ] {
        let error = writer.write(values).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    writer.write(&[MdsValue::Int(-128), MdsValue::Str("[1]")]).unwrap();
    let folder = writer.finish().unwrap();
    assert_eq!(MdsDataset::open(&folder).unwrap().samples(), 1);
    assert!(MdsWriter::create(&folder, &COLUMNS).err().unwrap().to_string().contains("index.json"));
    let empty = MdsWriter::create(dir.path().join("empty"), &COLUMNS).unwrap().finish();
    assert!(empty.unwrap_err().to_string().contains("samples"));
}

#[test]
fn numbers_that_a_column_cannot_hold_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let columns = [("half", "float16"), ("single", "float32"), ("int", "str_int"), ("decimal", "str_decimal")];
    let mut writer = MdsWriter::create(dir.path(), &columns).unwrap();
    let good = [65504.0, 3.4e38];
    for ([half, single], [int, decimal], part) in [
        ([70000.0, 1.0], ["1", "1"], "float16 in the column \"half\", found 70000"),
        ([1.0, -1e300], ["1", "1"], "float32 in the column \"single\", found -1"),
        (good, ["1.0", "1"], "str_int in the column \"int\""),
        (good, ["", "1"], "str_int in the column \"int\""),
        (good, ["1", "one"], "str_decimal in the column \"decimal\""),
    ] {
        let values = [MdsValue::Float(half), MdsValue::Float(single), MdsValue::Str(int), MdsValue::Str(decimal)];
        let error = writer.write(&values).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let infinite = f64::INFINITY;
    for (half, single) in [(good[0], good[1]), (infinite, -infinite), (f64::NAN, 1e-300)] {
        let digits = [MdsValue::Str("-123456789012345678901"), MdsValue::Str("1.50")];
        let [int, decimal] = digits;
        writer.write(&[MdsValue::Float(half), MdsValue::Float(single), int, decimal]).unwrap();
    }
    let data = MdsDataset::open(writer.finish().unwrap()).unwrap();
    let float = |at: usize, name: &str| match data.stream([0]).nth(at).unwrap().unwrap().get(name).unwrap() {
        MdsValue::Float(number) => number,
        other => panic!("{other:?}"),
    };
    assert_eq!((float(0, "half"), float(0, "single")), (65504.0, f64::from(3.4e38_f32)));
    assert_eq!((float(1, "half"), float(1, "single")), (infinite, -infinite));
    assert!(float(2, "half").is_nan() && float(2, "single") == 0.0);
}

#[test]
fn shards_are_as_large_as_their_places_allow() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = MdsWriter::create(dir.path(), &[("x", "int8")]).unwrap().shard_bytes(usize::MAX);
    writer.write(&[MdsValue::Int(1)]).unwrap();
    writer.finish().unwrap();
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("index.json")).unwrap()).unwrap();
    assert_eq!(index["shards"][0]["size_limit"], u32::MAX);
}

/// Mosaic's streaming 0.13.0 has read the files of this fixture, by the test below this one.
#[test]
fn what_is_written_is_what_mosaic_has_read() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let theirs = fixture("mds").join("written");
    let names = |folder: &Path| {
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(dir.path()), names(&theirs));
    for name in names(&theirs) {
        assert!(fs::read(dir.path().join(&name)).unwrap() == fs::read(theirs.join(&name)).unwrap(), "{name:?}");
    }
}

/// After a change of the format, write the fixture `mds/written` anew with the files that Mosaic reads here.
#[test]
fn mosaic_reads_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path());
    let script = fixture("mds").join("read.py");
    let Some(found) = crate::python::python("streaming", &script, &[dir.path()]) else { return };
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let expected = (0..50_usize).map(|i| {
        let numbers = [format!("{}", 3 - i as i64), format!("{:?}", -(i as f64)), format!("{:?}", i as f64 / 8.0)];
        let [class, half, weight] = numbers;
        let (bytes, small) = (hex(&sample(i % 9)), 5 * i);
        format!(
            "{{\"bytes\": \"{bytes}\", \"class\": {class}, \"half\": {half}, \"info\": {{\"id\": {i}}}, \
             \"small\": {small}.0, \"text\": \"text \\u00fc {i}\", \"weight\": {weight}}}"
        )
    });
    assert_eq!(found, expected.collect::<Vec<_>>());
}
