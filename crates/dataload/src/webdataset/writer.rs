//! Writes samples to tar shards.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use ::tar::{Builder, Header};

use super::index::{HELD, IndexText, holds};
use super::tar::padded;
use crate::DataError;
use crate::output::Output;
use crate::read::require_local;
use crate::shards::index as shard_index;

/// Collects the options of a [`WebDatasetWriter`]; made by [`WebDatasetWriter::builder`].
#[derive(Clone, Debug)]
#[must_use = "call build() to get the writer"]
pub struct WebDatasetWriterBuilder {
    pattern: String,
    max_count: u64,
    max_size: u64,
    start_shard: u64,
    index: bool,
}

impl WebDatasetWriterBuilder {
    /// The most samples per shard; 100,000 unless set.
    #[doc(alias = "maxcount")]
    pub fn max_count(mut self, samples: u64) -> Self {
        self.max_count = samples;
        self
    }

    /// The most bytes of content per shard before compression; a single larger sample gets its own shard; 3 GB unless
    /// set.
    #[doc(alias = "maxsize")]
    pub fn max_size(mut self, bytes: u64) -> Self {
        self.max_size = bytes;
        self
    }

    /// The number of the first shard; 0 unless set.
    pub fn start_shard(mut self, number: u64) -> Self {
        self.start_shard = number;
        self
    }

    /// Whether each shard gets an index beside it, see [`WebDataset::write_index`](super::WebDataset::write_index); off
    /// unless set. Keys and extensions must not have spaces then.
    pub fn index(mut self, index: bool) -> Self {
        self.index = index;
        self
    }

    /// Makes the writer; the first file is created with the first sample.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a pattern without one number like `%06d`, or a limit of 0;
    /// [`DataError::Layout`] for a URL, and for an index of shards that are compressed by gzip, which cannot be read in
    /// the middle.
    pub fn build(self) -> Result<WebDatasetWriter, DataError> {
        for (option, limit) in [("max_count", self.max_count), ("max_size", self.max_size)] {
            DataError::at_least_1(option, limit)?;
        }
        require_local(self.pattern.as_ref())?;
        let name = ShardName::parse(&self.pattern)?;
        if self.index {
            shard_index::require_seekable(self.pattern.as_ref())?;
        }
        let (number, index, keys) = (self.start_shard, IndexText::default(), HashSet::new());
        let (options, files) = (self, Vec::new());
        Ok(WebDatasetWriter { options, name, number, shard: None, samples: 0, bytes: 0, keys, index, files })
    }
}

/// Writes samples to `data-000000.tar`, `data-000001.tar`, and so on.
///
/// A shard is written under a temporary name and renamed when it is complete. The same samples give the same bytes:
/// owner, mode and time are fixed. With a pattern that ends in `.tar.gz`, `.tgz` or `.tar.zst`, shards are compressed.
///
/// # Source
/// Python's `webdataset.ShardWriter`.
#[doc(alias = "ShardWriter")]
pub struct WebDatasetWriter {
    options: WebDatasetWriterBuilder,
    name: ShardName,
    /// The number of the next shard.
    number: u64,
    shard: Option<Builder<Output>>,
    /// How many samples the open shard has.
    samples: u64,
    /// How many bytes of content the open shard has.
    bytes: u64,
    /// The keys in the open shard: a reader would merge neighbouring samples with equal keys.
    keys: HashSet<String>,
    /// The index of the open shard.
    index: IndexText,
    files: Vec<PathBuf>,
}

impl WebDatasetWriter {
    /// Options for shards named by `pattern`, in which `%06d` or `%d` stands for the shard's number.
    pub fn builder(pattern: impl Into<String>) -> WebDatasetWriterBuilder {
        let (max_count, max_size) = (100_000, 3_000_000_000);
        WebDatasetWriterBuilder { pattern: pattern.into(), max_count, max_size, start_shard: 0, index: false }
    }

    /// Adds a sample with these files, as (extension, content).
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a key or extension that would read back differently: an empty one, or one with
    /// a backslash, a newline or a zero byte; an absolute key, or one with a dot after its last slash, a `.` or `..`
    /// component or a leading `__`; a key that the shard already has; an extension with a slash or in upper case, or a
    /// repeated one; and for no files at all; [`DataError::Io`].
    pub fn write<E, B>(&mut self, key: &str, files: &[(E, B)]) -> Result<(), DataError>
    where
        E: AsRef<str>,
        B: AsRef<[u8]>,
    {
        check_key(key)?;
        check_extensions(key, files)?;
        if self.options.index {
            let mut names = files.iter().map(|(extension, _)| format!("{key}.{}", extension.as_ref()));
            if let Some(name) = names.find(|name| !holds(name)) {
                return Err(DataError::option("index", HELD, format!("{name:?}")));
            }
        }
        let bytes = files.iter().map(|(_, content)| content.as_ref().len() as u64).sum::<u64>();
        let full = self.samples >= self.options.max_count || self.bytes.saturating_add(bytes) > self.options.max_size;
        if full && self.samples > 0 {
            self.close_shard()?;
        }
        if !self.keys.insert(key.to_owned()) {
            return Err(DataError::option("key", "one that the shard does not have yet", key));
        }
        let shard = match &mut self.shard {
            Some(shard) => shard,
            None => self.shard.insert(Builder::new(Output::create(Path::new(&self.name.of(self.number)))?)),
        };
        for (extension, content) in files {
            let content = content.as_ref();
            let mut header = Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o444);
            header.set_mtime(0);
            let name = format!("{key}.{}", extension.as_ref());
            let written = shard.append_data(&mut header, &name, content);
            if let Err(error) = written {
                let path = shard.get_ref().path().to_owned();
                return Err(DataError::Io { path, error });
            }
            if self.options.index {
                let bytes = content.len() as u64;
                let start = shard.get_ref().written() - padded(bytes).unwrap_or(bytes);
                self.index.add(&name, key.len(), start, bytes);
            }
        }
        self.samples += 1;
        self.bytes += bytes;
        Ok(())
    }

    /// Completes the last shard and returns the files of all shards.
    ///
    /// A writer that is dropped instead keeps the complete shards and removes the unfinished one.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub fn finish(mut self) -> Result<Vec<PathBuf>, DataError> {
        self.close_shard()?;
        Ok(std::mem::take(&mut self.files))
    }

    fn close_shard(&mut self) -> Result<(), DataError> {
        let Some(shard) = self.shard.take() else { return Ok(()) };
        let path = shard.get_ref().path().to_owned();
        let output = shard.into_inner().map_err(DataError::io(&path))?;
        let path = output.finish()?;
        let index = std::mem::take(&mut self.index);
        if self.options.index {
            shard_index::write(&path, &index.finish(&path))?;
        }
        self.files.push(path);
        self.number += 1;
        (self.samples, self.bytes) = (0, 0);
        self.keys.clear();
        Ok(())
    }
}

