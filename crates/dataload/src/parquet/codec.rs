//! Decompresses pages, without trusting their declared sizes for allocations.

use std::io::Read;

use ::parquet::basic::CompressionCodec;
use flate2::bufread::MultiGzDecoder;

use super::buffers::Buffer;
use crate::read::MAX_DEFLATE_RATIO;

/// Decompresses the pages of one column chunk.
pub(super) enum Codec {
    None,
    Snappy(Box<snap::raw::Decoder>),
    Gzip,
    Brotli,
    #[cfg(feature = "zstd")]
    Zstd(Box<zstd::bulk::Decompressor<'static>>),
    Lz4,
}

/// The highest compression ratios that the formats can reach; a header that declares more is wrong.
const SNAPPY_RATIO: u64 = 64 / 3 + 1;
const LZ4_RATIO: u64 = 256;
/// zstd and brotli have no bound: beyond this ratio, memory grows with the decompressed data.
const TRUSTED_RATIO: u64 = 64;
const TRUSTED_BYTES: u64 = 1 << 20;

impl Codec {
    /// The decoder for a codec; for one that this build does not support, its name as the error.
    pub(super) fn new(codec: CompressionCodec) -> Result<Self, String> {
        Ok(match codec {
            CompressionCodec::UNCOMPRESSED => Self::None,
            CompressionCodec::SNAPPY => Self::Snappy(Box::new(snap::raw::Decoder::new())),
            CompressionCodec::GZIP => Self::Gzip,
            CompressionCodec::BROTLI => Self::Brotli,
            #[cfg(feature = "zstd")]
            CompressionCodec::ZSTD => {
                Self::Zstd(Box::new(zstd::bulk::Decompressor::new().map_err(|error| error.to_string())?))
            }
            CompressionCodec::LZ4_RAW => Self::Lz4,
            other => return Err(other.to_string()),
        })
    }

    /// Whether pages are stored as they are.
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Decompresses `packed` into exactly the first `bytes` bytes of `out`; an error says what was found instead.
    pub(super) fn decompress(&mut self, packed: &[u8], out: &mut Buffer, bytes: usize) -> Result<(), String> {
        let within = |ratio: u64| match bytes as u64 <= (packed.len() as u64).saturating_mul(ratio) + 64 {
            true => Ok(()),
            false => Err(format!("{bytes} bytes declared for {} compressed ones", packed.len())),
        };
        let found = match self {
            Self::None => {
                out.resize(packed.len()).copy_from_slice(packed);
                packed.len()
            }
            Self::Snappy(decoder) => {
                within(SNAPPY_RATIO)?;
                decoder.decompress(packed, out.resize(bytes)).map_err(|error| error.to_string())?
            }
            Self::Lz4 => {
                within(LZ4_RATIO)?;
                let found = lz4_flex::block::decompress_into(packed, out.resize(bytes));
                found.map_err(|error| error.to_string())?
            }
            Self::Gzip => {
                within(MAX_DEFLATE_RATIO)?;
                fill(MultiGzDecoder::new(packed), packed.len(), out, bytes)?
            }
            Self::Brotli => fill(brotli_decompressor::Decompressor::new(packed, 1 << 12), packed.len(), out, bytes)?,
            #[cfg(feature = "zstd")]
            Self::Zstd(decoder) if trusted(packed.len(), bytes) => {
                decoder.decompress_to_buffer(packed, out.resize(bytes)).map_err(|error| error.to_string())?
            }
            #[cfg(feature = "zstd")]
            Self::Zstd(_) => {
                let decoder = zstd::Decoder::with_buffer(packed).map_err(|error| error.to_string())?;
                fill(decoder, packed.len(), out, bytes)?
            }
        };
        match found == bytes {
            true => Ok(()),
            false => Err(format!("{found} bytes")),
        }
    }
}

fn trusted(packed: usize, bytes: usize) -> bool {
    bytes as u64 <= (packed as u64).saturating_mul(TRUSTED_RATIO) + TRUSTED_BYTES
}

/// Reads `bytes` bytes, and one more to notice a page that is too long. Where the size is not trusted, memory doubles
/// as it fills up.
fn fill(mut reader: impl Read, packed: usize, out: &mut Buffer, bytes: usize) -> Result<usize, String> {
    let mut room = if trusted(packed, bytes) { bytes } else { TRUSTED_BYTES as usize };
    let mut filled = 0;
    loop {
        let buffer = out.resize(room);
        while filled < room {
            match reader.read(&mut buffer[filled..]).map_err(|error| error.to_string())? {
                0 => return Ok(filled),
                count => filled += count,
            }
        }
        if room == bytes {
            let more = reader.read(&mut [0]).map_err(|error| error.to_string())?;
            return Ok(filled + more);
        }
        room = room.saturating_mul(2).min(bytes);
    }
}
