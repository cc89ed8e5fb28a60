//! Tables of comma-separated values.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use csv::{ErrorKind, StringRecord};
use csv_core::ReadRecordResult;
use serde::de::DeserializeOwned;

use super::rows::Rows;
use crate::{DataError, Dataset};

/// The rows of a CSV file, read in any order; clones share it.
///
/// Opening reads the file once to find its rows, which may have several lines where fields are quoted, and keeps 8
/// bytes for each. Rows are parsed when they are asked for, by all workers at once.
///
/// ```
/// use overdrive_dataload::{CsvDataset, Dataset};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("iris.csv");
/// # std::fs::write(&path, "length,width,species\n5.1,3.5,setosa\n4.9,wide,setosa\n")?;
///
/// let rows = CsvDataset::open(&path)?;
/// assert_eq!(rows.get(0)?["species"], "setosa");
/// // By position; a struct that implements `Deserialize` takes the columns by name.
/// let numbers = rows.typed::<(f32, f32, String)>();
/// assert_eq!(numbers.get(0)?.1, 3.5);
/// let error = numbers.get(1).err().map(|error| error.to_string()).unwrap_or_default();
/// assert!(error.ends_with("iris.csv: line 3: column \"width\": invalid float literal"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `datasets.load_dataset("csv", ..)` of Hugging Face; `pandas.read_csv`. RFC 4180.
#[doc(alias = "read_csv")]
pub struct CsvDataset<T = BTreeMap<String, String>> {
    table: Arc<CsvTable>,
    samples: PhantomData<fn() -> T>,
}

struct CsvTable {
    rows: Rows,
    format: Format,
    headers: Option<StringRecord>,
    columns: usize,
}

/// Collects the options of a [`CsvDataset`]; made by [`CsvDataset::builder`].
///
/// ```
/// use overdrive_dataload::{CsvDataset, Dataset};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("points.tsv");
/// # std::fs::write(&path, "0.5\t1\n2\t3\n")?;
///
/// let points = CsvDataset::builder(&path).delimiter(b'\t').has_headers(false).open()?.typed::<(f32, i64)>();
/// assert_eq!((points.len(), points.get(0)?), (2, (0.5, 1)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "call open() to get the dataset"]
pub struct CsvDatasetBuilder {
    path: PathBuf,
    format: Format,
    has_headers: bool,
}

#[derive(Clone, Copy, Debug)]
struct Format {
    delimiter: u8,
    quote: u8,
}

impl CsvDatasetBuilder {
    /// What stands between two fields; a comma unless set, `b'\t'` for TSV.
    pub fn delimiter(mut self, delimiter: u8) -> Self {
        self.format.delimiter = delimiter;
        self
    }

    /// What stands around a field that contains delimiters, quotes (twice) or line ends; `b'"'` unless set.
    pub fn quote(mut self, quote: u8) -> Self {
        self.format.quote = quote;
        self
    }

    /// Whether the first row has the columns' names; on unless set.
    pub fn has_headers(mut self, has_headers: bool) -> Self {
        self.has_headers = has_headers;
        self
    }

