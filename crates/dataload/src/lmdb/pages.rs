//! Reads the pages of an LMDB file, and checks every number in them before it is used.
//!
//! LMDB itself follows the numbers in its pages through the memory map without checks, and a damaged one makes it read
//! outside the map. So the tree is read here first, with plain reads; LMDB gets only a tree that passed.
//!
//! The layout is that of LMDB 0.9 on 64-bit little-endian machines.

use std::path::Path;
use std::sync::Arc;

use crate::DataError;
use crate::local::LocalFile;
use crate::read::read_at;

const MAGIC: u32 = 0xbeef_c0de;
const VERSION: u32 = 1;
/// The length of a page's header, which meta pages have too.
const HEADER: usize = 16;
/// How much of a meta page is read.
const META_BYTES: usize = 152;
const META_FLAG: u16 = 0x08;
/// The flags that say what a page is; the other bits are only used by the writing process.
const KIND_BITS: u16 = 0x6f;
const LEAST_PAGE: u64 = 512;
/// LMDB's limit.
const LARGEST_PAGE: u64 = 1 << 15;
/// The length of a node's header: its value's size, its flags and its key's length.
const NODE: usize = 8;
/// The root page number of an empty tree.
const NO_PAGE: u64 = u64::MAX;
/// The deepest tree that LMDB's cursors can walk.
const MAX_DEPTH: u16 = 32;

/// The kind of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Branch = 0x01,
    Leaf = 0x02,
}

/// The file, and the content of its current meta page.
pub(super) struct Pages {
    local: LocalFile,
    path: Arc<Path>,
    page_bytes: u64,
    last_page: u64,
    transaction: u64,
    main: Tree,
}

/// The root of a tree of pages, and the tree's declared size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    /// The flags of the database: options of its keys.
    pub(super) flags: u16,
    pub(super) depth: u16,
    pub(super) branches: u64,
    pub(super) leaves: u64,
    pub(super) entries: u64,
    pub(super) root: u64,
}

/// One page in memory.
pub(super) struct Page {
    bytes: Vec<u8>,
    /// The page's offset in the file.
    offset: u64,
    /// How many nodes it has.
    pub(super) nodes: usize,
}

/// An entry of a page.
pub(super) struct Node<'a> {
    /// The node's offset in the file.
    pub(super) offset: u64,
    pub(super) flags: u16,
    pub(super) key: &'a [u8],
    /// The first two words: the value's size on a leaf page, part of a page number on a branch page.
    low: u64,
    /// The bytes after the key, up to the end of the page.
    rest: &'a [u8],
}

impl Pages {
    /// Opens a database file: both meta pages must be intact, and the file at least as long as the current one says.
    pub(super) fn open(path: Arc<Path>) -> Result<Self, DataError> {
        let local = LocalFile::open(&path)?;
        let length = local.bytes;
        let first = Meta::read(&local, 0, &path)?;
        let second = Meta::read(&local, first.page_bytes, &path)?;
        if second.page_bytes != first.page_bytes {
            let expected = format!("pages of {} bytes, as in the first meta page", first.page_bytes);
            return Err(DataError::corrupt(&path, first.page_bytes, expected, second.page_bytes.to_string()));
        }
        // As LMDB chooses: the newer one, and on a tie the first.
        let meta = if second.transaction > first.transaction { second } else { first };
        let end = meta.last_page.checked_add(1).and_then(|pages| pages.checked_mul(meta.page_bytes));
        if end.is_none_or(|end| end > length) {
            let expected = format!("{} pages of {} bytes", u128::from(meta.last_page) + 1, meta.page_bytes);
            return Err(DataError::corrupt(&path, length, expected, format!("the end of the file, {length} bytes")));
        }
        let Meta { page_bytes, last_page, transaction, main } = meta;
        Ok(Self { local, path, page_bytes, last_page, transaction, main })
    }

    /// The main tree, which every file has; named databases are entries of it.
    pub(super) fn main(&self) -> Tree {
        self.main
    }

    /// The number of the last transaction that was committed.
    pub(super) fn transaction(&self) -> u64 {
        self.transaction
    }

    /// The end of the last page, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        (self.last_page + 1) * self.page_bytes
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The name by which the file is opened again.
    pub(super) fn name(&self) -> &Path {
        &self.local.name
    }

    /// The file's length, and its [state](LocalFile::state).
    pub(super) fn stamp(&self) -> [u64; 2] {
        [self.local.bytes, self.local.state]
    }

    /// Reads a page of a tree; `from` is the offset of the reference to it, for errors.
    pub(super) fn read(&self, number: u64, kind: Kind, from: u64) -> Result<Page, DataError> {
        self.require(number, 1, from)?;
        let offset = number * self.page_bytes;
        let mut bytes = vec![0; self.page_bytes as usize];
        read_at(&self.local.file, &mut bytes, offset).map_err(DataError::io(&self.path))?;
        let (own, flags) = (u64_at(&bytes, 0), u16_at(&bytes, 10));
        if own != number {
            return Err(self.corrupt(offset, format!("page {number}"), format!("a page with the number {own}")));
        }
        if flags & KIND_BITS != kind as u16 {
            return Err(self.corrupt(
                offset + 10,
                format!("a {kind:?} page").to_lowercase(),
                format!("flags {flags:#x}"),
            ));
        }
        // The pointers to the nodes grow upwards, ending at `lower`; the nodes grow downwards, beginning at `upper`.
        let (lower, upper) = (usize::from(u16_at(&bytes, 12)), usize::from(u16_at(&bytes, 14)));
        let nodes = lower.saturating_sub(HEADER) / 2;
        let least = if kind == Kind::Branch { 2 } else { 1 };
        if nodes < least || lower % 2 != 0 || lower > upper || upper > bytes.len() {
            let expected = format!("bounds of a page's free space, with {least} nodes or more");
            return Err(self.corrupt(offset + 12, expected, format!("{lower} and {upper}")));
        }
        Ok(Page { bytes, offset, nodes })
    }

