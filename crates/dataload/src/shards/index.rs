//! The index beside a shard: a text file that says where its samples begin.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::DataError;
use crate::output::Output;
use crate::read::{Version, first_of, read_file, with_ending};

/// The most bytes of an index: those of ten million samples.
const MAX_BYTES: u64 = 1 << 30;

/// Where the samples of a shard are, by its index.
#[derive(Debug, Default)]
pub struct ShardIndex {
    /// For each sample the end of the one before it; then the end of the last one.
    bounds: Vec<u64>,
    /// The checksums of their keys, where they have some.
    keys: Vec<u32>,
    /// The positions of the selected samples, where not all of them are.
    kept: Option<Vec<u32>>,
    /// That of its shard which it was made of or compared with, where that is elsewhere.
    version: Option<Version>,
}

/// Where a sample is: between the ends of the one before it and of its own, in bytes of the (decompressed) content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl ShardIndex {
    /// An index to [`push`](Self::push) to, of which all samples are selected, or those that [`push`](Self::push) says.
    pub(crate) fn new(all: bool) -> Self {
        Self { bounds: vec![0], keys: Vec::new(), kept: (!all).then(Vec::new), version: None }
    }

    /// An index of samples that follow each other, with these starts and at last the end.
    #[cfg(feature = "mds")]
    pub(crate) fn from_bounds(bounds: Vec<u64>) -> Self {
        Self { bounds, kept: None, ..Self::default() }
    }

    /// The index of this version of its shard, which is to be opened when samples are read by the index.
    pub(crate) fn of_version(self, version: Option<&Version>) -> Self {
        Self { version: version.cloned(), ..self }
    }

    /// That version.
    pub(crate) fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    /// Adds a sample that ends at `end`.
    pub(crate) fn push(&mut self, end: u64, key: Option<&str>, is_selected: bool) {
        self.keys.extend(key.map(|key| crc32c::crc32c(key.as_bytes())));
        if let Some(kept) = self.kept.as_mut().filter(|_| is_selected) {
            // An index is too small for 2^32 samples.
            kept.push(self.bounds.len() as u32 - 1);
        }
        self.bounds.push(end);
    }

    /// How many samples are selected.
    pub(crate) fn len(&self) -> usize {
        self.kept.as_ref().map_or(self.bounds.len().saturating_sub(1), Vec::len)
    }

    /// The position in the shard of the selected sample with this number; past the end if there are fewer.
    pub(crate) fn position_of(&self, item: usize) -> usize {
        let sample = self.kept.as_ref().map_or(Some(item), |kept| kept.get(item).map(|&sample| sample as usize));
        sample.unwrap_or(self.bounds.len())
    }

    /// Where a sample is, by its number among all.
    pub(crate) fn span(&self, sample: usize) -> Option<Span> {
        let bounds = self.bounds.get(sample..)?.first_chunk::<2>()?;
        Some(Span { start: bounds[0], end: bounds[1] })
    }

    /// Whether a sample has this key, by its number among all.
    pub(crate) fn has_key(&self, sample: usize, key: &str) -> bool {
        self.keys.get(sample).is_none_or(|&checksum| checksum == crc32c::crc32c(key.as_bytes()))
    }
}

/// The file that [`write`] writes: `train-0.tar.idx` for `train-0.tar`.
pub(crate) fn path_of(shard: &Path) -> PathBuf {
    with_ending(shard, ".idx")
}

/// The index beside a shard, under the name of [`path_of`] or without the shard's endings, as DALI's `wds2idx` names
/// it.
pub(crate) fn find(shard: &Path) -> Result<Option<PathBuf>, DataError> {
    let packed = shard.extension().is_some_and(|ending| ending == "zst");
    let stem = if packed { shard.with_extension("") } else { shard.to_owned() };
    let names = [path_of(shard), stem.with_extension("idx")];
    let names: Vec<_> = names.into_iter().filter(|path| path != shard).collect();
    match first_of(&names) {
        // A store that does not let its files be listed says so of each that does not exist.
        Err(DataError::Remote { error, .. }) if error.kind() == ErrorKind::PermissionDenied => Ok(None),
        found => Ok(found?.cloned()),
    }
}

/// The text of an index.
pub(crate) fn read(path: &Path) -> Result<String, DataError> {
    let found = |error: std::string::FromUtf8Error| error.utf8_error().to_string();
    String::from_utf8(read_file(path, None, MAX_BYTES)?).map_err(|error| DataError::layout(path, "text", found(error)))
}

/// Writes the index of a shard; an earlier one stays until it is complete.
pub(crate) fn write(shard: &Path, text: &str) -> Result<(), DataError> {
    let mut output = Output::create(&path_of(shard))?;
    output.write_all(text.as_bytes()).map_err(DataError::io(output.path()))?;
    output.finish()?;
    Ok(())
}

/// An error in a line of an index, counted from 1.
pub(crate) fn bad_line(path: &Path, line: usize, problem: impl Into<String>) -> DataError {
    DataError::Line { path: path.to_owned(), line: line as u64, problem: problem.into() }
}

/// An index of another shard, or of an earlier state of this one.
pub(crate) fn misfit(index: &Path, shard: &Path, found: impl ToString) -> DataError {
    let expected = format!("the index of {}", shard.display());
    let found = format!("{}: make it again with `overdrive-data index`, or remove it", found.to_string());
    DataError::layout(index, expected, found)
}

/// Refuses the name of a shard that will be compressed as a whole.
pub(crate) fn require_seekable(shard: &Path) -> Result<(), DataError> {
    let ending = shard.extension().unwrap_or_default().to_ascii_lowercase();
    match ending == "gz" || ending == "tgz" {
        true => Err(DataError::layout(shard, "no compression or .zst, for an index to be of use", "gzip")),
        false => Ok(()),
    }
}

/// The error where there is no index.
pub(crate) fn missing(shard: &Path) -> DataError {
    let expected = format!("its index {}, which `overdrive-data index` writes", path_of(shard).display());
    DataError::layout(shard, expected, "none")
}

/// Says why an index is not used.
pub(crate) fn ignored(error: &DataError) {
    tracing::warn!("the shard is read from its start: {error}");
}

/// An error for a sample that is not where the index has it.
pub(crate) fn misplaced(shard: &Path, span: Span, found: impl Into<String>) -> DataError {
    let expected = format!("a sample that ends at byte {}, as the index beside the shard says", span.end);
    DataError::corrupt(shard, span.start, expected, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_found_by_either_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let find = |path: &Path| find(path).unwrap();
        assert_eq!(find(&path("a.b.tar")), None);
        std::fs::write(path("a.b.idx"), "").unwrap();
        assert_eq!(find(&path("a.b.tar")), Some(path("a.b.idx")));
        assert_eq!(find(&path("a.b.tar.zst")), Some(path("a.b.idx")));
        std::fs::write(path("a.b.tar.idx"), "").unwrap();
        assert_eq!(find(&path("a.b.tar")), Some(path("a.b.tar.idx")));
    }

    #[test]
    fn samples_that_are_not_selected_leave_a_gap() {
        let mut index = ShardIndex::new(false);
        let samples = [(10, "a", true), (30, "b", false), (35, "c", true)];
        samples.into_iter().for_each(|(end, key, is_selected)| index.push(end, Some(key), is_selected));
        let spans = [0, 1, 2].map(|item| index.span(index.position_of(item)));
        assert_eq!(spans, [Some(Span { start: 0, end: 10 }), Some(Span { start: 30, end: 35 }), None]);
        assert_eq!(index.len(), 2);
        assert!(index.has_key(1, "b") && !index.has_key(2, "b"));
    }
}
