//! Groups the files of a shard into samples.

use std::path::Path;
use std::sync::Arc;

use super::index::{HELD, IndexText, holds, is_of, parse};
use super::tar::{TarFile, TarReader};
use super::{Options, WebSample};
use crate::bad::{Bad, noting};
use crate::content::Content;
use crate::read::Version;
use crate::shards::index::{ShardIndex, Span, find, misfit, misplaced, read};
use crate::{Cancellation, DataError};

/// The most files of one sample.
const MAX_FILES: usize = 4096;

/// The samples of one shard, in order; see [`WebDataset`](super::WebDataset) for the handling of errors.
pub struct WebSamples {
    tar: TarReader,
    options: Options,
    /// The first file of the next sample, whose content has not been read.
    ahead: Option<Named>,
    left_out: LeftOut,
    /// The index, if samples are read by it, and the number of the next one among all.
    index: Option<(Arc<ShardIndex>, usize)>,
    done: bool,
}

/// The next files that are left out, because other files of their sample were lost.
enum LeftOut {
    Nothing,
    /// Those of one sample, behind a gap. The name of the first file may be cut, if the gap took its extended header.
    BehindGap,
    /// Those of the next sample.
    Next,
    /// Those with this key.
    Key(Arc<str>),
}

/// A file whose name has a key and an extension.
pub(super) struct Named {
    pub(super) file: TarFile,
    /// The position of the dot between them.
    pub(super) dot: usize,
}

impl WebSamples {
    pub(super) fn open(
        path: Arc<Path>,
        version: Option<&Version>,
        options: Options,
        cancelled: &Cancellation,
    ) -> Result<Self, DataError> {
        Ok(Self::new(Content::open_version(path, version)?.until(cancelled), options))
    }

    /// The samples of a shard that is already in memory; `path` only names it in errors.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a compression that this build does not support.
    pub fn from_bytes(shard: Vec<u8>, path: &Path) -> Result<Self, DataError> {
        Ok(Self::new(Content::from_bytes(shard, path)?, Options::default()))
    }

    fn new(content: Content, options: Options) -> Self {
        let (tar, left_out) = (TarReader::new(content), LeftOut::Nothing);
        Self { tar, options, ahead: None, left_out, index: None, done: false }
    }

    /// Skips the `count` items that an earlier reader of this shard returned. If the last of them was an error that no
    /// sample follows, the shard ends here, as it did then.
    pub(super) fn skip_items(&mut self, count: u64) {
        let mut skipped = 0;
        while skipped < count {
            match self.sample(false) {
                // `next` does not return a sample without selected files either, so it does not count.
                Ok(Some(sample)) => skipped += u64::from(!sample.files.is_empty()),
                Err(Bad { more: true, .. }) => skipped += 1,
                Ok(None) | Err(_) => {
                    self.done = true;
                    break;
                }
            }
        }
    }

    /// The next sample, without content unless `read`.
    fn sample(&mut self, read: bool) -> Result<Option<WebSample>, Bad> {
        let Some(first) = self.first()? else { return Ok(None) };
        let key = first.file.name[..first.dot].into();
        let mut sample = WebSample { key, shard: self.tar.path().clone(), files: Vec::new() };
        let (mut bytes, mut files) = (0u64, 0);
        let mut next = Some(first);
        while let Some(named) = next {
            if named.file.name[..named.dot] != *sample.key {
                self.ahead = Some(named);
                break;
            }
            files += 1;
            if files > MAX_FILES {
                let expected = format!("at most {MAX_FILES} files per sample");
                let found = format!("more of {:?}", sample.key);
                let error = self.tar.corrupt(named.file.offset, expected, found);
                return Err(self.lost(&sample, error));
            }
            self.add(&named, &mut sample, &mut bytes, read)?;
            next = self.next_named()?;
        }
        Ok(Some(sample))
    }

    /// The first file of the next sample that may be complete.
    fn first(&mut self) -> Result<Option<Named>, Bad> {
        loop {
            let Some(named) = self.ahead.take().map_or_else(|| self.next_named(), |named| Ok(Some(named)))? else {
                return Ok(None);
            };
            let key = &named.file.name[..named.dot];
            self.left_out = match &self.left_out {
                LeftOut::BehindGap if named.file.may_be_cut => LeftOut::Next,
                LeftOut::BehindGap | LeftOut::Next => LeftOut::Key(key.into()),
                LeftOut::Key(left_out) if **left_out == *key => continue,
                LeftOut::Key(_) | LeftOut::Nothing => {
                    self.left_out = LeftOut::Nothing;
                    return Ok(Some(named));
                }
            };
        }
    }

