//! The checksums of a file and of each of its pieces, in one pass.

use std::collections::BTreeMap;

use crc32fast::Hasher;

use crate::manifest::{File, Pieces, checksum};

/// Computes checksums of a file's bytes, which are given in order.
pub(crate) struct Checksums<'a> {
    header: usize,
    pieces: &'a [(String, usize)],
    /// The finished pieces' hashers, the header's first.
    done: Vec<Hasher>,
    /// The current piece's hasher; `seen` is how many of its bytes were taken.
    piece: Hasher,
    seen: usize,
}

impl<'a> Checksums<'a> {
    /// For a file that has a header and these pieces, each with its name and length.
    pub fn new(header: usize, pieces: &'a [(String, usize)]) -> Self {
        Self { header, pieces, done: Vec::new(), piece: Hasher::new(), seen: 0 }
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let length = match self.done.len() {
                0 => self.header,
                count => self.pieces.get(count - 1).map_or(usize::MAX, |(_, length)| *length),
            };
            let (now, rest) = bytes.split_at(bytes.len().min(length - self.seen));
            self.piece.update(now);
            self.seen += now.len();
            bytes = rest;
            if self.seen == length {
                self.end_piece();
            }
        }
    }

    fn end_piece(&mut self) {
        self.done.push(std::mem::take(&mut self.piece));
        self.seen = 0;
    }

    /// The file's entry for the manifest.
    pub fn finish(mut self, bytes: u64) -> File {
        // Pieces of length 0 at the end.
        while self.done.len() <= self.pieces.len() {
            self.end_piece();
        }
        let mut whole = Hasher::new();
        self.done.iter().for_each(|piece| whole.combine(piece));
        let mut each = self.done.into_iter().map(|piece| checksum(piece.finalize()));
        let header = each.next().unwrap_or_default();
        let tensors: BTreeMap<_, _> = self.pieces.iter().map(|(name, _)| name.clone()).zip(each).collect();
        File { bytes, crc32: checksum(whole.finalize()), pieces: Some(Pieces { header, tensors }) }
    }
}
