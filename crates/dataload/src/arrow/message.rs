//! Finds and checks the messages of the IPC format.

use std::ops::Range;
use std::path::Path;

use arrow_ipc::{Block as FileBlock, Message, MessageHeader, MetadataVersion, RecordBatch, root_as_message};

use super::file::Backing;
use super::node::Bytes;
use crate::DataError;
use crate::columns::Words;

/// The largest size of a header, which takes some dozens of bytes per column.
const MAX_HEADER_BYTES: u64 = 1 << 26;
const CONTINUATION: [u8; 4] = [0xff; 4];

/// The place of a message in its file.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) header: Range<usize>,
    pub(super) body: Range<usize>,
}

/// A file's content, and its name for errors.
#[derive(Clone, Copy)]
pub(super) struct Messages<'a> {
    pub(super) content: &'a Backing,
    pub(super) path: &'a Path,
}

/// What the header of a record batch or dictionary says of its arrays.
#[derive(Debug)]
pub(super) struct Arrays {
    pub(super) rows: usize,
    /// The length of each array, and how many of its elements are null.
    pub(super) nodes: Vec<(usize, usize)>,
    /// The place of each buffer in the file.
    pub(super) buffers: Vec<Range<usize>>,
    /// For each array of views, how many buffers it has besides its first two.
    pub(super) variable: Vec<usize>,
    /// How the buffers are compressed, if they are.
    pub(super) codec: Option<Codec>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codec {
    Lz4,
    Zstd,
}

impl Messages<'_> {
    pub(super) fn corrupt(&self, at: usize, expected: impl Into<String>, found: impl Into<String>) -> DataError {
        DataError::corrupt(self.path, at as u64, expected, found)
    }

    /// Copies bytes of the file to memory with the alignment that flatbuffers need.
    pub(super) fn bytes(&self, range: &Range<usize>, what: &'static str) -> Result<Words, DataError> {
        DataError::check_bytes(MAX_HEADER_BYTES, range.len() as u64, what, self.path)?;
        let mut words = Words::new(range.len())?;
        match self.content.copy(range.start, words.bytes_mut()) {
            true => Ok(words),
            false => Err(self.corrupt(range.start, format!("{} bytes of {what}", range.len()), self.ends())),
        }
    }

    /// The bytes of the file.
    pub(super) fn length(&self) -> usize {
        self.content.len()
    }

    fn ends(&self) -> String {
        format!("the end of the file at byte {}", self.content.len())
    }

    /// The message that begins at `at`; `None` at the end of the stream.
    pub(super) fn at(&self, at: usize) -> Result<Option<Block>, DataError> {
        if at == self.content.len() {
            return Ok(None);
        }
        let word = |at: usize| {
            let mut word = [0; 4];
            let there = self.content.copy(at, &mut word);
            there.then_some(word).ok_or_else(|| self.corrupt(at, "the length of a message", self.ends()))
        };
        // Before version 0.15, a message began with its length.
        let (length, header) = match word(at)? {
            CONTINUATION => (word(at + 4)?, at + 8),
            length => (length, at + 4),
        };
        let length = match usize::try_from(i32::from_le_bytes(length)) {
            Ok(0) => return Ok(None),
            Ok(length) => length,
            Err(_) => return Err(self.corrupt(at, "the length of a message", "a negative number")),
        };
        let header = header..header.saturating_add(length);
        let body = self.with_message(&header, |message| Ok(message.bodyLength()))?;
        Ok(Some(Block { body: self.body(header.end, body)?, header }))
    }

    /// A message that the footer lists.
    pub(super) fn listed(&self, block: &FileBlock) -> Result<Block, DataError> {
        let (start, length) = (usize::try_from(block.offset()), usize::try_from(block.metaDataLength()));
        let (Ok(start), Ok(length @ 8..)) = (start, length) else {
            let found = format!("a block of {} bytes at {}", block.metaDataLength(), block.offset());
            return Err(self.corrupt(self.content.len(), "a footer with places of messages", found));
        };
        let end = start.saturating_add(length);
        let mut mark = [0; 4];
        let skip = if self.content.copy(start, &mut mark) && mark == CONTINUATION { 8 } else { 4 };
        Ok(Block { header: start + skip..end, body: self.body(end, block.bodyLength())? })
    }