    /// An error after which the other files of the sample are left out.
    fn lost(&mut self, sample: &WebSample, error: DataError) -> Bad {
        self.left_out = LeftOut::Key(sample.key.clone());
        Bad { error, more: true }
    }

    /// Says what is lost beside a damaged file, whose sample is not known.
    fn beside(&mut self, Bad { error, more }: Bad) -> Bad {
        // The index says where the next sample begins.
        if self.index.is_some() {
            return Bad { error, more };
        }
        if more {
            self.left_out = LeftOut::BehindGap;
        }
        let note = match more {
            true => "the samples beside it, which may lack a file, are left out",
            false => "the samples after it are lost: how many is unknown",
        };
        Bad { error: noting(error, note), more }
    }

    fn add(&mut self, named: &Named, sample: &mut WebSample, bytes: &mut u64, read: bool) -> Result<(), Bad> {
        let extension = named.file.name[named.dot + 1..].to_lowercase();
        if !self.options.wants(&extension) {
            return Ok(());
        }
        if sample.files.iter().any(|(name, _)| *name == extension) {
            let found = format!("{:?}, a second {extension:?}", named.file.name);
            let error = self.tar.corrupt(named.file.offset, "at most one file per extension in a sample", found);
            return Err(self.lost(sample, error));
        }
        *bytes = bytes.saturating_add(named.file.bytes);
        DataError::check_bytes(self.options.max_sample_bytes, *bytes, "a sample", self.tar.path())
            .map_err(|error| self.lost(sample, error))?;
        let content = if read { self.tar.read(&named.file) } else { Ok(Vec::new()) };
        let content = content.map_err(|error| self.beside(error.into()))?;
        sample.files.push((extension, content));
        Ok(())
    }

    fn next_named(&mut self) -> Result<Option<Named>, Bad> {
        self.named().map_err(|bad| self.beside(bad))
    }

    fn named(&mut self) -> Result<Option<Named>, Bad> {
        while let Some(file) = self.tar.next_file()? {
            if let Some(dot) = dot(&file.name) {
                return Ok(Some(Named { file, dot }));
            }
        }
        Ok(None)
    }

    /// Reads on by an index, from the selected sample with this number.
    pub(super) fn by_index(mut self, index: Arc<ShardIndex>, item: usize) -> Self {
        self.index = Some((index, item));
        self
    }

    /// The index beside the shard, after a check that it is the shard's: nothing belongs to a sample but what it lists.
    pub(super) fn load_index(&mut self) -> Result<Option<ShardIndex>, DataError> {
        let Some(path) = find(self.tar.path())? else { return Ok(None) };
        let length = self.tar.seekable_length()?;
        let text = read(&path)?;
        let parsed = parse(&path, &text, &self.options)?;
        let misfit = |shard: &Self, found: String| misfit(&path, shard.tar.path(), found);
        if parsed.end > length {
            return Err(misfit(
                self,
                format!("an index that ends at byte {}, of a shard of {length} bytes", parsed.end),
            ));
        }
        // Where the shard is the very file that the index was made of, its extended headers need not be read again.
        let index = parsed.index.of_version(self.tar.version());
        let is_same = is_of(parsed.stamp, self.tar.path(), index.version());
        let gaps = parsed.gaps.into_iter().filter(|_| !is_same).map(|(start, end)| (start, Some(end)));
        for (start, end) in gaps.chain([(parsed.end, None)]) {
            self.check_gap(start, end).map_err(|found| misfit(self, found))?;
        }
        Ok(Some(index))
    }

    /// Checks that nothing up to the content at `end`, or the archive's end mark, belongs to a sample.
    fn check_gap(&mut self, start: u64, end: Option<u64>) -> Result<(), String> {
        self.tar.seek(start, end).map_err(|error| error.to_string())?;
        loop {
            match (self.tar.next_file().map_err(|bad| bad.error.to_string())?, end) {
                (Some(_), Some(end)) if self.tar.at() == end => return Ok(()),
                (Some(file), _) if dot(&file.name).is_none() => {}
                (Some(file), _) => {
                    return Err(format!("an index that lacks the file {:?} at byte {}", file.name, file.offset));
                }
                (None, None) => return Ok(()),
                (None, Some(end)) => return Err(format!("an index with a file at byte {end}, where there is none")),
            }
        }
    }

    /// The text of an index of the whole shard, and how many samples it has.
    pub(super) fn list(mut self) -> Result<(String, u64), DataError> {
        self.tar.seekable_length()?;
        let (mut text, path) = (IndexText::default(), self.tar.path().clone());
        while let Some(Named { file, dot }) = self.next_named().map_err(|bad| bad.error)? {
            if !holds(&file.name) {
                return Err(DataError::layout(&path, HELD, format!("{:?}", file.name)));
            }
            text.add(&file.name, dot, self.tar.at(), file.bytes);
        }
        let samples = text.samples();
        Ok((text.finish(&path), samples))
    }

