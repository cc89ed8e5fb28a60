//! Files that pyarrow wrote read back with equal content, by columns and by rows.

use overdrive_dataload::{
    Column, DataError, Dataset, FieldKind, IterableDataset, ParquetDataset, StreamPosition, Value,
};
use tch::Kind;

use crate::table::{
    NUMBERS, ROWS, assert_few, assert_nested, assert_numbers, assert_rows, assert_texts, blob, floats, ints, is_null,
    lists, number, text, value,
};
use crate::{fixture, names_file};

/// Rows per row group.
const GROUP: usize = 25;

pub(crate) fn open(name: &str) -> ParquetDataset {
    ParquetDataset::open(fixture("parquet").join(format!("{name}.parquet")).to_str().unwrap()).unwrap()
}

#[test]
fn numbers_and_texts_read_back_with_equal_values() {
    for name in ["numbers", "required"] {
        let table = open(name).read().unwrap();
        assert_numbers(&table, None, name);
        assert_texts(table.bytes("text").unwrap(), text, name);
        assert_texts(table.bytes("blob").unwrap(), blob, name);
    }
    for name in ["pages", "pages-v2", "plain"] {
        let table = open(name).read().unwrap();
        assert_numbers(&table, None, name);
        assert_few(&table, name);
    }
}

#[test]
fn every_codec_and_page_version() {
    for codec in [
        "snappy",
        "gzip",
        "brotli",
        "lz4",
        #[cfg(feature = "zstd")]
        "zstd",
    ] {
        for name in [format!("codec-{codec}"), format!("codec-{codec}-v2")] {
            assert_few(&open(&name).read().unwrap(), &name);
        }
    }
}

fn filled(name: &str) -> ParquetDataset {
    let mut dataset = open(name);
    for (column, _) in NUMBERS {
        dataset = dataset.fill_null(column, 1.0).unwrap();
    }
    dataset.fill_null_bytes("fixed", &[9; 5]).unwrap()
}

#[test]
fn nulls_are_errors_or_filled() {
    for name in ["nulls", "nulls-v2"] {
        let dataset = filled(name).fill_null_bytes("text", b"none").unwrap().fill_null_bytes("blob", b"").unwrap();
        let table = dataset.read().unwrap();
        assert_numbers(&table, Some(1.0), name);
        let expected = |i| if is_null(i) { b"none".to_vec() } else { text(i) };
        assert_texts(table.bytes("text").unwrap(), expected, name);
        for column in ["bool", "float32", "fixed", "text"] {
            let error = open(name).select([column]).unwrap().read().unwrap_err();
            assert!(matches!(error, DataError::Layout { .. }), "{error}");
            let text = names_file(&error, name);
            assert!(text.contains(column) && text.contains("fill_null") && text.contains("row group"), "{text}");
        }
    }
    // The error names the row of the first null.
    let null = |name: &str, column, group| {
        let error = open(name).select([column]).unwrap().read_row_groups(&[group]).unwrap_err().to_string();
        error.split("found ").last().unwrap().to_owned()
    };
    for name in ["nulls", "nulls-v2"] {
        for column in ["bool", "float32", "fixed", "text", "blob"] {
            assert_eq!(null(name, column, 0), "a null in row 3 of row group 0", "{name} {column}");
            assert_eq!(null(name, column, 1), "a null in row 6 of row group 1", "{name} {column}");
        }
    }
    assert_eq!(null("nested", "holes", 0), "a null in row 3 of row group 0", "a list");
    assert_eq!(null("nested", "holes", 1), "a null in row 4 of row group 1", "an element of a list");
    for (column, value) in [("int8", 300.0), ("int64", 0.5), ("text", 0.0)] {
        let error = open("nulls").fill_null(column, value).err().unwrap();
        assert!(matches!(error, DataError::InvalidOption { option: "fill_null", .. }), "{error}");
    }
    assert!(open("nulls").fill_null_bytes("fixed", b"four").is_err());
    assert!(matches!(open("nulls").fill_null("none", 0.0), Err(DataError::Layout { .. })));
}

