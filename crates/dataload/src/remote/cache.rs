//! Chunks of remote files on the disk.
//!
//! A file has an entry of two files: its bytes, with holes where chunks are absent, and a checksum for each chunk that is
//! there. Processes may write one entry at the same time, because they write the same bytes. What a crash has left is
//! recognised by the checksum.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::read::{read_at, write_all_at};

/// Set in the entry of a chunk that is there, above its checksum.
const IS_THERE: u64 = 1 << 32;

/// A remote file's chunks.
pub(super) struct Entry {
    data: File,
    sums: File,
    path: PathBuf,
}

impl Entry {
    /// Opens the entry of this name, and makes room for it where it is new: removes those that were opened longest ago,
    /// until the files of all have `limit` bytes at most. What is removed while it is open takes room until it is closed.
    pub(super) fn open(folder: &Path, name: &str, bytes: u64, limit: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut lock =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(folder.join("lock"))?;
        // Only this call: whoever has an entry open goes on with it after its removal.
        lock.lock()?;
        let open = |end: &str| {
            let path = folder.join(format!("{name}.{end}"));
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)
        };
        let data = open("data")?;
        if data.metadata()?.len() != bytes {
            // The lock's file has the bytes of all entries, so that not every new one lists the folder. They may be too
            // many, after a crash, and then are counted anew too early.
            let mut total = [0; 8];
            let known = lock.read_exact(&mut total).map(|()| u64::from_le_bytes(total)).ok();
            let total = match known.and_then(|total| total.checked_add(bytes)).filter(|total| *total <= limit) {
                Some(total) => total,
                None => bytes + make_room(folder, name, limit.saturating_sub(bytes))?,
            };
            write_all_at(&lock, 0, &total.to_le_bytes())?;
            data.set_len(bytes)?;
        }
        data.set_modified(SystemTime::now())?;
        Ok(Self { data, sums: open("sums")?, path: folder.join(format!("{name}.data")) })
    }

    /// The bytes of all chunks, to be read by offset or mapped; with a name by which this very file can be opened while it
    /// is open, even where the cache has removed it meanwhile.
    pub(super) fn file(&self) -> io::Result<(File, PathBuf)> {
        let file = self.data.try_clone()?;
        #[cfg(unix)]
        {
            let name = PathBuf::from(format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)));
            if name.exists() {
                return Ok((file, name));
            }
        }
        Ok((file, self.path.clone()))
    }

    /// Waits until no other process fetches the whole file, and keeps others waiting as long as the result lives.
    /// `waiting` is called where that takes time. Ends with the process, however that ends.
    pub(super) fn alone(&self, waiting: impl FnOnce()) -> io::Result<Alone<'_>> {
        match self.sums.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                waiting();
                self.sums.lock()?;
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        Ok(Alone(&self.sums))
    }

    pub(super) fn read(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        read_at(&self.data, buffer, at)
    }

    /// Whether the chunk is there, and as it was written. Not at once: reads it.
    pub(super) fn has(&self, chunk: u64, at: u64, bytes: usize) -> bool {
        let (mut sum, mut found) = ([0; 8], vec![0; bytes]);
        if read_at(&self.sums, &mut sum, chunk * 8).is_err() || u64::from_le_bytes(sum) & IS_THERE == 0 {
            return false;
        }
        self.read(at, &mut found).is_ok() && u64::from_le_bytes(sum) == checksum(&found)
    }

    /// Keeps a chunk.
    pub(super) fn write(&self, chunk: u64, at: u64, bytes: &[u8]) -> io::Result<()> {
        write_all_at(&self.data, at, bytes)?;
        write_all_at(&self.sums, chunk * 8, &checksum(bytes).to_le_bytes())
    }
}

/// No other process fetches the whole file.
pub(super) struct Alone<'a>(&'a File);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        // It ends with the file's last handle at the latest.
        _ = self.0.unlock();
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    IS_THERE | u64::from(crc32c::crc32c(bytes))
}

/// Removes entries other than `but` where they take more than `limit` bytes, those that were opened longest ago first, and
/// some more, so that not every new entry lists the folder. Returns the bytes of the rest.
fn make_room(folder: &Path, but: &str, limit: u64) -> io::Result<u64> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_data = path.extension().is_some_and(|end| end == "data");
        if is_data && path.file_stem().is_some_and(|stem| stem != but) {
            let found = match fs::metadata(&path) {
                // Somebody empties the folder.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                found => found?,
            };
            // As large as it can become.
            entries.push((found.modified()?, found.len(), path));
        }
    }
    entries.sort();
    let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
    if total <= limit {
        return Ok(total);
    }
    for (_, bytes, path) in entries {
        if total <= limit - limit / 16 {
            break;
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let _ = fs::remove_file(path.with_extension("sums"));
        total -= bytes;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_there_once_written_and_damage_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Entry::open(folder.path(), "one", 10, 1 << 20).unwrap();
        let entry = open();
        assert!(!entry.has(0, 0, 4));
        // Another process.
        open().write(1, 4, b"efgh").unwrap();
        assert!(!entry.has(0, 0, 4) && entry.has(1, 4, 4) && !entry.has(2, 8, 2));
        let mut found = [0; 4];
        entry.read(4, &mut found).unwrap();
        assert_eq!(&found, b"efgh");
        write_all_at(&entry.data, 5, b"x").unwrap();
        assert!(!open().has(1, 4, 4), "it was damaged");
    }

    #[test]
    fn a_new_entry_takes_the_place_of_those_opened_longest_ago() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = vec![7; 1 << 20];
        let write = |name: &str, seconds: u64| {
            let entry = Entry::open(folder.path(), name, 1 << 20, 5 << 19).unwrap();
            entry.write(0, 0, &bytes).unwrap();
            entry.data.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds)).unwrap();
            entry
        };
        let (old, _) = (write("old", 5), write("older", 3));
        write("new", 9);
        let mut names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["lock", "new.data", "new.sums", "old.data", "old.sums"]);
        write("newest", 10);
        assert!(!folder.path().join("old.data").exists());
        assert!(old.has(0, 0, 1 << 20), "whoever has it open goes on");
    }

    #[test]
    fn the_bytes_of_all_entries_are_noted_and_counted_anew_where_that_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let (lock, limit) = (folder.path().join("lock"), 100);
        let noted = || u64::from_le_bytes(fs::read(&lock).unwrap().try_into().unwrap());
        let open = |name: &str, bytes: u64| drop(Entry::open(folder.path(), name, bytes, limit).unwrap());
        open("a", 30);
        open("b", 40);
        open("a", 30);
        assert_eq!(noted(), 70);
        // Somebody has emptied the folder, or a process died before it made the entry.
        fs::remove_file(folder.path().join("b.data")).unwrap();
        open("c", 60);
        assert_eq!(noted(), 90);
        assert!(folder.path().join("a.data").exists());
        // A note that is damaged, as an earlier version of this crate leaves it.
        fs::write(&lock, "").unwrap();
        open("d", 20);
        assert!(noted() <= limit && !folder.path().join("a.data").exists());
        let found = ["a", "c", "d"].map(|name| fs::metadata(folder.path().join(format!("{name}.data"))));
        assert_eq!(noted(), found.into_iter().flatten().map(|it| it.len()).sum::<u64>());
    }

    #[test]
    #[cfg(unix)]
    fn an_entry_that_is_gone_is_not_counted() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("gone.data")).unwrap();
        Entry::open(folder.path(), "one", 60, 100).unwrap();
        Entry::open(folder.path(), "two", 60, 100).unwrap();
        assert!(!folder.path().join("one.data").exists());
    }
}
