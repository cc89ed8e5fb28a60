//! Samples kept in a file once they have been read.
//!
//! The file has a header, a table with one entry per sample, and the samples in the order in which they were written. A
//! sample is written before its entry, which has a checksum of the sample and one of itself: anything that a crash left
//! half-written fails its checksum and counts as missing, and a damaged length is never used.

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};

use overdrive_core::LockedFile;

use crate::cache::Storable;
use crate::read::{read_at, require_local, write_all_at};
use crate::{DataError, Dataset};

const MAGIC: &[u8; 8] = b"ODCACHE2";
const HEADER_BYTES: u64 = 64;
const ENTRY_BYTES: u64 = 24;
/// The table is kept in memory, where an absurd length would abort the process.
const MAX_SAMPLES: usize = u32::MAX as usize;
/// The rest of the header holds the beginning of the form's name.
const FORM_BYTES: usize = 40;

/// A dataset that keeps every sample in a file from its first access on; later runs of the program use the file too.
///
/// Only one process at a time can open the file: each rank needs its own. Delete it by hand when the dataset's content
/// changes.
///
/// ```no_run
/// use overdrive_dataload::{DataLoader, Disk, ImageFolder, ToFloat};
///
/// let folder = ImageFolder::open("photos")?.decoded();
/// let loader = DataLoader::builder(folder).cache(Disk("photos.cache".into()))?.collate(ToFloat::unit()).build()?;
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
pub struct DiskCached<D> {
    dataset: D,
    /// The dataset's length when the file was opened.
    len: usize,
    path: PathBuf,
    file: LockedFile,
    entries: RwLock<Vec<Entry>>,
    /// Where the next sample goes; `None` once writing has failed.
    end: Mutex<Option<u64>>,
}

/// Where a sample is in the file; a length of 0 means that it is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    offset: u64,
    len: u64,
    checksum: u32,
}

impl Entry {
    fn to_bytes(self, index: usize) -> [u8; ENTRY_BYTES as usize] {
        let mut bytes = [0; ENTRY_BYTES as usize];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.checksum.to_le_bytes());
        let own = Self::own_checksum(index, &bytes[..20]);
        bytes[20..].copy_from_slice(&own.to_le_bytes());
        bytes
    }

    /// `None` for an entry that is damaged, or belongs to another index.
    fn from_bytes(index: usize, bytes: &[u8; ENTRY_BYTES as usize]) -> Option<Self> {
        if bytes.iter().all(|&byte| byte == 0) {
            return Some(Self::default());
        }
        let (fields, own) = bytes.split_last_chunk()?;
        let (offset, rest) = fields.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (checksum, _) = rest.split_first_chunk()?;
        let (offset, len) = (u64::from_le_bytes(*offset), u64::from_le_bytes(*len));
        let intact = u32::from_le_bytes(*own) == Self::own_checksum(index, fields);
        intact.then_some(Self { offset, len, checksum: u32::from_le_bytes(*checksum) })
    }

    fn own_checksum(index: usize, fields: &[u8]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&(index as u64).to_le_bytes()), fields)
    }

    /// Includes the index and offset, so that another sample's bytes do not match.
    fn checksum_of(index: usize, offset: u64, sample: &[u8]) -> u32 {
        let place = crc32c::crc32c(&[(index as u64).to_le_bytes(), offset.to_le_bytes()].concat());
        crc32c::crc32c_append(place, sample)
    }
}

