//! Arrow files that pyarrow and Hugging Face's datasets wrote read back with equal content, by columns and by rows.

use std::fs;
use std::path::Path;

use overdrive_core::Stateful;
use overdrive_dataload::{
    ArrowDataset, Column, DataError, DataLoader, Dataset, FieldKind, IterableDataset, Row, StreamPosition, Table, Value,
};
use tch::Kind;

use crate::table::{
    NUMBERS, ROWS, assert_nested, assert_numbers, assert_rows, assert_texts, blob, floats, ints, is_null, lists,
    number, text, value,
};
use crate::{fixture, image, names_file};

/// Rows per record batch.
const BATCH: usize = 25;

fn open(name: &str) -> ArrowDataset {
    ArrowDataset::open(fixture("arrow").join(format!("{name}.arrow")).to_str().unwrap()).unwrap()
}

#[test]
fn numbers_and_texts_read_back_with_equal_values() {
    for name in ["numbers", "numbers-stream"] {
        let dataset = open(name);
        assert_eq!(dataset.record_batches().collect::<Vec<_>>(), [BATCH, BATCH, ROWS - 2 * BATCH]);
        let bytes = fs::read(dataset.files().next().unwrap()).unwrap();
        let in_memory = ArrowDataset::from_bytes(bytes, Path::new("some.arrow")).unwrap();
        for dataset in [dataset, in_memory] {
            let table = dataset.read().unwrap();
            assert_numbers(&table, None, name);
            assert_texts(table.bytes("text").unwrap(), text, name);
            assert_texts(table.bytes("blob").unwrap(), blob, name);
        }
    }
    let old = open("old").read().unwrap();
    assert_rows(&floats(old.tensor("int64").unwrap()), number, "old");
    assert_texts(old.bytes("text").unwrap(), text, "old");
}

fn nested(name: &str) -> ArrowDataset {
    let dataset = open(name).fill_null("point.x", -1.0).unwrap().fill_null("point.ys", 0.0).unwrap();
    dataset.fill_null("holes", 99.0).unwrap().fill_null("codes", -99.0).unwrap().fill_null("gaps", 0.5).unwrap()
}

/// The lists of lists of a column.
fn deep(table: &Table, name: &str) -> Vec<Vec<Vec<f64>>> {
    let ragged = table.ragged(name).unwrap();
    let [outer, inner] = [0, 1].map(|level| ragged.offsets(level).unwrap());
    let values = floats(&ragged.clone().into_tensors().unwrap().0);
    let list = |pair: &[i64]| values[pair[0] as usize..pair[1] as usize].to_vec();
    outer.windows(2).map(|pair| inner[pair[0] as usize..=pair[1] as usize].windows(2).map(list).collect()).collect()
}

/// The values of a row.
type RowValues<'a> = &'a dyn Fn(usize) -> Vec<f64>;

fn quarters(i: usize) -> Vec<f64> {
    (0..3).map(|j| number(i + j) / 4.0).collect()
}

