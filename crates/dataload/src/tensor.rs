//! From plain bytes to a tensor, without waking libtorch's thread pool.

use tch::{Kind, Tensor};

use crate::DataError;

/// A tensor of `shape` with a copy of `bytes` in the machine's byte order.
///
/// tch clears the new tensor before it copies, and libtorch clears with its whole thread pool from 32,768 elements on:
/// in a worker that would be one more pool that competes with the training thread. Few wide elements, viewed as the
/// right kind afterwards, keep batches of up to 512 kiB below that number.
pub(crate) fn tensor_from_bytes(bytes: &[u8], kind: Kind, shape: &[i64]) -> Result<Tensor, DataError> {
    let divides = |kind: &Kind| bytes.len().is_multiple_of(kind.elt_size_in_bytes());
    let wide = [Kind::ComplexDouble, Kind::Int64].into_iter().find(divides).unwrap_or(kind);
    // The length comes from the bytes themselves, since tch does not compare it with them.
    let elements = bytes.len() / wide.elt_size_in_bytes();
    Tensor::f_from_data_size(bytes, &[elements as i64], wide)
        .and_then(|flat| flat.f_view_dtype(kind))
        .and_then(|flat| flat.f_view(shape))
        // To autograd the batch shall be a tensor of its own, not a view of the wide one.
        .and_then(|view| view.f_data())
        .map_err(DataError::Tensor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_gives_the_same_bytes() {
        for length in [0, 1, 7, 8, 12, 16, 24, 100, 784] {
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
    fn a_wrong_shape_is_an_error_and_the_result_is_no_view() {
        assert!(matches!(tensor_from_bytes(&[0; 16], Kind::Uint8, &[4, 5]), Err(DataError::Tensor(_))));
        let batch = tensor_from_bytes(&[0; 16], Kind::Float, &[4]).unwrap().set_requires_grad(true);
        batch.sum(Kind::Float).backward();
        assert_eq!(batch.grad().sum(Kind::Float).double_value(&[]), 4.0);
    }
}
