//! The data that the ranks of a communicator exchange: lanes of records, each with one writer.
//!
//! Each rank has a lane for its collectives and a lane for the making of communicators, which all ranks read, and a
//! lane to each other rank for its sends. A lane is a ring buffer in the file. Pages that every reader has read are
//! given back to the system.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::code::{Code, Failure};
use super::file::{self, BROKEN, Head, TEXT, TEXT_LENGTH, TEXT_WORDS};

/// The length of all lanes together, of which only the parts in use take memory. Every file system has room for a file
/// of this length.
const ALL_BYTES: u64 = 1 << 43;
const PAGE: u64 = 4096;

/// A lane, named by its writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Collectives(usize),
    /// For the making of communicators.
    Members(usize),
    /// For what the first rank sends to the second one.
    Pair(usize, usize),
}

/// The head of a record, before its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// What the writer says of the record.
    pub words: [u64; 3],
    pub bytes: u64,
}

const HEAD: u64 = 32;

impl Record {
    fn encode(self) -> [u8; HEAD as usize] {
        let mut all = [0; HEAD as usize];
        for (place, word) in all.chunks_exact_mut(8).zip(self.words.iter().chain([&self.bytes])) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        all
    }

    fn decode(bytes: [u8; HEAD as usize]) -> Self {
        let mut words = [0; 4];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            let mut own = [0; 8];
            own.copy_from_slice(place);
            *word = u64::from_ne_bytes(own);
        }
        let [first, second, third, bytes] = words;
        Self { words: [first, second, third], bytes }
    }
}

/// One rank's view of a communicator's file.
pub struct Lanes {
    file: File,
    head: Head,
    rank: usize,
    ranks: usize,
    /// Where the first lane begins, and the length of each.
    begin: u64,
    room: u64,
}

/// The words of a lane: how many bytes and records were written, and how many bytes each rank has read.
fn words_of_lane(ranks: usize) -> usize {
    2 + ranks
}

fn lanes_of(ranks: usize) -> usize {
    2 * ranks + ranks * ranks
}

impl Lanes {
    /// Takes a rank's seat in the file at this path.
    pub fn attach(path: &Path, (rank, ranks): (usize, usize), device: u64) -> Result<Self, Failure> {
        // After the lanes' words: how many receives each rank has begun from each other rank.
        let words = lanes_of(ranks) * words_of_lane(ranks) + ranks * ranks;
        let (file, head) = file::attach(path, (rank, ranks), device, words)?;
        let begin = (((head.lanes() + words) * size_of::<u64>()) as u64).next_multiple_of(PAGE);
        let room = ALL_BYTES / lanes_of(ranks) as u64 / PAGE * PAGE;
        Ok(Self { file, head, rank, ranks, begin, room })
    }

    /// Makes the lanes short, so that a test can fill them.
    #[cfg(test)]
    pub fn set_room(&mut self, bytes: u64) {
        self.room = bytes;
    }

    pub fn head(&self) -> &Head {
        &self.head
    }

    fn number(&self, lane: Lane) -> usize {
        match lane {
            Lane::Collectives(rank) => rank,
            Lane::Members(rank) => self.ranks + rank,
            Lane::Pair(from, to) => 2 * self.ranks + from * self.ranks + to,
        }
    }

    fn word(&self, lane: Lane, word: usize) -> &AtomicU64 {
        self.head.word(self.head.lanes() + self.number(lane) * words_of_lane(self.ranks) + word)
    }

    /// How many bytes were written.
    fn written(&self, lane: Lane) -> u64 {
        self.word(lane, 0).load(Ordering::Acquire)
    }

    /// How many records were written.
    pub fn records(&self, lane: Lane) -> u64 {
        self.word(lane, 1).load(Ordering::Acquire)
    }

    /// How many bytes a rank has read.
    fn read_by(&self, lane: Lane, rank: usize) -> &AtomicU64 {
        self.word(lane, 2 + rank)
    }

    /// How many receives a rank has begun from another one.
    pub fn receives(&self, (receiver, sender): (usize, usize)) -> &AtomicU64 {
        let begin = self.head.lanes() + lanes_of(self.ranks) * words_of_lane(self.ranks);
        self.head.word(begin + receiver * self.ranks + sender)
    }

    /// How many bytes every reader has read.
    fn read_by_all(&self, lane: Lane) -> u64 {
        let read = |rank| self.read_by(lane, rank).load(Ordering::Acquire);
        match lane {
            Lane::Pair(_, to) => read(to),
            _ => (0..self.ranks).map(read).min().unwrap_or(0),
        }
    }

