//! Writes zstd's seekable format, which `content/seekable.rs` reads.

use std::io::{self, Write};

use zstd::bulk::Compressor;
use zstd::zstd_safe::CParameter;

use crate::content::{FOOTER_MAGIC, TABLE_MAGIC};

/// The content of a frame. Whoever reads a sample decompresses its frame from the start: half a megabyte takes half a
/// millisecond, and compresses as well as a stream at zstd's default level, whose window is not much larger.
const FRAME_BYTES: usize = 1 << 19;

/// Compresses what is written in frames that can be read without each other, and ends with a table of them.
pub(super) struct FrameWriter<W: Write> {
    output: W,
    compressor: Compressor<'static>,
    /// The content of the next frame.
    content: Vec<u8>,
    /// The compressed size of each frame, and that of its content.
    frames: Vec<[u32; 2]>,
}

impl<W: Write> FrameWriter<W> {
    pub(super) fn new(output: W) -> io::Result<Self> {
        let mut compressor = Compressor::new(zstd::DEFAULT_COMPRESSION_LEVEL)?;
        // So that damage is noticed when the file is read.
        compressor.set_parameter(CParameter::ChecksumFlag(true))?;
        Ok(Self { output, compressor, content: Vec::with_capacity(FRAME_BYTES), frames: Vec::new() })
    }

    fn end_frame(&mut self) -> io::Result<()> {
        let frame = self.compressor.compress(&self.content)?;
        self.output.write_all(&frame)?;
        // Both are far below 2^32.
        self.frames.push([frame.len() as u32, self.content.len() as u32]);
        self.content.clear();
        Ok(())
    }

    /// Writes the rest and the table.
    pub(super) fn finish(mut self) -> io::Result<W> {
        // A file without content has a frame, too: readers know it by its first bytes.
        if !self.content.is_empty() || self.frames.is_empty() {
            self.end_frame()?;
        }
        let count = u32::try_from(self.frames.len()).map_err(io::Error::other)?;
        let bytes = u32::try_from(8 * u64::from(count) + 9).map_err(io::Error::other)?;
        let table = [TABLE_MAGIC, bytes].into_iter().chain(self.frames.into_iter().flatten()).chain([count]);
        let mut table: Vec<u8> = table.flat_map(u32::to_le_bytes).collect();
        // No checksums in the table: each frame has one.
        table.push(0);
        table.extend(FOOTER_MAGIC.to_le_bytes());
        self.output.write_all(&table)?;
        Ok(self.output)
    }
}

impl<W: Write> Write for FrameWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(FRAME_BYTES - self.content.len());
        self.content.extend_from_slice(&bytes[..count]);
        if self.content.len() == FRAME_BYTES {
            self.end_frame()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}
