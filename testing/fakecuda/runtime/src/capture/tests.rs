use std::sync::Arc;

use super::*;
use crate::operation::{Kind, Operation};

const MAIN: u64 = 1;
const SIDE: u64 = 2;
const OTHER: u64 = 3;
const EVENT: u64 = 9;
const THREAD: i32 = 1;

fn begun(mode: Mode) -> Captures {
    let mut captures = Captures::default();
    captures.begin(MAIN, mode, THREAD, 16).unwrap();
    captures
}

fn add(captures: &mut Captures, stream: u64, number: usize) {
    let operation = Operation::new(Kind::Kernel, "kernel", Arc::new(|| {}));
    captures.add(stream, number, Step::Run(operation)).expect("a capture").unwrap();
}

fn wait(captures: &mut Captures, stream: u64, event: u64) -> Result<Wait, CudaError> {
    captures.wait(stream, event, true, false)
}

fn dependencies(graph: &Graph) -> Vec<&[usize]> {
    graph.nodes.iter().map(|node| node.dependencies.as_slice()).collect()
}

#[test]
fn a_fork_and_a_join_are_dependencies() {
    let mut captures = begun(Mode::Global);
    add(&mut captures, MAIN, 1);
    assert_eq!(captures.record(EVENT, MAIN), Ok(true));
    add(&mut captures, MAIN, 2);
    assert_eq!(wait(&mut captures, SIDE, EVENT), Ok(Wait::Captured));
    add(&mut captures, SIDE, 3);
    assert_eq!(captures.record(EVENT, SIDE), Ok(true));
    assert_eq!(wait(&mut captures, MAIN, EVENT), Ok(Wait::Captured));
    assert_eq!(captures.of(MAIN).unwrap().tips(MAIN), [2, 3]);
    add(&mut captures, MAIN, 4);
    let (handle, graph) = captures.end(MAIN, THREAD).unwrap();
    assert_eq!((handle, dependencies(&graph)), (16, vec![&[][..], &[1], &[1], &[2, 3]]));
    assert!(captures.of(MAIN).is_none() && captures.of(SIDE).is_none());
}

#[test]
fn a_fork_that_is_not_joined_fails_at_the_end_and_leaves_no_capture() {
    let mut captures = begun(Mode::Global);
    captures.record(EVENT, MAIN).unwrap();
    wait(&mut captures, SIDE, EVENT).unwrap();
    add(&mut captures, SIDE, 1);
    assert_eq!(captures.end(MAIN, THREAD).err(), Some(CudaError::CAPTURE_UNJOINED));
    assert!(captures.of(SIDE).is_none());
    assert!(captures.begin(MAIN, Mode::Global, THREAD, 32).is_ok() && captures.end(MAIN, THREAD).is_ok());
}

#[test]
fn only_the_stream_and_the_thread_that_began_a_capture_end_it() {
    let mut captures = begun(Mode::ThreadLocal);
    assert_eq!(captures.end(SIDE, THREAD).err(), Some(CudaError::ILLEGAL_STATE));
    captures.record(EVENT, MAIN).unwrap();
    wait(&mut captures, SIDE, EVENT).unwrap();
    assert_eq!(captures.end(SIDE, THREAD).err(), Some(CudaError::CAPTURE_UNMATCHED));
    assert_eq!(captures.end(MAIN, THREAD).err(), Some(CudaError::CAPTURE_INVALIDATED));
    let mut captures = begun(Mode::Global);
    assert_eq!(captures.end(MAIN, THREAD + 1).err(), Some(CudaError::CAPTURE_WRONG_THREAD));
    assert_eq!(captures.end(MAIN, THREAD).err(), Some(CudaError::ILLEGAL_STATE), "it is over, as on a device");
    assert!(begun(Mode::Relaxed).end(MAIN, THREAD + 1).is_ok());
}

#[test]
fn a_stream_is_in_one_capture_at_a_time() {
    let mut captures = begun(Mode::Global);
    assert_eq!(captures.begin(MAIN, Mode::Global, THREAD, 32), Err(CudaError::ILLEGAL_STATE));
    assert!(captures.end(MAIN, THREAD).is_ok(), "the second begin has not hurt it");
}

#[test]
fn what_is_refused_invalidates_and_everything_after_it_says_so() {
    let mut captures = begun(Mode::Global);
    assert_eq!(captures.refuse(SIDE, CudaError::CAPTURE_UNSUPPORTED), Ok(()));
    assert_eq!(captures.refuse(MAIN, CudaError::CAPTURE_UNSUPPORTED), Err(CudaError::CAPTURE_UNSUPPORTED));
    assert_eq!(captures.refuse(MAIN, CudaError::CAPTURE_UNSUPPORTED), Err(CudaError::CAPTURE_INVALIDATED));
    assert_eq!(captures.add(MAIN, 1, Step::Record(EVENT)), Some(Err(CudaError::CAPTURE_INVALIDATED)));
    assert_eq!(captures.record(EVENT, MAIN), Err(CudaError::CAPTURE_INVALIDATED));
    assert_eq!(captures.end(MAIN, THREAD).err(), Some(CudaError::CAPTURE_INVALIDATED));
    assert_eq!(captures.refuse(MAIN, CudaError::CAPTURE_UNSUPPORTED), Ok(()));
}

