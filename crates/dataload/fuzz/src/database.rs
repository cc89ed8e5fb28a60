//! Fuzzes `LmdbDataset`. LMDB's C code gets a file only after the crate has checked the file's trees, and hardly any
//! random bytes pass the first checks. So the input is also tried with valid page headers.

use overdrive_dataload::{DataError, Dataset, LmdbDataset};

/// LMDB's smallest page size, so that a small input has many pages.
const PAGE: usize = 512;
/// The flags of a meta page that say what it is.
const META_FLAGS: [u8; 2] = [0x08, 0];
const MAGIC: u32 = 0xbeef_c0de;
const VERSION: u32 = 1;
// Offsets in a meta page, as in `src/lmdb/pages.rs`.
const FLAGS_AT: usize = 10;
const MAGIC_AT: usize = 16;
const VERSION_AT: usize = 20;
const PAGE_SIZE_AT: usize = 40;
/// The main tree's number of entries.
const ENTRIES_AT: usize = 120;
/// The last page's number.
const LAST_PAGE_AT: usize = 136;

/// Opens the bytes as a database as they are, and with valid page headers. Returns how many values could be read in
/// all.
pub(crate) fn lmdb(bytes: &[u8]) -> usize {
    let mut pages = with_headers(bytes);
    let mut values = read(bytes).unwrap_or(0);
    let mut outcome = read(&pages);
    if let Err(DataError::Corrupt { found, .. }) = &outcome
        && let Ok(entries) = found.parse::<u64>()
    {
        // The tree was read to its end, and only the declared number of entries is wrong. Correct it, so that LMDB
        // reads the tree too.
        pages.chunks_exact_mut(PAGE).take(2).for_each(|meta| put(meta, ENTRIES_AT, &entries.to_le_bytes()));
        outcome = read(&pages);
    }
    values += outcome.unwrap_or(0);
    values
}

/// How many values can be read from the main database and a named one.
fn read(bytes: &[u8]) -> Result<usize, DataError> {
    let path = super::file("fuzz.mdb", bytes);
    let count = |dataset: LmdbDataset| (0..dataset.len()).filter(|&index| dataset.get(index).is_ok()).count();
    // Values of the named database are compared with their checksums, if it has them; those of the main one are not.
    let named = LmdbDataset::builder(&path).database("train").open().map_or(0, count);
    match LmdbDataset::builder(&path).verify_crc(false).open().map(count) {
        Err(_) if named > 0 => Ok(named),
        main => Ok(main? + named),
    }
}

/// Pads to whole pages, at least three, and numbers them. The first two get the headers of valid meta pages.
fn with_headers(bytes: &[u8]) -> Vec<u8> {
    let mut pages = bytes.to_vec();
    pages.resize(bytes.len().next_multiple_of(PAGE).max(3 * PAGE), 0);
    let last = (pages.len() / PAGE - 1) as u64;
    for (number, page) in pages.chunks_exact_mut(PAGE).enumerate() {
        put(page, 0, &(number as u64).to_le_bytes());
        if number < 2 {
            put(page, FLAGS_AT, &META_FLAGS);
            put(page, MAGIC_AT, &MAGIC.to_le_bytes());
            put(page, VERSION_AT, &VERSION.to_le_bytes());
            put(page, PAGE_SIZE_AT, &(PAGE as u32).to_le_bytes());
            put(page, LAST_PAGE_AT, &last.to_le_bytes());
        }
    }
    pages
}

fn put(page: &mut [u8], at: usize, bytes: &[u8]) {
    page[at..at + bytes.len()].copy_from_slice(bytes);
}
