//! Tensors in memory that something else has allocated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use overdrive_ffi::{tensor_from_owner, tensor_from_vec};
use tch::Kind;

#[test]
fn a_vector_becomes_a_tensor_in_place() {
    let values = vec![1.5f32, -2.0, 3.25, 4.0, 0.0];
    let data = values.as_ptr();
    let tensor = tensor_from_vec(values, Kind::Float, &[2, 2]).unwrap();
    assert_eq!((tensor.size(), tensor.data_ptr().cast_const().cast()), (vec![2, 2], data));
    // A view keeps the memory alive.
    let row = tensor.get(1);
    drop(tensor);
    assert_eq!(Vec::<f32>::try_from(row).unwrap(), [3.25, 4.0]);

    let words = vec![i64::from_ne_bytes([1, 2, 3, 4, 5, 6, 7, 8]), 9];
    let bytes = tensor_from_vec(words, Kind::Uint8, &[8]).unwrap();
    assert_eq!(Vec::<u8>::try_from(bytes).unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(tensor_from_vec(Vec::<f32>::new(), Kind::Double, &[3, 0]).unwrap().size(), [3, 0]);
    for (kind, shape) in
        [(Kind::Float, &[3][..]), (Kind::Double, &[2]), (Kind::Uint8, &[-1]), (Kind::Int8, &[i64::MAX, 4])]
    {
        let error = tensor_from_vec(vec![0.0f32; 2], kind, shape).unwrap_err();
        assert!(error.message().contains("does not fit into 8 bytes"), "{error}");
    }
}

/// Bytes from the first address on that is `odd` above a multiple of 8; they say when they are dropped.
struct Lent {
    bytes: Vec<u8>,
    odd: usize,
    dropped: Arc<AtomicBool>,
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        let skip = self.odd + (8 - self.bytes.as_ptr().addr() % 8) % 8;
        &mut self.bytes[skip..]
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.dropped.store(true, Relaxed);
    }
}

#[test]
fn memory_of_another_library_lives_as_long_as_its_tensors() {
    let dropped = Arc::new(AtomicBool::new(false));
    let lend = |bytes: usize, odd: usize| {
        dropped.store(false, Relaxed);
        Lent { bytes: vec![2; bytes + 16], odd, dropped: dropped.clone() }
    };
    let mut lent = lend(24, 0);
    let data = lent.as_mut().as_ptr();
    let tensor = tensor_from_owner(lent, Kind::Int64, &[3]).unwrap();
    assert_eq!(tensor.data_ptr().cast_const().cast(), data);
    let mut last = tensor.get(2);
    drop(tensor);
    assert!(!dropped.load(Relaxed));
    assert_eq!(last.int64_value(&[]), i64::from_ne_bytes([2; 8]));
    _ = last.fill_(7);
    assert_eq!(last.int64_value(&[]), 7);
    std::thread::spawn(move || drop(last)).join().unwrap();
    assert!(dropped.load(Relaxed));
    // What is refused is dropped as well: too small, not aligned, no bools.
    for (odd, kind, shape) in [
        (0, Kind::Float, &[9][..]),
        (0, Kind::Uint8, &[-1]),
        (1, Kind::Int16, &[2]),
        (4, Kind::Int64, &[1]),
        (0, Kind::Bool, &[8]),
    ] {
        assert!(tensor_from_owner(lend(8, odd), kind, shape).is_err(), "{kind:?} {shape:?}");
        assert!(dropped.load(Relaxed), "{kind:?} {shape:?}");
    }
    assert!(tensor_from_owner(lend(8, 1), Kind::Uint8, &[8]).is_ok());
}