    fn body(&self, start: usize, length: i64) -> Result<Range<usize>, DataError> {
        let end = usize::try_from(length).ok().and_then(|length| start.checked_add(length));
        match end.filter(|&end| end <= self.content.len()) {
            Some(end) => Ok(start..end),
            None => Err(self.corrupt(start, format!("a message's body of {length} bytes"), self.ends())),
        }
    }

    /// Reads the header of a message.
    pub(super) fn with_message<T>(
        &self,
        header: &Range<usize>,
        read: impl FnOnce(Message<'_>) -> Result<T, DataError>,
    ) -> Result<T, DataError> {
        let words = self.bytes(header, "a message's header")?;
        let message = root_as_message(words.bytes());
        let message = message
            .map_err(|error| self.corrupt(header.start, "a message's header", first_line(&error.to_string())))?;
        if message.version() < MetadataVersion::V4 {
            let found = format!("{:?}", message.version());
            return Err(DataError::layout(self.path, "metadata of version 4 or 5, of Arrow 0.8 or later", found));
        }
        read(message)
    }

    /// Reads the header of a record batch or dictionary.
    pub(super) fn arrays(&self, block: &Block) -> Result<Arrays, DataError> {
        self.with_message(&block.header, |message| {
            let dictionary = message.header_as_dictionary_batch();
            let batch = dictionary.map_or_else(|| message.header_as_record_batch(), |dictionary| dictionary.data());
            match batch {
                Some(batch) => self.arrays_of(block, batch),
                None => {
                    let found = message.header_type().variant_name().unwrap_or("another message");
                    Err(self.corrupt(block.header.start, "a record batch", found))
                }
            }
        })
    }

    fn arrays_of(&self, block: &Block, batch: RecordBatch<'_>) -> Result<Arrays, DataError> {
        let bad = |expected: &str, found: String| self.corrupt(block.header.start, expected, found);
        let count =
            |count: i64| usize::try_from(count).map_err(|_| bad("numbers that are not negative", count.to_string()));
        let codec = match batch.compression().map(|compression| compression.codec()) {
            None => None,
            Some(arrow_ipc::CompressionType::LZ4_FRAME) => Some(Codec::Lz4),
            Some(arrow_ipc::CompressionType::ZSTD) => Some(Codec::Zstd),
            Some(other) => return Err(bad("compression by LZ4 or zstd", format!("{other:?}"))),
        };
        let nodes = batch.nodes().into_iter().flatten();
        let nodes = nodes.map(|node| Ok((count(node.length())?, count(node.null_count())?)));
        let buffers = batch.buffers().into_iter().flatten().map(|buffer| {
            let start = count(buffer.offset())?.checked_add(block.body.start);
            let end = start.zip(usize::try_from(buffer.length()).ok()).and_then(|(start, len)| start.checked_add(len));
            match start.zip(end) {
                Some((start, end)) if end <= block.body.end => Ok(start..end),
                _ => Err(bad("buffers within the message's body", format!("{buffer:?}"))),
            }
        });
        Ok(Arrays {
            rows: count(batch.length())?,
            nodes: nodes.collect::<Result<_, DataError>>()?,
            buffers: buffers.collect::<Result<_, DataError>>()?,
            variable: batch.variadicBufferCounts().into_iter().flatten().map(count).collect::<Result<_, _>>()?,
            codec,
        })
    }

    /// The kind of a message; of a dictionary also its id, and whether it adds to an earlier one.
    pub(super) fn kind(&self, block: &Block) -> Result<(MessageHeader, Option<(i64, bool)>), DataError> {
        self.with_message(&block.header, |message| {
            let dictionary = message.header_as_dictionary_batch();
            Ok((message.header_type(), dictionary.map(|dictionary| (dictionary.id(), dictionary.isDelta()))))
        })
    }
}

/// Only the first line: the verifier adds one for each table around the place.
pub(super) fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
