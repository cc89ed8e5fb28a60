//! Reads a shard: the number of samples, where each begins, what `index.json` says once more, and the samples.

use std::sync::Arc;

use super::index::Shard;
use super::sample::{Column, MdsSample};
use crate::bad::noting;
use crate::content::Content;
use crate::read::Version;
use crate::shards::index::{ShardIndex, Span};
use crate::{Cancellation, DataError};

/// The most bytes of a sample: 1 GiB.
const MAX_SAMPLE_BYTES: u64 = 1 << 30;
const NUMBER_BYTES: u64 = 4;

/// A shard that was opened.
pub(super) struct ShardReader {
    content: Content,
    columns: Arc<[Column]>,
    samples: u64,
    bytes: u64,
}

/// The samples of a shard from one on.
pub(super) struct ShardSamples {
    reader: ShardReader,
    /// The ends of all samples, before them the start of the first.
    bounds: Vec<u32>,
    next: usize,
    done: bool,
}

impl ShardReader {
    pub(super) fn open(shard: &Shard, version: Option<&Version>, cancelled: &Cancellation) -> Result<Self, DataError> {
        // The number of samples, which comes first, may look like the start of a compressed file.
        let open = if shard.is_packed { Content::open_version } else { Content::open_plain };
        let content = open(shard.path.clone(), version)?.until(cancelled);
        Ok(Self { content, columns: shard.columns.clone(), samples: shard.samples, bytes: shard.bytes })
    }

    /// Reads where the samples are.
    pub(super) fn table(mut self) -> Result<ShardSamples, DataError> {
        let bounds = self
            .bounds()
            .map_err(|error| noting(error, &format!("the {} samples of the shard are lost", self.samples)))?;
        Ok(ShardSamples { reader: self, bounds, next: 0, done: false })
    }

    fn bounds(&mut self) -> Result<Vec<u32>, DataError> {
        let count = self.content.bytes(NUMBER_BYTES, "the number of samples")?;
        let count = u64::from(numbers(&count).next().unwrap_or_default());
        if count != self.samples {
            let expected = format!("{} samples, as index.json says", self.samples);
            return Err(self.content.corrupt(0, expected, count.to_string()));
        }
        let table = self.content.bytes(NUMBER_BYTES * (count + 1), "the offsets of the samples")?;
        let bounds: Vec<u32> = numbers(&table).collect();
        let at = |position: usize| NUMBER_BYTES * (1 + position as u64);
        let least = self.content.at();
        if let Some(&first) = bounds.first().filter(|&&first| u64::from(first) < least) {
            return Err(self.content.corrupt(at(0), format!("an offset of {least} or more"), first.to_string()));
        }
        if let Some(position) = bounds.windows(2).position(|pair| pair[0] > pair[1]) {
            let expected = format!("an offset of {} or more", bounds[position]);
            return Err(self.content.corrupt(at(position + 1), expected, bounds[position + 1].to_string()));
        }
        match bounds.last().map(|&end| u64::from(end)) {
            Some(end) if end != self.bytes => {
                let expected = format!("the end of the shard at byte {}, as index.json says", self.bytes);
                Err(self.content.corrupt(at(bounds.len() - 1), expected, end.to_string()))
            }
            _ => Ok(bounds),
        }
    }

    /// Reads the sample at a place.
    pub(super) fn read(&mut self, span: Span) -> Result<MdsSample, DataError> {
        match self.content.length() {
            Some(_) => self.content.seek(span.start)?,
            None => self.content.skip(span.start.saturating_sub(self.content.at()), "what is before a sample")?,
        }
        let bytes = span.end.saturating_sub(span.start);
        DataError::check_bytes(MAX_SAMPLE_BYTES, bytes, "a sample", self.content.path())?;
        let bytes = self.content.bytes(bytes, "a sample")?;
        MdsSample::new(bytes, span.start, self.content.path(), &self.columns)
    }
}

impl ShardSamples {
    /// The samples after the first `position`.
    pub(super) fn after(mut self, position: u64) -> Self {
        self.next = usize::try_from(position).unwrap_or(usize::MAX);
        if let (None, Some(&start)) = (self.reader.content.length(), self.bounds.get(self.next)) {
            // Behind damage the shard ended, and it ends here too.
            let rest = u64::from(start).saturating_sub(self.reader.content.at());
            self.done = matches!(self.reader.content.skip(rest, "samples"), Err(DataError::Corrupt { .. }));
        }
        self
    }

    /// Where the samples are, for random access.
    pub(super) fn index(self) -> Result<ShardIndex, DataError> {
        let content = self.reader.content;
        match content.length() {
            Some(_) => {
                let bounds = self.bounds.into_iter().map(u64::from).collect();
                Ok(ShardIndex::from_bounds(bounds).of_version(content.version()))
            }
            None => {
                let expected = "a shard that is not compressed, for random access";
                Err(DataError::layout(content.path(), expected, "a compressed one: read it as a stream"))
            }
        }
    }
}

impl Iterator for ShardSamples {
    type Item = Result<MdsSample, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let [start, end] = *self.bounds.get(self.next..)?.first_chunk::<2>().filter(|_| !self.done)?;
        self.next += 1;
        let span = Span { start: start.into(), end: end.into() };
        let read = self.reader.read(span);
        // Behind damage in compressed data nothing can be read.
        let cut = self.reader.content.length().is_none() && self.reader.content.at() < span.end;
        self.done = match &read {
            Err(DataError::Cancelled | DataError::Io { .. } | DataError::Remote { .. }) => true,
            Err(DataError::Corrupt { .. }) => cut,
            Ok(_) | Err(_) => false,
        };
        let after = self.bounds.len().saturating_sub(self.next + 1);
        Some(read.map_err(|error| match self.done {
            true => noting(error, &format!("the {after} samples after it are lost")),
            false => error,
        }))
    }
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u32> {
    let (numbers, _) = bytes.as_chunks::<4>();
    numbers.iter().map(|&number| u32::from_le_bytes(number))
}
