//! Widens unsigned integers, for which libtorch has few operators, to signed ones of twice the width.

/// Turns the bytes of narrow values into the bytes of wide ones.
pub(super) type Widen = fn(&[u8]) -> Vec<u8>;

/// `u16` in the machine's byte order as `i32`.
pub(super) fn u16_to_i32(bytes: &[u8]) -> Vec<u8> {
    let (values, _) = bytes.as_chunks::<2>();
    values.iter().flat_map(|&value| i32::from(u16::from_ne_bytes(value)).to_ne_bytes()).collect()
}

/// `u32` in the machine's byte order as `i64`.
pub(super) fn u32_to_i64(bytes: &[u8]) -> Vec<u8> {
    let (values, _) = bytes.as_chunks::<4>();
    values.iter().flat_map(|&value| i64::from(u32::from_ne_bytes(value)).to_ne_bytes()).collect()
}
