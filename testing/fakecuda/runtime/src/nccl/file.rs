//! The file in shared memory by which the ranks of a communicator exchange data.
//!
//! A unique id is the path of this file. The file exists from the time when the first rank comes until the last one has
//! come. Then it is removed, but the ranks still have it open. If ranks die before that, the next process that makes an
//! id removes the file. The head of the file is mapped to memory and has atomic words. The data that ranks send are
//! read and written as a file, so that a full file system is an error rather than a signal.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use super::code::{Code, Failure};
use super::liveness::Process;

/// The beginning of each file's name. After it come the process ID and the start of the process that made the id, and a
/// counter.
const NAME: &str = "overdrive-nccl-";
/// Bytes of `ncclUniqueId`.
pub const ID_BYTES: usize = 128;
/// The largest number of ranks of a communicator; enough for tests on one machine.
pub const MAX_RANKS: usize = 64;

/// The words of the head: a mark, the number of ranks, how the communicator broke and the text of that, the seat of
/// each rank, then the words of the lanes.
const MARK: usize = 0;
const RANKS: usize = 1;
pub const BROKEN: usize = 2;
pub const TEXT_LENGTH: usize = 3;
pub const TEXT: usize = 4;
pub const TEXT_WORDS: usize = 64;
const SEATS: usize = TEXT + TEXT_WORDS;
/// A seat: the rank's process ID and start, its device, and whether it is taken.
const SEAT_WORDS: usize = 4;
/// Marks a file of this layout; a file of another build is refused.
const MARK_VALUE: u64 = 0x6f76_6472_6976_6503;

/// A new id: a path, and zeros after it. Removes the files that dead processes have left.
pub fn new_id() -> [u8; ID_BYTES] {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let own = Process::own();
    let name = format!("{NAME}{}-{}-{}", own.id, own.start, NEXT.fetch_add(1, Ordering::Relaxed));
    // Room for the parts that splits add is not needed: their paths are not passed on as ids.
    let fits = |folder: &PathBuf| folder.as_os_str().len() + name.len() + 2 <= ID_BYTES && is_writable(folder);
    let folders = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
    let folder = folders.into_iter().find(fits).unwrap_or_else(|| PathBuf::from("/tmp"));
    sweep(&folder);
    let (mut id, path) = ([0; ID_BYTES], folder.join(name).into_os_string().into_encoded_bytes());
    id[..path.len()].copy_from_slice(&path);
    id
}

/// The path in an id; `None` if `new_id` has not made it.
pub fn path_of(id: &[u8; ID_BYTES]) -> Option<PathBuf> {
    let end = id.iter().position(|byte| *byte == 0)?;
    let path = PathBuf::from(str::from_utf8(&id[..end]).ok()?);
    path.file_name()?.to_str()?.starts_with(NAME).then_some(path)
}

fn is_writable(folder: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(folder.as_os_str().as_encoded_bytes()) else { return false };
    // SAFETY: a text that ends with a zero byte.
    unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
}

