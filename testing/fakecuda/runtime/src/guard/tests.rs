use std::ops::Range;
use std::sync::Mutex;

use super::*;

/// The handler and what it caught are the process's: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Whole pages, as pinned memory is.
struct Block(Range<usize>);

impl Block {
    fn new(pages: usize) -> Self {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping touches no other memory.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, access, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        assert!(start());
        take_touches();
        Self(at as usize..at as usize + pages * PAGE)
    }

    fn bytes(&self, bytes: Range<usize>) -> Range<usize> {
        self.0.start + bytes.start..self.0.start + bytes.end
    }

    fn read(&self, offset: usize) -> u8 {
        // SAFETY: a byte of the mapping; the guard's handler opens its page.
        unsafe { ((self.0.start + offset) as *const u8).read_volatile() }
    }

    fn write(&self, offset: usize, value: u8) {
        // SAFETY: as above.
        unsafe { ((self.0.start + offset) as *mut u8).write_volatile(value) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        forget(&self.0);
        // SAFETY: made by `new`, and nobody has its addresses any more.
        unsafe { libc::munmap(self.0.start as *mut libc::c_void, self.0.len()) };
    }
}

#[test]
fn a_copy_to_the_device_may_be_read_and_not_written_until_it_has_run() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(2);
    block.write(100, 7);
    let ticket = protect(&block.bytes(0..5000), &block.0, false).expect("whole pages");
    assert_eq!((block.read(100), take_touches()), (7, (vec![], 0)));
    block.write(100, 8);
    block.write(4500, 9);
    let text = "the host writes pinned memory that a copy to the device still reads: byte 100 of 5000";
    assert_eq!(take_touches(), (vec![text.to_owned()], 0), "once for the copy, and it went on");
    let mut seen = (0, 0);
    run(Some(&ticket), || seen = (block.read(100), block.read(4500)));
    assert_eq!(seen, (8, 9));
    block.write(100, 1);
    assert_eq!(take_touches(), (vec![], 0), "the copy has run");
}

#[test]
fn a_copy_from_the_device_may_not_even_be_read() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(3);
    let [first, second] =
        [0..PAGE, PAGE..3 * PAGE].map(|bytes| protect(&block.bytes(bytes), &block.0, true).expect("whole pages"));
    assert_eq!(block.read(PAGE + 1), 0);
    let text = "reads pinned memory that a copy from the device has yet to write: byte 1 of 8192";
    assert_eq!(take_touches().0, [format!("the host {text}")]);
    run(Some(&first), || block.write(5, 5));
    run(Some(&second), || block.write(PAGE, 6));
    assert_eq!((block.read(5), block.read(PAGE), take_touches()), (5, 6, (vec![], 0)));
}

#[test]
fn two_copies_of_a_page_guard_it_until_both_have_run() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let [first, second] =
        [0..64, 64..128].map(|bytes| protect(&block.bytes(bytes), &block.0, false).expect("whole pages"));
    run(Some(&first), || {});
    block.write(70, 1);
    let (touches, _) = take_touches();
    assert_eq!(touches.len(), 1);
    assert!(touches[0].ends_with("byte 6 of 64"), "{touches:?}");
    run(Some(&second), || {});
    assert_eq!(*pages(), BTreeMap::new());
}

#[test]
fn neighbours_of_a_copy_are_not_reported() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let ticket = protect(&block.bytes(0..64), &block.0, true).expect("whole pages");
    block.write(64, 1);
    assert_eq!((block.read(64), take_touches()), (1, (vec![], 0)));
    run(Some(&ticket), || {});
    let inner = block.bytes(10..20);
    assert!(protect(&inner, &inner, true).is_none(), "registered memory without a whole page");
}

#[test]
fn work_of_the_stand_in_may_touch_what_other_copies_guard() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let ticket = protect(&block.bytes(0..64), &block.0, true).expect("whole pages");
    run(None, || block.write(3, 3));
    assert_eq!(take_touches(), (vec![], 0));
    run(Some(&ticket), || {});
}

#[test]
fn another_fault_goes_to_the_handler_that_was_there_before() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    // A child, because the fault ends it. It is this process's copy: it allocates nothing.
    // SAFETY: the child only faults.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: protecting a page of a mapping, and touching it, which ends the child.
        unsafe {
            libc::mprotect(block.0.start as *mut libc::c_void, PAGE, libc::PROT_NONE);
            (block.0.start as *mut u8).write_volatile(1);
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: the child of above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
}
