//! Rows of tables as samples.

use anyhow::{Context, Result, bail};
use overdrive_dataload::{Row, Value};
use tch::Kind;

use crate::example::text;
use crate::sample::{Fields, KEY, LABEL, Sample, guess_name};

/// How a column becomes a field.
pub struct Named {
    column: String,
    field: String,
    /// Whether it holds a file, whose content tells what comes after the field's name, if that is not empty.
    is_file: bool,
}

/// Whether a column is the label: `datasets` calls it so.
pub fn is_label(column: &str, columns: &[String]) -> bool {
    column == "label" && !columns.iter().any(|column| column == LABEL)
}

/// The fields of columns. `datasets` stores an image as a structure of its bytes and its file's name.
pub fn names(columns: &[String]) -> Vec<Named> {
    let has = |column: String| columns.contains(&column);
    let is_file = |stem: &str| has(format!("{stem}.bytes")) && has(format!("{stem}.path"));
    let files = columns.iter().filter(|column| column.strip_suffix(".bytes").is_some_and(is_file)).count();
    let named = columns.iter().filter(|column| !column.strip_suffix(".path").is_some_and(is_file)).map(|column| {
        let stem = column.strip_suffix(".bytes").filter(|stem| is_file(stem));
        let field = match stem {
            Some(_) if files == 1 => String::new(),
            None if is_label(column, columns) => LABEL.to_owned(),
            // A name with a slash cannot be a file's extension.
            stem => stem.unwrap_or(column).replace('/', ".").to_lowercase(),
        };
        Named { column: column.clone(), field, is_file: stem.is_some() }
    });
    named.collect()
}

/// The sample in a row; `is_null` says which columns it does not have.
pub fn sample(row: &Row, index: usize, named: &[Named], is_null: impl Fn(&str) -> bool) -> Result<Sample> {
    let (mut key, mut fields) = (None, Fields::new());
    for Named { column, field, is_file } in named {
        if is_null(column) {
            continue;
        }
        let content = match row.get(column) {
            Some(Value::Bytes(bytes)) => bytes.clone(),
            Some(Value::Int(number)) => number.to_string().into_bytes(),
            Some(Value::Float(number)) => number.to_string().into_bytes(),
            Some(Value::Tensor(numbers)) => {
                let numbers = numbers.f_flatten(0, -1)?;
                match numbers.f_kind()? {
                    Kind::Half | Kind::Float | Kind::Double => {
                        text(&Vec::<f64>::try_from(&numbers.f_to_kind(Kind::Double)?)?)
                    }
                    _ => text(&Vec::<i64>::try_from(&numbers.f_to_kind(Kind::Int64)?)?),
                }
            }
            _ => bail!("row {index}: column {column:?} has lists of lists, which no field can hold"),
        };
        if column == KEY {
            key = Some(String::from_utf8(content).with_context(|| format!("row {index}: {KEY} is not text"))?);
        } else {
            let field = match (*is_file, field.as_str()) {
                (false, field) => field.to_owned(),
                (true, "") => guess_name(&content).to_owned(),
                (true, field) => format!("{field}.{}", guess_name(&content)),
            };
            fields.push((field, content));
        }
    }
    // Rows without a key are numbered.
    Ok(Sample { key: key.unwrap_or_else(|| format!("{index:09}")), fields })
}