/// Removes the files in a folder whose maker is dead, and all of whose ranks are dead.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(rest) = name.strip_prefix(NAME) else { continue };
        let mut numbers = rest.split('-');
        let (id, start) = (numbers.next().map(str::parse), numbers.next().map(str::parse));
        let (Some(Ok(id)), Some(Ok(start))) = (id, start) else { continue };
        if (Process { id, start }).is_alive() {
            continue;
        }
        let Ok(file) = OpenOptions::new().read(true).write(true).open(entry.path()) else { continue };
        // A rank that is just coming is alive, and has the lock.
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => continue,
        }
        if !Head::of_any(&file).is_some_and(|head| (0..head.ranks()).any(|rank| head.is_alive(rank) == Some(true))) {
            // It does no harm if the file stays.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The mapped words.
pub struct Head {
    at: *const AtomicU64,
    words: usize,
}

// SAFETY: atomics in memory that is unmapped only when the value is dropped.
unsafe impl Send for Head {}
// SAFETY: as above.
unsafe impl Sync for Head {}

impl Head {
    /// The words of a file that has at least so many of them.
    fn new(file: &File, words: usize) -> io::Result<Self> {
        let (protection, bytes) = (libc::PROT_READ | libc::PROT_WRITE, words * size_of::<u64>());
        // SAFETY: a new mapping at an address of the system's choice touches no other memory.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { at: at.cast(), words }) }
    }

    /// The words of a file that another process has made, if it is complete.
    fn of_any(file: &File) -> Option<Self> {
        let seats = SEATS + MAX_RANKS * SEAT_WORDS;
        let length = file.metadata().ok()?.len() as usize / size_of::<u64>();
        let head = Self::new(file, length.min(seats)).ok().filter(|head| head.words > SEATS)?;
        (head.word(MARK).load(Ordering::Acquire) == MARK_VALUE && head.ranks() <= MAX_RANKS).then_some(head)
    }

    /// A word. An index beyond the end means the last one.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: within the mapping, which is aligned to pages, and all access to it is atomic.
        unsafe { &*self.at.add(index.min(self.words - 1)) }
    }

    pub fn ranks(&self) -> usize {
        self.word(RANKS).load(Ordering::Acquire) as usize
    }

    /// The index of the first word of the lanes.
    pub fn lanes(&self) -> usize {
        SEATS + self.ranks() * SEAT_WORDS
    }

    fn seat(&self, rank: usize) -> usize {
        SEATS + rank * SEAT_WORDS
    }

    /// The device of a rank, if the rank has come.
    pub fn device(&self, rank: usize) -> Option<u64> {
        let seat = self.seat(rank);
        (self.word(seat + 3).load(Ordering::Acquire) != 0).then(|| self.word(seat + 2).load(Ordering::Acquire))
    }

    /// Whether a rank's process is alive; `None` if the rank has not come yet.
    pub fn is_alive(&self, rank: usize) -> Option<bool> {
        self.device(rank)?;
        let [id, start] = [0, 1].map(|word| self.word(self.seat(rank) + word).load(Ordering::Acquire));
        Some(Process { id: id as u32, start }.is_alive())
    }

    fn sit(&self, rank: usize, device: u64) -> Result<(), Failure> {
        let (own, seat) = (Process::own(), self.seat(rank));
        if self.device(rank).is_some() {
            return Err(Failure::new(Code::INVALID_USAGE, format!("rank {rank} has come already")));
        }
        for (word, value) in [u64::from(own.id), own.start, device, 1].into_iter().enumerate() {
            self.word(seat + word).store(value, Ordering::Release);
        }
        Ok(())
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this size, and every reference to a word borrows the value.
        unsafe { libc::munmap(self.at.cast_mut().cast(), self.words * size_of::<u64>()) };
    }
}

/// Opens a communicator's file, or makes it, and takes a rank's seat. `lane_words` is the number of words that the
/// lanes need.
pub fn attach(
    path: &Path,
    (rank, ranks): (usize, usize),
    device: u64,
    lane_words: usize,
) -> Result<(File, Head), Failure> {
    let file = loop {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.lock()?;
        // Another process may have removed it in between.
        if file.metadata()?.nlink() > 0 {
            break file;
        }
    };
    let words = SEATS + ranks * SEAT_WORDS + lane_words;
    let is_new = file.metadata()?.len() == 0;
    if is_new {
        // SAFETY: the file is open. Its pages are there then, and no access to the mapping can fail.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, (words * size_of::<u64>()) as i64) } {
            0 => {}
            error => return Err(io::Error::from_raw_os_error(error).into()),
        }
    } else if (file.metadata()?.len() as usize) < words * size_of::<u64>() {
        return Err(Failure::new(Code::INVALID_ARGUMENT, "the ranks do not agree on how many they are"));
    }
    let head = Head::new(&file, words)?;
    if is_new {
        head.word(RANKS).store(ranks as u64, Ordering::Release);
        head.word(MARK).store(MARK_VALUE, Ordering::Release);
    }
    if head.word(MARK).load(Ordering::Acquire) != MARK_VALUE || head.ranks() != ranks {
        return Err(Failure::new(Code::INVALID_ARGUMENT, "the ranks do not agree on how many they are"));
    }
    head.sit(rank, device)?;
    file.unlock()?;
    Ok((file, head))
}
