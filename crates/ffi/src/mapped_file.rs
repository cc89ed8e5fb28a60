//! Files as memory.

use std::fmt;
use std::fs::File;
use std::io;
use std::ptr;

use memmap2::{MmapOptions, MmapRaw};

/// A file that the operating system reads where it is used, page by page, and keeps in its cache for all processes.
///
/// Its bytes are copied out and never lent, so another process that writes to the file changes what is read from then
/// on, and nothing else. One that shortens the file makes the operating system end this process when it reads past the
/// new end, as with every memory-mapped file.
///
/// ```
/// use overdrive_ffi::MappedFile;
///
/// # fn main() -> std::io::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("file");
/// std::fs::write(&path, b"some bytes")?;
/// let file = MappedFile::new(&std::fs::File::open(&path)?)?;
/// let mut bytes = [0; 5];
/// assert!(file.read(5, &mut bytes) && bytes == *b"bytes");
/// assert!(!file.read(6, &mut bytes));
/// # Ok(())
/// # }
/// ```
pub struct MappedFile {
    map: MmapRaw,
}

impl MappedFile {
    /// Maps a whole file. It may be empty; what is appended later is not part of the map.
    ///
    /// # Errors
    /// When the operating system refuses: what is no regular file cannot be mapped.
    pub fn new(file: &File) -> io::Result<Self> {
        Ok(Self { map: MmapOptions::new().map_raw_read_only(file)? })
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether there is no byte at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `bytes` from `offset` on. False, with nothing copied, where the file has fewer.
    #[must_use]
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let fits = offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len());
        if fits {
            // SAFETY: the range lies within the map, which lives as long as `self`, and `bytes` is memory of its own.
            // No reference to the map exists, so it may change meanwhile.
            unsafe { ptr::copy_nonoverlapping(self.map.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        }
        fits
    }
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedFile {{ len: {} }}", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_within_the_file_is_read() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("file");
        std::fs::write(&path, (0..200).collect::<Vec<u8>>())?;
        let file = MappedFile::new(&File::open(&path)?)?;
        let mut bytes = [7; 3];
        assert_eq!((file.len(), file.is_empty()), (200, false));
        assert!(file.read(197, &mut bytes) && bytes == [197, 198, 199]);
        for offset in [198, 200, usize::MAX - 2, usize::MAX] {
            assert!(!file.read(offset, &mut bytes) && bytes == [197, 198, 199], "{offset}");
        }
        assert!(file.read(200, &mut []) && !file.read(201, &mut []));
        std::fs::write(&path, [])?;
        let empty = MappedFile::new(&File::open(&path)?)?;
        assert!(empty.is_empty() && empty.read(0, &mut []) && !empty.read(0, &mut bytes));
        Ok(())
    }
}
