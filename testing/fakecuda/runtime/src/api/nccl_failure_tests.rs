//! Tests of what goes wrong between NCCL's ranks, and of what NCCL refuses.

use std::ptr::null;

use super::captures::{cudaStreamBeginCapture, cudaStreamEndCapture};
use super::control::fakecuda_set_pace;
use super::device::cudaSetDevice;
use super::nccl::{Config, ncclCommAbort, ncclCommDestroy, ncclCommFinalize, ncclCommInitRank, ncclGetLastError};
use super::nccl::{ncclCommInitAll, ncclCommInitRankConfig, ncclCommShrink, ncclGetErrorString};
use super::nccl_calls::{
    ncclAllReduce, ncclBroadcast, ncclGroupEnd, ncclGroupStart, ncclRecv, ncclRedOpCreatePreMulSum, ncclRedOpDestroy,
    ncclSend,
};
use super::nccl_tests::{
    INT32, SUM, alone, async_error, count, from_device, id, in_processes, join, join_all, new_stream, notes, on_device,
    text,
};
use super::streams::{cudaStreamQuery, cudaStreamSynchronize};

const UNHANDLED_CUDA: i32 = 1;
const INVALID_ARGUMENT: i32 = 4;
const INVALID_USAGE: i32 = 5;
const REMOTE: i32 = 6;
const IN_PROGRESS: i32 = 7;
const NOT_READY: i32 = 600;

#[test]
fn a_rank_whose_process_ends_is_an_error_of_the_others_and_no_hang() {
    let name = "api::nccl_failure_tests::a_rank_whose_process_ends_is_an_error_of_the_others_and_no_hang";
    // With a third rank, that one might find it first, and the call itself would fail here.
    in_processes(name, &[true, false], |rank, id| {
        let communicator = join(id, rank, 2);
        let (stream, own) = (new_stream(), on_device(&[rank as i32]));
        assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, communicator, stream), 0);
        assert_eq!((cudaStreamSynchronize(stream), from_device(own, 1)), (0, vec![1]));
        if rank == 1 {
            // SAFETY: ends this process without any of its own doing.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, communicator, stream), 0);
        assert_eq!((cudaStreamSynchronize(stream), async_error(communicator)), (0, REMOTE));
        assert_eq!((from_device(own, 1), count("nccl ranks that ended")), (vec![1], 1), "nothing was written");
        assert!(notes().contains("the process of rank 1 has ended"), "{}", notes());
        assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, communicator, stream), REMOTE);
        assert!(text(ncclGetLastError(communicator)).contains("the process of rank 1 has ended"));
        assert_eq!((ncclCommDestroy(communicator), ncclCommAbort(communicator)), (REMOTE, 0));
    });
}

