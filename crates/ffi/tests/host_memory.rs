//! The count of host memory, in a separate test process because it affects the whole process and cannot end.

use overdrive_ffi::{Error, ErrorKind, host_memory};
use tch::{Device, Kind, Tensor};

#[test]
fn what_tensors_have_is_counted_and_limited() {
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
