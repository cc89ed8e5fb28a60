//! Corrects checksums and lengths, so that the fuzzer reaches the code behind the checks.

use flate2::Crc;

/// Valid files; [`with_footer`] and [`with_pages`] replace a part of them.
const TABLES: [&[u8]; 4] = [
    include_bytes!("../../tests/fixtures/parquet/numbers.parquet"),
    include_bytes!("../../tests/fixtures/parquet/nested.parquet"),
    include_bytes!("../../tests/fixtures/parquet/encodings-1.parquet"),
    include_bytes!("../../tests/fixtures/parquet/pages-v2.parquet"),
];
const PARQUET_MAGIC: &[u8] = b"PAR1";

/// Corrects the checksums of a PNG's chunks.
pub(crate) fn png_checksums(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = bytes.strip_prefix(b"\x89PNG\r\n\x1a\n").map(|_| bytes.to_vec())?;
    let mut rest = &mut bytes[8..];
    while let Some((length, _)) = rest.split_first_chunk::<4>() {
        let end = 8 + u32::from_be_bytes(*length) as usize;
        let Some((chunk, after)) = rest.split_at_mut_checked(end) else { break };
        let mut crc = Crc::new();
        crc.update(&chunk[4..]);
        let Some((checksum, after)) = after.split_first_chunk_mut::<4>() else { break };
        *checksum = crc.sum().to_be_bytes();
        rest = after;
    }
    Some(bytes)
}

/// Corrects an npy header's length to end at its first newline.
pub(crate) fn npy_length(bytes: &[u8]) -> Option<Vec<u8>> {
    let (start, text) = match bytes {
        [0x93, b'N', b'U', b'M', b'P', b'Y', 1, _, _, _, text @ ..] => (10, text),
        [0x93, b'N', b'U', b'M', b'P', b'Y', _, _, _, _, _, _, text @ ..] => (12, text),
        _ => return None,
    };
    let length = text.iter().position(|&byte| byte == b'\n')? as u32 + 1;
    let mut repaired = bytes.to_vec();
    repaired[8..start].copy_from_slice(&length.to_le_bytes()[..start - 8]);
    Some(repaired)
}

/// Corrects a safetensors header's length to end at the last brace.
pub(crate) fn safetensors_length(bytes: &[u8]) -> Option<Vec<u8>> {
    let (_, text) = bytes.split_first_chunk::<8>()?;
    let length = text.iter().rposition(|&byte| byte == b'}')? as u64 + 1;
    Some([&length.to_le_bytes()[..], text].concat())
}

/// Corrects the checksums of records and their lengths.
pub(crate) fn tfrecord_checksums(bytes: &[u8]) -> Vec<u8> {
    let masked = |bytes: &[u8]| crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes();
    let mut repaired = bytes.to_vec();
    let mut rest = &mut repaired[..];
    while let Some((header, after)) = rest.split_first_chunk_mut::<12>() {
        let checksum = masked(&header[..8]);
        header[8..].copy_from_slice(&checksum);
        let length = header.iter().take(8).rev().fold(0u64, |length, &byte| length << 8 | u64::from(byte));
        let content = usize::try_from(length).ok().and_then(|length| after.split_at_mut_checked(length));
        let Some((content, after)) = content else { break };
        let Some((checksum, after)) = after.split_first_chunk_mut::<4>() else { break };
        *checksum = masked(content);
        rest = after;
    }
    repaired
}

/// Corrects the checksums of tar headers.
pub(crate) fn tar_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut repaired = bytes.to_vec();
    for block in repaired.chunks_exact_mut(512).filter(|block| block[257..262] == *b"ustar") {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    repaired
}

/// A valid file, selected by the first byte, and the remaining bytes.
fn choose(bytes: &[u8]) -> (&'static [u8], &[u8]) {
    let (which, rest) = bytes.split_first().unwrap_or((&0, &[]));
    (TABLES[usize::from(*which) % TABLES.len()], rest)
}

/// A valid file's pages, with the bytes as footer.
pub(crate) fn with_footer(bytes: &[u8]) -> Vec<u8> {
    let (table, footer) = choose(bytes);
    [table, footer, &(footer.len() as u32).to_le_bytes(), PARQUET_MAGIC].concat()
}

/// A valid file, with the bytes written over its first pages.
pub(crate) fn with_pages(bytes: &[u8]) -> Vec<u8> {
    let (table, pages) = choose(bytes);
    let mut damaged = table.to_vec();
    damaged.iter_mut().skip(PARQUET_MAGIC.len()).zip(pages).for_each(|(to, from)| *to = *from);
    damaged
}