#[test]
fn a_captured_event_cannot_be_waited_for_by_the_host_until_it_is_recorded_elsewhere() {
    let mut captures = begun(Mode::Global);
    captures.record(EVENT, MAIN).unwrap();
    assert_eq!(captures.refuse_event(EVENT + 1), Ok(()));
    assert_eq!(captures.refuse_event(EVENT), Err(CudaError::CAPTURED_EVENT));
    assert_eq!(captures.end(MAIN, THREAD).err(), Some(CudaError::CAPTURE_INVALIDATED));
    assert_eq!(captures.refuse_event(EVENT), Err(CudaError::CAPTURED_EVENT), "also when the capture is over");
    assert_eq!(captures.record(EVENT, MAIN), Ok(false));
    assert_eq!(captures.refuse_event(EVENT), Ok(()));
}

#[test]
fn events_do_not_cross_the_border_of_a_capture() {
    let mut captures = begun(Mode::Global);
    assert_eq!(wait(&mut captures, OTHER, EVENT), Ok(Wait::Uncaptured));
    assert_eq!(captures.wait(MAIN, EVENT, false, false), Ok(Wait::Captured), "one that was never recorded");
    assert_eq!(wait(&mut captures, MAIN, EVENT), Err(CudaError::CAPTURE_ISOLATION));
    assert_eq!(captures.end(MAIN, THREAD).err(), Some(CudaError::CAPTURE_INVALIDATED));
    let mut captures = begun(Mode::Global);
    captures.record(EVENT, MAIN).unwrap();
    assert_eq!(captures.wait(OTHER, EVENT, true, true), Err(CudaError::CAPTURE_IMPLICIT), "the legacy stream");
    assert!(captures.end(MAIN, THREAD).is_err());
    assert_eq!(wait(&mut captures, OTHER, EVENT), Err(CudaError::CAPTURED_EVENT), "of a capture that is over");
    captures.begin(MAIN, Mode::Global, THREAD, 32).unwrap();
    assert_eq!(wait(&mut captures, MAIN, EVENT), Err(CudaError::CAPTURE_ISOLATION));
}

#[test]
fn two_captures_do_not_merge() {
    let mut captures = begun(Mode::Global);
    captures.begin(OTHER, Mode::Global, THREAD, 32).unwrap();
    captures.record(EVENT, MAIN).unwrap();
    assert_eq!(wait(&mut captures, OTHER, EVENT), Err(CudaError::CAPTURE_MERGE));
    for stream in [MAIN, OTHER] {
        assert_eq!(captures.end(stream, THREAD).err(), Some(CudaError::CAPTURE_INVALIDATED));
    }
}

#[test]
fn the_modes_of_a_capture_and_of_a_thread_say_what_is_unsafe() {
    use Mode::{Global, Relaxed, ThreadLocal};
    // By the capture's mode, whether it is the thread's own, and the thread's mode: the table of
    // `cudaThreadExchangeStreamCaptureMode`.
    let refused = [(Global, true, Global), (Global, true, ThreadLocal), (Global, false, Global)];
    let refused = [&refused[..], &[(ThreadLocal, true, Global), (ThreadLocal, true, ThreadLocal)]].concat();
    for capture in [Global, ThreadLocal, Relaxed] {
        for is_own in [true, false] {
            for mode in [Global, ThreadLocal, Relaxed] {
                let mut captures = begun(capture);
                let thread = Thread { number: if is_own { THREAD } else { THREAD + 1 }, mode };
                let expected = refused.contains(&(capture, is_own, mode));
                assert_eq!(captures.refuse_unsafe(thread).is_err(), expected, "{capture:?} {is_own} {mode:?}");
                assert_eq!(captures.end(MAIN, THREAD).is_err(), expected);
            }
        }
    }
}

#[test]
fn a_graph_that_is_launched_into_a_capture_keeps_its_order() {
    let mut inner = begun(Mode::Global);
    add(&mut inner, MAIN, 1);
    add(&mut inner, MAIN, 2);
    let (_, inner) = inner.end(MAIN, THREAD).unwrap();
    let mut captures = begun(Mode::Global);
    add(&mut captures, MAIN, 10);
    let mut last = 10;
    let number = || {
        last += 1;
        last
    };
    captures.add_graph(MAIN, &inner, number).expect("a capture").unwrap();
    add(&mut captures, MAIN, 20);
    let (_, graph) = captures.end(MAIN, THREAD).unwrap();
    assert_eq!(dependencies(&graph), [&[][..], &[10], &[11], &[12]]);
}
