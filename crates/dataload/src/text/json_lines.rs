//! A JSON value on every line.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::rows::Rows;
use crate::{DataError, Dataset};

/// A file with a JSON value on every line, read in any order; clones share it.
///
/// Opening reads the file once to find its lines, and keeps 8 bytes for each. Lines are parsed when they are asked for,
/// by all workers at once. Empty lines do not count.
///
/// ```
/// use overdrive_dataload::{Dataset, JsonLines};
/// use serde::Deserialize;
///
/// #[derive(Deserialize)]
/// struct Review {
///     text: String,
///     stars: i64,
/// }
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("reviews.jsonl");
/// # std::fs::write(&path, "{\"text\": \"good\", \"stars\": 4}\n{\"text\": \"bad\"}\n")?;
///
/// let values = JsonLines::open(&path)?;
/// assert_eq!(values.get(0)?["text"], "good");
/// let reviews = values.typed::<Review>();
/// let review = reviews.get(0)?;
/// assert_eq!((review.text.as_str(), review.stars), ("good", 4));
/// let error = reviews.get(1).err().map(|error| error.to_string()).unwrap_or_default();
/// assert!(error.ends_with("reviews.jsonl: line 2: column 15: missing field `stars`"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `datasets.load_dataset("json", ..)` of Hugging Face; `pandas.read_json(.., lines=True)`.
#[doc(alias = "jsonl")]
#[doc(alias = "read_json")]
pub struct JsonLines<T = Value> {
    rows: Arc<Rows>,
    samples: PhantomData<fn() -> T>,
}

impl JsonLines {
    /// A file, here or elsewhere (a URL), whose samples are any JSON values; see [`typed`](Self::typed).
    ///
    /// # Errors
    /// [`DataError::Io`]; [`DataError::Layout`] for what is no regular file, or is compressed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, DataError> {
        const MARK: &[u8] = b"\xef\xbb\xbf";
        let (mut at, mut start, mut line, mut empty) = (0, 0, 1, true);
        let rows = Rows::open(path.as_ref(), |piece, found| {
            let mark = if at == 0 && piece.starts_with(MARK) { MARK.len() } else { 0 };
            (at, start) = if mark > 0 { (mark as u64, mark as u64) } else { (at, start) };
            let mut rest = &piece[mark..];
            while !rest.is_empty() {
                let end = memchr::memchr(b'\n', rest);
                let (text, after) = rest.split_at(end.map_or(rest.len(), |end| end + 1));
                if empty && !text.trim_ascii().is_empty() {
                    found.row(start, line);
                    empty = false;
                }
                at += text.len() as u64;
                if end.is_some() {
                    (start, line, empty) = (at, line + 1, true);
                }
                rest = after;
            }
        })?;
        Ok(Self { rows: Arc::new(rows), samples: PhantomData })
    }

    /// The same file, each line deserialized to a `T`.
    pub fn typed<T: DeserializeOwned + Send>(&self) -> JsonLines<T> {
        JsonLines { rows: self.rows.clone(), samples: PhantomData }
    }
}

impl<T: DeserializeOwned + Send> Dataset for JsonLines<T> {
    type Sample = T;

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn get(&self, index: usize) -> Result<T, DataError> {
        let line = self.rows.read(index)?;
        serde_json::from_slice(line.trim_ascii_end()).map_err(|error| {
            // The message ends with the place within the line.
            let text = error.to_string();
            let problem = text.rsplit_once(" at line ").map_or(text.as_str(), |(problem, _)| problem);
            self.rows.error(index, 0, format!("column {}: {problem}", error.column()))
        })
    }
}

impl<T> Clone for JsonLines<T> {
    fn clone(&self) -> Self {
        Self { rows: self.rows.clone(), samples: PhantomData }
    }
}

impl<T> fmt::Debug for JsonLines<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JsonLines {{ {}, len: {} }}", self.rows.path().display(), self.rows.len())
    }
}
