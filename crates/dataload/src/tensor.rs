//! Makes tensors from plain bytes without starting libtorch's thread pool.

use tch::{Device, Kind, Tensor};

use crate::DataError;

/// libtorch uses its thread pool for 32,768 elements or more (`at::internal::GRAIN_SIZE`).
const MOST_ELEMENTS: usize = 32_767;

/// A tensor of `shape` with a copy of `bytes` in the machine's byte order.
///
/// tch zeroes a new tensor before copying into it, and libtorch zeroes large ones with its thread pool: in a worker
/// that would be one more pool that competes with the training thread. So the bytes are copied as few wide elements, in
/// pieces where these are still too many, and viewed as the right kind afterwards.
pub(crate) fn tensor_from_bytes(bytes: &[u8], kind: Kind, shape: &[i64]) -> Result<Tensor, DataError> {
    let divides = |kind: &Kind| bytes.len().is_multiple_of(kind.elt_size_in_bytes());
    let wide = [Kind::ComplexDouble, Kind::Int64].into_iter().find(divides).unwrap_or(kind);
    // Lengths are computed from the bytes, since tch does not check them.
    let elements = |bytes: &[u8]| (bytes.len() / wide.elt_size_in_bytes()) as i64;
    let copy = |bytes: &[u8]| Tensor::f_from_data_size(bytes, &[elements(bytes)], wide);

    let piece_bytes = MOST_ELEMENTS * wide.elt_size_in_bytes();
    let flat = if bytes.len() <= piece_bytes {
        copy(bytes)?
    } else {
        let flat = Tensor::f_empty([elements(bytes)], (wide, Device::Cpu))?;
        let mut start = 0;
        for piece in bytes.chunks(piece_bytes) {
            flat.f_narrow(0, start, elements(piece))?.f_copy_(&copy(piece)?)?;
            start += elements(piece);
        }
        flat
    };
    // `f_data`, so that autograd does not see the batch as a view of the wide tensor.
    Ok(flat.f_view_dtype(kind)?.f_view(shape)?.f_data()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_gives_the_same_bytes() {
        for length in [0, 1, 7, 8, 12, 16, 24, 100, 784, 99_999, 600_008, 3 << 20] {
            let bytes: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let tensor = tensor_from_bytes(&bytes, Kind::Uint8, &[length, 1]).unwrap();
            assert_eq!((tensor.kind(), tensor.size()), (Kind::Uint8, vec![length, 1]));
            assert_eq!(Vec::<u8>::try_from(tensor.view(-1)).unwrap(), bytes);
        }
        for length in [1, 2, 3, 4, 8] {
            let values: Vec<f32> = (0..length).map(|i| i as f32 / 3.0).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            let tensor = tensor_from_bytes(&bytes, Kind::Float, &[length]).unwrap();
            assert_eq!(Vec::<f32>::try_from(tensor).unwrap(), values);
        }
    }

    #[test]
    fn a_wrong_shape_is_an_error_and_the_result_is_not_a_view() {
        assert!(matches!(tensor_from_bytes(&[0; 16], Kind::Uint8, &[4, 5]), Err(DataError::Tensor(_))));
        let batch = tensor_from_bytes(&[0; 16], Kind::Float, &[4]).unwrap().set_requires_grad(true);
        batch.sum(Kind::Float).backward();
        assert_eq!(batch.grad().sum(Kind::Float).double_value(&[]), 4.0);
    }
}
