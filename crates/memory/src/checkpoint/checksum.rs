//! Whether two tensors have the same bits, without keeping one of them.

use overdrive_ffi::{Error as TorchError, storage};
use tch::{Kind, Tensor};

/// Elements that are looked at together: their copies as 64-bit integers take 8 MiB.
const CHUNK: i64 = 1 << 20;

/// A checksum of the bits in their order; none for a tensor without memory of its own, such as a sparse one.
pub(super) fn checksum(tensor: &Tensor) -> Result<Option<i64>, TorchError> {
    if storage(tensor).is_err() {
        return Ok(None);
    }
    let _no_grad = tch::no_grad_guard();
    let mut plain = tensor.f_detach()?.f_resolve_conj()?.f_resolve_neg()?;
    if plain.f_is_complex()? {
        plain = plain.f_view_as_real()?;
    }
    let bits = match plain.kind().elt_size_in_bytes() {
        1 => Kind::Int8,
        2 => Kind::Int16,
        4 => Kind::Int,
        _ => Kind::Int64,
    };
    let flat = plain.f_contiguous()?.f_view_dtype(bits)?.f_flatten(0, -1)?;
    let mut sum = 0_i64;
    for chunk in flat.f_split(CHUNK, 0)? {
        // Odd weights, so that each bit and each exchange counts; integers wrap.
        let ones = Tensor::f_ones(chunk.size().as_slice(), (Kind::Int64, chunk.device()))?;
        let numbers = ones.f_cumsum(0, Kind::Int64)?;
        let weights = numbers.f_add(&numbers)?.f_sub(&ones)?;
        let of_chunk = chunk.f_to_kind(Kind::Int64)?.f_mul(&weights)?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        sum = sum.wrapping_mul(31).wrapping_add(of_chunk);
    }
    Ok(Some(sum))
}

#[cfg(test)]
mod tests {
    use overdrive_ffi::autograd::BoxError;
    use tch::Device;

    use super::*;

    #[test]
    fn each_bit_and_the_order_count() -> Result<(), BoxError> {
        let of = |values: &[f32]| checksum(&Tensor::from_slice(values));
        let all = [&[1.0, 2.0][..], &[2.0, 1.0], &[1.0, -2.0], &[1.0, 2.0000002], &[0.0, 0.0], &[0.0, -0.0]];
        for (one, other) in all.iter().enumerate().flat_map(|(at, one)| all[..at].iter().map(move |other| (one, other)))
        {
            assert_ne!(of(one)?, of(other)?, "{one:?} and {other:?}");
        }
        let large = Tensor::rand([CHUNK + 3], (Kind::Float, Device::Cpu));
        let other = large.copy();
        assert_eq!(checksum(&large)?, checksum(&other)?);
        let _ = other.get(CHUNK + 1).fill_(-1.0);
        assert_ne!(checksum(&large)?, checksum(&other)?);
        // The values, in whatever order of memory.
        let matrix = large.narrow(0, 0, 12).view([3, 4]);
        assert_eq!(checksum(&matrix.tr())?, checksum(&matrix.tr().contiguous())?);
        for kind in [
            Kind::Bool,
            Kind::Uint8,
            Kind::BFloat16,
            Kind::Double,
            Kind::Int64,
            Kind::ComplexFloat,
            Kind::ComplexDouble,
        ] {
            let [zero, one] = [0, 1].map(|value| Tensor::full([5], value, (Kind::Int, Device::Cpu)).to_kind(kind));
            assert_ne!(checksum(&zero)?, checksum(&one)?, "{kind:?}");
            assert!(checksum(&zero.narrow(0, 0, 0))?.is_some());
        }
        Ok(())
    }
}
