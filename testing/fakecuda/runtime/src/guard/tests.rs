use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::*;
use crate::clock::Access;
use crate::operation::{Kind, Operation, Work};
use crate::progress::{Order, Pace};
use crate::waiting::Locked;
use crate::world::World;

/// The handler and its touches belong to the process: one test at a time.
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
fn a_copy_to_the_device_may_be_read_and_not_written_until_the_host_has_waited() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(2);
    block.write(100, 7);
    let ticket = protect(&block.bytes(0..5000), &block.0, false).expect("whole pages");
    assert_eq!((block.read(100), take_touches()), (7, (vec![], 0)));
    block.write(100, 8);
    block.write(4500, 9);
    let text = "the host writes pinned memory that a copy to the device still reads: byte 100 of 5000";
    assert_eq!(take_touches(), (vec![text.to_owned()], 0), "one report per copy");
    let mut seen = (0, 0);
    run(std::slice::from_ref(&ticket), || seen = (block.read(100), block.read(4500)));
    assert_eq!(seen, (8, 9));
    release(&ticket);
    block.write(100, 1);
    assert_eq!(take_touches(), (vec![], 0), "the host has waited");
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
    run(std::slice::from_ref(&first), || block.write(5, 5));
    run(std::slice::from_ref(&second), || block.write(PAGE, 6));
    [first, second].iter().for_each(release);
    assert_eq!((block.read(5), block.read(PAGE), take_touches()), (5, 6, (vec![], 0)));
}

#[test]
fn two_copies_of_a_page_guard_it_until_the_host_has_waited_for_both() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let [first, second] =
        [0..64, 64..128].map(|bytes| protect(&block.bytes(bytes), &block.0, false).expect("whole pages"));
    release(&first);
    block.write(70, 1);
    let (touches, _) = take_touches();
    assert_eq!(touches.len(), 1);
    assert!(touches[0].ends_with("byte 6 of 64"), "{touches:?}");
    release(&second);
    assert_eq!(*pages(), BTreeMap::new());
}

#[test]
fn what_a_copy_to_the_device_reads_may_be_read_beside_one_from_the_device() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let to_device = protect(&block.bytes(0..64), &block.0, false).expect("whole pages");
    let from_device = protect(&block.bytes(64..128), &block.0, true).expect("whole pages");
    assert_eq!((block.read(10), take_touches()), (0, (vec![], 0)));
    [to_device, from_device].iter().for_each(release);
}

#[test]
fn neighbours_of_a_copy_are_not_reported() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let ticket = protect(&block.bytes(0..64), &block.0, true).expect("whole pages");
    block.write(64, 1);
    assert_eq!((block.read(64), take_touches()), (1, (vec![], 0)));
    release(&ticket);
    let inner = block.bytes(10..20);
    assert!(protect(&inner, &inner, true).is_none(), "registered memory without a whole page");
}

#[test]
fn work_of_the_stand_in_may_touch_what_other_copies_guard() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let ticket = protect(&block.bytes(0..64), &block.0, true).expect("whole pages");
    run(&[], || block.write(3, 3));
    assert_eq!(take_touches(), (vec![], 0));
    release(&ticket);
}

#[test]
fn another_fault_goes_to_the_handler_that_was_there_before() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    // A forked child, because the fault ends it. After a fork it must not allocate.
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

/// A world whose pinned memory is this block, and the stream of a copy from the device into it.
fn world_with(block: &Block, pace: Pace) -> (Locked, u64) {
    let mut world = World::of_a_test();
    world.progress.set_pace(pace);
    world.guards = true;
    world.pinned.insert(block.0.start, block.0.len());
    let stream = world.progress.add_stream(0, Order::NonBlocking);
    let accesses = vec![Access { bytes: block.bytes(0..PAGE), writes: true }];
    let at = block.0.start;
    // SAFETY: a byte of the block; the guard lets copies write it.
    let work: Work = Arc::new(move || unsafe { (at as *mut u8).write_volatile(7) });
    let copy = Operation { accesses, ..Operation::new(Kind::Copy(PAGE), "copy", work) };
    world.issue(stream, copy).expect("a stream");
    (world, stream)
}

#[test]
fn a_touch_before_the_host_has_waited_is_reported_whenever_the_copy_runs() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let paces = [Pace::Eager, Pace::Lazy].into_iter().chain((0..50).map(Pace::Random));
    for pace in paces {
        let block = Block::new(1);
        let (mut world, stream) = world_with(&block, pace);
        world.progress.tick();
        block.read(0);
        assert_eq!(take_touches().0.len(), 1, "{pace:?}");
        world.synchronize(stream).expect("a stream");
        assert_eq!((block.read(0), take_touches()), (7, (vec![], 0)), "{pace:?}");

        let (mut world, stream) = world_with(&block, pace);
        let event = world.progress.add_event(false);
        world.record_event(event, stream, false).expect("both");
        assert!(world.synchronize_event(event));
        assert_eq!((block.read(0), take_touches()), (7, (vec![], 0)), "{pace:?}");
    }
    assert_eq!(*pages(), BTreeMap::new());
}

#[test]
fn a_host_function_may_touch_what_was_copied_before_it() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let (mut world, stream) = world_with(&block, Pace::Lazy);
    let at = block.0.start;
    // SAFETY: a byte of the block.
    let function: Work = Arc::new(move || assert_eq!(unsafe { (at as *const u8).read_volatile() }, 7));
    world.issue(stream, Operation::new(Kind::Host, "function", function)).expect("a stream");
    world.synchronize(stream).expect("a stream");
    assert_eq!(take_touches(), (vec![], 0));
}

#[test]
fn the_copies_of_a_stream_that_has_ended_are_done_when_the_host_has_waited_for_everything() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let block = Block::new(1);
    let (mut world, stream) = world_with(&block, Pace::Lazy);
    assert!(world.progress.end_stream(stream));
    world.synchronize_all();
    assert_eq!((block.read(0), take_touches()), (7, (vec![], 0)));
}
