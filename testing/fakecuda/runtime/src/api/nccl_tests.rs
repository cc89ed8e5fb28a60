//! Tests of NCCL's functions with ranks that are processes, and with ranks that are threads.
//!
//! Each test runs itself again in processes with four devices: the world of this one is shared with other tests.

use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use super::control::{fakecuda_counts, fakecuda_find_races, fakecuda_notes, fakecuda_set_pace};
use super::device::cudaSetDevice;
use super::events::{cudaEventCreate, cudaEventRecord};
use super::memory::{cudaMalloc, cudaMemcpy, cudaMemcpyAsync};
use super::nccl::{UniqueId, ncclCommDestroy, ncclCommGetAsyncError, ncclCommInitAll, ncclCommInitRank};
use super::nccl::{ncclCommCount, ncclCommShrink, ncclCommSplit, ncclCommUserRank, ncclGetUniqueId};
use super::nccl_calls::{
    ncclAllGather, ncclAllReduce, ncclAlltoAll, ncclBroadcast, ncclGather, ncclGroupEnd, ncclGroupStart, ncclRecv,
    ncclReduce, ncclReduceScatter, ncclScatter, ncclSend,
};
use super::streams::{cudaStreamCreateWithFlags, cudaStreamQuery, cudaStreamSynchronize, cudaStreamWaitEvent};

pub const INT32: i32 = 2;
pub const SUM: i32 = 0;
const RANK: &str = "FAKECUDA_TEST_RANK";
const ID: &str = "FAKECUDA_TEST_ID";
/// How a process ends that has run its rank: one that ran no test at all would end with 0.
const DONE: i32 = 77;
/// Far more than any test takes: one that hangs is ended, and fails.
const LIMIT: Duration = Duration::from_secs(120);

pub fn text(text: *const std::ffi::c_char) -> String {
    // SAFETY: each of the functions returns a text that ends with a zero byte.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

pub fn count(what: &str) -> u64 {
    let counts = text(fakecuda_counts());
    let line = counts.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(": "));
    line.map_or(0, |number| number.parse().unwrap())
}

pub fn notes() -> String {
    text(fakecuda_notes())
}

pub fn id() -> UniqueId {
    let mut id = std::mem::MaybeUninit::<UniqueId>::uninit();
    // SAFETY: valid for writes, and written when it returns 0.
    unsafe {
        assert_eq!(ncclGetUniqueId(id.as_mut_ptr()), 0);
        id.assume_init()
    }
}

