//! One file of record batches: its schema, its dictionaries, and where its batches are.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::{Endianness, MessageHeader, MetadataVersion, Schema as FileSchema, root_as_footer};
use arrow_schema::{DataType, Field, Schema};
use overdrive_ffi::MappedFile;

use super::layout::{Leaf, LevelKind, leaves};
use super::message::{Arrays, Block, Messages, first_line};
use super::node::{Bytes, Node, Piece};
use super::read::{ReadError, Reader};
use super::unpack::Unpacked;
use crate::DataError;
use crate::columns::{Array, OnNull};
use crate::local::map;

const MAGIC: &[u8] = b"ARROW1";
/// The footer's length and the magic bytes.
const TAIL_BYTES: usize = 10;

/// Where a file's bytes are.
pub(super) enum Backing {
    Mapped(MappedFile),
    Memory(Vec<u8>),
}

impl Backing {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Mapped(map) => map.len(),
            Self::Memory(bytes) => bytes.len(),
        }
    }
}

impl Bytes for Backing {
    fn copy(&self, at: usize, out: &mut [u8]) -> bool {
        match self {
            Self::Mapped(map) => map.copy(at, out),
            Self::Memory(bytes) => bytes.copy(at, out),
        }
    }
}

/// An IPC file or stream.
pub(super) struct ArrowFile {
    pub(super) path: Arc<Path>,
    content: Backing,
    pub(super) schema: Schema,
    pub(super) leaves: Vec<Leaf>,
    /// For each array the id of its dictionary, if it has one.
    ids: Vec<Option<i64>>,
    dictionaries: BTreeMap<i64, Array>,
    /// Each record batch with its number of rows.
    pub(super) batches: Vec<(Block, usize)>,
}

impl ArrowFile {
    pub(super) fn open(path: Arc<Path>, limit: u64) -> Result<Self, DataError> {
        let map = map(&path)?;
        Self::new(path, Backing::Mapped(map), limit)
    }

    pub(super) fn new(path: Arc<Path>, content: Backing, limit: u64) -> Result<Self, DataError> {
        let (schema, leaves) = (Schema::empty(), Vec::new());
        let (ids, dictionaries, batches) = (Vec::new(), BTreeMap::new(), Vec::new());
        let mut file = Self { path, content, schema, leaves, ids, dictionaries, batches };
        let mut start = [0; MAGIC.len()];
        if file.content.copy(0, &mut start) && start == *MAGIC {
            file.read_footer(limit)?;
        } else {
            file.read_stream(limit)?;
        }
        Ok(file)
    }

