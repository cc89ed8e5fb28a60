//! Databases; LMDB opens them only when their trees pass the checks.

use overdrive_dataload::{DataError, Dataset, LmdbDataset};

/// LMDB's smallest page size, so that a small input has many pages.
const PAGE: usize = 512;
/// The offset in a meta page of the main tree's number of entries.
const ENTRIES: usize = 120;
/// The offset in a meta page of the last page's number.
const LAST_PAGE: usize = 136;

/// Reads the bytes as they are, and as pages with correct page numbers.
pub(crate) fn lmdb(bytes: &[u8]) -> usize {
    let mut pages = with_numbers(bytes);
    let mut given = read(bytes).unwrap_or(0);
    let mut outcome = read(&pages);
    if let Err(DataError::Corrupt { found, .. }) = &outcome
        && let Ok(entries) = found.parse::<u64>()
    {
        // The tree was walked to its end, and only the declared count is wrong: fix it, so that LMDB reads the tree
        // too.
        pages.chunks_exact_mut(PAGE).take(2).for_each(|meta| put(meta, ENTRIES, &entries.to_le_bytes()));
        outcome = read(&pages);
    }
    given += outcome.unwrap_or(0);
    given
}

/// How many values can be read from the main database and a named one.
fn read(bytes: &[u8]) -> Result<usize, DataError> {
    let path = super::file("fuzz.mdb", bytes);
    let count = |dataset: LmdbDataset| (0..dataset.len()).filter(|&index| dataset.get(index).is_ok()).count();
    let named = LmdbDataset::builder(&path).database("train").open().map_or(0, count);
    match LmdbDataset::builder(&path).verify_crc(false).open().map(count) {
        Err(_) if named > 0 => Ok(named),
        main => Ok(main? + named),
    }
}

/// Pads to whole pages and numbers them; the first two get valid meta page headers.
fn with_numbers(bytes: &[u8]) -> Vec<u8> {
    let mut pages = bytes.to_vec();
    pages.resize(bytes.len().next_multiple_of(PAGE).max(3 * PAGE), 0);
    let last = (pages.len() / PAGE - 1) as u64;
    for (number, page) in pages.chunks_exact_mut(PAGE).enumerate() {
        put(page, 0, &(number as u64).to_le_bytes());
        if number < 2 {
            put(page, 10, &[0x08, 0]);
            put(page, 16, &0xbeef_c0de_u32.to_le_bytes());
            put(page, 20, &1u32.to_le_bytes());
            put(page, 40, &(PAGE as u32).to_le_bytes());
            put(page, LAST_PAGE, &last.to_le_bytes());
        }
    }
    pages
}

fn put(page: &mut [u8], at: usize, bytes: &[u8]) {
    page[at..at + bytes.len()].copy_from_slice(bytes);
}