#[test]
fn nulls_are_masked_in_tables_batches_and_rows() -> Result<(), DataError> {
    let masked = |name: &str, column: &str| open(name).select([column])?.mask_null(column);
    for name in ["nulls", "nulls-v2"] {
        for column in NUMBERS.map(|(column, _)| column).into_iter().chain(["fixed", "text", "blob"]) {
            let (dataset, mask) = (masked(name, column)?, format!("{column}.is_null"));
            let table = dataset.read()?;
            assert_eq!(table.columns().map(|(name, _)| name).collect::<Vec<_>>(), [column, &mask]);
            assert_eq!(table.tensor(&mask)?.kind(), Kind::Bool);
            assert_rows(&floats(table.tensor(&mask)?), |i| f64::from(is_null(i)), column);
            match table.get(column).unwrap() {
                Column::Tensor(tensor) if column != "fixed" => {
                    assert_rows(&floats(tensor), |i| if is_null(i) { 0.0 } else { value(column, i) }, column);
                }
                Column::Bytes(bytes) => assert!(bytes.iter().enumerate().all(|(i, it)| it.is_empty() || !is_null(i))),
                _ => {}
            }
            // Row by row, as a stream, and in batches, whose rows may be shuffled.
            assert_eq!([2, 3].map(|i| dataset.get(i).unwrap().int(&mask)), [Some(0), Some(1)], "{column}");
            let nulls: i64 = dataset.stream(0..3).map(|row| row.unwrap().int(&mask).unwrap()).sum();
            assert_eq!(nulls as usize, (0..ROWS).filter(|&i| is_null(i)).count());
            let batches = dataset.batches(7)?.window(2).epoch(0).collect::<Result<Vec<_>, _>>()?;
            let found: Vec<f64> = batches.iter().flat_map(|batch| floats(batch.tensor(&mask).unwrap())).collect();
            assert_rows(&found, |i| f64::from(is_null(i)), column);
        }
        // A masked value is a zero, which no other row of these has.
        let numbers = open(name).select(["int64", "uint8"])?.mask_null("int64")?.fill_null("uint8", 255.0)?;
        for workers in [0, 2] {
            let loader = numbers.batches(7)?.shuffle(true).window(2).loader().num_workers(workers).build()?;
            let mut nulls = 0;
            for batch in &loader {
                let batch = batch?;
                let [values, masked, bytes] =
                    ["int64", "int64.is_null", "uint8"].map(|it| floats(batch.tensor(it).unwrap()));
                nulls += masked.iter().filter(|&&is_null| is_null == 1.0).count();
                let agrees = |((value, masked), byte): ((&f64, &f64), &f64)| match *masked == 1.0 {
                    true => (*value, *byte) == (0.0, 255.0),
                    false => *byte == value + 50.0,
                };
                assert!(values.iter().zip(&masked).zip(&bytes).all(agrees), "{values:?} {masked:?} {bytes:?}");
            }
            assert_eq!(nulls, (0..ROWS).filter(|&i| is_null(i)).count());
        }
    }
    // Structures and lists are masked as a whole; a null inside of a list is an error.
    let table = open("nested").select(["point"])?.mask_null("point.x")?.mask_null("point.ys")?.read()?;
    for mask in ["point.x.is_null", "point.ys.is_null"] {
        assert_rows(&floats(table.tensor(mask)?), |i| f64::from(is_null(i)), mask);
    }
    let ys = |i| if is_null(i) { vec![] } else { ints(i) };
    assert_eq!(lists(&table, "point.ys"), (0..ROWS).map(ys).collect::<Vec<_>>());
    assert!(masked("nested", "holes")?.read_row_groups(&[0]).is_err_and(|error| {
        error.to_string().contains("`mask_null`") && error.to_string().ends_with("a null in row 4 of row group 0")
    }));
    // Nothing can be null, nothing is there.
    for (name, column) in [("required", "int8"), ("required", "text"), ("empty", "int64"), ("empty", "ints")] {
        let table = masked(name, column)?.read()?;
        assert_eq!(floats(table.tensor(&format!("{column}.is_null"))?), vec![0.0; table.rows()]);
    }
    assert!(matches!(open("nulls").mask_null("none"), Err(DataError::Layout { .. })));
    let of = |dataset: ParquetDataset| dataset.fingerprint();
    assert_ne!(
        of(masked("nulls", "int8")?),
        of(open("nulls").select(["int8"])?),
        "a state is bound to the rows' bytes"
    );
    Ok(())
}