    /// The node at a position of a page.
    pub(super) fn node<'a>(&self, page: &'a Page, position: usize) -> Result<Node<'a>, DataError> {
        let pointer = HEADER + 2 * position;
        let start = usize::from(u16_at(&page.bytes, pointer));
        let node = page.bytes.get(start..).filter(|node| {
            start % 2 == 0 && start >= HEADER + 2 * page.nodes && node.len() >= NODE + usize::from(key_bytes(node))
        });
        let Some(node) = node else {
            let expected = "the offset of a node within the page";
            return Err(self.corrupt(page.offset + pointer as u64, expected, start.to_string()));
        };
        let (key, rest) = node[NODE..].split_at(key_bytes(node).into());
        let low = u64::from(u16_at(node, 0)) | u64::from(u16_at(node, 2)) << 16;
        Ok(Node { offset: page.offset + start as u64, flags: u16_at(node, 4), key, low, rest })
    }

    /// Checks that the file has `count` pages from `number` on, and that none of them is a meta page.
    pub(super) fn require(&self, number: u64, count: u64, from: u64) -> Result<(), DataError> {
        let last = number.checked_add(count - 1);
        if number < 2 || last.is_none_or(|last| last > self.last_page) {
            let expected = format!("a page from 2 to {}", self.last_page);
            let found = if count == 1 { number.to_string() } else { format!("{count} from {number} on") };
            return Err(self.corrupt(from, expected, found));
        }
        Ok(())
    }

    /// Checks that a value of this length can begin on page `number`.
    pub(super) fn require_value(&self, number: u64, bytes: u64, from: u64) -> Result<(), DataError> {
        self.require(number, (HEADER as u64 + bytes).div_ceil(self.page_bytes), from)
    }

    pub(super) fn corrupt(&self, offset: u64, expected: impl Into<String>, found: impl Into<String>) -> DataError {
        DataError::corrupt(&self.path, offset, expected, found)
    }
}

impl<'a> Node<'a> {
    /// On a branch page, the page that it leads to.
    pub(super) fn child(&self) -> u64 {
        self.low | u64::from(self.flags) << 32
    }

    /// On a leaf page, the length of the value in bytes.
    pub(super) fn value_bytes(&self) -> u64 {
        self.low
    }

    /// The first `length` bytes after the key, if the page has them.
    pub(super) fn inline(&self, length: u64) -> Option<&'a [u8]> {
        self.rest.get(..usize::try_from(length).ok()?)
    }
}

impl Tree {
    pub(super) const BYTES: usize = 48;

    /// From the bytes of a meta page, or of the entry of a named database.
    pub(super) fn parse(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            flags: u16_at(bytes, 4),
            depth: u16_at(bytes, 6),
            branches: u64_at(bytes, 8),
            leaves: u64_at(bytes, 16),
            entries: u64_at(bytes, 32),
            root: u64_at(bytes, 40),
        }
    }

    /// Whether the tree is empty; `None` when root and depth contradict each other.
    pub(super) fn is_empty(&self) -> Option<bool> {
        match (self.root, self.depth) {
            (NO_PAGE, 0) => Some(true),
            (NO_PAGE, _) | (_, 0) => None,
            (_, depth) if depth > MAX_DEPTH => None,
            _ => Some(false),
        }
    }
}

/// The fields of a meta page.
struct Meta {
    page_bytes: u64,
    last_page: u64,
    transaction: u64,
    main: Tree,
}

impl Meta {
    fn read(local: &LocalFile, offset: u64, path: &Path) -> Result<Self, DataError> {
        let corrupt = |at: u64, expected: &str, found: String| DataError::corrupt(path, offset + at, expected, found);
        let left = local.bytes.saturating_sub(offset);
        if left < META_BYTES as u64 {
            return Err(corrupt(0, "a meta page of LMDB", format!("the end of the file after {left} bytes")));
        }
        let mut bytes = [0; META_BYTES];
        read_at(&local.file, &mut bytes, offset).map_err(DataError::io(path))?;
        let (magic, version) = (u32_at(&bytes, HEADER), u32_at(&bytes, HEADER + 4));
        if magic != MAGIC {
            let found = format!("{magic:08x}");
            return Err(corrupt(16, "LMDB's magic number beefc0de, at its place in files of 64-bit machines", found));
        }
        if version != VERSION {
            return Err(corrupt(20, "version 1 of LMDB's format", version.to_string()));
        }
        let flags = u16_at(&bytes, 10);
        if flags & META_FLAG == 0 {
            return Err(corrupt(10, "a meta page", format!("flags {flags:#x}")));
        }
        // Two tree records follow. The first is of the free pages; its padding field holds the page size of the file.
        let (page_bytes, main) = (u64::from(u32_at(&bytes, 40)), Tree::parse(array_at(&bytes, 88)));
        if !page_bytes.is_power_of_two() || !(LEAST_PAGE..=LARGEST_PAGE).contains(&page_bytes) {
            let expected = "a page size, a power of two from 512 to 32768";
            return Err(corrupt(40, expected, page_bytes.to_string()));
        }
        Ok(Self { page_bytes, last_page: u64_at(&bytes, 136), transaction: u64_at(&bytes, 144), main })
    }
}

fn key_bytes(node: &[u8]) -> u16 {
    if node.len() < NODE { 0 } else { u16_at(node, 6) }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..].first_chunk().expect("every caller has checked the length")
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*array_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*array_at(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*array_at(bytes, at))
}
