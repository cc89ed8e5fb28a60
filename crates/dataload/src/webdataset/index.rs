//! The index of a tar shard: a line for each sample, with extension, offset, length and name of each of its files.
//!
//! This is the format of DALI's `wds2idx`. DALI reads the first two words of the first line and no more: behind them
//! are the shard's length and the time of its last change.

use std::fmt::Write;
use std::path::Path;
use std::time::UNIX_EPOCH;

use super::Options;
use super::samples::dot;
use super::tar::{BLOCK, padded};
use crate::DataError;
use crate::read::{Input, Version, is_url};
use crate::shards::index::{ShardIndex, bad_line};

/// The version; earlier ones lack the names.
const VERSION: &str = "v1.2";

/// Collects the lines of an index.
#[derive(Default)]
pub(super) struct IndexText {
    lines: String,
    key: Option<String>,
    samples: u64,
}

impl IndexText {
    pub(super) fn samples(&self) -> u64 {
        self.samples
    }

    /// Adds a file, whose content is at `offset`. Files of a sample follow each other.
    pub(super) fn add(&mut self, name: &str, dot: usize, offset: u64, bytes: u64) {
        let (key, extension) = (&name[..dot], &name[dot + 1..]);
        if self.key.as_deref() != Some(key) {
            self.lines.push_str(if self.samples > 0 { "\n" } else { "" });
            self.samples += 1;
            self.key = Some(key.to_owned());
        } else {
            self.lines.push(' ');
        }
        // Writing to a string does not fail.
        _ = write!(self.lines, "{extension} {offset} {bytes} {name}");
    }

    /// The whole text, for a shard that is complete.
    pub(super) fn finish(self, shard: &Path) -> String {
        let Self { lines, samples, .. } = self;
        let end = if samples > 0 { "\n" } else { "" };
        format!("{VERSION} {samples} {}\n{lines}{end}", stamp(shard).unwrap_or_default())
    }
}

/// Whether an index, which separates its words by spaces, can hold a name.
pub(super) fn holds(name: &str) -> bool {
    !name.contains(char::is_whitespace) && !name.ends_with('.')
}

/// What [`holds`] asks for.
pub(super) const HELD: &str =
    "file names without spaces and with an extension, since an index separates its words by spaces";

/// Whether a shard is the file with this [`stamp`]. Of one elsewhere only the length is known: it was copied there later.
pub(super) fn is_of(stamp: &str, shard: &Path, version: Option<&Version>) -> bool {
    match is_url(shard) {
        true => {
            let length = stamp.split(' ').next().and_then(|length| length.parse().ok());
            Input::open_version(shard, version).is_ok_and(|(_, bytes)| Some(bytes) == length)
        }
        false => self::stamp(shard).is_some_and(|found| found == stamp),
    }
}

/// The length and the time of the last change of a file.
fn stamp(shard: &Path) -> Option<String> {
    let meta = std::fs::metadata(shard).ok()?;
    let changed = meta.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{} {}", meta.len(), changed.as_nanos()))
}

/// What an index says.
pub(super) struct Parsed<'a> {
    pub(super) index: ShardIndex,
    /// Between which ends of files and which contents there is more than one header: an extended header, files that
    /// belong to no sample, or samples that the index lacks.
    pub(super) gaps: Vec<(u64, u64)>,
    /// The end of the last sample.
    pub(super) end: u64,
    /// The [`stamp`] of the shard that it was made of.
    pub(super) stamp: &'a str,
}

pub(super) fn parse<'a>(path: &Path, text: &'a str, options: &Options) -> Result<Parsed<'a>, DataError> {
    let mut lines = text.lines().zip(1..);
    let first = lines.next().map_or("", |(line, _)| line);
    let mut words = first.splitn(3, ' ');
    let (version, count) = (words.next(), words.next().and_then(|word| word.parse::<u64>().ok()));
    let (Some(VERSION), Some(count)) = (version, count) else {
        let expected =
            format!("expected the index of a tar file, which begins with {VERSION} and the number of samples");
        return Err(bad_line(path, 1, format!("{expected}, found {:?}", shown(first))));
    };
    let index = ShardIndex::new(options.extensions.is_none());
    let mut parsed = Parsed { index, gaps: Vec::new(), end: 0, stamp: words.next().unwrap_or_default() };
    let (mut samples, mut before) = (0, None);
    for (line, number) in lines {
        samples += 1;
        let sample = add_files(line, options, &mut parsed).map_err(|problem| bad_line(path, number, problem))?;
        let Some((key, counts)) = sample else { continue };
        if before == Some(key) {
            let expected = "expected another key than that of the line before";
            return Err(bad_line(path, number, format!("{expected}, found {:?}", shown(key))));
        }
        before = Some(key);
        parsed.index.push(parsed.end, Some(key), counts);
    }
    if samples != count {
        return Err(bad_line(path, 1, format!("expected {count} samples, as it says, found {samples}")));
    }
    Ok(parsed)
}

/// Adds the files of a line. Returns its key and whether a file of it is wanted; `None` where its files belong to no
/// sample.
fn add_files<'a>(line: &'a str, options: &Options, parsed: &mut Parsed<'_>) -> Result<Option<(&'a str, bool)>, String> {
    let (mut words, mut sample) = (line.split_ascii_whitespace(), None::<(&str, bool)>);
    while let Some(extension) = words.next() {
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        let (Some(offset), Some(bytes), Some(name)) = (number(), number(), words.next()) else {
            let expected = "expected an extension, an offset, a length and a name for each file";
            return Err(format!("{expected}, found {:?}", shown(extension)));
        };
        // Whether these belong to no sample in the shard either is seen in the gap.
        let Some(dot) = dot(name) else { continue };
        let least = parsed.end.saturating_add(BLOCK);
        let end = padded(bytes).and_then(|bytes| offset.checked_add(bytes));
        let Some(end) = end.filter(|_| offset >= least && offset.is_multiple_of(BLOCK)) else {
            let expected = format!("expected an offset that is a multiple of {BLOCK}, and {least} or more");
            return Err(format!("{expected}, found {offset} for {:?} of {bytes} bytes", shown(name)));
        };
        if offset > least {
            parsed.gaps.push((parsed.end, offset));
        }
        parsed.end = end;
        let wanted = options.extensions.is_none() || options.wants(&name[dot + 1..].to_lowercase());
        let key = &name[..dot];
        match &mut sample {
            None => sample = Some((key, wanted)),
            Some((first, counts)) if *first == key => *counts |= wanted,
            Some((first, _)) => return Err(format!("expected files of {:?}, found {:?}", shown(first), shown(name))),
        }
    }
    Ok(sample)
}

/// The start of a word or line that may be of any length.
fn shown(word: &str) -> String {
    word.chars().take(80).collect()
}
