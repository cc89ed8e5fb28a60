//! Visits a tree's entries in order, and thereby checks that LMDB can walk it safely.

use super::pages::{Kind, Pages, Tree, u64_at};
use crate::DataError;

/// Flag of a node: the value is on separate (overflow) pages.
const BIG: u16 = 0x01;
/// Flag of a node: the value is the record of another tree.
const SUB_TREE: u16 = 0x02;

/// What an entry's value is.
pub(super) enum Value {
    Bytes,
    /// A named database.
    Tree(Tree),
}

/// Calls `visit` with every key of `tree`, in order, and the kind of its value.
///
/// On success, every page that a search can reach is in the file and of the right kind, every node is within its page,
/// every value within the file, and a search for a key finds it. Values are not read.
pub(super) fn walk(pages: &Pages, tree: Tree, visit: &mut dyn FnMut(&[u8], Value)) -> Result<(), DataError> {
    let path = pages.path();
    if tree.flags != 0 {
        let expected = "a database of plain keys with one value each";
        let found = format!("one with integer or reversed keys, or with duplicates (flags {:#x})", tree.flags);
        return Err(DataError::layout(path, expected, found));
    }
    let root = tree.root;
    match tree.is_empty() {
        Some(true) => {}
        Some(false) => {
            let mut walk = Walk { pages, tree, visit, pages_read: 0, entries: 0, bound: Vec::new(), inclusive: true };
            walk.subtree(root, 1, 0)?;
            let entries = walk.entries;
            if entries != tree.entries {
                return Err(pages.corrupt(0, format!("{} entries", tree.entries), entries.to_string()));
            }
            return Ok(());
        }
        None => {
            let found = format!("root page {root} at a depth of {}", tree.depth);
            return Err(pages.corrupt(0, "a tree's root and depth", found));
        }
    }
    match tree.entries {
        0 => Ok(()),
        entries => Err(pages.corrupt(0, format!("a tree of {entries} entries"), "no page of it")),
    }
}

struct Walk<'a> {
    pages: &'a Pages,
    tree: Tree,
    visit: &'a mut dyn FnMut(&[u8], Value),
    /// Damaged branches can form a cycle: the tree's declared number of pages bounds the walk.
    pages_read: u64,
    entries: u64,
    /// The next key must be above this one, or may equal it where `inclusive`.
    bound: Vec<u8>,
    inclusive: bool,
}

impl Walk<'_> {
    /// Visits page `number` and the pages below it; `from` is the offset of the reference to it.
    fn subtree(&mut self, number: u64, level: u16, from: u64) -> Result<(), DataError> {
        let kind = if level == self.tree.depth { Kind::Leaf } else { Kind::Branch };
        let page = self.pages.read(number, kind, from)?;
        self.pages_read += 1;
        let declared = self.tree.branches.saturating_add(self.tree.leaves);
        if self.pages_read > declared {
            return Err(self.pages.corrupt(from, format!("a tree of {declared} pages"), "another one"));
        }
        for position in 0..page.nodes {
            let node = self.pages.node(&page, position)?;
            // A branch's first key is never compared in a search, and is usually empty.
            if kind == Kind::Leaf || position > 0 {
                self.pass(node.key, kind, node.offset)?;
            }
            if kind == Kind::Branch {
                self.subtree(node.child(), level + 1, node.offset)?;
                continue;
            }
            let bytes = node.value_bytes();
            let inline = if node.flags == BIG { 8 } else { bytes };
            let Some(inline) = node.inline(inline) else {
                let expected = "an entry within its page";
                return Err(self.pages.corrupt(node.offset, expected, format!("a value of {bytes} bytes")));
            };
            let value = match (node.flags, <&[u8; Tree::BYTES]>::try_from(inline)) {
                (0, _) => Value::Bytes,
                (BIG, _) => {
                    self.pages.require_value(u64_at(inline, 0), bytes, node.offset)?;
                    Value::Bytes
                }
                (SUB_TREE, Ok(record)) => Value::Tree(Tree::parse(record)),
                (flags, _) => {
                    let found = format!("flags {flags:#x} and {bytes} bytes");
                    return Err(self.pages.corrupt(node.offset, "a value or a named database", found));
                }
            };
            self.entries += 1;
            (self.visit)(node.key, value);
        }
        Ok(())
    }

    /// Checks that `key` is in order, and makes it the bound for the next one.
    fn pass(&mut self, key: &[u8], kind: Kind, offset: u64) -> Result<(), DataError> {
        let in_order = key > &*self.bound || (self.inclusive && key == &*self.bound);
        if key.is_empty() || !in_order {
            let found =
                format!("{:?} after {:?}", key.escape_ascii().to_string(), self.bound.escape_ascii().to_string());
            return Err(self.pages.corrupt(offset, "keys in ascending order", found));
        }
        self.bound.clear();
        self.bound.extend_from_slice(key);
        self.inclusive = kind == Kind::Branch;
        Ok(())
    }
}
