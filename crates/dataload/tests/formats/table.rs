//! The content of the Parquet and Arrow fixtures, and what it is when it is read.

use overdrive_dataload::{BytesColumn, Table};
use tch::{Kind, Tensor};

pub(crate) const ROWS: usize = 60;

/// The columns of `numbers` in `fixtures/make_parquet.py`, and the kinds that they are read as.
pub(crate) const NUMBERS: [(&str, Kind); 11] = [
    ("bool", Kind::Bool),
    ("int8", Kind::Int8),
    ("int16", Kind::Int16),
    ("int32", Kind::Int),
    ("int64", Kind::Int64),
    ("uint8", Kind::Uint8),
    ("uint16", Kind::Int),
    ("uint32", Kind::Int64),
    ("float16", Kind::Half),
    ("float32", Kind::Float),
    ("float64", Kind::Double),
];

// The functions of a row's number, as in `make_parquet.py`.

pub(crate) fn number(i: usize) -> f64 {
    (i * 37 % 101) as f64 - 50.0
}

pub(crate) fn value(name: &str, i: usize) -> f64 {
    match name {
        "bool" => f64::from(i.is_multiple_of(3)),
        name if name.starts_with("uint") => number(i) + 50.0,
        name if name.starts_with("float") => number(i) / 4.0,
        _ => number(i),
    }
}

pub(crate) fn text(i: usize) -> Vec<u8> {
    format!("text {}", i % 7).repeat(i % 3).into_bytes()
}

pub(crate) fn blob(i: usize) -> Vec<u8> {
    (0..i % 9).map(|j| (i * 31 + j * 7) as u8).collect()
}

pub(crate) fn ints(i: usize) -> Vec<f64> {
    (0..i % 4).map(|j| number(i + j)).collect()
}

pub(crate) fn is_null(i: usize) -> bool {
    i % 7 == 3
}

pub(crate) fn floats(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.to_kind(Kind::Double).view(-1)).unwrap()
}

pub(crate) fn assert_rows(found: &[f64], value: impl Fn(usize) -> f64, what: &str) {
    let expected: Vec<f64> = (0..ROWS).map(value).collect();
    assert_eq!(found, expected, "{what}");
}

pub(crate) fn assert_texts(found: &BytesColumn, text: impl Fn(usize) -> Vec<u8>, what: &str) {
    assert!(found.iter().eq((0..ROWS).map(text)), "{what}");
    assert_eq!((found.len(), found.get(ROWS)), (ROWS, None));
}

/// The lists of a column of plain lists.
pub(crate) fn lists(table: &Table, name: &str) -> Vec<Vec<f64>> {
    let ragged = table.ragged(name).unwrap();
    assert_eq!((ragged.rows(), ragged.lists()), (table.rows(), 1));
    let offsets = ragged.offsets(0).unwrap();
    let (values, found) = ragged.clone().into_tensors().unwrap();
    assert_eq!(Vec::<i64>::try_from(&found[0]).unwrap(), offsets);
    let values = floats(&values);
    offsets.windows(2).map(|pair| values[pair[0] as usize..pair[1] as usize].to_vec()).collect()
}

pub(crate) fn assert_few(table: &Table, what: &str) {
    assert_rows(&floats(table.tensor("int64").unwrap()), number, what);
    assert_texts(table.bytes("text").unwrap(), text, what);
    assert_eq!(lists(table, "ints"), (0..ROWS).map(ints).collect::<Vec<_>>(), "{what}");
}

pub(crate) fn assert_numbers(table: &Table, fill: Option<f64>, what: &str) {
    for (name, kind) in NUMBERS {
        let tensor = table.tensor(name).unwrap();
        assert_eq!((tensor.kind(), tensor.size()), (kind, vec![ROWS as i64]), "{what} {name}");
        let expected = |i| fill.filter(|_| is_null(i)).unwrap_or(value(name, i));
        assert_rows(&floats(tensor), expected, &format!("{what} {name}"));
    }
    let tensor = table.tensor("fixed").unwrap();
    assert_eq!((tensor.kind(), tensor.size()), (Kind::Uint8, vec![ROWS as i64, 5]));
    let expected = (0..ROWS * 5).map(|k| match fill {
        Some(_) if is_null(k / 5) => 9.0,
        _ => f64::from((k / 5 + k % 5) as u8),
    });
    assert_eq!(floats(tensor), expected.collect::<Vec<_>>(), "{what}");
}

/// Checks the columns of lists and structures that all formats read alike: nulls in `point` are filled with -1, in
/// `holes` with 99.
pub(crate) fn assert_nested(table: &Table) {
    assert_eq!(lists(table, "ints"), (0..ROWS).map(ints).collect::<Vec<_>>());
    let deep = table.ragged("deep").unwrap();
    let (outer, inner) = (deep.offsets(0).unwrap(), deep.offsets(1).unwrap());
    let values = floats(&deep.clone().into_tensors().unwrap().0);
    for (i, pair) in outer.windows(2).enumerate() {
        let rows = inner[pair[0] as usize..=pair[1] as usize].windows(2);
        let found: Vec<&[f64]> = rows.map(|pair| &values[pair[0] as usize..pair[1] as usize]).collect();
        let half = |k: usize, j: usize| (i + j + k) as f64 / 2.0;
        let expected: Vec<Vec<f64>> = (0..i % 3).map(|j| (0..j).map(|k| half(k, j)).collect()).collect();
        assert_eq!(found, expected, "row {i}");
    }
    let words = table.ragged("words").unwrap();
    let bytes: Vec<u8> = (0..ROWS).flat_map(|i| (0..i % 3).flat_map(move |j| text(i + j))).collect();
    assert_eq!((words.lists(), floats(&words.clone().into_tensors().unwrap().0).len()), (2, bytes.len()));

    let few = |i: usize| (0..i % 3).map(|j| number(i + j)).collect::<Vec<_>>();
    assert_eq!(lists(table, "boxes.a"), (0..ROWS).map(few).collect::<Vec<_>>());
    assert_eq!(table.ragged("boxes.b").unwrap().offsets(0), table.ragged("boxes.a").unwrap().offsets(0));
    let x = |i| if is_null(i) { -1.0 } else { number(i) };
    assert_rows(&floats(table.tensor("point.x").unwrap()), x, "point.x");
    let ys = |i: usize| if is_null(i) { vec![] } else { ints(i) };
    assert_eq!(lists(table, "point.ys"), (0..ROWS).map(ys).collect::<Vec<_>>());
    let hole = |j| if is_null(j) { 99.0 } else { j as f64 };
    let holes = |i: usize| if is_null(i) { vec![] } else { (0..i % 5).map(hole).collect() };
    assert_eq!(lists(table, "holes"), (0..ROWS).map(holes).collect::<Vec<_>>());

    assert_texts(table.bytes("category").unwrap(), text, "category");
    assert_texts(table.bytes("large").unwrap(), text, "large");
    assert_rows(&floats(table.tensor("date").unwrap()), |i| 1000.0 + number(i), "date");
    assert_rows(&floats(table.tensor("time").unwrap()), |i| number(i) * 1e9, "time");
}
