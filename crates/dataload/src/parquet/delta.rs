//! Checks the number of values that delta encodings declare, which the `parquet` crate trusts.

/// Walks `streams` consecutive sequences of delta-packed numbers without decoding them: none may declare more than
/// `most` numbers. An error says what was found.
pub(super) fn check(mut bytes: &[u8], most: u32, streams: usize) -> Result<(), String> {
    (0..streams).try_for_each(|_| check_one(&mut bytes, most))
}

fn check_one(bytes: &mut &[u8], most: u32) -> Result<(), String> {
    let block_values = varint(bytes, "delta-packed numbers")?;
    let miniblocks = varint(bytes, "delta-packed numbers")?;
    let mut left = varint(bytes, "delta-packed numbers")?;
    // The first number stands alone; the others are in blocks.
    varint(bytes, "delta-packed numbers")?;
    if left > u64::from(most) {
        return Err(format!("{left} delta-packed numbers in a page of {most} values"));
    }
    let sane = (1..=1 << 24).contains(&block_values) && (1..=block_values).contains(&miniblocks);
    if !sane || block_values % miniblocks != 0 || !(block_values / miniblocks).is_multiple_of(32) {
        return Err(format!("delta-packed blocks of {block_values} numbers in {miniblocks} parts"));
    }
    let miniblock_values = block_values / miniblocks;
    left = left.saturating_sub(1);
    while left > 0 {
        varint(bytes, "delta-packed numbers")?;
        let widths = take(bytes, miniblocks)?;
        for &width in widths {
            // Miniblocks after the last number have no bytes, whatever their width.
            if left > 0 {
                take(bytes, u64::from(width) * miniblock_values / 8)?;
            }
            left = left.saturating_sub(miniblock_values);
        }
    }
    Ok(())
}

fn take<'a>(bytes: &mut &'a [u8], count: u64) -> Result<&'a [u8], String> {
    let split = usize::try_from(count).ok().and_then(|count| bytes.split_at_checked(count));
    let (taken, rest) = split.ok_or_else(|| format!("{count} delta-packed bytes with {} left", bytes.len()))?;
    *bytes = rest;
    Ok(taken)
}

/// Takes a number of variable length; an error says that `what` ends, or has a longer one.
pub(super) fn varint(bytes: &mut &[u8], what: &str) -> Result<u64, String> {
    let mut value = 0;
    for position in 0..10 {
        let Some((&byte, rest)) = bytes.split_first() else { return Err(format!("the end of the {what}")) };
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << (7 * position);
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(format!("a number of more than ten bytes among the {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_numbers_are_checked() {
        // The specification's first example: 1, 2, 3, 4, 5 in blocks of 128 numbers and 4 parts.
        let example = [128, 1, 4, 5, 2, 2, 0, 0, 0, 0];
        assert_eq!(check(&example, 5, 1), Ok(()));
        assert_eq!(check(&[example, example].concat(), 5, 2), Ok(()));
        assert!(check(&example, 4, 1).unwrap_err().contains("5 delta-packed numbers"));
        for cut in 0..example.len() {
            assert!(check(&example[..cut], 5, 1).is_err(), "cut at {cut}");
        }
        assert!(check(&[128, 1, 0, 5, 2], 5, 1).unwrap_err().contains("in 0 parts"));
        assert!(check(&[128, 1, 8, 5, 2], 5, 1).unwrap_err().contains("in 8 parts"));
        assert!(check(&[128, 1, 4, 5, 2, 2, 255, 0, 0, 0], 5, 1).unwrap_err().contains("1020 delta-packed bytes"));
        assert!(check(&[255; 40], 5, 1).unwrap_err().contains("ten bytes"));
    }
}
