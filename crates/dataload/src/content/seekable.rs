//! zstd's seekable format: independent frames, and a table of their sizes in a skippable frame at the end.
//!
//! Other decoders read such a file as any other one. `contrib/seekable_format/zstd_seekable_compression_format.md` of
//! zstd describes the table.

use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};

use zstd::bulk::Decompressor;

use super::limiter::{Bytes, ReadLimiter};
use super::{BUFFER_BYTES, Unpack};

/// The first bytes of the table's frame.
pub(crate) const TABLE_MAGIC: u32 = 0x184d_2a5e;
/// The last bytes of the table.
pub(crate) const FOOTER_MAGIC: u32 = 0x8f92_eab1;
/// Magic and size of a skippable frame.
const HEADER_BYTES: u64 = 8;
/// The number of frames, a byte of flags, and the magic.
const FOOTER_BYTES: u64 = 9;
const HAS_CHECKSUMS: u8 = 1 << 7;
const RESERVED: u8 = 0b0111_1100;
/// The largest frame that is read as a whole; writers make them far smaller.
const MAX_FRAME_BYTES: u32 = 1 << 26;
/// The most bytes of a table that is read: those of five million frames. A file with holes may be far longer than what
/// it takes on the disk, so that its length justifies no memory.
const MAX_TABLE_BYTES: u64 = 1 << 26;
/// zstd's default: a decoder holds at most 128 MiB of history, whatever the frame asks for.
pub(crate) const ZSTD_WINDOW_LOG: u32 = 27;

type Decoder = zstd::Decoder<'static, BufReader<ReadLimiter>>;

/// A zstd file. It is decompressed as it is read, until it is asked to move: then it needs a table of its frames.
pub(super) enum ZstdReader {
    Stream(BufReader<Decoder>),
    Frames(FrameReader),
    /// There is no way to read it any more.
    Closed,
}

/// Reads frame by frame. Nothing of a frame is given whose own checksum is wrong; those in the table are not verified.
pub(super) struct FrameReader {
    input: Box<dyn Bytes>,
    decompressor: Decompressor<'static>,
    /// For each frame the offset in the file and that in the content; at the end, the ends of both.
    starts: Vec<(u64, u64)>,
    /// The next frame, and whether it was tried and is damaged.
    next: usize,
    is_damaged: bool,
    /// The content of the frame before it, and how much of that has been read.
    content: Vec<u8>,
    read: usize,
}

impl ZstdReader {
    pub(super) fn new(reader: BufReader<ReadLimiter>) -> io::Result<Self> {
        let mut decoder = zstd::Decoder::with_buffer(reader)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG)?;
        Ok(Self::Stream(BufReader::with_capacity(BUFFER_BYTES, decoder)))
    }

    /// The same file, read frame by frame; `None` without a table, where it is read as before.
    fn frames(&mut self) -> io::Result<Option<&mut FrameReader>> {
        if let Self::Stream(decoder) = self {
            let file = decoder.get_mut().get_mut();
            let at = file.stream_position()?;
            let starts = read_table(file);
            file.seek(SeekFrom::Start(at))?;
            let Some(starts) = starts? else { return Ok(None) };
            if let Self::Stream(decoder) = std::mem::replace(self, Self::Closed) {
                let input = decoder.into_inner().finish().into_inner().input;
                let (decompressor, content) = (Decompressor::new()?, Vec::new());
                let (next, is_damaged, read) = (0, false, 0);
                *self = Self::Frames(FrameReader { input, decompressor, starts, next, is_damaged, content, read });
            }
        }
        match self {
            Self::Frames(frames) => Ok(Some(frames)),
            Self::Stream(_) | Self::Closed => Err(io::ErrorKind::NotSeekable.into()),
        }
    }
}

impl Unpack for ZstdReader {
    fn content_length(&mut self) -> io::Result<Option<u64>> {
        Ok(self.frames()?.and_then(|frames| frames.starts.last().map(|(_, length)| *length)))
    }

    fn seek(&mut self, to: u64) -> io::Result<Option<u64>> {
        Ok(self.frames()?.map(|frames| frames.seek(to)))
    }
}