#[test]
fn a_rank_that_ends_before_all_have_come_ends_the_others_wait() {
    let name = "api::nccl_failure_tests::a_rank_that_ends_before_all_have_come_ends_the_others_wait";
    in_processes(name, &[false, true], |rank, id| {
        let (mut own, config) = (0, Config::of(rank as i32));
        assert_eq!(cudaSetDevice(rank as i32), 0);
        // Rank 0 does not block, and ends. The third rank never comes.
        // SAFETY: valid for writes and reads.
        let code = unsafe { ncclCommInitRankConfig(&raw mut own, 3, id, rank as i32, &raw const config) };
        assert_eq!((code, own != 0), if rank == 0 { (IN_PROGRESS, true) } else { (REMOTE, false) });
        if rank == 0 {
            // SAFETY: ends this process without any of its own doing.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
    });
}

#[test]
fn a_collective_in_a_capture_is_refused_and_those_after_it_still_meet() {
    const CAPTURE_INVALIDATED: i32 = 901;
    alone("api::nccl_failure_tests::a_collective_in_a_capture_is_refused_and_those_after_it_still_meet", || {
        let (all, mut graph) = (join_all(1), 0);
        let (stream, own) = (new_stream(), on_device(&[7]));
        let reduce = || ncclAllReduce(own, own, 1, INT32, SUM, all[0], stream);
        assert_eq!((cudaStreamBeginCapture(stream, 0), reduce()), (0, UNHANDLED_CUDA));
        // SAFETY: valid for writes.
        assert_eq!((unsafe { cudaStreamEndCapture(stream, &raw mut graph) }, graph), (CAPTURE_INVALIDATED, 0));
        assert!(notes().contains("ncclDevKernel_AllReduce is refused"), "{}", notes());
        assert_eq!((reduce(), cudaStreamSynchronize(stream), from_device(own, 1)), (0, 0, vec![7]));
        assert_eq!(count("nccl AllReduce"), 1);
    });
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_until_the_others_abort() {
    alone("api::nccl_failure_tests::a_rank_that_does_not_come_is_waited_for_until_the_others_abort", || {
        for pace in 0..3 {
            fakecuda_set_pace(pace, 1);
            let all = join_all(2);
            assert_eq!(cudaSetDevice(0), 0);
            let (stream, own) = (new_stream(), on_device(&[7]));
            assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, all[0], stream), 0);
            std::thread::scope(|scope| {
                let waits = scope.spawn(move || cudaStreamSynchronize(stream));
                // The other device is not held up meanwhile, nor is the abort.
                assert_eq!(cudaSetDevice(1), 0);
                assert_eq!(from_device(on_device(&[5]), 1), [5]);
                assert_eq!((cudaStreamQuery(stream), async_error(all[0])), (NOT_READY, 0));
                assert_eq!(ncclCommAbort(all[0]), 0);
                assert_eq!(waits.join().unwrap(), 0);
            });
            assert_eq!((cudaStreamQuery(stream), from_device(own, 1)), (0, vec![7]));
            assert_eq!((ncclCommAbort(all[0]), ncclCommAbort(all[1])), (INVALID_ARGUMENT, 0));
        }
    });
}

#[test]
fn a_send_without_its_receive_does_not_end() {
    alone("api::nccl_failure_tests::a_send_without_its_receive_does_not_end", || {
        for pace in 0..2 {
            fakecuda_set_pace(pace, 1);
            let all = join_all(2);
            let [(to, sent), (from, received)] = [0, 1].map(|device| {
                assert_eq!(cudaSetDevice(device), 0);
                (new_stream(), on_device(&[device + 8]))
            });
            assert_eq!(ncclSend(sent, 1, INT32, 1, all[0], to), 0);
            assert_eq!(cudaStreamQuery(to), NOT_READY);
            // The receive's host waits; that of the lazy send does not.
            assert_eq!(ncclRecv(received, 1, INT32, 0, all[1], from), 0);
            assert_eq!((cudaStreamSynchronize(from), from_device(received, 1)), (0, vec![8]));
            assert_eq!([ncclCommDestroy(all[0]), ncclCommDestroy(all[1])], [0, 0]);
        }
    });
}

#[test]
fn ranks_that_do_not_agree_are_told_both_sides() {
    alone("api::nccl_failure_tests::ranks_that_do_not_agree_are_told_both_sides", || {
        type Call = fn(usize, usize, usize, usize) -> i32;
        let cases: [(Call, &str); 4] = [
            (|rank, own, all, to| ncclAllReduce(own, own, 1 + rank, INT32, SUM, all, to), "AllReduce of 2 Int32, sum"),
            (
                |rank, own, all, to| ncclAllReduce(own, own, 1, INT32, rank as i32, all, to),
                "AllReduce of 1 Int32, prod",
            ),
            (|rank, own, all, to| ncclBroadcast(own, own, 1, INT32, rank as i32, all, to), "of 1 Int32, root 1"),
            (
                |rank, own, all, to| match rank {
                    0 => ncclSend(own, 2, INT32, 1, all, to),
                    _ => ncclRecv(own, 1, INT32, 0, all, to),
                },
                "it sends 2 Int32, and 1 Int32 are received",
            ),
        ];
        for (number, (call, note)) in cases.into_iter().enumerate() {
            let all = join_all(2);
            let own = [0, 1].map(|device| {
                assert_eq!(cudaSetDevice(device), 0);
                (new_stream(), on_device(&[4, 4]))
            });
            for rank in 0..2 {
                assert_eq!(call(rank, own[rank].1, all[rank], own[rank].0), 0);
            }
            for rank in 0..2 {
                let (stream, address) = own[rank];
                assert_eq!((cudaStreamSynchronize(stream), async_error(all[rank])), (0, INVALID_USAGE));
                assert_eq!(from_device(address, 2), [4, 4]);
            }
            assert!(notes().lines().last().unwrap().contains(note), "{}", notes());
            assert_eq!(count("mismatched collectives"), 2 * number as u64 + 2);
            assert_eq!([ncclCommAbort(all[0]), ncclCommAbort(all[1])], [0, 0]);
        }
    });
}

