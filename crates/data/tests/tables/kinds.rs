//! What columns hold.

use std::sync::Arc;

use arrow_array::types::Float32Type;
use arrow_array::{ArrayRef, BooleanArray, FixedSizeListArray, Float32Array, Float64Array, RecordBatch};
use arrow_schema::{DataType, Field};
use overdrive_dataload::{ArrowDataset, ArrowWriter, TfRecord, TfRecordDataset};
use parquet::basic::LogicalType;
use parquet::data_type::Int64Type;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use super::*;

#[test]
fn integers_and_texts_are_columns_of_their_kind() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let line =
        |i: usize| format!("{{\"text\": \"good {i}\", \"stars\": {}, \"half\": {i}.5, \"zip\": \"0{i}\"}}\n", 4 + i);
    fs::write(path("a.jsonl"), (0..3).map(line).collect::<String>()).unwrap();
    good(&path("a.jsonl"), &path("a.parquet"), &[]);
    let reader = SerializedFileReader::new(fs::File::open(path("a.parquet")).unwrap()).unwrap();
    let schema = reader.metadata().file_metadata().schema_descr();
    let columns = schema.columns().iter();
    let kinds: Vec<_> = columns
        .map(|column| (column.name(), column.physical_type().to_string(), column.logical_type_ref().cloned()))
        .collect();
    let text = || ("BYTE_ARRAY".to_owned(), Some(LogicalType::String));
    let named = |name, (physical, logical)| (name, physical, logical);
    let stars = ("stars", "INT64".to_owned(), None);
    assert_eq!(
        kinds,
        [named("__key__", text()), named("text", text()), stars, named("half", text()), named("zip", text())]
    );

    good(&path("a.jsonl"), &path("a.arrow"), &[]);
    let dataset = ArrowDataset::from_files([path("a.arrow")]).unwrap();
    let kinds: Vec<_> = dataset.schema().fields().iter().map(|field| field.data_type().clone()).collect();
    assert_eq!(kinds, [DataType::Utf8, DataType::Utf8, DataType::Int64, DataType::Utf8, DataType::Utf8]);

    good(&path("a.jsonl"), &path("a.mds"), &[]);
    let index = JsonLines::open(path("a.mds/index.json")).unwrap().get(0).unwrap();
    assert_eq!(index["shards"][0]["column_names"], serde_json::json!(["__key__", "half", "stars", "text", "zip"]));
    assert_eq!(index["shards"][0]["column_encodings"], serde_json::json!(["str", "str", "int", "str", "str"]));
}

#[test]
fn the_first_thousand_samples_say_what_a_column_holds() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    // The first is an integer, and another is none; what is packed has control characters, and images say what they are.
    shard(dir.path(), "mixed", 9, |i| {
        let score = if i == 0 { "1".to_owned() } else { format!("{i}.5") };
        vec![("score", score.into()), ("raw", vec![i as u8; 4]), ("png", b"abc".to_vec()), ("x.json", b"1".to_vec())]
    });
    good(&path("mixed-000000.tar"), &path("mixed.mds"), &[]);
    let index = JsonLines::open(path("mixed.mds/index.json")).unwrap().get(0).unwrap();
    assert_eq!(index["shards"][0]["column_names"], serde_json::json!(["__key__", "png", "raw", "score", "x.json"]));
    assert_eq!(index["shards"][0]["column_encodings"], serde_json::json!(["str", "png", "bytes", "str", "str"]));
    // A later sample that differs is refused by name.
    let lines = |last: &str| (0..1000).map(|i| format!("{{\"a\": {i}}}\n")).collect::<String>() + last;
    for (last, part) in [("{\"a\": 1.5}", "field \"a\" is no number"), ("{\"a\": \"b\"}", "field \"a\" is no number")] {
        fs::write(path("late.jsonl"), lines(last)).unwrap();
        for target in ["late.parquet", "late.mds"] {
            let error = bad(&path("late.jsonl"), &path(target), &[]);
            assert!(error.contains(part) && error.contains("000001000"), "{error}");
        }
        good(&path("late.jsonl"), &path("late.csv"), &[]);
        fs::remove_file(path("late.csv")).unwrap();
    }
}

fn lines(path: &Path) -> Vec<serde_json::Value> {
    let lines = JsonLines::open(path).unwrap();
    (0..lines.len()).map(|line| lines.get(line).unwrap()).collect()
}