impl BufRead for ZstdReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        match self {
            Self::Stream(decoder) => decoder.fill_buf(),
            Self::Frames(frames) => frames.fill(),
            Self::Closed => Err(io::ErrorKind::NotSeekable.into()),
        }
    }

    fn consume(&mut self, count: usize) {
        match self {
            Self::Stream(decoder) => decoder.consume(count),
            Self::Frames(frames) => frames.read += count,
            Self::Closed => {}
        }
    }
}

impl Read for ZstdReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}

impl FrameReader {
    /// Moves to an offset of the content in the frame before the next one, or to the start of its frame.
    fn seek(&mut self, to: u64) -> u64 {
        let end = self.starts[self.next].1;
        let begin = end.saturating_sub(self.content.len() as u64);
        if (begin..end).contains(&to) {
            self.read = (to - begin) as usize;
            return to;
        }
        let frame = self.starts.partition_point(|(_, start)| *start <= to).saturating_sub(1);
        self.is_damaged &= frame == self.next;
        (self.next, self.read) = (frame, 0);
        self.content.clear();
        self.starts[frame].1
    }

    fn fill(&mut self) -> io::Result<&[u8]> {
        // Some frames may be empty.
        while self.read >= self.content.len() && self.next + 1 < self.starts.len() {
            if self.is_damaged {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a damaged frame"));
            }
            let frame = self.load();
            self.is_damaged = frame.is_err();
            (self.content, self.read) = (frame?, 0);
            self.next += 1;
        }
        Ok(&self.content[self.read.min(self.content.len())..])
    }

    /// Reads and decompresses the next frame.
    fn load(&mut self) -> io::Result<Vec<u8>> {
        self.content.clear();
        let ((start, begin), (end, content_end)) = (self.starts[self.next], self.starts[self.next + 1]);
        let mut packed = vec![0; (end - start) as usize];
        self.input.seek(SeekFrom::Start(start))?;
        self.input.read_exact(&mut packed)?;
        let bytes = (content_end - begin) as usize;
        let content = self.decompressor.decompress(&packed, bytes)?;
        if content.len() != bytes {
            let found = format!("a frame of {} bytes, where the table of frames says {bytes}", content.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, found));
        }
        Ok(content)
    }
}

/// The table at the end of a file; `None` where there is none, it is not that of this file, or it or a
/// frame is too large.
pub(super) fn read_table(file: &mut (impl Read + Seek)) -> io::Result<Option<Vec<(u64, u64)>>> {
    let bytes = file.seek(SeekFrom::End(0))?;
    let Some(at) = bytes.checked_sub(FOOTER_BYTES + HEADER_BYTES) else { return Ok(None) };
    file.seek(SeekFrom::Start(at + HEADER_BYTES))?;
    let mut footer = [0; FOOTER_BYTES as usize];
    file.read_exact(&mut footer)?;
    let [c0, c1, c2, c3, flags, magic @ ..] = footer;
    if u32::from_le_bytes(magic) != FOOTER_MAGIC || flags & RESERVED != 0 {
        return Ok(None);
    }
    let entry: u64 = if flags & HAS_CHECKSUMS == 0 { 8 } else { 12 };
    let table = u64::from(u32::from_le_bytes([c0, c1, c2, c3])) * entry;
    let Some(start) = at.checked_sub(table).filter(|_| table <= MAX_TABLE_BYTES) else { return Ok(None) };
    file.seek(SeekFrom::Start(start))?;
    let mut content = vec![0; (HEADER_BYTES + table) as usize];
    file.read_exact(&mut content)?;
    let (words, _) = content.as_chunks::<4>();
    let words: Vec<u32> = words.iter().map(|&word| u32::from_le_bytes(word)).collect();
    if words[0] != TABLE_MAGIC || u64::from(words[1]) != table + FOOTER_BYTES {
        return Ok(None);
    }
    let mut end = (0, 0);
    let mut starts = vec![end];
    for sizes in words[2..].chunks_exact(entry as usize / 4) {
        if sizes[0].max(sizes[1]) > MAX_FRAME_BYTES {
            return Ok(None);
        }
        end = (end.0 + u64::from(sizes[0]), end.1 + u64::from(sizes[1]));
        starts.push(end);
    }
    Ok((end.0 == start).then_some(starts))
}
