//! JSON lines and tables of comma-separated values: rows in any order, and errors that name their line.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use overdrive_dataload::{CsvDataset, DataError, DataLoader, Dataset, JsonLines};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::names_file;

fn written(content: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.txt");
    fs::write(&path, content).unwrap();
    (folder, path)
}

fn all<D: Dataset>(dataset: &D) -> Vec<D::Sample> {
    (0..dataset.len()).map(|index| dataset.get(index).unwrap()).collect()
}

/// What an error says after the file's name.
fn problem<T>(result: Result<T, DataError>) -> String {
    let error = result.err().expect("an error");
    assert!(matches!(error, DataError::Line { .. }), "{error}");
    names_file(&error, "rows.txt").split_once("rows.txt: ").unwrap().1.to_owned()
}

#[test]
fn json_lines_are_read_in_any_order_whatever_ends_and_separates_them() {
    let values = [json!({"a": 1}), json!([1.5, null]), json!("text with \u{e9}"), json!(3)];
    let line = |value: &Value| value.to_string();
    let [a, b, c, d] = values.each_ref().map(line);
    for content in [
        format!("{a}\n{b}\n{c}\n{d}\n"),
        format!("{a}\n{b}\n{c}\n{d}"),
        format!("{a}\r\n{b}\r\n{c}\r\n{d}\r\n"),
        format!("\u{feff}{a}\n{b}\n{c}\n{d}\n"),
        format!("\n\n{a}\n \t\n{b}\n\n\n  {c} \n{d}\n\n \n"),
    ] {
        let (_folder, path) = written(&content);
        let lines = JsonLines::open(&path).unwrap();
        assert_eq!(all(&lines), values, "{content:?}");
        assert_eq!(lines.get(2).unwrap(), values[2]);
        assert!(matches!(lines.get(4), Err(DataError::IndexOutOfRange { index: 4, len: 4 })));
    }
    for nothing in ["", "\n", " \n\r\n\t", "\u{feff}"] {
        let (_folder, path) = written(nothing);
        assert_eq!(JsonLines::open(&path).unwrap().len(), 0, "{nothing:?}");
    }
}

#[derive(Debug, Deserialize, PartialEq)]
struct Row {
    name: String,
    count: i32,
}

#[test]
fn a_bad_json_line_is_named_by_its_number() -> Result<(), DataError> {
    let (_folder, path) =
        written("{\"name\": \"a\", \"count\": 1}\n\n{\"name\": \"b\"}\n{\"name\": 5}\n[1, \n\nnull\n");
    let lines = JsonLines::open(&path)?;
    let rows = lines.typed::<Row>();
    assert_eq!(rows.get(0)?, Row { name: "a".to_owned(), count: 1 });
    assert_eq!(problem(rows.get(1)), "line 3: column 13: missing field `count`");
    assert_eq!(problem(rows.get(2)), "line 4: column 10: invalid type: integer `5`, expected a string");
    assert_eq!(problem(lines.get(3)), "line 5: column 3: EOF while parsing a value");
    assert_eq!(problem(rows.get(4)), "line 7: column 4: invalid type: null, expected struct Row");
    let deep = "[".repeat(1_000_000);
    let (_folder, path) = written(format!("1\n{deep}\n"));
    assert!(problem(JsonLines::open(&path)?.get(1)).starts_with("line 2: column 128: recursion limit exceeded"));
    Ok(())
}

#[test]
fn lines_longer_than_any_buffer_are_found() -> Result<(), DataError> {
    let lengths = [0, 1, (1 << 18) - 3, (1 << 18) - 2, (1 << 18) - 1, 1 << 18, 700_000, 5];
    let texts: Vec<String> = lengths.iter().map(|&length| "x".repeat(length)).collect();
    let (_folder, path) = written(texts.iter().map(|text| format!("\"{text}\"\n")).collect::<String>());
    assert!(all(&JsonLines::open(&path)?.typed::<String>()) == texts);
    let (_folder, path) = written(texts.iter().map(|text| format!("1,\"{text}\n\"\r\n")).collect::<String>());
    let rows = CsvDataset::builder(&path).has_headers(false).open()?.typed::<(u8, String)>();
    assert_eq!(rows.len(), texts.len());
    assert!(all(&rows).iter().zip(&texts).all(|((one, found), text)| *one == 1 && *found == format!("{text}\n")));
    Ok(())
}