#[test]
fn a_communicator_that_does_not_block_is_in_progress_until_all_have_come() {
    alone("api::nccl_failure_tests::a_communicator_that_does_not_block_is_in_progress_until_all_have_come", || {
        let (mut all, id, config) = ([0; 2], id(), Config::of(0));
        let mut begin = |rank: usize| {
            assert_eq!(cudaSetDevice(rank as i32), 0);
            // SAFETY: valid for writes and reads.
            let code = unsafe { ncclCommInitRankConfig(&raw mut all[rank], 2, id, rank as i32, &raw const config) };
            (code, all[rank])
        };
        let (code, first) = begin(0);
        let (stream, own) = (new_stream(), on_device(&[1]));
        assert_eq!((code, async_error(first)), (IN_PROGRESS, IN_PROGRESS));
        assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, first, stream), INVALID_ARGUMENT);
        let (code, second) = begin(1);
        assert_eq!((code, async_error(first)), (0, 0));
        assert_eq!(cudaSetDevice(0), 0);
        assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, first, stream), 0);
        // What was issued is not done.
        assert_eq!((ncclCommFinalize(first), async_error(first)), (IN_PROGRESS, IN_PROGRESS));
        assert_eq!(cudaSetDevice(1), 0);
        let other = on_device(&[2]);
        assert_eq!(ncclAllReduce(other, other, 1, INT32, SUM, second, new_stream()), 0);
        assert_eq!(cudaStreamSynchronize(stream), 0);
        assert_eq!((from_device(own, 1), async_error(first)), (vec![3], 0));
        assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, first, stream), INVALID_ARGUMENT, "it was finalized");
        assert_eq!((ncclCommFinalize(first), ncclCommDestroy(first)), (INVALID_ARGUMENT, 0));
        assert_eq!((ncclCommDestroy(second), ncclCommDestroy(second), ncclCommDestroy(0)), (0, INVALID_ARGUMENT, 0));
    });
}

#[test]
fn a_child_of_a_process_with_collectives_under_way_finds_the_world_unlocked() {
    alone("api::nccl_failure_tests::a_child_of_a_process_with_collectives_under_way_finds_the_world_unlocked", || {
        let all = join_all(2);
        assert_eq!(cudaSetDevice(0), 0);
        let (stream, own) = (new_stream(), on_device(&[1]));
        assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, all[0], stream), 0);
        for _ in 0..300 {
            // SAFETY: the child calls nothing that a lock of another thread than the world's could hold up.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let is_waiting = cudaStreamQuery(stream) == NOT_READY;
                // SAFETY: ends the child without any of the parent's doing.
                unsafe { libc::_exit(i32::from(!is_waiting)) };
            }
            let mut status = -1;
            // SAFETY: valid for writes.
            assert_eq!((unsafe { libc::waitpid(child, &raw mut status, 0) }, status), (child, 0));
        }
        assert_eq!([ncclCommAbort(all[0]), ncclCommAbort(all[1])], [0, 0]);
    });
}