    fn messages(&self) -> Messages<'_> {
        Messages { content: &self.content, path: &self.path }
    }

    fn read_footer(&mut self, limit: u64) -> Result<(), DataError> {
        let messages = self.messages();
        let end = self.content.len();
        let at = end.saturating_sub(TAIL_BYTES);
        let tail = messages.bytes(&(at..end), "the end of the file")?;
        let (length, magic) = tail.bytes().split_at(tail.bytes().len().saturating_sub(MAGIC.len()));
        if magic != MAGIC || at < MAGIC.len() {
            let expected = format!("{}, as every complete file ends", MAGIC.escape_ascii());
            return Err(messages.corrupt(at, expected, magic.escape_ascii().to_string()));
        }
        let length = i32::from_le_bytes(length.try_into().unwrap_or_default());
        let start = usize::try_from(length).ok().and_then(|length| at.checked_sub(length));
        let Some(start) = start else {
            return Err(messages.corrupt(at, "a footer within the file", format!("one of {length} bytes")));
        };
        let words = messages.bytes(&(start..at), "the footer")?;
        let footer = root_as_footer(words.bytes());
        let footer = footer.map_err(|error| messages.corrupt(start, "a footer", first_line(&error.to_string())))?;
        let schema = footer.schema().ok_or_else(|| messages.corrupt(start, "a footer with a schema", "none"))?;
        let dictionaries = footer.dictionaries().into_iter().flatten().map(|block| messages.listed(block));
        let dictionaries = dictionaries.collect::<Result<Vec<_>, _>>()?;
        let batches = footer.recordBatches().into_iter().flatten().map(|block| messages.listed(block));
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        self.set_schema(schema, start, footer.version())?;
        for block in dictionaries {
            self.add_dictionary(&block, limit)?;
        }
        batches.into_iter().try_for_each(|block| self.add_batch(block))
    }

    fn read_stream(&mut self, limit: u64) -> Result<(), DataError> {
        let mut at = 0;
        while let Some(block) = self.messages().at(at)? {
            if at == 0 {
                self.read_schema(&block)?;
            } else {
                match self.messages().kind(&block)?.0 {
                    MessageHeader::RecordBatch => self.add_batch(block.clone())?,
                    MessageHeader::DictionaryBatch => self.add_dictionary(&block, limit)?,
                    other => {
                        let found = other.variant_name().unwrap_or("another message");
                        return Err(self.messages().corrupt(at, "a record batch or a dictionary", found));
                    }
                }
            }
            at = block.body.end;
        }
        // The end mark is a length of 0, behind four more bytes since version 0.15.
        match (at, self.messages().length() - at) {
            (0, _) => Err(self.messages().corrupt(0, "an Arrow IPC file or stream", "no message")),
            (_, 0) => {
                tracing::warn!(
                    "{}: the stream has no end mark: it may lack its last record batches",
                    self.path.display()
                );
                Ok(())
            }
            (_, 1..=8) => Ok(()),
            (_, rest) => Err(self.messages().corrupt(at, "the end of the stream", format!("{rest} more bytes"))),
        }
    }

    fn read_schema(&mut self, block: &Block) -> Result<(), DataError> {
        let words = self.messages().bytes(&block.header, "a message's header")?;
        // `Messages::at` has checked it.
        let message = arrow_ipc::root_as_message(words.bytes()).ok();
        match message.and_then(|message| Some((message.header_as_schema()?, message.version()))) {
            Some((schema, version)) => self.set_schema(schema, block.header.start, version),
            None => Err(self.messages().corrupt(0, "a schema at the start of the stream", "another message")),
        }
    }

    fn set_schema(&mut self, schema: FileSchema<'_>, at: usize, version: MetadataVersion) -> Result<(), DataError> {
        if (schema.endianness() == Endianness::Little) != cfg!(target_endian = "little") {
            let found = format!("{:?}-endian values", schema.endianness());
            return Err(DataError::layout(&self.path, "values in this machine's byte order", found));
        }
        let read = try_fb_to_schema(schema);
        self.schema = read.map_err(|error| self.messages().corrupt(at, "a schema", first_line(&error.to_string())))?;
        // Their unions have one buffer more, and so all columns behind them other buffers.
        let is_union = |field: &&Field| matches!(field.data_type(), DataType::Union(..));
        if version < MetadataVersion::V5
            && let Some(union) = self.schema.flattened_fields().into_iter().find(is_union)
        {
            let found = format!("the union {:?} of {version:?}", union.name());
            return Err(DataError::layout(&self.path, "metadata of version 5 where there are unions", found));
        }
        self.leaves = leaves(&self.schema);
        self.ids.clear();
        schema.fields().into_iter().flatten().for_each(|field| add_ids(field, &mut self.ids));
        Ok(())
    }

    fn add_batch(&mut self, block: Block) -> Result<(), DataError> {
        let arrays = self.messages().arrays(&block)?;
        self.check_rows(&arrays, &block)?;
        self.batches.push((block, arrays.rows));
        Ok(())
    }

    /// Checks that the batch can have as many rows as its header says, before memory is allocated for them.
    fn check_rows(&self, arrays: &Arrays, block: &Block) -> Result<(), DataError> {
        // LZ4 and zstd make at most this many bytes of one.
        let (ratio, more) = if arrays.codec.is_some() { (1 << 16, 1 << 16) } else { (1, 0) };
        for leaf in &self.leaves {
            let mut elements = Some(arrays.rows);
            let len = leaf.levels.first().and_then(|level| arrays.nodes.get(level.node)).map(|node| node.0);
            for (level, (_, buffers)) in leaf.levels.iter().zip(arrays.of_leaf(leaf)) {
                if let LevelKind::FixedList(length) = level.kind {
                    elements = elements.and_then(|elements| elements.checked_mul(length));
                }
                if let Some(bits) = level.kind.least_bits() {
                    let room = arrays.buffers.get(buffers.start.saturating_add(1)).map_or(0, Range::len);
                    let most = room.saturating_mul(ratio).saturating_add(more);
                    elements = elements.filter(|elements| elements.saturating_mul(bits).div_ceil(8) <= most);
                    break;
                }
            }
            if len != elements.map(|_| arrays.rows) {
                let expected = format!("{} values in column {:?}, one for each row", arrays.rows, leaf.field.name());
                let found = len.map_or("no column".to_owned(), |len| format!("{len}, or too few bytes for them"));
                return Err(self.messages().corrupt(block.header.start, expected, found));
            }
        }
        match arrays.rows > 0 && self.leaves.is_empty() {
            true => {
                Err(self.messages().corrupt(block.header.start, "columns", format!("{} rows without", arrays.rows)))
            }
            false => Ok(()),
        }
    }

    fn add_dictionary(&mut self, block: &Block, limit: u64) -> Result<(), DataError> {
        let messages = self.messages();
        let Some((id, is_delta)) = messages.kind(block)?.1 else {
            return Err(messages.corrupt(block.header.start, "a dictionary", "another message"));
        };
        if is_delta || self.dictionaries.contains_key(&id) {
            let found = format!("dictionary {id} again");
            return Err(DataError::layout(&self.path, "each dictionary once, as a whole", found));
        }
        let mut leaves = self.leaves.iter().filter(|leaf| self.id(leaf) == Some(id));
        // A dictionary of a column whose type is not supported is skipped.
        let Some(leaf) = leaves.find_map(Leaf::of_dictionary) else { return Ok(()) };
        let arrays = messages.arrays(block)?;
        let unpacked = self.unpack(&arrays, [&leaf].into_iter(), limit)?;
        let values = self.nodes(&arrays, &unpacked, &leaf).and_then(|nodes| {
            let reader = Reader { leaf: &leaf, nulls: &OnNull::Error, dictionary: None, limit };
            let read = reader.read(&nodes, 0..arrays.rows);
            read.map_err(|bad| {
                let found = match bad {
                    ReadError::Null { row } => format!("a null at {row}"),
                    ReadError::Malformed { row, expected } => {
                        format!("other content from value {row} on, instead of {expected}")
                    }
                    ReadError::TooLarge { bytes } => format!("{bytes} bytes, above the limit of {limit}"),
                    other => format!("{other:?}"),
                };
                messages.corrupt(block.body.start, format!("values in dictionary {id}, none of them null"), found)
            })
        });
        self.dictionaries.insert(id, values?);
        Ok(())
    }

    fn id(&self, leaf: &Leaf) -> Option<i64> {
        self.ids.get(leaf.levels.last()?.node).copied().flatten()
    }

    /// The dictionary of a column, if it is dictionary-encoded.
    pub(super) fn dictionary(&self, leaf: &Leaf) -> Option<&Array> {
        self.dictionaries.get(&self.id(leaf)?)
    }

    /// The header of a record batch.
    pub(super) fn arrays(&self, batch: usize) -> Result<Arrays, DataError> {
        self.messages().arrays(&self.batches[batch].0)
    }

    /// The buffers of some columns; decompresses them if they are compressed.
    pub(super) fn unpack<'a>(
        &self,
        arrays: &Arrays,
        leaves: impl Iterator<Item = &'a Leaf>,
        limit: u64,
    ) -> Result<Unpacked, DataError> {
        let mut unpacked = Unpacked::default();
        if let Some(codec) = arrays.codec {
            let of_leaf = |leaf| arrays.of_leaf(leaf).map(|(_, buffers)| buffers);
            for buffers in leaves.flat_map(of_leaf) {
                for (buffer, range) in arrays.buffers.iter().enumerate().take(buffers.end).skip(buffers.start) {
                    unpacked.add(buffer, range.clone(), codec, &self.messages(), limit)?;
                }
            }
        }
        Ok(unpacked)
    }

    /// The arrays of a column.
    pub(super) fn nodes<'a>(
        &'a self,
        arrays: &'a Arrays,
        unpacked: &'a Unpacked,
        leaf: &Leaf,
    ) -> Result<Vec<Node<'a>>, DataError> {
        let piece = |buffer: usize| match arrays.codec {
            Some(_) => unpacked.get(buffer),
            None => {
                let range = arrays.buffers.get(buffer)?.clone();
                Some(Piece { bytes: &self.content, range })
            }
        };
        let nodes = arrays.of_leaf(leaf).map(|(node, buffers)| {
            let &(len, nulls) = arrays.nodes.get(node)?;
            let valid = match nulls {
                0 => None,
                _ => Some((piece(buffers.start)?, 0)),
            };
            // The first buffer is the validity bitmap. Structs and fixed-size lists have no other.
            let buffers = buffers.skip(1).map(piece).collect::<Option<Vec<_>>>()?;
            Some(Node { len, offset: 0, valid, buffers })
        });
        nodes.collect::<Option<Vec<_>>>().ok_or_else(|| {
            let expected = format!("the arrays and buffers of column {:?}", leaf.field.name());
            let found = format!("{} arrays with {} buffers", arrays.nodes.len(), arrays.buffers.len());
            self.messages().corrupt(0, expected, found)
        })
    }
}

impl Arrays {
    /// For each array of a column, its index and the indices of its buffers. The first buffer is the validity bitmap.
    fn of_leaf(&self, leaf: &Leaf) -> impl Iterator<Item = (usize, Range<usize>)> {
        leaf.levels.iter().map(|level| {
            let variable = |views: Range<usize>| {
                let counts = self.variable.get(views).unwrap_or_default().iter();
                counts.fold(0usize, |sum, &count| sum.saturating_add(count))
            };
            let first = level.buffer.saturating_add(variable(0..level.views));
            let own = if level.kind.is_views() { variable(level.views..level.views + 1) } else { 0 };
            (level.node, first..first.saturating_add(level.kind.buffers()).saturating_add(own))
        })
    }
}

/// Appends the dictionary ids of an array and of the arrays within it.
fn add_ids(field: arrow_ipc::Field<'_>, ids: &mut Vec<Option<i64>>) {
    ids.push(field.dictionary().map(|dictionary| dictionary.id()));
    // The arrays within a dictionary-encoded array are in the dictionary.
    if field.dictionary().is_none() {
        field.children().into_iter().flatten().for_each(|child| add_ids(child, ids));
    }
}
