//! The checksums of a file and of each of its pieces, in one pass.

use std::collections::BTreeMap;

use crc32fast::Hasher;

use crate::manifest::{BLOCK, File, Pieces, checksum};

/// Computes checksums of a file's bytes, which are given in order.
pub(crate) struct Checksums<'a> {
    header: usize,
    pieces: &'a [(String, usize)],
    /// The finished pieces' blocks, the header's first.
    done: Vec<Vec<Hasher>>,
    /// The finished blocks of the current piece; `seen` is how many of its bytes were taken.
    blocks: Vec<Hasher>,
    seen: usize,
    /// The current block's hasher; `in_block` is how many of its bytes were taken.
    block: Hasher,
    in_block: usize,
}

impl<'a> Checksums<'a> {
    /// For a file that has a header and these pieces, each with its name and length.
    pub fn new(header: usize, pieces: &'a [(String, usize)]) -> Self {
        let (done, blocks, block) = (Vec::new(), Vec::new(), Hasher::new());
        Self { header, pieces, done, blocks, seen: 0, block, in_block: 0 }
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let length = match self.done.len() {
                0 => self.header,
                count => self.pieces.get(count - 1).map_or(usize::MAX, |(_, length)| *length),
            };
            let left = (length - self.seen).min(BLOCK - self.in_block);
            let (now, rest) = bytes.split_at(bytes.len().min(left));
            self.block.update(now);
            (self.seen, self.in_block) = (self.seen + now.len(), self.in_block + now.len());
            bytes = rest;
            if self.in_block == BLOCK {
                self.end_block();
            }
            if self.seen == length {
                self.end_piece();
            }
        }
    }

    fn end_block(&mut self) {
        self.blocks.push(std::mem::take(&mut self.block));
        self.in_block = 0;
    }

    fn end_piece(&mut self) {
        if self.in_block > 0 {
            self.end_block();
        }
        self.done.push(std::mem::take(&mut self.blocks));
        self.seen = 0;
    }

    /// The file's entry for the manifest.
    pub fn finish(mut self, bytes: u64) -> File {
        // Pieces of length 0 at the end.
        while self.done.len() <= self.pieces.len() {
            self.end_piece();
        }
        let of_piece = |blocks: &Vec<Hasher>| checksum(combined(blocks).finalize());
        let crc32 = checksum(combined(self.done.iter().flatten()).finalize());
        let header = self.done.first().map(of_piece).unwrap_or_default();
        let (mut tensors, mut blocks) = (BTreeMap::new(), BTreeMap::new());
        for ((name, _), of_tensor) in self.pieces.iter().zip(&self.done[1..]) {
            tensors.insert(name.clone(), of_piece(of_tensor));
            if of_tensor.len() > 1 {
                let each = of_tensor.iter().map(|block| checksum(block.clone().finalize()));
                blocks.insert(name.clone(), each.collect());
            }
        }
        File { bytes, crc32, pieces: Some(Pieces { header, tensors, blocks }) }
    }
}

fn combined<'a>(parts: impl IntoIterator<Item = &'a Hasher>) -> Hasher {
    let mut whole = Hasher::new();
    parts.into_iter().for_each(|part| whole.combine(part));
    whole
}