#[test]
fn what_is_wrong_gets_the_code_of_nccl() {
    alone("api::nccl_failure_tests::what_is_wrong_gets_the_code_of_nccl", || {
        let all = join_all(2);
        assert_eq!(cudaSetDevice(1), 0);
        let elsewhere = (new_stream(), on_device(&[1]));
        assert_eq!(cudaSetDevice(0), 0);
        let (stream, own, host) = (new_stream(), on_device(&[1]), [1]);
        let reduce = |own, count, data, operator, all| ncclAllReduce(own, own, count, data, operator, all, stream);
        assert_eq!(reduce(own, 1, INT32, SUM, 77), INVALID_ARGUMENT);
        assert_eq!(reduce(own, 1, 12, SUM, all[0]), INVALID_ARGUMENT);
        assert_eq!(reduce(own, 1, 10, SUM, all[0]), INVALID_ARGUMENT, "8-bit floating-point numbers");
        assert_eq!(reduce(own, 1, INT32, 9, all[0]), INVALID_ARGUMENT);
        assert_eq!(reduce(own, 1000, INT32, SUM, all[0]), INVALID_ARGUMENT, "more than the block has");
        assert_eq!(reduce(own, usize::MAX, INT32, SUM, all[0]), INVALID_ARGUMENT);
        assert_eq!(reduce(0, 1, INT32, SUM, all[0]), INVALID_ARGUMENT);
        assert_eq!(reduce(host.as_ptr() as usize, 1, INT32, SUM, all[0]), INVALID_ARGUMENT);
        assert_eq!(reduce(elsewhere.1, 1, INT32, SUM, all[0]), INVALID_ARGUMENT);
        assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, all[0], elsewhere.0), UNHANDLED_CUDA);
        assert_eq!(ncclBroadcast(own, own, 1, INT32, 2, all[0], stream), INVALID_ARGUMENT);
        assert_eq!(ncclSend(own, 1, INT32, -1, all[0], stream), INVALID_ARGUMENT);
        assert_eq!(ncclGroupEnd(), INVALID_USAGE);
        ncclGroupStart();
        assert_eq!(reduce(own, 1, INT32, 9, all[0]), INVALID_ARGUMENT);
        assert_eq!((reduce(own, 1, INT32, SUM, all[0]), ncclGroupEnd()), (0, INVALID_ARGUMENT));
        assert_eq!((count("nccl AllReduce"), cudaStreamQuery(stream)), (0, 0), "nothing began");
        let (mut operator, half) = (0, 0.5f32);
        // SAFETY: valid for writes and reads.
        let code = unsafe { ncclRedOpCreatePreMulSum(&raw mut operator, &raw const half as usize, 7, 1, all[0]) };
        assert_eq!((code, operator), (0, 5));
        assert_eq!(reduce(own, 1, INT32, operator, all[0]), INVALID_ARGUMENT, "of another type");
        assert_eq!([ncclRedOpDestroy(operator, all[0]), ncclRedOpDestroy(SUM, all[0])], [0, INVALID_ARGUMENT]);
        assert_eq!(text(ncclGetErrorString(REMOTE)), "remote process exited or there was a network error");
        let (mut new, same) = ([0; 2], [1, 1]);
        // SAFETY: valid for writes and reads; ids are only read.
        unsafe {
            assert_eq!(ncclCommInitRank(&raw mut new[0], 2, id(), 2), INVALID_ARGUMENT);
            assert_eq!(ncclCommInitRank(std::ptr::null_mut(), 1, id(), 0), INVALID_ARGUMENT);
            assert_eq!(ncclCommInitAll(new.as_mut_ptr(), 2, same.as_ptr()), INVALID_USAGE, "one device twice");
            assert_eq!(ncclCommShrink(all[0], [0].as_ptr(), 1, &raw mut new[0], null(), 0), INVALID_ARGUMENT);
        }
        assert!(text(ncclGetLastError(0)).contains("left out"));
    });
}