#[test]
fn nulls_of_parquet_are_those_of_arrow() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let fixtures: std::path::PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "..", "dataload", "tests", "fixtures"].iter().collect();
    let rows = |source: &str| -> Samples {
        let target = path(&format!("{}.tfrecord", source.replace('/', "-")));
        good(&fixtures.join(source), &target, &[]);
        let records = TfRecordDataset::from_files([target]).unwrap();
        let fields = |record: TfRecord| {
            let (key, fields) = (record.offset().to_string(), record.example().unwrap());
            let bytes = |name: &str| (name.to_owned(), fields.bytes(name).unwrap().to_vec());
            (key, fields.features().map(|(name, _)| bytes(name)).collect())
        };
        records.stream([0]).map(|record| fields(record.unwrap())).collect()
    };
    let (arrow, parquet) = (rows("arrow/nulls.arrow"), rows("parquet/nulls.parquet"));
    assert_eq!(arrow.len(), 60);
    // Every seventh row has nulls alone, and its number as the key.
    let counts: Vec<usize> = arrow.iter().take(4).map(|(_, fields)| fields.len()).collect();
    assert_eq!(counts, [15, 15, 15, 1]);
    assert_eq!(arrow, parquet);
    let row = &arrow[1].1;
    let found = ["bool", "int8", "uint32", "float32", "float64"].map(|name| str::from_utf8(&row[name]).unwrap());
    assert_eq!(found, ["0", "-13", "37", "-3.25", "-3.25"]);
    assert_eq!((&row["fixed"], &row["text"]), (&vec![1, 2, 3, 4, 5], &b"text 1".to_vec()));
}

#[test]
fn arrays_keep_their_shape_and_numbers_their_precision() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let rows = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(
        (0..4).map(|i| Some((0..3).map(move |j| Some(i as f32 + j as f32 / 10.0)).collect::<Vec<_>>())),
        3,
    );
    let inner = Arc::new(Field::new("item", rows.value_type(), true));
    let list = Arc::new(Field::new("item", DataType::FixedSizeList(inner, 3), true));
    let matrix = FixedSizeListArray::new(list, 2, Arc::new(rows.clone()), None);
    let columns: [(&str, ArrayRef); 5] = [
        ("matrix", Arc::new(matrix)),
        ("vector", Arc::new(rows.slice(0, 2))),
        ("single", Arc::new(Float32Array::from(vec![0.1, f32::NAN]))),
        ("double", Arc::new(Float64Array::from(vec![0.1, 1e-7]))),
        ("flag", Arc::new(BooleanArray::from(vec![true, false]))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::create(path("a.arrow"), batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    good(&path("a.arrow"), &path("a.jsonl"), &[]);
    let expected = [
        serde_json::json!({"__key__": "000000000", "matrix": [[0, 0.1, 0.2], [1, 1.1, 1.2]], "vector": "0 0.1 0.2",
            "single": "0.1", "double": "0.1", "flag": "1"}),
        serde_json::json!({"__key__": "000000001", "matrix": [[2, 2.1, 2.2], [3, 3.1, 3.2]], "vector": "1 1.1 1.2",
            "single": "NaN", "double": "0.0000001", "flag": "0"}),
    ];
    assert_eq!(lines(&path("a.jsonl")), expected);
}

#[test]
fn nulls_in_lists_and_lists_of_texts_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let nested = [env!("CARGO_MANIFEST_DIR"), "..", "dataload", "tests", "fixtures", "parquet", "nested.parquet"];
    let error = bad(&nested.iter().collect::<std::path::PathBuf>(), &path("a.jsonl"), &[]);
    assert!(error.contains("row 0: column \"deep\" has lists of texts or of lists"), "{error}");

    // [1, null], [2] and a null, which is read as an empty list.
    let schema = "message m { optional group a (LIST) { repeated group list { optional int64 element; } } }";
    let file = fs::File::create(path("a.parquet")).unwrap();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(file, schema, Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&[1, 2], Some(&[3, 2, 3, 0]), Some(&[0, 1, 0, 0])).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    let error = bad(&path("a.parquet"), &path("a.jsonl"), &[]);
    assert!(error.contains("row 0: column \"a\" has a null in its list"), "{error}");
    good(&path("a.parquet"), &path("a.jsonl"), &["--skip-errors"]);
    assert_eq!(lines(&path("a.jsonl"))[1]["a"], "");
}