#[test]
fn every_encoding() {
    for name in ["encodings-1", "encodings-2"] {
        let table = filled(name).read().unwrap();
        assert_numbers(&table, Some(1.0), name);
        assert_texts(table.bytes("text").unwrap(), text, name);
        assert_texts(table.bytes("blob").unwrap(), blob, name);
    }
}

#[test]
fn nested_columns() {
    for name in [
        "nested",
        #[cfg(feature = "zstd")]
        "nested-v2",
    ] {
        let dataset = open(name).fill_null("point.x", -1.0).unwrap().fill_null("point.ys", 0.0).unwrap();
        let dataset = dataset.fill_null("holes", 99.0).unwrap();
        let names: Vec<&str> = dataset.fields().map(|field| field.name()).collect();
        let expected = "ints deep words vector boxes.a boxes.b pairs.key pairs.value point.x point.ys holes category \
                        large date time";
        assert_eq!(names.join(" "), expected);
        let table = dataset.read().unwrap();

        assert_nested(&table);
        let few = |i: usize| (0..i % 3).map(|j| number(i + j)).collect::<Vec<_>>();
        assert_eq!(lists(&table, "pairs.value"), (0..ROWS).map(few).collect::<Vec<_>>());
        let vector = table.ragged("vector").unwrap().to_tensor().unwrap();
        assert_eq!(vector.size(), [ROWS as i64, 3]);
        let expected: Vec<f64> = (0..ROWS * 3).map(|k| number(k / 3 + k % 3) / 4.0).collect();
        assert_eq!(floats(&vector), expected);
    }
    let old = open("old-lists").read().unwrap();
    assert_eq!(lists(&old, "ints"), (0..ROWS).map(ints).collect::<Vec<_>>());
    assert_eq!(old.ragged("deep").unwrap().lists(), 2);
}

#[test]
fn lists_are_padded_truncated_or_of_one_length() {
    let table = open("nested").select(["ints", "deep", "words"]).unwrap().read().unwrap();
    let padded = |max_len| table.ragged("ints").unwrap().to_padded(-1.0, max_len).unwrap();
    for (max_len, width) in [(None, 3), (Some(2), 2), (Some(5), 5), (Some(0), 0)] {
        let (values, lengths) = padded(max_len);
        assert_eq!((values.kind(), values.size()), (Kind::Int, vec![ROWS as i64, width as i64]));
        let length = |i: usize| ints(i).len().min(width);
        assert_rows(&floats(&lengths), |i| length(i) as f64, "lengths");
        let place = |i: usize, j: usize| if j < length(i) { ints(i)[j] } else { -1.0 };
        let expected: Vec<f64> = (0..ROWS).flat_map(|i| (0..width).map(move |j| place(i, j))).collect();
        assert_eq!(floats(&values), expected);
    }
    for (column, value) in [("deep", 0.0), ("words", 0.0), ("ints", 0.5)] {
        let error = table.ragged(column).unwrap().to_padded(value, None).unwrap_err();
        assert!(matches!(error, DataError::InvalidOption { .. }), "{error}");
    }
    let error = table.ragged("ints").unwrap().to_tensor().unwrap_err();
    assert!(error.to_string().contains("1 in row 1"), "{error}");

    let vectors = open("nested").select(["vector"]).unwrap().list_size("vector", 3).unwrap();
    assert_eq!(vectors.read().unwrap().tensor("vector").unwrap().size(), [ROWS as i64, 3]);
    let error = open("nested").select(["vector"]).unwrap().list_size("vector", 4).unwrap().read().unwrap_err();
    assert!(names_file(&error, "nested.parquet").contains("lists of 4"), "{error}");
    let ints = open("nested").select(["ints"]).unwrap().list_size("ints", 1).unwrap();
    for (groups, expected) in
        [(&[0, 2][..], "one of 1 in row 1 of row group 0"), (&[2][..], "one of 3 in row 1 of row group 2")]
    {
        assert!(ints.read_row_groups(groups).unwrap_err().to_string().ends_with(expected), "{groups:?}");
    }
    assert!(open("nested").list_size("deep", 1).is_err() && open("nested").list_size("date", 1).is_err());
}

