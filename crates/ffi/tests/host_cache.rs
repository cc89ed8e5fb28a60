//! The cache of host memory and its count, in a separate test process because it affects the whole process.

use std::sync::{Mutex, PoisonError};

use overdrive_ffi::{Error, ErrorKind, cache_host_memory, cached_host_memory, host_memory};
use tch::{Device, Kind, Tensor};

/// Both tests allocate.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn freed_memory_is_kept_up_to_the_limit_and_taken_again() {
    const MIB: usize = 1 << 20;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let tensor = |bytes: usize| Tensor::ones([bytes as i64], (Kind::Uint8, Device::Cpu));
    let before = tensor(4 * MIB);
    // oneDNN frees memory with the allocator that is current when a tensor is dropped.
    let onednn = |n: i64| Tensor::ones([n], (Kind::Float, Device::Cpu)).to_mkldnn();
    let (small, large) = (onednn(100), onednn(1 << 20));
    cache_host_memory(16 * MIB).unwrap();
    let first = tensor(8 * MIB);
    let place = first.data_ptr();
    drop((before, small, large));
    assert_eq!(cached_host_memory().unwrap(), 0, "malloc's memory is returned to malloc");
    drop(first);
    assert_eq!(cached_host_memory().unwrap(), 8 * MIB);
    // A block that would waste too much is not reused.
    let (half, same) = (tensor(4 * MIB), tensor(7 * MIB));
    assert!(half.data_ptr() != place && same.data_ptr() == place);
    assert_eq!(same.sum(Kind::Int64).int64_value(&[]), 7 * MIB as i64);
    drop((half, same, tensor(12 * MIB)));
    assert_eq!(cached_host_memory().unwrap(), 12 * MIB, "the oldest block was evicted for the one freed last");
    std::thread::spawn(move || drop(tensor(2 * MIB))).join().unwrap();
    assert_eq!(cached_host_memory().unwrap(), 14 * MIB);
    drop((onednn(100), onednn(1 << 18)));
    assert_eq!(cached_host_memory().unwrap(), 16 * MIB, "the memory of oneDNN tensors and of their sources is kept");
    cache_host_memory(0).unwrap();
    assert_eq!(cached_host_memory().unwrap(), 0);
    drop(tensor(8 * MIB));
    assert_eq!(cached_host_memory().unwrap(), 0);
}

#[test]
fn what_tensors_have_is_counted_and_limited() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let tensor = |bytes: usize| Tensor::f_ones([bytes as i64], (Kind::Uint8, Device::Cpu));
    let before = tensor(1 << 20).unwrap();
    host_memory::count(usize::MAX).unwrap();
    let start = host_memory::stats().unwrap();
    let now = || host_memory::stats().unwrap().allocated - start.allocated;
    let (small, large) = (tensor(1000).unwrap(), tensor(1 << 20).unwrap());
    assert_eq!(now(), (1 << 20) + 1000);
    // Views have no memory of their own, and empty tensors none at all.
    let _view = (large.narrow(0, 0, 10), tensor(0).unwrap());
    drop((before, small));
    assert_eq!(now(), 1 << 20, "what was there before is not counted");
    assert_eq!(host_memory::stats().unwrap().peak, start.allocated + (1 << 20) + 1000);
    host_memory::reset_peak().unwrap();
    assert_eq!(host_memory::stats().unwrap().peak, start.allocated + (1 << 20));
    std::thread::spawn(move || drop(large)).join().unwrap();

    host_memory::count((start.allocated + (3 << 20)) as usize).unwrap();
    let held = tensor(2 << 20).unwrap();
    let error = Error::from(tensor(2 << 20).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    assert!(error.to_string().contains("Tried to allocate 2097152 bytes"), "{error}");
    drop(held);
    assert!(tensor(2 << 20).is_ok());
    assert_eq!(host_memory::stats().unwrap().refused, start.refused + 1);
    host_memory::count(usize::MAX).unwrap();
}
