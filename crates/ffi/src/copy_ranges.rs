//! Reads parts of a tensor as bytes.

use std::ops::Range;
use std::slice;

use tch::{Device, Tensor};

use crate::error::Error;
use crate::memory::storage_of;

/// Copies ranges of a tensor's bytes, each to the bytes of `into` from its place on. Not with libtorch's threads, and
/// without a call of libtorch for each range, as `narrow` and `copy_` need.
///
/// ```
/// use overdrive_ffi::copy_ranges;
/// use tch::Tensor;
///
/// let mut bytes = [0; 4];
/// copy_ranges(&Tensor::from_slice(&[1u8, 2, 3]), &mut bytes, [(2, 0..2), (0, 2..3)])?;
/// assert_eq!(bytes, [3, 0, 1, 2]);
/// # Ok::<(), overdrive_ffi::Error>(())
/// ```
///
/// # Errors
/// `Other` for a tensor that is not on the host or not contiguous, and for a range that is outside of it or does not
/// fit into `into`; earlier ranges are copied then.
///
/// # Syncs
/// No.
pub fn copy_ranges(
    source: &Tensor,
    into: &mut [u8],
    copies: impl IntoIterator<Item = (usize, Range<usize>)>,
) -> Result<(), Error> {
    // Refuses tensors without memory of their own.
    storage_of(source)?;
    if source.device() != Device::Cpu || !source.is_contiguous() {
        return Err(Error::refused("copy_ranges: a contiguous tensor on the host is needed".to_owned()));
    }
    let length = source.numel() * source.kind().elt_size_in_bytes();
    let bytes = match length {
        0 => &[][..],
        // SAFETY: a contiguous tensor has that many bytes from its pointer on, which live as long as `source`. They are
        // read as libtorch's own copies read them, and no closure runs while they are lent.
        _ => unsafe { slice::from_raw_parts(source.data_ptr().cast::<u8>().cast_const(), length) },
    };
    let copies: Vec<(usize, Range<usize>)> = copies.into_iter().collect();
    for (at, range) in copies {
        let target = at.checked_add(range.len()).and_then(|end| into.get_mut(at..end));
        let (Some(target), Some(part)) = (target, bytes.get(range.clone())) else {
            let message = format!("copy_ranges: bytes {range:?} of {length} do not fit at {at}");
            return Err(Error::refused(message));
        };
        target.copy_from_slice(part);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn only_bytes_that_are_there_are_copied() -> Result<(), Box<dyn std::error::Error>> {
        let numbers = Tensor::from_slice(&[1i16, 2, 3, 4, 5, 6]);
        let mut bytes = [0; 6];
        copy_ranges(&numbers.narrow(0, 2, 4), &mut bytes, [(0, 4..8), (4, 0..2), (6, 0..0)])?;
        assert_eq!(bytes.as_slice(), [5i16, 6, 3].map(i16::to_ne_bytes).concat());
        for (at, range) in [(0, 0..13), (4, 0..3), (usize::MAX, 0..1), (0, 13..14)] {
            assert!(copy_ranges(&numbers, &mut bytes, [(at, range)]).is_err());
        }
        copy_ranges(&Tensor::zeros([0], (Kind::Float, Device::Cpu)), &mut bytes, [(0, 0..0)])?;
        for refused in [numbers.view([2, 3]).tr(), numbers.to_sparse_sparse_dim(1), Tensor::new()] {
            assert!(copy_ranges(&refused, &mut bytes, []).is_err());
        }
        Ok(())
    }
}
