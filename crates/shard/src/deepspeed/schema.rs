//! Every key that DeepSpeed documents, and what becomes of it.

use serde_json::{Map, Value};

use super::error::DeepSpeedError;
use super::keys;
use super::tree::{Tree, joined, shown, wrong};

/// Keys of one section with which the same is done.
#[derive(Debug)]
pub(super) struct Row {
    /// The path of the section; empty for the document.
    pub section: &'static str,
    pub keys: &'static [&'static str],
    pub rule: Rule,
    /// What is made of it, or why it is refused or without effect, for the book and for errors.
    pub why: &'static str,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Rule {
    /// Read by this crate.
    Honoured,
    /// Accepted, whatever its value is: it changes nothing in a run.
    NoEffect,
    /// The same, with all that is below it.
    Open,
    /// Accepted with these values, which ask for nothing that is not there; others are refused.
    Only(&'static [Plain]),
}

/// A value that is compared.
#[derive(Clone, Copy, Debug)]
pub(super) enum Plain {
    Flag(bool),
    Number(f64),
    Text(&'static str),
}

/// What is switched off.
pub(super) const OFF: Rule = Rule::Only(&[Plain::Flag(false)]);
pub(super) const ON: Rule = Rule::Only(&[Plain::Flag(true)]);
/// What is refused with any value, except null.
pub(super) const REFUSED: Rule = Rule::Only(&[]);

impl Plain {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::Flag(flag) => value.as_bool() == Some(flag),
            Self::Number(number) => value.as_f64() == Some(number),
            Self::Text(text) => value.as_str() == Some(text),
        }
    }
}

impl Row {
    fn paths(&self) -> impl Iterator<Item = String> {
        self.keys.iter().map(|key| joined(self.section, key))
    }
}

/// Refuses the keys that DeepSpeed does not have, and those that Overdrive does not honour.
pub(super) fn check(tree: &Tree) -> Result<(), DeepSpeedError> {
    check_within(tree.root(), "", &keys::tables())
}

/// The same for the object at a path.
pub(super) fn check_within(object: &Map<String, Value>, path: &str, tables: &[&[Row]]) -> Result<(), DeepSpeedError> {
    for (name, value) in object {
        let path = joined(path, name);
        match (find(tables, &path), value) {
            (_, Value::Null) if find(tables, &path).is_some() || is_section(tables, &path) => {}
            (Some(row), value) => check_value(row, &path, value)?,
            (None, Value::Object(inner)) if is_section(tables, &path) => check_within(inner, &path, tables)?,
            (None, other) if is_section(tables, &path) => return Err(wrong(&path, other, "an object")),
            (None, _) => return Err(unknown(tables, path)),
        }
    }
    Ok(())
}

fn check_value(row: &Row, path: &str, value: &Value) -> Result<(), DeepSpeedError> {
    let Rule::Only(accepted) = row.rule else { return Ok(()) };
    if accepted.iter().any(|plain| plain.is(value)) {
        return Ok(());
    }
    let reason = row.why.to_owned();
    Err(DeepSpeedError::Refused { key: path.to_owned(), found: shown(value), reason })
}

pub(super) fn find<'a>(tables: &[&'a [Row]], path: &str) -> Option<&'a Row> {
    let (section, key) = path.rsplit_once('.').unwrap_or(("", path));
    tables.iter().flat_map(|table| table.iter()).find(|row| row.section == section && row.keys.contains(&key))
}

fn is_section(tables: &[&[Row]], path: &str) -> bool {
    let is_within =
        |section: &str| section.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    tables.iter().flat_map(|table| table.iter()).any(|row| is_within(row.section))
}

fn unknown(tables: &[&[Row]], key: String) -> DeepSpeedError {
    let all = tables.iter().flat_map(|table| table.iter()).flat_map(Row::paths);
    let nearest = all.map(|path| (distance(&path, &key), path)).min().filter(|(distance, _)| *distance <= 3);
    let hint = nearest.map_or_else(String::new, |(_, path)| format!("; `{path}` is similar"));
    DeepSpeedError::UnknownKey { key, hint }
}

/// How many letters have to be put in, left out or replaced to make one text of the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (above, letter) in one.chars().enumerate() {
        let mut corner = row[0];
        row[0] = above + 1;
        for (place, of_other) in other.chars().enumerate() {
            let replaced = corner + usize::from(letter != of_other);
            corner = row[place + 1];
            row[place + 1] = replaced.min(corner + 1).min(row[place] + 1);
        }
    }
    row[row.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_letters() {
        assert_eq!(distance("stage", "stage"), 0);
        assert_eq!(distance("stage", "sage"), 1);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
    }

    #[test]
    fn no_key_is_in_the_tables_twice_or_is_a_section_too() {
        let tables = keys::tables();
        let mut paths: Vec<String> = tables.iter().flat_map(|table| table.iter()).flat_map(Row::paths).collect();
        for path in &paths {
            assert!(!is_section(&tables, path), "{path}");
        }
        paths.sort();
        let count = paths.len();
        paths.dedup();
        assert_eq!(paths.len(), count);
    }

    #[test]
    fn unknown_keys_are_named_with_what_is_similar() {
        let told = |text: &str| check(&Tree::parse(text).unwrap()).expect_err(text).to_string();
        assert_eq!(
            told(r#"{"zero_optimization": {"stag": 2}}"#),
            "`zero_optimization.stag` is unknown: DeepSpeed has no such key; `zero_optimization.stage` is similar"
        );
        assert_eq!(told(r#"{"my_comment": 1}"#), "`my_comment` is unknown: DeepSpeed has no such key");
        assert_eq!(told(r#"{"fp16": true}"#), "`fp16` is true, but should be an object");
        assert_eq!(
            told(r#"{"train_batch_siz": null}"#),
            "`train_batch_siz` is unknown: DeepSpeed has no such key; `train_batch_size` is similar"
        );
    }
}