impl<D: Dataset> DiskCached<D>
where
    D::Sample: Storable,
{
    /// Opens the file at `path`, or creates it.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a URL, and for a file that is not a cache, belongs to another dataset or kind of
    /// sample, or is open in another process; [`DataError::InvalidOption`] for 2^32 samples or more; [`DataError::Io`].
    pub fn open(dataset: D, path: impl Into<PathBuf>) -> Result<Self, DataError> {
        let (path, len) = (path.into(), dataset.len());
        require_local(&path)?;
        if len > MAX_SAMPLES {
            return Err(DataError::option("cache(Disk)", format!("at most {MAX_SAMPLES} samples"), len));
        }
        let io = |error| DataError::Io { path: path.clone(), error };
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        let file = match file.try_lock() {
            Ok(()) => LockedFile::new(file),
            Err(TryLockError::WouldBlock) => {
                return Err(DataError::layout(
                    &path,
                    "a cache that only this loader has open",
                    "one that another process or loader has open",
                ));
            }
            Err(TryLockError::Error(error)) => return Err(io(error)),
        };
        let header = header_of(len, &D::Sample::form());
        let table_bytes = ENTRY_BYTES * len as u64;
        let file_bytes = file.metadata().map_err(io)?.len();
        let entries =
            if file_bytes < HEADER_BYTES + table_bytes && is_unfinished(&file, &header, file_bytes).map_err(io)? {
                // The file has no samples yet. The header is written last, so a file with a header has its table.
                file.set_len(0).and_then(|()| file.set_len(HEADER_BYTES + table_bytes)).map_err(io)?;
                write_all_at(&file, 0, &header).map_err(io)?;
                vec![Entry::default(); len]
            } else {
                let mut found = [0; HEADER_BYTES as usize];
                read_at(&file, &mut found[..file_bytes.min(HEADER_BYTES) as usize], 0).map_err(io)?;
                if found != header {
                    let expected = format!("a cache of {len} samples of the form {:?}", D::Sample::form());
                    return Err(DataError::layout(&path, expected, describe(&found)));
                }
                let mut table = vec![0; table_bytes as usize];
                read_at(&file, &mut table, HEADER_BYTES).map_err(io)?;
                entries_of(&table, &path)
            };
        let end = Mutex::new(Some(file_bytes.max(HEADER_BYTES + table_bytes)));
        Ok(Self { dataset, len, path, file, entries: RwLock::new(entries), end })
    }

    /// How many samples the file has, by its table.
    pub fn cached(&self) -> usize {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).iter().filter(|entry| entry.len > 0).count()
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The sample from the file; `None` when it is missing or its checksum does not match.
    fn read(&self, index: usize) -> Option<D::Sample> {
        let entry = *self.entries.read().unwrap_or_else(PoisonError::into_inner).get(index)?;
        let file_bytes = self.file.metadata().ok()?.len();
        if entry.len == 0 || entry.offset.checked_add(entry.len)? > file_bytes {
            return None;
        }
        let len = usize::try_from(entry.len).ok()?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).ok()?;
        bytes.resize(len, 0);
        read_at(&self.file, &mut bytes, entry.offset).ok()?;
        if Entry::checksum_of(index, entry.offset, &bytes) != entry.checksum {
            tracing::warn!(path = %self.path.display(), index, "a damaged sample in the cache is read again");
            return None;
        }
        let mut rest = &bytes[..];
        D::Sample::load(&mut rest).filter(|_| rest.is_empty())
    }

    /// Appends the sample to the file. A write error (a full disk) ends the caching, not the training.
    fn write(&self, index: usize, sample: &D::Sample) {
        let mut bytes = Vec::new();
        sample.store(&mut bytes);
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(offset) = *end else { return };
        let entry = Entry { offset, len: bytes.len() as u64, checksum: Entry::checksum_of(index, offset, &bytes) };
        let place = HEADER_BYTES + ENTRY_BYTES * index as u64;
        match write_all_at(&self.file, offset, &bytes)
            .and_then(|()| write_all_at(&self.file, place, &entry.to_bytes(index)))
        {
            Ok(()) => {
                *end = Some(offset + entry.len);
                self.entries.write().unwrap_or_else(PoisonError::into_inner)[index] = entry;
            }
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "nothing more is written to the cache");
                *end = None;
            }
        }
    }
}

impl<D: Dataset> Dataset for DiskCached<D>
where
    D::Sample: Storable,
{
    type Sample = D::Sample;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<D::Sample, DataError> {
        DataError::check_index(index, self.len)?;
        if let Some(sample) = self.read(index) {
            return Ok(sample);
        }
        let sample = self.dataset.get(index)?;
        self.write(index, &sample);
        Ok(sample)
    }

    fn key(&self, index: usize) -> Option<String> {
        self.dataset.key(index)
    }
}

/// The table's entries; a damaged one counts as having no sample.
fn entries_of(table: &[u8], path: &Path) -> Vec<Entry> {
    let (table, _) = table.as_chunks();
    let entries: Vec<_> = table.iter().enumerate().map(|(index, bytes)| Entry::from_bytes(index, bytes)).collect();
    let damaged = entries.iter().filter(|entry| entry.is_none()).count();
    if damaged > 0 {
        tracing::warn!(path = %path.display(), damaged, "samples with a damaged entry in the cache are read again");
    }
    entries.into_iter().map(Option::unwrap_or_default).collect()
}

fn header_of(len: usize, form: &str) -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..8].copy_from_slice(MAGIC);
    header[8..16].copy_from_slice(&(len as u64).to_le_bytes());
    header[16..20].copy_from_slice(&crc32c::crc32c(form.as_bytes()).to_le_bytes());
    let shown = &form.as_bytes()[..form.len().min(FORM_BYTES)];
    header[24..24 + shown.len()].copy_from_slice(shown);
    header
}

fn describe(header: &[u8; HEADER_BYTES as usize]) -> String {
    if !header.starts_with(MAGIC) {
        return "a file that is not a cache, or a cache of another version".to_owned();
    }
    let len = header[8..16].iter().rev().fold(0u64, |len, &byte| len << 8 | u64::from(byte));
    let form = header[24..].split(|&byte| byte == 0).next().unwrap_or_default();
    format!("one of {len} samples of the form {:?}", String::from_utf8_lossy(form))
}