    /// Finds the rows.
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Layout`] for what is no regular file, is compressed, or should have headers and
    /// is empty; [`DataError::Line`] for headers that are not UTF-8 and for a quote that is not closed; [`DataError::InvalidOption`] for a delimiter that
    /// is also the quote or a line end.
    pub fn open(self) -> Result<CsvDataset, DataError> {
        let Format { delimiter, quote } = self.format;
        if delimiter == quote || [delimiter, quote].iter().any(|byte| b"\r\n".contains(byte)) {
            let found = format!("delimiter {}, quote {}", delimiter.escape_ascii(), quote.escape_ascii());
            return Err(DataError::option("delimiter", "two bytes for it and the quote that end no line", found));
        }
        let mut reader = csv_core::ReaderBuilder::new().delimiter(delimiter).quote(quote).build();
        // The fields are not kept: only where records end is of interest.
        let (mut fields, mut ends) = ([0; 1024], [0; 64]);
        let (mut at, mut start, mut line, mut unclosed) = (0, 0, 1, None);
        let rows = Rows::open(&self.path, |piece, found| {
            let mut rest = piece;
            if piece.is_empty() && at > start {
                let mut ends_a_row = |text: &[u8]| {
                    matches!(reader.read_record(text, &mut fields, &mut ends).0, ReadRecordResult::Record)
                };
                // The end of a line ends the last row, unless a quote is open, which one more would close. (The parser's
                // `clone` forgets its state.)
                if ends_a_row(b"\n") {
                    found.row(start, line);
                } else if ends_a_row(&[quote, b'\n']) {
                    unclosed = Some(line);
                }
                return;
            }
            loop {
                let (result, read, _, _) = reader.read_record(rest, &mut fields, &mut ends);
                (at, rest) = (at + read as u64, &rest[read..]);
                match result {
                    ReadRecordResult::Record => {
                        found.row(start, line);
                        (start, line) = (at, reader.line());
                    }
                    ReadRecordResult::OutputFull | ReadRecordResult::OutputEndsFull => {}
                    ReadRecordResult::InputEmpty | ReadRecordResult::End => return,
                }
                // To the parser, empty input is the end of the file.
                if rest.is_empty() && !piece.is_empty() {
                    return;
                }
            }
        })?;
        if let Some(line) = unclosed {
            let problem = "a quote is not closed before the end of the file".to_owned();
            return Err(DataError::Line { path: self.path.clone(), line, problem });
        }
        let mut table = CsvTable { rows, format: self.format, headers: None, columns: 0 };
        if self.has_headers && table.rows.len() == 0 {
            return Err(DataError::layout(&self.path, "a row with the columns' names", "an empty file"));
        }
        if table.rows.len() > 0 {
            let (first, _) = table.record(0)?;
            table.columns = first.len();
            table.headers = self.has_headers.then(|| distinct(&first));
        }
        Ok(CsvDataset { table: Arc::new(table), samples: PhantomData })
    }
}

/// The names, the second `x` being `x.1`, as in pandas: a map would lose one of them.
fn distinct(headers: &StringRecord) -> StringRecord {
    let mut seen = HashSet::new();
    let mut name = |header: &str| {
        let numbered = (1..).map(|number| format!("{header}.{number}"));
        let mut names = std::iter::once(header.to_owned()).chain(numbered);
        names.find(|name| seen.insert(name.clone())).unwrap_or_default()
    };
    headers.iter().map(&mut name).collect()
}

impl CsvDataset {
    /// A file whose first row has the columns' names, and whose samples are maps from these to the fields; see
    /// [`typed`](Self::typed).
    ///
    /// # Errors
    /// As [`CsvDatasetBuilder::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        Self::builder(path).open()
    }

    /// Sets options before opening.
    pub fn builder(path: impl AsRef<Path>) -> CsvDatasetBuilder {
        let format = Format { delimiter: b',', quote: b'"' };
        CsvDatasetBuilder { path: path.as_ref().to_owned(), format, has_headers: true }
    }

    /// The same file, each row deserialized to a `T`: a struct or map by the columns' names, a tuple or `Vec` by their
    /// order. A tuple of fewer elements than there are columns takes the first ones.
    pub fn typed<T: DeserializeOwned + Send>(&self) -> CsvDataset<T> {
        CsvDataset { table: self.table.clone(), samples: PhantomData }
    }
}

impl<T> CsvDataset<T> {
    /// The columns' names; empty without headers.
    pub fn headers(&self) -> Vec<&str> {
        self.table.headers.iter().flatten().collect()
    }
}

impl CsvTable {
    /// The fields of a row, and how many empty lines precede it.
    fn record(&self, row: usize) -> Result<(StringRecord, u64), DataError> {
        let bytes = self.rows.read(row)?;
        // The line that the index knows is that after the record before, where empty lines may follow.
        let is_end = |byte: &&u8| b"\r\n".contains(byte);
        let empty = bytes.iter().take_while(is_end).filter(|&&byte| byte == b'\n').count() as u64;
        let Format { delimiter, quote } = self.format;
        let mut reader = csv::ReaderBuilder::new();
        reader.has_headers(false).flexible(true).delimiter(delimiter).quote(quote);
        let mut record = StringRecord::new();
        let wrong = |error: csv::Error| match error.kind() {
            ErrorKind::Utf8 { err, .. } => self.rows.error(row, empty, format!("field {}: not UTF-8", err.field() + 1)),
            _ => self.rows.error(row, empty, error.to_string()),
        };
        reader.from_reader(bytes.as_slice()).read_record(&mut record).map_err(wrong)?;
        Ok((record, empty))
    }
}

impl<T: DeserializeOwned + Send> Dataset for CsvDataset<T> {
    type Sample = T;

    fn len(&self) -> usize {
        self.table.rows.len() - usize::from(self.table.headers.is_some())
    }

    fn get(&self, index: usize) -> Result<T, DataError> {
        DataError::check_index(index, self.len())?;
        let (table, headers) = (&*self.table, self.table.headers.as_ref());
        let row = index + usize::from(headers.is_some());
        let (record, empty) = table.record(row)?;
        if record.len() != table.columns {
            let problem = format!("expected {} fields, found {}", table.columns, record.len());
            return Err(table.rows.error(row, empty, problem));
        }
        record.deserialize(headers).map_err(|error| {
            let problem = match error.kind() {
                ErrorKind::Deserialize { err, .. } => {
                    let field = err.field().map(|field| field as usize);
                    let name = field.and_then(|field| headers?.get(field));
                    match (name, field) {
                        (Some(name), _) => format!("column {name:?}: {}", err.kind()),
                        (None, Some(field)) => format!("field {}: {}", field + 1, err.kind()),
                        (None, None) => err.kind().to_string(),
                    }
                }
                _ => error.to_string(),
            };
            table.rows.error(row, empty, problem)
        })
    }
}

impl<T> Clone for CsvDataset<T> {
    fn clone(&self) -> Self {
        Self { table: self.table.clone(), samples: PhantomData }
    }
}

impl<T> fmt::Debug for CsvDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = &self.table.rows;
        write!(f, "CsvDataset {{ {}, rows: {}, headers: {:?} }}", rows.path().display(), rows.len(), self.headers())
    }
}