#[test]
fn nested_columns() {
    for name in [
        "nested",
        "nested-stream",
        "nested-lz4",
        #[cfg(feature = "zstd")]
        "nested-zstd",
    ] {
        let dataset = nested(name);
        let names: Vec<&str> = dataset.fields().map(|field| field.name()).collect();
        let expected = "ints deep words vector gaps one matrix pairs vectors boxes.a boxes.b map.key map.value point.x \
                        point.ys holes category codes large view date time";
        assert_eq!(names.join(" "), expected);
        let table = dataset.read().unwrap();
        assert_nested(&table);
        let tensors: [(&str, i64, RowValues<'_>); 4] = [
            ("vector", 3, &quarters),
            ("gaps", 3, &|i| if is_null(i) { vec![0.5; 3] } else { quarters(i) }),
            ("one", 1, &|i| vec![number(i)]),
            ("matrix", 6, &|i| [quarters(i), quarters(i + 1)].concat()),
        ];
        for (column, width, values) in tensors {
            let tensor = table.tensor(column).unwrap();
            assert_eq!(tensor.size(), [ROWS as i64, width], "{column}");
            assert_eq!(floats(tensor), (0..ROWS).flat_map(values).collect::<Vec<_>>(), "{column}");
        }
        let bytes = |i: usize| text(i).into_iter().map(f64::from).collect::<Vec<_>>();
        assert_eq!(deep(&table, "pairs"), (0..ROWS).map(|i| vec![bytes(i), bytes(i + 1)]).collect::<Vec<_>>());
        let vectors = |i: usize| (0..i % 3).map(|j| quarters(i + j)).collect::<Vec<_>>();
        assert_eq!(deep(&table, "vectors"), (0..ROWS).map(vectors).collect::<Vec<_>>());
        let few = |i: usize| (0..i % 3).map(|j| number(i + j)).collect::<Vec<_>>();
        assert_eq!(lists(&table, "map.value"), (0..ROWS).map(few).collect::<Vec<_>>());
        assert_eq!(table.ragged("map.key").unwrap().offsets(0), table.ragged("map.value").unwrap().offsets(0));
        let code = |i| if is_null(i) { -99.0 } else { number(i) };
        assert_rows(&floats(table.tensor("codes").unwrap()), code, "codes");
        assert_texts(table.bytes("view").unwrap(), |i| text(i).repeat(3), "view");

        // Single rows have the same values.
        for i in [0, 3, 5, 24, 25, 59] {
            let row = dataset.get(i).unwrap();
            assert_eq!(floats(row.tensor("ints").unwrap()), ints(i), "{name} {i}");
            assert_eq!(
                (floats(row.tensor("one").unwrap()), row.tensor("one").unwrap().size()),
                (vec![number(i)], vec![1])
            );
            assert_eq!((row.bytes("category"), row.int("codes")), (Some(&*text(i)), Some(code(i) as i64)));
            assert_eq!(
                (row.bytes("view"), row.int("date")),
                (Some(&*text(i).repeat(3)), Some(1000 + number(i) as i64))
            );
            assert!(matches!(row.get("deep"), Some(Value::Values(Column::Ragged(lists))) if lists.rows() == 1));
        }
    }
}

#[test]
fn nulls_are_errors_filled_or_masked() {
    let columns = || NUMBERS.map(|(name, _)| name).into_iter().chain(["fixed", "text", "blob"]);
    let mut filled = open("nulls");
    for (name, _) in NUMBERS {
        filled = filled.fill_null(name, 1.0).unwrap();
    }
    let filled = filled.fill_null_bytes("fixed", &[9; 5]).unwrap().fill_null_bytes("text", b"none").unwrap();
    let table = filled.fill_null_bytes("blob", b"").unwrap().read().unwrap();
    assert_numbers(&table, Some(1.0), "filled");
    assert_texts(table.bytes("text").unwrap(), |i| if is_null(i) { b"none".to_vec() } else { text(i) }, "filled");
    assert_texts(table.bytes("blob").unwrap(), |i| if is_null(i) { Vec::new() } else { blob(i) }, "filled");

    for column in columns() {
        let only = open("nulls").select([column]).unwrap();
        for (batch, row) in [(0, 3), (1, 6), (2, 2)] {
            let error = only.read_record_batches(&[batch]).unwrap_err();
            assert!(matches!(error, DataError::Layout { .. }), "{error}");
            let text = names_file(&error, "nulls.arrow");
            assert!(text.contains(&format!("column {column:?}")) && text.contains("fill_null"), "{text}");
            assert!(text.ends_with(&format!("found a null in row {row} of record batch {batch}")), "{text}");
        }
        assert!(only.get(31).unwrap_err().to_string().ends_with("a null in row 6 of record batch 1"));

        let masked = only.mask_null(column).unwrap();
        let mask = format!("{column}.is_null");
        let table = masked.read().unwrap();
        assert_eq!(table.columns().map(|(name, _)| name).collect::<Vec<_>>(), [column, &mask]);
        assert_eq!(table.tensor(&mask).unwrap().kind(), Kind::Bool);
        assert_rows(&floats(table.tensor(&mask).unwrap()), |i| f64::from(is_null(i)), column);
        match table.get(column).unwrap() {
            Column::Tensor(tensor) if column != "fixed" => {
                assert_rows(&floats(tensor), |i| if is_null(i) { 0.0 } else { value(column, i) }, column);
            }
            Column::Bytes(bytes) => assert!(bytes.iter().enumerate().all(|(i, it)| it.is_empty() || !is_null(i))),
            _ => {}
        }
        let rows = [2, 3].map(|i| masked.get(i).unwrap().int(&mask));
        assert_eq!(rows, [Some(0), Some(1)], "{column}");
    }
    // Structures and lists are masked as a whole; a null inside of a list is an error.
    let point = open("nested").select(["point"]).unwrap().mask_null("point.x").unwrap().mask_null("point.ys").unwrap();
    let table = point.read().unwrap();
    let gaps = open("nested").select(["gaps"]).unwrap().mask_null("gaps").unwrap().read().unwrap();
    assert_rows(&floats(gaps.tensor("gaps.is_null").unwrap()), |i| f64::from(is_null(i)), "gaps");
    assert_eq!(floats(&gaps.tensor("gaps").unwrap().get(3)), [0.0; 3]);
    for mask in ["point.x.is_null", "point.ys.is_null"] {
        assert_rows(&floats(table.tensor(mask).unwrap()), |i| f64::from(is_null(i)), mask);
    }
    assert!(
        lists(&table, "point.ys")
            .iter()
            .enumerate()
            .all(|(i, list)| *list == if is_null(i) { vec![] } else { ints(i) })
    );
    let error = open("nested").select(["holes"]).unwrap().mask_null("holes").unwrap().read().unwrap_err();
    assert!(error.to_string().contains("column \"holes\"") && error.to_string().contains("a null in row 4"), "{error}");

    for (column, value) in [("int8", 300.0), ("int64", 0.5), ("text", 0.0)] {
        let error = open("nulls").fill_null(column, value).err().unwrap();
        assert!(matches!(error, DataError::InvalidOption { option: "fill_null", .. }), "{error}");
    }
    for error in [open("nulls").fill_null("none", 0.0), open("nulls").select(["tex"]), open("nulls").mask_null("none")]
    {
        assert!(matches!(error, Err(DataError::InvalidOption { option: "column", .. })));
    }
    assert!(open("nulls").fill_null_bytes("fixed", b"four").is_err());
}

#[test]
fn columns_without_a_kind_are_refused_and_others_read() {
    for (column, part) in [
        ("uint64", "UInt64"),
        ("decimal", "Decimal"),
        ("nothing", "Null"),
        ("sparse", "Union"),
        ("dense", "Union"),
        ("runs", "RunEndEncoded"),
        ("views", "ListView"),
        ("none", "FixedSizeList"),
        ("numbered", "Dictionary"),
    ] {
        let dataset = open("refused").select([column]).unwrap();
        let found = dataset.fields().next().unwrap().kind().clone();
        assert!(matches!(&found, FieldKind::Unsupported(what) if what.contains(part)), "{found:?}");
        let text = names_file(&dataset.read().unwrap_err(), "refused.arrow");
        assert!(text.contains(column) && text.contains(part), "{text}");
        assert!(dataset.get(0).is_err());
    }
    let table = open("refused").select(["last", "middle", "first"]).unwrap().read().unwrap();
    assert_eq!(table.columns().map(|(name, _)| name).collect::<Vec<_>>(), ["last", "middle", "first"]);
    assert_rows(&floats(table.tensor("first").unwrap()), number, "first");
    assert_texts(table.bytes("middle").unwrap(), |i| text(i).repeat(3), "middle");
    assert_texts(table.bytes("last").unwrap(), text, "last");
}

#[test]
fn empty_files_and_empty_record_batches() {
    let table = open("no-batches").read().unwrap();
    assert_eq!((table.rows(), table.tensor("int64").unwrap().size()), (0, vec![0]));
    assert!(table.bytes("text").unwrap().is_empty() && open("no-batches").is_empty());
    let dataset = open("empty-batch");
    assert_eq!(dataset.record_batches().collect::<Vec<_>>(), [40, 0, 20]);
    assert_rows(&floats(dataset.read().unwrap().tensor("int64").unwrap()), number, "empty-batch");
    assert_eq!(dataset.get(40).unwrap().int("int64"), Some(number(40) as i64));
    assert_eq!(dataset.stream([1]).count(), 0);
    for name in ["delta", "replaced"] {
        let error = ArrowDataset::from_files([fixture("arrow").join(format!("{name}.arrow"))]).err().unwrap();
        assert!(matches!(error, DataError::Layout { .. }), "{error}");
        assert!(names_file(&error, name).contains("dictionary"), "{error}");
    }
}

#[test]
fn files_of_one_schema_are_one_dataset() {
    let dataset = open("numbers*");
    assert_eq!((dataset.files().count(), dataset.len()), (2, 2 * ROWS));
    assert_eq!(dataset.get(ROWS + 30).unwrap().int("int64"), Some(number(30) as i64));
    let table = dataset.select(["int8"]).unwrap().read_record_batches(&[5, 0]).unwrap();
    let expected: Vec<f64> = (2 * BATCH..ROWS).chain(0..BATCH).map(number).collect();
    assert_eq!(floats(table.tensor("int8").unwrap()), expected);
    assert!(matches!(open("numbers").read_record_batches(&[3]), Err(DataError::IndexOutOfRange { index: 3, len: 3 })));
    let error = ArrowDataset::from_files(["numbers", "old"].map(|name| fixture("arrow").join(format!("{name}.arrow"))));
    let error = error.err().unwrap();
    assert!(matches!(error, DataError::Layout { .. }) && names_file(&error, "old.arrow").contains("bool"), "{error}");
    assert!(matches!(ArrowDataset::from_files(Vec::<String>::new()), Err(DataError::InvalidOption { .. })));
    assert!(matches!(ArrowDataset::open("none.arrow"), Err(DataError::Io { .. })));
}

#[test]
fn bytes_behind_the_end_of_a_stream_are_an_error() {
    let mut bytes = fs::read(fixture("arrow/numbers-stream.arrow")).unwrap();
    let open = |bytes: &[u8]| ArrowDataset::from_bytes(bytes.to_vec(), Path::new("some.arrow"));
    let end = bytes.len();
    assert_eq!(open(&bytes).unwrap().len(), ROWS);
    // The mark can be missing, since some writers leave it out.
    assert_eq!(open(&bytes[..end - 8]).unwrap().len(), ROWS);
    // Another stream behind the first one would be lost without a word.
    bytes.extend_from_within(..);
    let error = open(&bytes).err().unwrap();
    assert!(matches!(error, DataError::Corrupt { .. }), "{error}");
    assert!(names_file(&error, "some.arrow").contains("expected the end of the stream"), "{error}");
}

/// Windows end by bytes, and the bytes of a row depend on its columns: a state is bound to them.
#[test]
fn a_state_is_bound_to_the_selected_columns() -> Result<(), DataError> {
    let of = |columns: &[&str]| Ok::<_, DataError>(open("numbers").select(columns)?.fingerprint());
    assert_eq!(open("numbers").fingerprint(), 0);
    assert_eq!(of(&["int64"])?, of(&["int64"])?);
    assert_ne!(of(&["int64"])?, of(&["int8"])?);
    assert_ne!(of(&["int64"])?, open("nulls").select(["int64"])?.fill_null("int64", 1.0)?.fingerprint());
    Ok(())
}

fn label(row: Row) -> Result<i64, DataError> {
    row.int("int64").ok_or_else(|| DataError::other("no number"))
}

#[test]
fn rows_by_number_and_as_a_stream_that_resumes_anywhere() -> Result<(), DataError> {
    let all: Vec<i64> = (0..ROWS).map(|i| number(i) as i64).collect();
    for name in ["numbers", "numbers-stream"] {
        let dataset = open(name).select(["int64", "text"])?.map(label);
        assert!(matches!(dataset.get(ROWS), Err(DataError::IndexOutOfRange { index: ROWS, len: ROWS })));
        assert_eq!((0..ROWS).map(|i| dataset.get(i)).collect::<Result<Vec<_>, _>>()?, all);
        let mut stream = dataset.stream(0..3);
        for given in 0..=ROWS {
            let rest = dataset.stream_from(0..3, stream.position()).collect::<Result<Vec<_>, _>>()?;
            assert_eq!(rest, all[given..]);
            stream.next();
        }
        assert_eq!(dataset.stream_from([0], StreamPosition { shard: 0, sample: u64::MAX }).count(), 0);
        assert!(dataset.open_shard(3, 0).is_err());
        assert!(dataset.shard_name(2).is_some_and(|name| name.ends_with(".arrow, record batch 2")));

        // Through the loader, from the middle of an epoch on, by rows and by record batches.
        let listed = |samples: Vec<i64>| Ok(samples);
        for workers in [0, 2] {
            let by_row = || {
                let builder = DataLoader::builder(dataset.clone()).batch_size(7).shuffle(true).seed(3);
                builder.num_workers(workers).collate(listed).build()
            };
            let (loader, mut later) = (by_row()?, by_row()?);
            let batches = loader.iter().collect::<Result<Vec<_>, _>>()?;
            let loader = by_row()?;
            assert_eq!(loader.iter().take(4).collect::<Result<Vec<_>, _>>()?, batches[..4]);
            later.load_state_dict(&loader.state_dict().unwrap()).unwrap();
            assert_eq!(later.iter().collect::<Result<Vec<_>, _>>()?, batches[4..]);
            let mut sorted = (batches.concat(), all.clone());
            sorted.0.sort_unstable();
            sorted.1.sort_unstable();
            assert_eq!(sorted.0, sorted.1);

            let by_batch = || {
                let builder = DataLoader::stream(dataset.clone()).batch_size(7).shuffle(true).shuffle_buffer(9).seed(3);
                builder.num_workers(workers).collate(listed).build()
            };
            let batches = by_batch()?.iter().collect::<Result<Vec<_>, _>>()?;
            let (loader, mut later) = (by_batch()?, by_batch()?);
            assert_eq!(loader.iter().take(4).collect::<Result<Vec<_>, _>>()?, batches[..4]);
            later.load_state_dict(&loader.state_dict().unwrap()).unwrap();
            assert_eq!(later.iter().collect::<Result<Vec<_>, _>>()?, batches[4..]);
        }
    }
    Ok(())
}

#[test]
fn datasets_of_hugging_face_are_opened_by_folder() -> Result<(), DataError> {
    let folder = fixture("arrow/pictures");
    let splits = ArrowDataset::load_splits(&folder)?;
    assert_eq!(
        splits.iter().map(|(name, split)| (&**name, split.len())).collect::<Vec<_>>(),
        [("test", 1), ("train", 2)]
    );
    let train = ArrowDataset::load_from_disk(folder.join("train"))?;
    assert_eq!((train.files().len(), train.len()), (2, 2));
    assert!(train.schema().metadata().contains_key("huggingface"));
    let names: Vec<&str> = train.fields().map(|field| field.name()).collect();
    assert_eq!(names, ["image.bytes", "image.path", "label", "caption", "embedding", "tokens"]);
    let table = train.read()?;
    assert_eq!(table.tensor("embedding")?.size(), [2, 3]);
    for (i, (dataset, index, file)) in
        [(&train, 0, "one.jpg"), (&train, 1, "even-8.png"), (&splits["test"], 0, "lossless.webp")]
            .into_iter()
            .enumerate()
    {
        let row = dataset.get(index)?;
        assert_eq!(row.bytes("image.bytes"), Some(&*fs::read(image(file)).unwrap()));
        assert_eq!((row.bytes("image.path"), row.int("label")), (Some(file.as_bytes()), Some(i as i64 % 2)));
        assert_eq!((row.bytes("caption"), floats(row.tensor("tokens").unwrap())), (Some(&*text(i + 1)), ints(i)));
        assert_eq!(floats(row.tensor("embedding").unwrap()), quarters(i));
    }

    let error = ArrowDataset::load_from_disk(&folder).err().unwrap();
    assert!(matches!(error, DataError::Layout { .. }), "{error}");
    assert!(names_file(&error, "pictures").contains("[\"train\", \"test\"]"), "{error}");
    assert!(matches!(ArrowDataset::load_splits(folder.join("train")), Err(DataError::Io { .. })));
    let copy = tempfile::tempdir().unwrap();
    for (state, part) in [
        ("{", "EOF"),
        ("{}", "_data_files"),
        (r#"{"_data_files": [{"name": "x"}]}"#, "filename"),
        (r#"{"_data_files": [{"filename": "../numbers.arrow"}]}"#, "numbers.arrow"),
        (r#"{"_data_files": [{"filename": "/etc/passwd"}]}"#, "/etc/passwd"),
        (
            r#"{"_data_files": [{"filename": "a.arrow"}, {"filename": "a.arrow"}]}"#,
            "each data file once, found \"a.arrow\" again",
        ),
        (
            r#"{"_data_files": [{"filename": "a.arrow"}], "_indices_files": [{"filename": "i.arrow"}]}"#,
            "flatten_indices",
        ),
    ] {
        fs::write(copy.path().join("state.json"), state).unwrap();
        let error = ArrowDataset::load_from_disk(copy.path()).err().unwrap();
        assert!(matches!(error, DataError::Layout { .. }), "{error}");
        assert!(names_file(&error, "state.json").contains(part), "{error}");
    }
    fs::write(copy.path().join("state.json"), r#"{"_data_files": [{"filename": "a.arrow"}]}"#).unwrap();
    let error = ArrowDataset::load_from_disk(copy.path()).err().unwrap();
    assert!(matches!(error, DataError::Io { .. }), "{error}");
    names_file(&error, "a.arrow");
    Ok(())
}