fn ended(mut child: Child, since: Instant) -> ExitStatus {
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if since.elapsed() > LIMIT {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs a test's ranks in processes of their own. `test`: the caller's name; `succeed`: which of them do.
pub fn in_processes(test: &str, succeed: &[bool], rank: impl Fn(usize, UniqueId)) {
    if let (Ok(own), Ok(path)) = (std::env::var(RANK), std::env::var(ID)) {
        let mut id = [0; 128];
        id[..path.len()].copy_from_slice(path.as_bytes());
        // SAFETY: an id is 128 bytes.
        rank(own.parse().unwrap(), unsafe { std::mem::transmute::<[u8; 128], UniqueId>(id) });
        std::process::exit(DONE);
    }
    // SAFETY: as above.
    let bytes = unsafe { std::mem::transmute::<UniqueId, [u8; 128]>(id()) };
    let path = text(bytes.as_ptr().cast());
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
        command.env(RANK, rank.to_string()).env(ID, &path).env("FAKECUDA_DEVICES", "4");
        command.env("FAKECUDA_BYTES", (64 << 20).to_string()).env_remove("CUDA_VISIBLE_DEVICES");
        command.stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    let (children, since): (Vec<Child>, _) = ((0..succeed.len()).map(start).collect(), Instant::now());
    let ends: Vec<bool> = children.into_iter().map(|child| ended(child, since).code() == Some(DONE)).collect();
    assert_eq!(ends, succeed);
    assert!(!std::fs::exists(path).unwrap(), "the file is removed");
}

/// Runs a test in a process of its own.
pub fn alone(test: &str, own: impl Fn()) {
    in_processes(test, &[true], |_, _| own());
}

/// Numbers on the thread's device.
pub fn on_device(numbers: &[i32]) -> usize {
    let mut address = 0;
    // SAFETY: valid for writes.
    assert_eq!(unsafe { cudaMalloc(&raw mut address, size_of_val(numbers)) }, 0);
    assert_eq!(cudaMemcpy(address, numbers.as_ptr() as usize, size_of_val(numbers), 1), 0);
    address
}

pub fn from_device(address: usize, count: usize) -> Vec<i32> {
    let mut numbers = vec![0; count];
    assert_eq!(cudaMemcpy(numbers.as_mut_ptr() as usize, address, size_of_val(&numbers[..]), 2), 0);
    numbers
}

pub fn new_stream() -> usize {
    let mut stream = 0;
    // SAFETY: valid for writes.
    assert_eq!(unsafe { cudaStreamCreateWithFlags(&raw mut stream, 1) }, 0);
    stream
}

pub fn async_error(communicator: usize) -> i32 {
    let mut error = -1;
    // SAFETY: valid for writes.
    assert_eq!(unsafe { ncclCommGetAsyncError(communicator, &raw mut error) }, 0);
    error
}

/// A rank of a communicator, on the device of its number.
pub fn join(id: UniqueId, rank: usize, ranks: usize) -> usize {
    let mut communicator = 0;
    assert_eq!(cudaSetDevice(rank as i32), 0);
    // SAFETY: valid for writes.
    assert_eq!(unsafe { ncclCommInitRank(&raw mut communicator, ranks as i32, id, rank as i32) }, 0);
    communicator
}

/// One communicator for each of the first devices.
pub fn join_all(ranks: usize) -> Vec<usize> {
    let mut all = vec![0; ranks];
    // SAFETY: valid for so many writes.
    assert_eq!(unsafe { ncclCommInitAll(all.as_mut_ptr(), ranks as i32, std::ptr::null()) }, 0);
    all
}

/// Every collective once, and what it has to give. `n`: ranks.
fn every_collective(communicator: usize, rank: usize, n: usize) {
    let stream = new_stream();
    // Of rank r, block b: 100 r + 10 b + 0 and 1.
    let block = |rank: usize, block: usize| [0, 1].map(|at| (100 * rank + 10 * block + at) as i32);
    let blocks = |rank: usize| (0..n).flat_map(|number| block(rank, number)).collect::<Vec<i32>>();
    let all = |part: &dyn Fn(usize) -> [i32; 2]| (0..n).flat_map(part).collect::<Vec<i32>>();
    let sum = |number| [0, 1].map(|at| (0..n).map(|rank| block(rank, number)[at]).sum::<i32>());
    let unchanged = vec![-1; 2 * n];
    let check = |call: &dyn Fn(usize, usize) -> i32, expected: Vec<i32>| {
        let (send, receive) = (on_device(&blocks(rank)), on_device(&unchanged));
        assert_eq!(call(send, receive), 0);
        assert_eq!(cudaStreamSynchronize(stream), 0);
        let mut whole = unchanged.clone();
        whole[..expected.len()].copy_from_slice(&expected);
        assert_eq!(from_device(receive, 2 * n), whole);
    };
    let root = n - 1;
    let at_root = |numbers: Vec<i32>| if rank == root { numbers } else { vec![] };
    let (c, s, r) = (communicator, stream, root as i32);
    check(&|from, to| ncclAllReduce(from, to, 2, INT32, SUM, c, s), sum(0).to_vec());
    check(&|from, to| ncclReduce(from, to, 2, INT32, SUM, r, c, s), at_root(sum(0).to_vec()));
    check(&|from, to| ncclReduceScatter(from, to, 2, INT32, SUM, c, s), sum(rank).to_vec());
    check(&|from, to| ncclBroadcast(from, to, 2, INT32, r, c, s), block(root, 0).to_vec());
    check(&|from, to| ncclAllGather(from, to, 2, INT32, c, s), all(&|other| block(other, 0)));
    check(&|from, to| ncclAlltoAll(from, to, 2, INT32, c, s), all(&|other| block(other, rank)));
    check(&|from, to| ncclGather(from, to, 2, INT32, r, c, s), at_root(all(&|other| block(other, 0))));
    check(&|from, to| ncclScatter(from, to, 2, INT32, r, c, s), block(root, rank).to_vec());
    let (next, last) = ((rank + 1) % n, (rank + n - 1) % n);
    let ring = |from, to| {
        ncclGroupStart();
        assert_eq!(ncclSend(from, 2, INT32, next as i32, c, s), 0);
        assert_eq!(ncclRecv(to, 2, INT32, last as i32, c, s), 0);
        ncclGroupEnd()
    };
    check(&ring, block(last, 0).to_vec());
    assert_eq!((async_error(c), notes()), (0, String::new()));
}

#[test]
fn what_a_collective_writes_is_computed_and_reading_what_nobody_computed_is_noted() {
    alone("api::nccl_tests::what_a_collective_writes_is_computed_and_reading_what_nobody_computed_is_noted", || {
        let (all, stream, own) = (join_all(1), new_stream(), on_device(&[7]));
        let [mut new, mut unknown] = [0; 2];
        // SAFETY: both are valid for writes.
        unsafe { assert_eq!([cudaMalloc(&raw mut new, 4), cudaMalloc(&raw mut unknown, 4)], [0; 2]) };
        assert_eq!(ncclAllReduce(own, new, 1, INT32, SUM, all[0], stream), 0);
        assert_eq!((cudaStreamSynchronize(stream), from_device(new, 1), notes()), (0, vec![7], String::new()));
        assert_eq!(ncclAllReduce(unknown, new, 1, INT32, SUM, all[0], stream), 0);
        assert_eq!(cudaStreamSynchronize(stream), 0);
        assert!(notes().starts_with("AllReduce reads 4 bytes that were not computed"), "{}", notes());
    });
}

#[test]
fn ranks_that_are_processes_compute_at_every_pace() {
    let name = "api::nccl_tests::ranks_that_are_processes_compute_at_every_pace";
    in_processes(name, &[true; 3], |rank, id| {
        fakecuda_set_pace(rank as i32, 5);
        let communicator = join(id, rank, 3);
        every_collective(communicator, rank, 3);
        assert_eq!((count("nccl AllReduce"), count("bytes nccl AllReduce")), (1, 8));
        assert_eq!(count("kernel ncclDevKernel_SendRecv"), 1, "one launch for a group");
        let contexts = (0..4).map(|device| count(&format!("contexts on device {device}"))).collect::<Vec<_>>();
        assert_eq!(contexts, (0..4).map(|device| u64::from(device == rank)).collect::<Vec<_>>());
        assert_eq!(ncclCommDestroy(communicator), 0);
    });
}

#[test]
fn ranks_that_are_threads_compute_and_split() {
    alone("api::nccl_tests::ranks_that_are_threads_compute_and_split", || {
        for pace in 0..3 {
            fakecuda_set_pace(pace, 11);
            let id = id();
            std::thread::scope(|scope| {
                for rank in 0..4 {
                    scope.spawn(move || {
                        let all = join(id, rank, 4);
                        every_collective(all, rank, 4);
                        let mut part = 0;
                        // Odd and even ranks, in the other order.
                        // SAFETY: valid for writes; without a configuration.
                        let code = unsafe {
                            ncclCommSplit(all, (rank % 2) as i32, -(rank as i32), &raw mut part, std::ptr::null())
                        };
                        assert_eq!((code, place(part)), (0, (1 - rank as i32 / 2, 2)));
                        every_collective(part, 1 - rank / 2, 2);
                        let (mut rest, left_out) = (0, [0, 2]);
                        if rank % 2 == 1 {
                            // SAFETY: as above; there are two.
                            let code = unsafe {
                                ncclCommShrink(all, left_out.as_ptr(), 2, &raw mut rest, std::ptr::null(), 0)
                            };
                            assert_eq!((code, place(rest)), (0, (rank as i32 / 2, 2)));
                            every_collective(rest, rank / 2, 2);
                        }
                        for own in [rest, part, all] {
                            assert_eq!(ncclCommDestroy(own), 0);
                        }
                    });
                }
            });
        }
    });
}

fn place(communicator: usize) -> (i32, i32) {
    let mut place = (-1, -1);
    // SAFETY: both are valid for writes.
    unsafe {
        assert_eq!(ncclCommUserRank(communicator, &raw mut place.0), 0);
        assert_eq!(ncclCommCount(communicator, &raw mut place.1), 0);
    }
    place
}

#[test]
fn a_collective_is_work_of_its_stream_and_the_host_goes_on() {
    alone("api::nccl_tests::a_collective_is_work_of_its_stream_and_the_host_goes_on", || {
        for pace in 0..2 {
            fakecuda_set_pace(pace, 0);
            let all = join_all(2);
            let streams = [0, 1].map(|device| {
                assert_eq!(cudaSetDevice(device), 0);
                (new_stream(), on_device(&[device + 1]))
            });
            let reduce = |rank: usize| {
                let (stream, own) = streams[rank];
                ncclAllReduce(own, own, 1, INT32, SUM, all[rank], stream)
            };
            // Rank 0 alone: nothing has come of it, and what is behind it waits as well.
            assert_eq!((reduce(0), cudaStreamQuery(streams[0].0)), (0, 600));
            assert_eq!((reduce(1), cudaStreamSynchronize(streams[0].0)), (0, 0));
            assert_eq!([from_device(streams[0].1, 1), from_device(streams[1].1, 1)], [[3], [3]]);
            assert_eq!([ncclCommDestroy(all[0]), ncclCommDestroy(all[1])], [0, 0]);
        }
    });
}

#[test]
fn a_group_of_one_thread_serves_several_ranks_and_streams() {
    alone("api::nccl_tests::a_group_of_one_thread_serves_several_ranks_and_streams", || {
        fakecuda_set_pace(1, 0);
        let all = join_all(2);
        let own = [0, 1].map(|device| {
            assert_eq!(cudaSetDevice(device), 0);
            ([new_stream(), new_stream()], [on_device(&[device + 1]), on_device(&[10 * (device + 1)])])
        });
        ncclGroupStart();
        for (rank, (streams, addresses)) in own.iter().enumerate() {
            for (stream, address) in streams.iter().zip(addresses) {
                assert_eq!(ncclAllReduce(*address, *address, 1, INT32, SUM, all[rank], *stream), 0);
            }
        }
        assert_eq!(count("launches"), 0, "nothing begins within the group");
        assert_eq!(ncclGroupEnd(), 0);
        assert_eq!((count("launches"), count("nccl AllReduce")), (2, 4));
        // The second stream waits for the launch in the first one.
        for (streams, addresses) in own {
            assert_eq!(cudaStreamSynchronize(streams[1]), 0);
            assert_eq!(addresses.map(|address| from_device(address, 1)), [[3], [30]]);
        }
    });
}

#[test]
fn a_collective_that_is_not_ordered_with_a_copy_is_a_race() {
    alone("api::nccl_tests::a_collective_that_is_not_ordered_with_a_copy_is_a_race", || {
        let all = join_all(1);
        let (copies, reduces, own, other) = (new_stream(), new_stream(), on_device(&[1]), on_device(&[2]));
        let mut event = 0;
        // SAFETY: valid for writes.
        assert_eq!(unsafe { cudaEventCreate(&raw mut event) }, 0);
        fakecuda_find_races(true);
        for is_ordered in [true, false] {
            assert_eq!(cudaMemcpyAsync(own, other, 4, 3, copies), 0);
            if is_ordered {
                assert_eq!([cudaEventRecord(event, copies), cudaStreamWaitEvent(reduces, event, 0)], [0, 0]);
            }
            assert_eq!(ncclAllReduce(own, own, 1, INT32, SUM, all[0], reduces), 0);
            assert_eq!(cudaStreamSynchronize(reduces), 0);
            assert_eq!(count("races") > 0, !is_ordered, "{}", notes());
            assert_eq!(cudaStreamSynchronize(copies), 0);
        }
        assert!(notes().contains("ncclDevKernel_AllReduce"));
    });
}