#[test]
fn columns_are_selected_and_described() {
    let dataset = open("nested").select(["date", "point", "boxes.list.element.a"]).unwrap();
    let found: Vec<_> = dataset.fields().map(|f| (f.name(), f.kind().clone(), f.lists(), f.nullable())).collect();
    let expected = [
        ("date", FieldKind::Number(Kind::Int), 0, true),
        ("point.x", FieldKind::Number(Kind::Double), 0, true),
        ("point.ys", FieldKind::Number(Kind::Int64), 1, true),
        ("boxes.a", FieldKind::Number(Kind::Int64), 1, true),
    ];
    assert_eq!(found, expected);
    assert_eq!(
        (dataset.rows(), dataset.row_groups().collect::<Vec<_>>()),
        (ROWS, vec![GROUP, GROUP, ROWS - 2 * GROUP])
    );
    assert!(open("required").fields().all(|field| !field.nullable()));
    assert!(open("nested").metadata("ARROW:schema").is_some() && open("numbers").metadata("none").is_none());
    let error = open("nested").select(["dat"]).err().unwrap();
    assert!(names_file(&error, "nested.parquet").contains("\"dat\""), "{error}");

    let table = open("numbers").select(["int8"]).unwrap().read_row_groups(&[2, 0]).unwrap();
    let expected: Vec<f64> = (2 * GROUP..ROWS).chain(0..GROUP).map(number).collect();
    assert_eq!((table.rows(), floats(table.tensor("int8").unwrap())), (ROWS - GROUP, expected));
    assert!(matches!(open("numbers").read_row_groups(&[3]), Err(DataError::IndexOutOfRange { index: 3, len: 3 })));
    for error in [table.ragged("int8").err(), table.bytes("int8").err(), table.tensor("none").err()] {
        assert!(matches!(error, Some(DataError::InvalidOption { option: "column", .. })), "{error:?}");
    }
}

#[test]
fn columns_without_a_kind_are_refused_and_others_read() {
    for (column, part) in [("uint64", "uint64"), ("decimal", "decimal"), ("time96", "INT96")] {
        let dataset = open("refused").select([column]).unwrap();
        let found = dataset.fields().next().unwrap().kind().clone();
        assert!(matches!(&found, FieldKind::Unsupported(what) if what.contains(part)), "{found:?}");
        let text = names_file(&dataset.read().unwrap_err(), "refused.parquet");
        assert!(text.contains(column) && text.contains(part), "{text}");
    }
    let table = open("refused").select(["int64"]).unwrap().read().unwrap();
    assert_rows(&floats(table.tensor("int64").unwrap()), number, "int64");
}

#[test]
fn empty_tables_and_empty_row_groups() {
    for name in ["empty", "no-groups"] {
        let table = open(name).read().unwrap();
        assert_eq!((table.rows(), table.tensor("int64").unwrap().size()), (0, vec![0]));
        assert_eq!((table.bytes("text").unwrap().is_empty(), lists(&table, "ints").len()), (true, 0));
        let lists = table.ragged("ints").unwrap();
        assert_eq!(lists.to_padded(0.0, None).unwrap().0.size(), [0, 0]);
        let error = lists.to_padded(0.0, Some(usize::MAX)).unwrap_err().to_string();
        assert!(error.contains("at most 2^40 bytes"), "{error}");
        assert!(open(name).is_empty() && open(name).batches(4).unwrap().is_empty());
    }
    let dataset = open("empty-group");
    assert_eq!(dataset.row_groups().collect::<Vec<_>>(), [40, 0, 20]);
    assert_few(&dataset.read().unwrap(), "empty-group");
    assert_eq!(dataset.get(40).unwrap().int("int64"), Some(number(40) as i64));
    assert_eq!(dataset.stream([1]).count(), 0);
}