#[test]
fn csv_rows_are_read_by_name_and_by_position() -> Result<(), DataError> {
    for content in [
        "name,count\n\"a, \"\"b\"\"\",1\nc,-2\n",
        "name,count\r\n\"a, \"\"b\"\"\",1\r\nc,-2",
        "\u{feff}name,count\r\"a, \"\"b\"\"\",1\r\rc,-2\r",
        "\nname,count\n\n\"a, \"\"b\"\"\",1\n\n\nc,-2\n\n",
    ] {
        let (_folder, path) = written(content);
        let table = CsvDataset::open(&path)?;
        assert_eq!((table.headers(), table.len()), (vec!["name", "count"], 2), "{content:?}");
        let map = |name: &str, count: &str| {
            BTreeMap::from([("name", name), ("count", count)].map(|(key, value)| (key.to_owned(), value.to_owned())))
        };
        assert_eq!(all(&table), [map("a, \"b\"", "1"), map("c", "-2")]);
        let row = |name: &str, count| Row { name: name.to_owned(), count };
        assert_eq!(all(&table.typed::<Row>()), [row("a, \"b\"", 1), row("c", -2)]);
        assert_eq!(table.typed::<(String, f32)>().get(1)?, ("c".to_owned(), -2.0));
        assert!(matches!(table.get(2), Err(DataError::IndexOutOfRange { index: 2, len: 2 })));
    }
    let (_folder, path) = written("1\t2.5\n3\t'4\t5'\n");
    let table = CsvDataset::builder(&path).delimiter(b'\t').quote(b'\'').has_headers(false).open()?;
    assert_eq!(all(&table.typed::<Vec<String>>()), [["1", "2.5"], ["3", "4\t5"]]);
    assert!(table.headers().is_empty());
    let numbers = "x,y,label\n0.5,1,3\n-2,0.25,4\n7,8,5\n";
    let (_folder, path) = written(numbers);
    let rows = CsvDataset::open(&path)?.typed::<(f32, f64, i64)>();
    let (x, y, labels) = DataLoader::builder(rows).batch_size(3).num_workers(2).build()?.iter().next().unwrap()?;
    assert_eq!((Vec::<f32>::try_from(x)?, Vec::<f64>::try_from(y)?), (vec![0.5, -2.0, 7.0], vec![1.0, 0.25, 8.0]));
    assert_eq!(Vec::<i64>::try_from(labels)?, [3, 4, 5]);
    Ok(())
}

#[test]
fn a_bad_csv_row_is_named_by_its_first_line() -> Result<(), DataError> {
    for end in ["\n", "\r\n"] {
        let lines = ["name,count", "\"two", "lines\",1", "", "b,x", "c", "d,4,5", "e,"];
        let (_folder, path) = written(lines.map(|line| format!("{line}{end}")).concat());
        let (table, rows) = (CsvDataset::open(&path)?, CsvDataset::open(&path)?.typed::<Row>());
        assert_eq!(rows.get(0)?, Row { name: format!("two{end}lines"), count: 1 });
        assert_eq!(problem(rows.get(1)), "line 5: column \"count\": invalid digit found in string");
        assert_eq!(problem(table.get(2)), "line 6: expected 2 fields, found 1");
        assert_eq!(problem(table.get(3)), "line 7: expected 2 fields, found 3");
        assert_eq!(problem(rows.get(4)), "line 8: column \"count\": cannot parse integer from empty string");
    }
    let (_folder, path) = written(b"a,b\n1,\xff\xfe\n");
    assert_eq!(problem(CsvDataset::open(&path)?.get(0)), "line 2: field 2: not UTF-8");
    let (_folder, path) = written("1,2\n");
    let table = CsvDataset::builder(&path).has_headers(false).open()?;
    assert_eq!(
        problem(table.typed::<(i64, bool)>().get(0)),
        "line 1: field 2: provided string was not `true` or `false`"
    );
    Ok(())
}