    /// The sample that an index has at a place.
    fn sample_at(&mut self, span: Span) -> Result<WebSample, Bad> {
        self.tar.seek(span.start, Some(span.end))?;
        let (mut sample, mut bytes) = (None::<WebSample>, 0);
        while self.tar.next_at() < span.end {
            let named = self.next_named()?.ok_or_else(|| self.misplaced(span, "the archive's end mark"))?;
            let key = &named.file.name[..named.dot];
            let shard = self.tar.path();
            let sample =
                sample.get_or_insert_with(|| WebSample { key: key.into(), shard: shard.clone(), files: vec![] });
            if *sample.key != *key {
                return Err(self.misplaced(span, &format!("the file {:?} of another sample", named.file.name)).into());
            }
            self.add(&named, sample, &mut bytes, true)?;
        }
        let sample = sample.ok_or_else(|| self.misplaced(span, "nothing"))?;
        let end = self.tar.next_at();
        if end != span.end {
            return Err(self.misplaced(span, &format!("{:?}, which ends at byte {end}", sample.key)).into());
        }
        // An error in the next header is the next sample's.
        match self.tar.next_file() {
            Ok(Some(file)) if dot(&file.name).is_some_and(|dot| file.name[..dot] == *sample.key) => {
                Err(self.misplaced(span, &format!("{:?}, which goes on with {:?}", sample.key, file.name)).into())
            }
            _ => Ok(sample),
        }
    }

    fn misplaced(&self, span: Span, found: &str) -> DataError {
        misplaced(self.tar.path(), span, found)
    }

    /// The next selected sample of the index.
    fn next_of_index(&mut self) -> Option<Result<WebSample, DataError>> {
        let (index, item) = self.index.as_mut()?;
        let (index, number) = (index.clone(), index.position_of(*item));
        let span = index.span(number)?;
        *item += 1;
        // After an error in a sample, the next one is where the index has it.
        let sample = match self.sample_at(span).map_err(|bad| bad.error) {
            Ok(sample) if !index.has_key(number, &sample.key) => {
                Err(self.misplaced(span, &format!("another one, {:?}", sample.key)))
            }
            Ok(sample) if sample.files.is_empty() => {
                Err(self.misplaced(span, &format!("other extensions in {:?}", sample.key)))
            }
            read => read,
        };
        use DataError::{Cancelled, Io, Remote};
        self.done = matches!(sample, Err(Cancelled | Io { .. } | Remote { .. }));
        Some(sample)
    }
}

impl Iterator for WebSamples {
    type Item = Result<WebSample, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if self.done {
                return None;
            }
            if self.index.is_some() {
                return self.next_of_index();
            }
            let item = self.sample(true).transpose();
            self.done = !matches!(item, Some(Ok(_) | Err(Bad { more: true, .. })));
            match item {
                // None of its files are selected.
                Some(Ok(sample)) if sample.files.is_empty() => {}
                item => return item.map(|item| item.map_err(|bad| bad.error)),
            }
        }
    }
}

/// The dot between key and extension: the first one after the last slash. `None` for names that do not belong to a
/// sample: without a dot, hidden, or whose first component begins and ends with two underscores (`__meta__`).
pub(super) fn dot(name: &str) -> Option<usize> {
    let first = name.split('/').next().unwrap_or_default();
    if first.len() >= 4 && first.starts_with("__") && first.ends_with("__") {
        return None;
    }
    let base = name.rfind('/').map_or(0, |slash| slash + 1);
    match name[base..].find('.')? {
        0 => None,
        dot => Some(base + dot),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_as_in_python() {
        let parts = |name: &str| dot(name).map(|dot| (name[..dot].to_owned(), name[dot + 1..].to_owned()));
        let pair = |key: &str, extension: &str| Some((key.to_owned(), extension.to_owned()));
        assert_eq!(parts("0001.jpg"), pair("0001", "jpg"));
        assert_eq!(parts("./a.b/0001.seg.png"), pair("./a.b/0001", "seg.png"));
        assert_eq!(parts("a/0001."), pair("a/0001", ""));
        for name in ["README", "a.b/README", ".hidden", "a/.hidden.png", "__meta__.json", "__meta__", "__m__/a.txt", ""]
        {
            assert_eq!(parts(name), if name == "__meta__.json" { pair("__meta__", "json") } else { None }, "{name}");
        }
    }
}
