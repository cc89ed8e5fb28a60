//! A device's memory: a window of addresses that the host may not touch, over host memory that holds the bytes.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

/// The alignment of small blocks, and that of blocks from a mebibyte on.
const ALIGNMENTS: [usize; 2] = [512, 2 << 20];
const LARGE: usize = 1 << 20;

/// The memory of one device.
#[derive(Debug)]
pub struct Memory {
    /// What device addresses are in; no page of it can be read or written.
    window: usize,
    /// The bytes, at the same offsets.
    bytes: usize,
    size: usize,
    /// Offset and length of the free blocks, and of those in use.
    free: BTreeMap<usize, usize>,
    used: BTreeMap<usize, usize>,
    used_bytes: usize,
    /// How much may be in use, for tests of an exhausted device.
    limit: usize,
}

/// Reserves addresses; pages take memory only once they are written.
fn reserve(size: usize, protection: i32) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the system's choice touches no other memory.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at as usize) }
}

impl Memory {
    /// A device with so many bytes.
    ///
    /// # Errors
    /// When the addresses cannot be reserved.
    pub fn new(size: usize) -> io::Result<Self> {
        let window = reserve(size, libc::PROT_NONE)?;
        let bytes = reserve(size, libc::PROT_READ | libc::PROT_WRITE)?;
        let free = BTreeMap::from([(0, size)]);
        Ok(Self { window, bytes, size, free, used: BTreeMap::new(), used_bytes: 0, limit: size })
    }

    /// Whether an address is one of this device's.
    pub fn contains(&self, address: usize) -> bool {
        (self.window..self.window + self.size).contains(&address)
    }

    /// Where the host finds the byte of a device address.
    pub fn on_host(&self, address: usize) -> Option<*mut u8> {
        self.contains(address).then(|| (address - self.window + self.bytes) as *mut u8)
    }

    /// Bytes in use, and of the device.
    pub fn usage(&self) -> (usize, usize) {
        (self.used_bytes, self.limit)
    }

    /// Lets only so many bytes be in use.
    pub fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes.min(self.size);
    }

    /// The addresses of a new block, the first that fits; `None` if the device has no room.
    pub fn allocate(&mut self, bytes: usize) -> Option<usize> {
        let alignment = ALIGNMENTS[usize::from(bytes >= LARGE)];
        let length = bytes.max(1).checked_next_multiple_of(ALIGNMENTS[0])?;
        if length > self.limit.saturating_sub(self.used_bytes) {
            return None;
        }
        let fits = |(&at, &room): (&usize, &usize)| {
            let begin = at.next_multiple_of(alignment);
            (begin + length <= at + room).then_some((at, room, begin))
        };
        let (at, room, begin) = self.free.iter().find_map(fits)?;
        self.free.remove(&at);
        if begin > at {
            self.free.insert(at, begin - at);
        }
        if begin + length < at + room {
            self.free.insert(begin + length, at + room - begin - length);
        }
        self.used.insert(begin, length);
        self.used_bytes += length;
        Some(self.window + begin)
    }

    /// The block that holds an address.
    pub fn block(&self, address: usize) -> Option<Range<usize>> {
        let offset = self.contains(address).then(|| address - self.window)?;
        let (&begin, &length) = self.used.range(..=offset).next_back()?;
        (offset < begin + length).then(|| self.window + begin..self.window + begin + length)
    }

    /// Frees a block; false if none begins at this address.
    pub fn free(&mut self, address: usize) -> bool {
        let Some(offset) = self.contains(address).then(|| address - self.window) else { return false };
        let Some(mut length) = self.used.remove(&offset) else { return false };
        self.used_bytes -= length;
        self.give_back(offset, length);
        let mut begin = offset;
        if let Some(next) = self.free.remove(&(begin + length)) {
            length += next;
        }
        if let Some((&before, &room)) = self.free.range(..begin).next_back()
            && before + room == begin
        {
            (begin, length) = (before, room + length);
        }
        self.free.insert(begin, length);
        true
    }

    /// Returns whole pages to the system: a test may allocate and free more than the machine has.
    fn give_back(&self, offset: usize, length: usize) {
        const PAGE: usize = 4096;
        let (begin, end) = (offset.next_multiple_of(PAGE), (offset + length) / PAGE * PAGE);
        if begin < end {
            // SAFETY: the pages are within the mapping, and no block in use holds a byte of them.
            unsafe { libc::madvise((self.bytes + begin) as *mut libc::c_void, end - begin, libc::MADV_DONTNEED) };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for at in [self.window, self.bytes] {
            // SAFETY: both mappings were made by `new` with this size, and nobody has their addresses any more.
            unsafe { libc::munmap(at as *mut libc::c_void, self.size) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_apart_aligned_and_used_again() {
        let mut memory = Memory::new(64 << 20).unwrap();
        let [one, other] = [1000, 1 << 20].map(|bytes| memory.allocate(bytes).unwrap());
        assert!(one.is_multiple_of(512) && (other - memory.window).is_multiple_of(2 << 20));
        assert_eq!(memory.block(one + 999), Some(one..one + 1024));
        assert_eq!(memory.block(one + 1024), None);
        assert_eq!(memory.usage(), (1024 + (1 << 20), 64 << 20));
        assert!(memory.free(one) && !memory.free(one) && !memory.free(other + 512));
        assert_eq!(memory.allocate(10), Some(one));
        assert!(memory.free(one) && memory.free(other));
        assert_eq!((memory.usage().0, memory.free.len()), (0, 1), "one free block again");
    }

    #[test]
    fn an_exhausted_device_says_so() {
        let mut memory = Memory::new(8 << 20).unwrap();
        assert_eq!(memory.allocate(usize::MAX), None);
        memory.set_limit(1024);
        let block = memory.allocate(600).unwrap();
        assert_eq!(memory.allocate(1), None);
        assert!(memory.free(block) && memory.allocate(1).is_some());
    }

    #[test]
    fn what_is_written_behind_the_window_is_zero_after_it_was_freed() {
        let mut memory = Memory::new(8 << 20).unwrap();
        let block = memory.allocate(1 << 20).unwrap();
        let bytes = memory.on_host(block).unwrap();
        // SAFETY: a block in use, of more than a byte.
        unsafe {
            assert_eq!(*bytes, 0);
            *bytes = 7;
        }
        assert!(memory.on_host(block - memory.window).is_none());
        assert!(memory.free(block));
        let block = memory.allocate(1 << 20).unwrap();
        let again = memory.on_host(block).unwrap();
        // SAFETY: as above.
        assert_eq!((again, unsafe { *again }), (bytes, 0));
    }
}
