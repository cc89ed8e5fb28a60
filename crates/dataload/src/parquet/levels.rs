//! Counts the definition levels of a page without storing them.

use super::delta::varint;

/// How many of the first `count` levels equal `level`; levels are stored in runs and bit-packed groups, `width` bits
/// each. An error says what was found.
pub(super) fn count(mut bytes: &[u8], width: u32, level: i16, count: u32) -> Result<u64, String> {
    let (mut left, mut found) = (u64::from(count), 0);
    while left > 0 {
        let header = varint(&mut bytes, "levels")?;
        if header & 1 == 0 {
            let Some((value, rest)) = bytes.split_at_checked(width.div_ceil(8) as usize) else {
                return Err(format!("the end of the levels with {left} missing"));
            };
            bytes = rest;
            let repeats = (header >> 1).min(left);
            let value = value.iter().rev().fold(0, |value, &byte| value << 8 | i32::from(byte));
            found += if value == i32::from(level) { repeats } else { 0 };
            left -= repeats;
        } else {
            // Some writers end the last group early.
            let packed = usize::try_from((header >> 1).saturating_mul(width.into())).unwrap_or(usize::MAX);
            let (packed, rest) = bytes.split_at(packed.min(bytes.len()));
            bytes = rest;
            let values = (packed.len() as u64 * 8 / u64::from(width)).min(left);
            found += (0..values).filter(|&index| unpack(packed, index, width) == i32::from(level)).count() as u64;
            left -= values;
        }
    }
    Ok(found)
}

/// The value at `index`, lowest bit first.
fn unpack(packed: &[u8], index: u64, width: u32) -> i32 {
    let first = index * u64::from(width);
    (0..u64::from(width)).fold(0, |value, bit| {
        let at = first + bit;
        value | i32::from(packed[(at / 8) as usize] >> (at % 8) & 1) << bit
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_groups_are_counted() {
        // A run of five ones, then eight values of one bit: 1 0 1 1 0 0 0 1.
        let mixed = [5 << 1, 1, 1 << 1 | 1, 0b1000_1101];
        assert_eq!((count(&mixed, 1, 1, 13), count(&mixed, 1, 0, 13)), (Ok(9), Ok(4)));
        assert_eq!((count(&mixed, 1, 1, 5), count(&mixed, 1, 1, 7), count(&mixed, 1, 1, 0)), (Ok(5), Ok(6), Ok(0)));
        // The specification's example: the numbers from 0 to 7, three bits each.
        let packed = [1 << 1 | 1, 0b1000_1000, 0b1100_0110, 0b1111_1010];
        assert!((0..8).all(|level| count(&packed, 3, level, 8) == Ok(1)));
        assert_eq!(count(&packed[..3], 3, 1, 5), Ok(1));
        // A level of two bytes.
        assert_eq!(count(&[3 << 1, 0x34, 0x12], 13, 0x1234, 3), Ok(3));
    }

    #[test]
    fn levels_that_end_early_are_an_error() {
        for bytes in [&[][..], &[2 << 1], &[2 << 1, 1], &[3, 0xff], &[0x80], &[0xff; 11], &[0, 1, 0, 1], &[1, 1]] {
            assert!(count(bytes, 1, 1, 30).is_err(), "{bytes:?}");
        }
        assert_eq!(
            count(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7e, 1], 1, 1, 30),
            Err("the end of the levels".into())
        );
    }
}
