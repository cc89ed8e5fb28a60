//! TFRecord's checksum.

/// CRC-32C, masked by a rotation and an offset, so that CRCs of data that contains CRCs stay effective.
///
/// # Source
/// `tensorflow/core/lib/hash/crc32c.h`: `Mask`.
pub(super) fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::masked_crc;

    #[test]
    fn agrees_with_the_published_vectors() {
        let unmasked = |bytes: &[u8]| masked_crc(bytes).wrapping_sub(0xa282_ead8).rotate_left(15);
        assert_eq!(unmasked(&[0; 32]), 0x8a91_36aa);
        assert_eq!(unmasked(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(unmasked(b"123456789"), 0xe306_9283);
    }
}
