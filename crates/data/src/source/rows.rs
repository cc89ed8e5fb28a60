//! Rows of tables as samples.

use anyhow::{Context, Result, bail};
use overdrive_dataload::{Field, FieldKind, Row, Value};
use serde::de::IgnoredAny;
use tch::{Kind, Tensor};

use crate::example::text;
use crate::sample::{Draft, KEY, LABEL, Sample, guess_name, is_image};

/// How a column becomes a field.
pub struct Named {
    pub column: String,
    field: String,
    /// Whether it holds a file, whose content tells what comes after the field's name, if that is not empty.
    is_file: bool,
    /// Whether its numbers have single precision or less.
    single: bool,
    /// The dimensions of the arrays in it, where a row gives them as one list.
    pub shape: Option<Vec<i64>>,
}

/// The field of a column. `datasets` calls the label so; a table that has keys was made of fields, whose names stay.
pub fn field_of<'a>(column: &'a str, columns: &[String]) -> &'a str {
    let has = |name: &str| columns.iter().any(|column| column == name);
    if column == "label" && !has(LABEL) && !has(KEY) { LABEL } else { column }
}

/// The fields of columns. `datasets` stores an image as a structure of its bytes and its file's name.
pub fn names<'a>(fields: impl Iterator<Item = &'a Field>) -> Vec<Named> {
    let (columns, singles): (Vec<String>, Vec<bool>) = fields
        .map(|field| {
            let single = matches!(field.kind(), FieldKind::Number(Kind::Half | Kind::Float));
            (field.name().to_owned(), single)
        })
        .unzip();
    let has = |column: String| columns.contains(&column);
    let is_file = |stem: &str| has(format!("{stem}.bytes")) && has(format!("{stem}.path"));
    let files = columns.iter().filter(|column| column.strip_suffix(".bytes").is_some_and(is_file)).count();
    let used = columns.iter().zip(singles).filter(|(column, _)| !column.strip_suffix(".path").is_some_and(is_file));
    let named = used.map(|(column, single)| {
        let stem = column.strip_suffix(".bytes").filter(|stem| is_file(stem));
        let field = match stem {
            Some(stem) if files == 1 && !is_image(stem) => "",
            Some(stem) => stem,
            None => field_of(column, &columns),
        };
        Named { column: column.clone(), field: field.to_owned(), is_file: stem.is_some(), single, shape: None }
    });
    named.collect()
}

/// The sample in a row; `is_null` says which columns it does not have.
pub fn sample(row: &Row, index: usize, named: &[Named], is_null: impl Fn(&str) -> bool) -> Result<Sample> {
    let mut draft = Draft::default();
    for Named { column, field, is_file, single, shape } in named.iter().filter(|named| !is_null(&named.column)) {
        let place = || format!("row {index}: column {column:?}");
        let (name, content) = match row.get(column) {
            Some(Value::Bytes(bytes)) if *is_file => (file_field(field, bytes), bytes.clone()),
            Some(Value::Bytes(bytes)) => (field.clone(), bytes.clone()),
            Some(Value::Int(number)) => (field.clone(), number.to_string().into_bytes()),
            Some(Value::Float(number)) => (field.clone(), float(*number, *single)),
            Some(Value::Tensor(numbers)) => match shape {
                Some(shape) => array(field, &numbers.f_reshape(shape)?).with_context(place)?,
                None => array(field, numbers).with_context(place)?,
            },
            _ => bail!("{} has lists of texts or of lists, which no field can hold", place()),
        };
        draft.add(name, content).with_context(place)?;
    }
    Ok(draft.finish(index))
}

/// The field of a file: the column's, where it has one, and behind it what the content is, unless it says that itself.
fn file_field(field: &str, content: &[u8]) -> String {
    match (field, guess_name(content)) {
        ("", kind) => kind.to_owned(),
        (field, _) if is_image(field) => field.to_owned(),
        (field, kind) => format!("{field}.{kind}"),
    }
}

/// The shortest text that reads back as the number, in its own precision.
pub fn float(number: f64, single: bool) -> Vec<u8> {
    if single { (number as f32).to_string().into_bytes() } else { number.to_string().into_bytes() }
}

/// The field of an array, and its numbers: a list's are separated by spaces, and one of more dimensions is JSON, which the
/// field's name then says.
pub fn array(field: &str, numbers: &Tensor) -> Result<(String, Vec<u8>)> {
    let (shape, flat) = (numbers.size(), numbers.f_flatten(0, -1)?);
    match numbers.f_kind()? {
        Kind::Half | Kind::Float => written(field, &shape, &Vec::<f32>::try_from(&flat.f_to_kind(Kind::Float)?)?),
        Kind::Double => written(field, &shape, &Vec::<f64>::try_from(&flat)?),
        _ => written(field, &shape, &Vec::<i64>::try_from(&flat.f_to_kind(Kind::Int64)?)?),
    }
}

fn written(field: &str, shape: &[i64], numbers: &[impl ToString]) -> Result<(String, Vec<u8>)> {
    if shape.len() < 2 {
        return Ok((field.to_owned(), text(numbers)));
    }
    let json = nested(shape, numbers);
    serde_json::from_str::<IgnoredAny>(&json).context("an array with NaN or an infinity, which JSON does not have")?;
    Ok((format!("{field}.json"), json.into_bytes()))
}

fn nested(shape: &[i64], numbers: &[impl ToString]) -> String {
    let Some((&count, inner)) = shape.split_first() else {
        return numbers.first().map(ToString::to_string).unwrap_or_default();
    };
    let each = inner.iter().product::<i64>() as usize;
    let parts = (0..count as usize).map(|part| nested(inner, &numbers[part * each..(part + 1) * each]));
    format!("[{}]", parts.collect::<Vec<_>>().join(","))
}