#[test]
fn files_of_one_schema_are_one_dataset() {
    let dataset = open("part-{0..2}");
    assert_eq!((dataset.files().count(), dataset.row_groups().len()), (3, 9));
    assert_few(&dataset.read().unwrap(), "parts");
    let paths = ["part-0", "numbers"].map(|name| fixture("parquet").join(format!("{name}.parquet")));
    let error = ParquetDataset::from_files(paths).err().unwrap();
    assert!(matches!(error, DataError::Layout { .. }), "{error}");
    names_file(&error, "numbers.parquet");
    assert!(matches!(ParquetDataset::from_files(Vec::<String>::new()), Err(DataError::InvalidOption { .. })));
}

#[test]
fn rows_by_number_and_as_a_stream() {
    let dataset = open("part-{0..2}");
    assert_eq!(dataset.len(), ROWS);
    for i in [59, 0, 17, 18, 19, 20, 1] {
        let row = dataset.get(i).unwrap();
        assert_eq!((row.int("int64"), row.bytes("text")), (Some(number(i) as i64), Some(&*text(i))), "row {i}");
        assert_eq!(floats(row.tensor("ints").unwrap()), ints(i));
        assert_eq!((row.float("int64"), row.values().len()), (None, 3));
    }
    assert!(matches!(dataset.get(ROWS), Err(DataError::IndexOutOfRange { index: ROWS, len: ROWS })));

    let numbers = |stream: &mut dyn Iterator<Item = _>| -> Vec<i64> {
        stream.map(|row: Result<overdrive_dataload::Row, _>| row.unwrap().int("int64").unwrap()).collect()
    };
    let all = numbers(&mut dataset.stream(0..9));
    assert_eq!(all, (0..ROWS).map(|i| number(i) as i64).collect::<Vec<_>>());
    let mut stream = dataset.stream(0..9);
    for given in 0..=ROWS {
        assert_eq!(numbers(&mut dataset.stream_from(0..9, stream.position())), all[given..]);
        stream.next();
    }
    assert_eq!(dataset.stream_from([0], StreamPosition { shard: 0, sample: u64::MAX }).count(), 0);

    let row = open("numbers").get(7).unwrap();
    for (name, _) in NUMBERS {
        let found = match row.get(name) {
            Some(Value::Int(value)) => *value as f64,
            Some(Value::Float(value)) => *value,
            other => panic!("{other:?}"),
        };
        assert_eq!(found, value(name, 7), "{name}");
    }
    assert_eq!(row.bytes("fixed"), Some(&[7, 8, 9, 10, 11][..]));
    let deep = open("nested").select(["deep", "words", "vector"]).unwrap().list_size("vector", 3).unwrap();
    let row = deep.get(5).unwrap();
    assert!(matches!(row.get("deep"), Some(Value::Values(Column::Ragged(_)))));
    assert_eq!(row.tensor("vector").unwrap().size(), [3]);
}

/// Windows end by bytes, and the bytes of a row depend on its columns: a state is bound to them.
#[test]
fn a_state_is_bound_to_the_selected_columns() {
    let of = |columns: &[&str]| open("numbers").select(columns).unwrap().fingerprint();
    assert_eq!(open("numbers").fingerprint(), 0);
    assert_eq!(of(&["int64"]), of(&["int64"]));
    assert_ne!(of(&["int64"]), of(&["int8"]));
    assert_ne!(of(&["int64"]), open("nulls").select(["int64"]).unwrap().fill_null("int64", 1.0).unwrap().fingerprint());
}