/// A file name with a number in it.
struct ShardName {
    before: String,
    width: usize,
    after: String,
}

impl ShardName {
    fn parse(pattern: &str) -> Result<Self, DataError> {
        let invalid = || DataError::option("pattern", "a name with one number like %06d", pattern);
        let (before, rest) = pattern.split_once('%').ok_or_else(invalid)?;
        let (width, after) = rest.split_once('d').ok_or_else(invalid)?;
        let width = if width.is_empty() { 0 } else { width.parse().map_err(|_| invalid())? };
        if width > 20 || after.contains('%') {
            return Err(invalid());
        }
        Ok(Self { before: before.to_owned(), width, after: after.to_owned() })
    }

    fn of(&self, number: u64) -> String {
        let Self { before, width, after } = self;
        format!("{before}{number:0width$}{after}")
    }
}

fn check_key(key: &str) -> Result<(), DataError> {
    let base = key.rsplit('/').next().unwrap_or_default();
    let absolute = key.starts_with('/');
    let dotted = base.contains('.') || key.split('/').any(|part| part == ".." || part == ".");
    let meta = key.split('/').next().is_some_and(|first| first.starts_with("__"));
    if base.is_empty() || absolute || dotted || meta || key.contains(['\0', '\\', '\n']) {
        let expected = "a relative name without a dot after its last slash, a `.` or `..` component, a leading `__`, a \
                        backslash, a newline or a zero byte";
        return Err(DataError::option("key", expected, format!("{key:?}")));
    }
    Ok(())
}

fn check_extensions<E: AsRef<str>, B>(key: &str, files: &[(E, B)]) -> Result<(), DataError> {
    if files.is_empty() {
        return Err(DataError::option("files", "at least one", format!("none for {key:?}")));
    }
    for (position, (extension, _)) in files.iter().enumerate() {
        let extension = extension.as_ref();
        let twice = files[..position].iter().any(|(other, _)| other.as_ref() == extension);
        let odd = extension.is_empty() || extension.contains(['/', '\0', '\\', '\n']);
        if twice || odd || extension.to_lowercase() != extension {
            let expected =
                "a different one for each file, in lower case, without a slash, a backslash, a newline or a zero byte";
            return Err(DataError::option("extension", expected, format!("{extension:?} for {key:?}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_read_back_differently_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let pattern = format!("{}/d-%03d.tar", dir.path().display());
        let mut writer = WebDatasetWriter::builder(pattern).build().unwrap();
        let one: &[(&str, &[u8])] = &[("txt", b"x")];
        for key in ["", "a.b", "/a", "../a", "a/../b", "a/", "__meta__/a", "a\0b", "./a"] {
            assert!(matches!(writer.write(key, one), Err(DataError::InvalidOption { .. })), "{key}");
        }
        for extension in ["", "a/b", "JPG", "x\0"] {
            let error = writer.write("a", &[(extension, b"x")]);
            assert!(matches!(error, Err(DataError::InvalidOption { .. })), "{extension}");
        }
        assert!(writer.write("a", &[("x", b"1"), ("x", b"2")]).is_err());
        assert!(writer.write::<&str, &[u8]>("a", &[]).is_err());
        writer.write("a.b/c", one).unwrap();
        assert!(writer.write("a.b/c", one).is_err());
        assert_eq!(writer.finish().unwrap(), [dir.path().join("d-000.tar")]);
    }

    #[test]
    fn patterns_need_one_number() {
        for pattern in ["data.tar", "%s.tar", "%06d-%d.tar", "%999999999999d.tar", "%0999d.tar", "%"] {
            assert!(WebDatasetWriter::builder(pattern).build().is_err(), "{pattern}");
        }
        assert_eq!(ShardName::parse("a-%06d.tar").unwrap().of(12), "a-000012.tar");
        assert_eq!(ShardName::parse("a-%d.tar").unwrap().of(12), "a-12.tar");
    }

    #[test]
    fn an_abandoned_shard_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let pattern = format!("{}/d-%d.tar", dir.path().display());
        let mut writer = WebDatasetWriter::builder(pattern).max_count(1).build().unwrap();
        writer.write("a", &[("x", b"1")]).unwrap();
        writer.write("b", &[("x", b"2")]).unwrap();
        drop(writer);
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["d-0.tar"]);
    }
}
