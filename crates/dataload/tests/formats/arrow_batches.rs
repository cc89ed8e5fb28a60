//! Record batches become tensors without a copy where that is sound, and tables become record batches that Python
//! reads.

use std::env;
use std::ops::Range;
use std::process::Command;
use std::sync::Arc;

use arrow_array::types::{Float32Type, Int32Type};
use arrow_array::{
    Array, ArrayRef, BooleanArray, FixedSizeListArray, Float32Array, Float64Array, Int64Array, LargeListArray,
    ListArray, RecordBatch, StringArray, UInt16Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::Field;
use overdrive_dataload::{ArrowColumns, ArrowDataset, ArrowWriter, Column, DataError, Dataset, Table};
use overdrive_ffi::storage;
use tch::Kind;

use crate::fixture;
use crate::table::floats;

const ROWS: usize = 1000;

fn column(number: usize) -> Vec<f32> {
    (0..ROWS).map(|row| (row * 31 + number) as f32 / 8.0).collect()
}

/// A batch of 16 columns of floats and one of vectors, and the addresses of their values.
fn batch_of_floats() -> (RecordBatch, Vec<usize>) {
    let mut addresses = Vec::new();
    let mut columns: Vec<(String, ArrayRef)> = Vec::new();
    for number in 0..16 {
        let array = Float32Array::from(column(number));
        addresses.push(array.values().as_ptr().addr());
        columns.push((format!("x{number}"), Arc::new(array)));
    }
    let vectors = (0..ROWS).map(|row| Some([Some(row as f32), Some(0.5)]));
    let vectors = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(vectors, 2);
    addresses.push(vectors.values().to_data().buffers()[0].as_ptr().addr());
    columns.push(("vector".to_owned(), Arc::new(vectors)));
    (RecordBatch::try_from_iter(columns).unwrap(), addresses)
}

/// How many columns have their values in other memory than the arrays had.
fn copies(table: &Table, addresses: &[usize]) -> usize {
    let address = |column: &Column| match column {
        Column::Tensor(tensor) => storage(tensor).unwrap().address,
        Column::Ragged(lists) => storage(&lists.clone().into_tensors().unwrap().0).unwrap().address,
        other => panic!("{other:?}"),
    };
    assert_eq!(table.columns().len(), addresses.len());
    table.columns().zip(addresses).filter(|((_, column), before)| address(column) != **before).count()
}

fn assert_floats(table: &Table, rows: std::ops::Range<usize>) {
    for number in 0..16 {
        let tensor = table.tensor(&format!("x{number}")).unwrap();
        assert_eq!((tensor.kind(), tensor.size()), (Kind::Float, vec![rows.len() as i64]));
        assert_eq!(Vec::<f32>::try_from(tensor).unwrap(), column(number)[rows.clone()]);
    }
    let vectors = table.tensor("vector").unwrap();
    assert_eq!(vectors.size(), [rows.len() as i64, 2]);
    assert_eq!(floats(vectors), rows.flat_map(|row| [row as f64, 0.5]).collect::<Vec<_>>());
}

#[test]
fn columns_whose_memory_is_not_shared_are_not_copied() -> Result<(), DataError> {
    let (batch, addresses) = batch_of_floats();
    let columns = ArrowColumns::new(&batch.schema());
    let table = columns.table(batch)?;
    assert_eq!(copies(&table, &addresses), 0);
    assert_floats(&table, 0..ROWS);
    // The tensors own the memory: it can be written to, and outlives the table.
    let mut first = table.tensor("x0")?.shallow_clone();
    drop(table);
    _ = first.fill_(7.0);
    assert_eq!(floats(&first), vec![7.0; ROWS]);

    // Shared memory is copied, so that writing to a tensor changes nothing else.
    let (batch, addresses) = batch_of_floats();
    let table = columns.table(batch.clone())?;
    assert_eq!(copies(&table, &addresses), 17);
    assert_floats(&table, 0..ROWS);
    _ = table.tensor("x0")?.shallow_clone().fill_(7.0);
    assert_eq!(copies(&columns.table(batch)?, &addresses), 0, "nothing shares it any more");
    // So is what begins within a buffer; a part from its start on stays where it is.
    let (batch, addresses) = batch_of_floats();
    let middle = batch.slice(10, 500);
    drop(batch);
    let table = columns.table(middle)?;
    assert_eq!(copies(&table, &addresses), 17);
    assert_floats(&table, 10..510);
    let (batch, addresses) = batch_of_floats();
    let start = batch.slice(0, 500);
    drop(batch);
    let table = columns.table(start)?;
    assert_eq!(copies(&table, &addresses), 0);
    assert_floats(&table, 0..500);
    // A column that is selected twice is shared.
    let (batch, addresses) = batch_of_floats();
    let twice = columns.clone().select(["x3", "x3"])?.table(batch)?;
    assert_eq!(copies(&twice, &[addresses[3]; 2]), 1);
    Ok(())
}

type Lists = Vec<Option<Vec<Option<i32>>>>;

/// Lists with offsets of 32 and 64 bits, lists of lists, and the addresses of their values.
fn batch_of_lists(lists: &Lists) -> (RecordBatch, Vec<usize>) {
    let short = ListArray::from_iter_primitive::<Int32Type, _, _>(lists.clone());
    let long = LargeListArray::from_iter_primitive::<Int32Type, _, _>(lists.clone());
    let inner = ListArray::from_iter_primitive::<Int32Type, _, _>(lists.clone());
    let item = Arc::new(Field::new("item", inner.data_type().clone(), true));
    let address = |lists: &dyn Array| lists.to_data().child_data()[0].buffers()[0].as_ptr().addr();
    let addresses = vec![address(&short), address(&long), address(&inner)];
    let deep = ListArray::new(item, OffsetBuffer::from_repeated_length(1, lists.len()), Arc::new(inner), None);
    let columns: [(&str, ArrayRef); 3] =
        [("short", Arc::new(short)), ("long", Arc::new(long)), ("deep", Arc::new(deep))];
    (RecordBatch::try_from_iter(columns).unwrap(), addresses)
}

/// The floor is none: the tensors of values are the arrays' memory. Offsets are converted to 64 bits.
#[test]
fn values_of_lists_whose_memory_is_not_shared_are_not_copied() -> Result<(), DataError> {
    let lists: Lists = (0..ROWS as i32).map(|row| Some((0..row % 5).map(|it| Some(row + it)).collect())).collect();
    let values = |rows: Range<usize>| lists[rows].iter().flatten().flatten().map(|it| f64::from(it.unwrap())).collect();
    let assert_lists = |table: &Table, rows: Range<usize>| {
        let expected: Vec<f64> = values(rows.clone());
        for (name, level) in [("short", 0), ("long", 0), ("deep", 1)] {
            let ragged = table.ragged(name).unwrap();
            assert_eq!(floats(&ragged.clone().into_tensors().unwrap().0), expected, "{name}");
            let lengths = ragged.offsets(level).unwrap().windows(2).map(|pair| pair[1] - pair[0]);
            assert!(lengths.eq(rows.clone().map(|row| row as i64 % 5)), "{name}");
        }
    };
    let (batch, addresses) = batch_of_lists(&lists);
    let columns = ArrowColumns::new(&batch.schema());
    let table = columns.table(batch)?;
    assert_eq!(copies(&table, &addresses), 0);
    assert_lists(&table, 0..ROWS);
    // Once, where others have the memory too.
    let (batch, addresses) = batch_of_lists(&lists);
    let table = columns.table(batch.clone())?;
    assert_eq!(copies(&table, &addresses), 3);
    assert_lists(&table, 0..ROWS);
    drop(batch);
    // A part has other values first, or none after its own.
    for (rows, expected) in [(10..500, 3), (0..500, 0)] {
        let (batch, addresses) = batch_of_lists(&lists);
        let part = batch.slice(rows.start, rows.len());
        drop(batch);
        let table = columns.table(part)?;
        assert_eq!(copies(&table, &addresses), expected);
        assert_lists(&table, rows);
    }
    // Missing lists have no values; a missing value needs one.
    let mut missing = lists.clone();
    missing[7] = None;
    let (batch, addresses) = batch_of_lists(&missing);
    let only = |column: &str| columns.clone().select([column])?.mask_null(column);
    let table = only("short")?.table(batch)?;
    let Some(Column::Ragged(found)) = table.get("short") else { panic!("{table:?}") };
    assert_eq!(storage(&found.clone().into_tensors()?.0).unwrap().address, addresses[0]);
    assert_eq!(floats(table.tensor("short.is_null")?).iter().position(|&is_null| is_null == 1.0), Some(7));
    missing[8] = Some(vec![None]);
    let (batch, addresses) = batch_of_lists(&missing);
    let table = columns.clone().select(["short"])?.fill_null("short", -1.0)?.table(batch)?;
    assert_eq!(copies(&table, &addresses[..1]), 1);
    Ok(())
}

fn many() -> RecordBatch {
    let lists = vec![Some(vec![Some(1), Some(2)]), Some(vec![]), None, Some(vec![Some(5)])];
    let columns: [(&str, ArrayRef); 6] = [
        ("flag", Arc::new(BooleanArray::from(vec![true, false, true, true]))),
        ("short", Arc::new(UInt16Array::from(vec![1, 65535, 2, 3]))),
        ("double", Arc::new(Float64Array::from(vec![Some(0.5), None, Some(1.5), None]))),
        ("name", Arc::new(StringArray::from(vec![Some("a"), Some("bc"), None, Some("")]))),
        ("list", Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists))),
        ("label", Arc::new(Int64Array::from(vec![3, 1, 4, 1]))),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

fn masked() -> ArrowColumns {
    let columns = ArrowColumns::new(&many().schema());
    ["double", "name", "list"].into_iter().fold(columns, |columns, name| columns.mask_null(name).unwrap())
}

#[test]
fn every_array_and_every_slice_of_it_becomes_the_same_values() -> Result<(), DataError> {
    for (batch, rows) in
        [(many(), 0..4), (many().slice(1, 3), 1..4), (many().slice(2, 1), 2..3), (many().slice(4, 0), 4..4)]
    {
        let table = masked().table(batch)?;
        let part = |all: [f64; 4]| all[rows.clone()].to_vec();
        assert_eq!(floats(table.tensor("flag")?), part([1.0, 0.0, 1.0, 1.0]));
        assert_eq!(floats(table.tensor("short")?), part([1.0, 65535.0, 2.0, 3.0]));
        assert_eq!(floats(table.tensor("double")?), part([0.5, 0.0, 1.5, 0.0]));
        assert_eq!(floats(table.tensor("double.is_null")?), part([0.0, 1.0, 0.0, 1.0]));
        assert!(table.bytes("name")?.iter().eq([&b"a"[..], b"bc", b"", b""][rows.clone()].iter().copied()));
        assert_eq!(floats(table.tensor("name.is_null")?), part([0.0, 0.0, 1.0, 0.0]));
        let lists = table.ragged("list")?;
        let lengths = lists.offsets(0).unwrap().windows(2).map(|pair| (pair[1] - pair[0]) as f64);
        assert_eq!(lengths.collect::<Vec<_>>(), part([2.0, 0.0, 0.0, 1.0]));
        assert_eq!(floats(table.tensor("list.is_null")?), part([0.0, 0.0, 1.0, 0.0]));
        assert_eq!(floats(table.tensor("label")?), part([3.0, 1.0, 4.0, 1.0]));
    }
    let columns = ArrowColumns::new(&many().schema());
    let error = columns.table(many()).unwrap_err();
    assert!(matches!(error, DataError::InvalidOption { option: "column", .. }), "{error}");
    assert!(error.to_string().contains("\"double\"") && error.to_string().ends_with("a null in row 1"), "{error}");
    assert!(matches!(columns.table(batch_of_floats().0), Err(DataError::InvalidOption { option: "batch", .. })));
    Ok(())
}

#[test]
fn tables_become_record_batches_of_the_same_values() -> Result<(), DataError> {
    let table = masked().table(many())?;
    let back = table.to_record_batch(&["name"])?;
    let again = ArrowColumns::new(&back.schema());
    let again = ["double", "name", "list"].into_iter().try_fold(again, |columns, name| columns.mask_null(name))?;
    let again = again.table(back.clone())?;
    assert_eq!(format!("{:?}", again.to_record_batch(&["name"])?), format!("{back:?}"));
    let names: Vec<_> = back.schema().fields().iter().map(|field| field.name().clone()).collect();
    assert_eq!(names, ["flag", "short", "double", "name", "list", "label"]);
    for (column, nulls) in [(0, 0), (1, 0), (2, 2), (3, 1), (4, 1), (5, 0)] {
        assert_eq!((back.column(column).len(), back.column(column).null_count()), (4, nulls), "{column}");
    }
    assert_eq!(back.column(0).to_data(), many().column(0).to_data());
    assert_eq!(back.column(2).to_data(), many().column(2).to_data());
    for texts in [["label"], ["none"]] {
        assert!(matches!(table.to_record_batch(&texts), Err(DataError::InvalidOption { option: "texts", .. })));
    }
    let (floats, _) = batch_of_floats();
    let back = ArrowColumns::new(&floats.schema()).table(floats.clone())?.to_record_batch(&[])?;
    assert!((0..16).all(|column| back.column(column).to_data() == floats.column(column).to_data()));
    let vectors = ArrowColumns::new(&back.schema()).table(back)?;
    assert_eq!(vectors.tensor("vector")?.size(), [ROWS as i64, 2]);
    Ok(())
}

/// Only a mask of nulls is a mask: another column of that name stays one.
#[test]
fn a_column_named_as_a_mask_is_kept() -> Result<(), DataError> {
    let mut columns = None;
    let named: [ArrayRef; 2] =
        [Arc::new(Int64Array::from(vec![3, 0])), Arc::new(BooleanArray::from(vec![true, false]))];
    for array in named {
        let double: ArrayRef = Arc::new(Float64Array::from(vec![0.5, 1.5]));
        let batch = RecordBatch::try_from_iter([("double", double), ("double.is_null", array)]).unwrap();
        let of_schema = ArrowColumns::new(&batch.schema());
        let back = of_schema.table(batch.clone())?.to_record_batch(&[])?;
        assert_eq!([0, 1].map(|at| back.column(at).to_data()), [0, 1].map(|at| batch.column(at).to_data()));
        columns = Some(of_schema);
    }
    let columns = columns.unwrap();
    let error = columns.mask_null("double").err().unwrap();
    assert!(matches!(error, DataError::InvalidOption { option: "mask_null", .. }), "{error}");
    assert!(error.to_string().contains("\"double.is_null\""), "{error}");
    Ok(())
}

#[test]
fn a_written_file_is_read_back_and_appears_when_it_is_complete() -> Result<(), DataError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("many.arrow");
    let mut writer = ArrowWriter::create(&path, many().schema())?;
    writer.write(&many())?;
    assert!(matches!(writer.write(&batch_of_floats().0), Err(DataError::InvalidOption { option: "batch", .. })));
    writer.write(&many().slice(1, 2))?;
    assert!(!path.exists());
    writer.finish()?;
    let dataset = ArrowDataset::from_files([&path])?.mask_null("double")?.mask_null("name")?.mask_null("list")?;
    let labels = (0..dataset.len()).map(|row| dataset.get(row).map(|row| row.int("label")));
    assert_eq!(labels.collect::<Result<Option<Vec<_>>, _>>()?.unwrap(), [3, 1, 4, 1, 1, 4]);
    drop(ArrowWriter::create(dir.path().join("other.arrow"), many().schema())?);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    Ok(())
}

/// Needs a Python with the packages `pyarrow` and `datasets`; `OVERDRIVE_PYTHON` sets the interpreter.
#[test]
fn python_reads_what_is_written() {
    let python = env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let imported = Command::new(&python).args(["-c", "import datasets, pyarrow"]).output();
    if !imported.is_ok_and(|output| output.status.success()) {
        println!("skipped: no Python with the packages pyarrow and datasets");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("some.arrow");
    let batch = masked().table(many()).unwrap().to_record_batch(&["name"]).unwrap();
    let mut writer = ArrowWriter::create(&path, batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    let output = Command::new(&python).arg(fixture("arrow").join("read.py")).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let expected = [
        r#"{"double": 0.5, "flag": true, "label": 3, "list": [1, 2], "name": "a", "short": 1}"#,
        r#"{"double": null, "flag": false, "label": 1, "list": [], "name": "bc", "short": 65535}"#,
        r#"{"double": 1.5, "flag": true, "label": 4, "list": null, "name": null, "short": 2}"#,
        r#"{"double": null, "flag": true, "label": 1, "list": [5], "name": "", "short": 3}"#,
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}