/// Whether the file was just created, or its creation was interrupted.
fn is_unfinished(file: &File, header: &[u8], file_bytes: u64) -> io::Result<bool> {
    let mut found = vec![0; file_bytes.min(HEADER_BYTES) as usize];
    read_at(file, &mut found, 0)?;
    Ok(found.iter().zip(header).all(|(&found, &wanted)| found == 0 || found == wanted))
}

impl<D> fmt::Debug for DiskCached<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DiskCached {{ {} }}", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;
    use crate::FnDataset;

    /// 20 samples of different lengths, and a count of reads.
    fn counted() -> (impl Dataset<Sample = Vec<u8>>, Arc<AtomicUsize>) {
        let reads = Arc::new(AtomicUsize::new(0));
        let counter = reads.clone();
        let dataset = FnDataset::new(20, move |index| {
            counter.fetch_add(1, SeqCst);
            Ok(vec![index as u8; index * 3])
        });
        (dataset, reads)
    }

    fn read_all(cache: &impl Dataset<Sample = Vec<u8>>) {
        assert!((0..20).all(|index| cache.get(index).unwrap() == vec![index as u8; index * 3]));
    }

    #[test]
    fn samples_outlive_the_program_and_are_read_once() -> Result<(), DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache");
        for expected_reads in [20, 0] {
            let (dataset, reads) = counted();
            let cache = DiskCached::open(dataset, &path)?;
            read_all(&cache);
            read_all(&cache);
            assert_eq!((reads.load(SeqCst), cache.cached()), (expected_reads, 20));
            let busy = DiskCached::open(counted().0, &path).unwrap_err().to_string();
            assert!(busy.contains("another process"), "{busy}");
        }
        Ok(())
    }

    #[test]
    fn whatever_an_interruption_leaves_is_read_anew() -> Result<(), DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache");
        read_all(&DiskCached::open(counted().0, &path)?);
        let whole = fs::read(&path).unwrap();
        for cut in (0..whole.len()).step_by(7) {
            fs::write(&path, &whole[..cut]).unwrap();
            match DiskCached::open(counted().0, &path) {
                Ok(cache) => read_all(&cache),
                Err(error) => panic!("cut at {cut}: {error}"),
            }
        }
        // Damage in the table or in a sample.
        for position in HEADER_BYTES as usize..whole.len() {
            let mut damaged = whole.clone();
            damaged[position] ^= 0x40;
            fs::write(&path, &damaged).unwrap();
            read_all(&DiskCached::open(counted().0, &path)?);
        }
        Ok(())
    }

    #[test]
    fn a_damaged_length_is_not_believed() -> Result<(), DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache");
        read_all(&DiskCached::open(counted().0, &path)?);
        let whole = fs::read(&path).unwrap();
        let entry = |index: usize| HEADER_BYTES as usize + ENTRY_BYTES as usize * index;
        for position in entry(7)..entry(8) {
            let mut damaged = whole.clone();
            damaged[position] ^= 1;
            fs::write(&path, &damaged).unwrap();
            let (dataset, reads) = counted();
            let cache = DiskCached::open(dataset, &path)?;
            assert_eq!(cache.cached(), 19, "damaged at {position}");
            read_all(&cache);
            assert_eq!(reads.load(SeqCst), 1);
        }
        // An intact entry of another sample does not count.
        let mut moved = whole.clone();
        moved.copy_within(entry(7)..entry(8), entry(9));
        fs::write(&path, &moved).unwrap();
        let cache = DiskCached::open(counted().0, &path)?;
        assert_eq!(cache.cached(), 19);
        read_all(&cache);
        Ok(())
    }

    #[test]
    fn another_dataset_or_file_is_refused() -> Result<(), DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache");
        drop(DiskCached::open(counted().0, &path)?);
        let shorter = FnDataset::new(19, |_| Ok(vec![0u8]));
        let error = DiskCached::open(shorter, &path).unwrap_err().to_string();
        assert!(error.contains("19 samples") && error.contains("found one of 20 samples"), "{error}");
        let texts = FnDataset::new(20, |_| Ok(String::new()));
        assert!(DiskCached::open(texts, &path).unwrap_err().to_string().contains("\"text\""));
        fs::write(&path, "a diary, which nobody would like to lose. ".repeat(20)).unwrap();
        assert!(matches!(DiskCached::open(counted().0, &path), Err(DataError::Layout { .. })));
        assert!(fs::read_to_string(&path).unwrap().starts_with("a diary"));
        Ok(())
    }
}
