//! Tables: a column for the key, and one for each field of the first samples.

use anyhow::{Context, Result, anyhow};
use serde::de::IgnoredAny;

use super::{Refused, Target};
use crate::sample::{KEY, Sample, TEXTS, is_image, number};

/// The first samples decide which columns there are.
const BATCH_SAMPLES: usize = 1000;
const BATCH_BYTES: usize = 1 << 26;

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Number,
    Text,
    Bytes,
}

#[derive(Clone, Debug)]
pub struct Column {
    pub name: String,
    pub kind: Kind,
}

impl Column {
    /// What a sample has in this column.
    pub fn of<'a>(&self, sample: &'a Sample) -> Option<&'a [u8]> {
        if self.name == KEY {
            return Some(sample.key.as_bytes());
        }
        sample.get(&self.name)
    }

    pub fn text_of<'a>(&self, sample: &'a Sample) -> Result<Option<&'a str>> {
        Ok(self.of(sample).map(std::str::from_utf8).transpose()?)
    }
}

/// What a format of tables asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    /// The format, if it holds text alone.
    pub text_alone: Option<&'static str>,
    /// The format, if every sample must have every column.
    pub complete: Option<&'static str>,
    /// Whether the field `json` must be JSON.
    pub json: bool,
}

/// A file, or several, of one format.
pub trait TableFile {
    fn write(&mut self, columns: &[Column], samples: &[Sample]) -> Result<()>;

    /// Moves everything to its final name.
    fn finish(self: Box<Self>) -> Result<()>;
}

type Open = Box<dyn FnOnce(&[Column]) -> Result<Box<dyn TableFile>>>;

pub struct Table {
    rules: Rules,
    open: Option<Open>,
    file: Option<(Vec<Column>, Box<dyn TableFile>)>,
    samples: Vec<Sample>,
    bytes: usize,
}

impl Table {
    /// A table that is opened when its columns are known.
    pub fn new(rules: Rules, open: impl FnOnce(&[Column]) -> Result<Box<dyn TableFile>> + 'static) -> Self {
        Self { rules, open: Some(Box::new(open)), file: None, samples: Vec::new(), bytes: 0 }
    }

    fn flush(&mut self) -> Result<()> {
        let samples = std::mem::take(&mut self.samples);
        self.bytes = 0;
        if let Some(open) = self.open.take() {
            let text_alone = self.rules.text_alone.is_some();
            let kind = |name: &str| if text_alone { Kind::Text } else { kind_of(name, &samples) };
            let columns = columns_of(&samples, kind);
            let file = open(&columns)?;
            self.file = Some((columns, file));
        }
        let (columns, file) = self.file.as_mut().context("the table could not be opened")?;
        file.write(columns, &samples)
    }
}

impl Target for Table {
    fn write(&mut self, sample: Sample) -> Result<(), Refused> {
        let columns = self.file.as_ref().map(|(columns, _)| columns.as_slice());
        // Where every sample has every column, the first one says which they are.
        let first = self.samples.first().filter(|_| columns.is_none() && self.rules.complete.is_some());
        let named = first.map(|first| columns_of(std::slice::from_ref(first), |_| Kind::Bytes));
        self.rules.check(columns.or(named.as_deref()), &sample).map_err(Refused::Sample)?;
        self.bytes += sample.bytes();
        self.samples.push(sample);
        if self.samples.len() == BATCH_SAMPLES || self.bytes >= BATCH_BYTES {
            self.flush().map_err(Refused::All)?;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        if !self.samples.is_empty() {
            self.flush()?;
        }
        self.file.context("no sample was written")?.1.finish()
    }
}

impl Rules {
    /// Checks that a sample fits the format, and the columns, where they are known.
    pub fn check(&self, columns: Option<&[Column]>, sample: &Sample) -> Result<()> {
        let bad = |name: &str, problem: &str| anyhow!("{}: field {name:?} {problem}", sample.key);
        for (name, content) in &sample.fields {
            let text = std::str::from_utf8(content);
            if let (Some(format), Err(_)) = (self.text_alone, &text) {
                return Err(bad(name, &format!("is not text, and {format} holds nothing else")));
            }
            if self.json && name == "json" && serde_json::from_slice::<IgnoredAny>(content).is_err() {
                return Err(bad(name, "is no JSON"));
            }
            if TEXTS.contains(&&**name) && text.is_err() {
                return Err(bad(name, "is not text"));
            }
            match columns.map(|columns| columns.iter().find(|column| column.name == *name).map(|column| column.kind)) {
                Some(None) => return Err(bad(name, "is not one of the first samples' fields, which are the columns")),
                Some(Some(Kind::Text)) if text.is_err() => {
                    return Err(bad(name, "is not text, as the first samples' are"));
                }
                Some(Some(Kind::Number)) if number(content).is_none() => {
                    return Err(bad(name, "is no number, as the first samples' are"));
                }
                _ => {}
            }
        }
        if let (Some(format), Some(columns)) = (self.complete, columns)
            && let Some(missing) = columns.iter().find(|column| column.of(sample).is_none())
        {
            return Err(bad(&missing.name, &format!("is missing, and {format} has all columns in every sample")));
        }
        Ok(())
    }
}

/// A column for the key, and one for each field of the samples.
fn columns_of(samples: &[Sample], kind: impl Fn(&str) -> Kind) -> Vec<Column> {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in samples.iter().flat_map(|sample| &sample.fields) {
        if !names.contains(&&**name) {
            names.push(name);
        }
    }
    let key = Column { name: KEY.to_owned(), kind: Kind::Text };
    let fields = names.into_iter().map(|name| Column { name: name.to_owned(), kind: kind(name) });
    [key].into_iter().chain(fields).collect()
}

/// The least that holds what the first samples have in a field: integers, else text, else bytes.
fn kind_of(name: &str, samples: &[Sample]) -> Kind {
    let ending = name.rsplit('.').next().unwrap_or_default();
    let contents = || samples.iter().filter_map(|sample| sample.get(name));
    let is_text = |content: &[u8]| {
        let odd = |letter: char| letter.is_control() && !letter.is_whitespace();
        std::str::from_utf8(content).is_ok_and(|text| !text.contains(odd))
    };
    match () {
        () if TEXTS.contains(&name) => Kind::Text,
        // A tiny image may look like a text.
        () if is_image(name) || !contents().all(is_text) => Kind::Bytes,
        () if ending != "json" && contents().all(|content| number(content).is_some()) => Kind::Number,
        () => Kind::Text,
    }
}
