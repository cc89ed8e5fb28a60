//! Checksums of the values, which LMDB itself does not have, stored in an extra entry.
//!
//! So the values themselves stay unchanged for other readers. The entry holds the magic bytes, one CRC-32C
//! (little-endian) over key and value of each other entry, in the order of the keys, and a CRC-32C over all of that.

/// The key of that entry; a database must not use it for anything else.
pub(super) const KEY: &[u8] = b"__crc32c__";

const MAGIC: &[u8; 8] = b"odcrc32c";
const CRC: usize = 4;

/// The checksums, in the order of the keys.
#[derive(Debug)]
pub(super) struct Checksums(Vec<u8>);

/// The checksum of an entry.
pub(super) fn of(key: &[u8], value: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(key), value)
}

/// The entry that holds `checksums`.
pub(super) fn encode(checksums: impl Iterator<Item = u32>) -> Vec<u8> {
    let mut entry = MAGIC.to_vec();
    entry.extend(checksums.flat_map(u32::to_le_bytes));
    entry.extend(crc32c::crc32c(&entry).to_le_bytes());
    entry
}

impl Checksums {
    /// What the entry holds, or what is wrong with it.
    pub(super) fn parse(entry: &[u8], entries: usize) -> Result<Self, String> {
        let table = entry.strip_prefix(MAGIC).and_then(|rest| rest.split_last_chunk());
        let Some((table, own)) = table else { return Err("a value in another format".to_owned()) };
        if crc32c::crc32c(&entry[..entry.len() - CRC]) != u32::from_le_bytes(*own) {
            return Err("a damaged table".to_owned());
        }
        match table.len() == entries.saturating_mul(CRC) {
            true => Ok(Self(table.to_vec())),
            false => Err(format!("{} of them", table.len() / CRC)),
        }
    }

    /// The checksum of the entry at `index`.
    pub(super) fn get(&self, index: usize) -> Option<u32> {
        let (table, _) = self.0.as_chunks::<CRC>();
        table.get(index).map(|&bytes| u32::from_le_bytes(bytes))
    }
}