#[test]
fn files_that_cannot_be_read_by_row_are_refused() -> Result<(), DataError> {
    let (folder, path) = written([0x1f, 0x8b, 8, 0]);
    for error in [JsonLines::open(&path).unwrap_err(), CsvDataset::open(&path).unwrap_err()] {
        let compressed = "expected a file that is not compressed, since its rows are read in any order";
        assert!(names_file(&error, "rows.txt").contains(compressed), "{error}");
    }
    assert!(matches!(JsonLines::open(folder.path()), Err(DataError::Layout { .. })));
    assert!(matches!(CsvDataset::open(folder.path().join("none")), Err(DataError::Io { .. })));
    let (_folder, path) = written("");
    let error = CsvDataset::open(&path).unwrap_err().to_string();
    assert!(error.ends_with("expected a row with the columns' names, found an empty file"), "{error}");
    assert_eq!(CsvDataset::builder(&path).has_headers(false).open()?.len(), 0);
    for (delimiter, quote) in [(b'"', b'"'), (b'\n', b'"'), (b',', b'\r')] {
        let error = CsvDataset::builder(&path).delimiter(delimiter).quote(quote).open().unwrap_err();
        assert!(matches!(error, DataError::InvalidOption { option: "delimiter", .. }), "{error}");
    }
    // The rest of the file would be one field.
    for (text, line) in [("a,b\n1,\"x\n3,4\n", 2), ("a,b\n1,2\n\n3,\"x\"\"", 3), ("\"", 1)] {
        let (_folder, path) = written(text);
        let told = problem(CsvDataset::open(&path));
        assert!(told.contains(&format!("{line}: a quote is not closed")), "{text:?}: {told}");
    }
    for text in ["a,b\n1,\"x\"", "a,b\n1,\"x\"\r\n\r\n", "a,b\n1,x\n\n\n", "a,b\r1,\"x\"\"\"\r"] {
        let (_folder, path) = written(text);
        assert_eq!(CsvDataset::open(&path)?.len(), 1, "{text:?}");
    }
    let (_folder, path) = written("x,x,x.1\n1,2,3\n");
    let names = ["x", "x.1", "x.1.1"];
    assert_eq!(CsvDataset::open(&path)?.headers(), names);
    let row: Vec<(String, String)> = CsvDataset::open(&path)?.get(0)?.into_iter().collect();
    assert_eq!(
        row,
        ["1", "2", "3"].into_iter().zip(names).map(|(field, name)| (name.into(), field.into())).collect::<Vec<_>>()
    );
    // A file that was cut after its rows were found.
    let (_folder, path) = written("1\n22\n333\n");
    let lines = JsonLines::open(&path)?;
    fs::write(&path, "1\n2").unwrap();
    assert_eq!(lines.get(0)?, json!(1));
    assert!(matches!(lines.get(1), Err(DataError::Io { .. })));
    Ok(())
}

#[test]
fn any_bytes_are_rows_or_errors() -> Result<(), DataError> {
    let good = b"{\"a\": [1, \"x,y\"]}\r\n\"p\"\"q\",2\n\n3,\xc3\xa9\r4".to_vec();
    for at in 0..good.len() {
        for change in [0, b'"', b'\n', b'\r', b',', 0xff, b'{'] {
            let mut bytes = good.clone();
            bytes[at] = change;
            let (_folder, path) = written(&bytes);
            let lines = JsonLines::open(&path)?;
            (0..lines.len()).for_each(|index| drop(lines.get(index)));
            let Ok(table) = CsvDataset::builder(&path).has_headers(at % 2 == 0).open() else { continue };
            (0..table.len()).for_each(|index| drop(table.typed::<Vec<String>>().get(index)));
        }
    }
    Ok(())
}