    /// The ranges of the file that have these bytes of a lane: two if they go around its end.
    fn places(&self, lane: Lane, position: u64, bytes: u64) -> [(u64, u64); 2] {
        let begin = self.begin + self.number(lane) as u64 * self.room;
        let first = bytes.min(self.room - position % self.room);
        [(begin + position % self.room, first), (begin, bytes - first)]
    }

    fn write_at(&self, lane: Lane, position: u64, bytes: &[u8]) -> io::Result<()> {
        let [(first, length), (second, _)] = self.places(lane, position, bytes.len() as u64);
        let (before, behind) = bytes.split_at(length as usize);
        self.file.write_all_at(before, first)?;
        self.file.write_all_at(behind, second)
    }

    fn read_at(&self, lane: Lane, position: u64, bytes: &mut [u8]) -> io::Result<()> {
        let [(first, length), (second, _)] = self.places(lane, position, bytes.len() as u64);
        let (before, behind) = bytes.split_at_mut(length as usize);
        self.file.read_exact_at(before, first)?;
        self.file.read_exact_at(behind, second)
    }

    /// Writes a record to a lane of this rank. Returns where it ends.
    pub fn post(&self, lane: Lane, words: [u64; 3], bytes: &[u8]) -> Result<u64, Failure> {
        let (begin, length) = (self.written(lane), bytes.len() as u64);
        let end = begin + HEAD + length;
        if end - self.read_by_all(lane) > self.room {
            return Err(Failure::new(Code::SYSTEM, format!("no room for {length} bytes between ranks")));
        }
        self.write_at(lane, begin, &Record { words, bytes: length }.encode())?;
        self.write_at(lane, begin + HEAD, bytes)?;
        self.word(lane, 0).store(end, Ordering::Release);
        self.word(lane, 1).fetch_add(1, Ordering::AcqRel);
        Ok(end)
    }

    /// The first record that this rank has not read yet.
    pub fn next(&self, lane: Lane) -> Result<Option<Record>, Failure> {
        let at = self.read_by(lane, self.rank).load(Ordering::Acquire);
        if self.written(lane) == at {
            return Ok(None);
        }
        let mut head = [0; HEAD as usize];
        self.read_at(lane, at, &mut head)?;
        Ok(Some(Record::decode(head)))
    }

    /// Reads bytes of the record that `next` has found, from this one on.
    pub fn take(&self, lane: Lane, from: u64, bytes: &mut [u8]) -> Result<(), Failure> {
        let at = self.read_by(lane, self.rank).load(Ordering::Acquire);
        Ok(self.read_at(lane, at + HEAD + from, bytes)?)
    }

    /// Moves on to the next record.
    pub fn skip(&self, lane: Lane, record: Record) {
        self.read_by(lane, self.rank).fetch_add(HEAD + record.bytes, Ordering::AcqRel);
        let (end, length) = (self.read_by_all(lane), HEAD + record.bytes);
        // Frees the pages that every reader has passed. It does no harm if two readers do the same.
        for (begin, bytes) in self.places(lane, end.saturating_sub(length.min(end)), length.min(end)) {
            let (from, to) = (begin.next_multiple_of(PAGE), (begin + bytes) / PAGE * PAGE);
            if from < to {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                // SAFETY: the file is open. A file system that cannot free them keeps the memory.
                unsafe { libc::fallocate(self.file.as_raw_fd(), mode, from as i64, (to - from) as i64) };
            }
        }
    }

    /// Whether the receiver of a pair has read everything up to here.
    pub fn is_received(&self, lane: Lane, end: u64) -> bool {
        self.read_by_all(lane) >= end
    }

    /// Ends the communicator for all ranks. Only the first reason counts.
    pub fn break_with(&self, failure: &Failure) {
        const WRITING: u64 = u64::MAX;
        let broken = self.head.word(BROKEN);
        if broken.compare_exchange(0, WRITING, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        let text = &failure.text.as_bytes()[..failure.text.len().min(TEXT_WORDS * 8)];
        for (number, part) in text.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.head.word(TEXT + number).store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        self.head.word(TEXT_LENGTH).store(text.len() as u64, Ordering::Relaxed);
        broken.store(failure.code.0 as u64, Ordering::Release);
    }

    /// Why the communicator has ended.
    pub fn broken(&self) -> Option<Failure> {
        let code = i32::try_from(self.head.word(BROKEN).load(Ordering::Acquire)).ok().filter(|code| *code > 0)?;
        let length = (self.head.word(TEXT_LENGTH).load(Ordering::Relaxed) as usize).min(TEXT_WORDS * 8);
        let words = (0..TEXT_WORDS).map(|number| self.head.word(TEXT + number).load(Ordering::Relaxed));
        let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).take(length).collect();
        Some(Failure::new(Code(code), String::from_utf8_lossy(&bytes)))
    }
}
