//! The cache of host memory, in a separate test process because it affects the whole process.

use overdrive_ffi::{cache_host_memory, cached_host_memory};
use tch::{Device, Kind, Tensor};

#[test]
fn freed_memory_is_kept_up_to_the_limit_and_taken_again() {
    const MIB: usize = 1 << 20;
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
