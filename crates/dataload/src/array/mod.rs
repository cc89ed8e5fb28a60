//! Files that hold arrays: npy and safetensors.

mod npy;
mod npy_header;
#[cfg(feature = "safetensors")]
mod safetensors;
mod widen;

#[cfg(feature = "mds")]
pub(crate) use npy::tensor_of;
pub use npy::{decode_npy, read_npy};
#[cfg(feature = "safetensors")]
pub use safetensors::SafeTensorsFile;

/// The shape as `i64`; `None` when its number of elements, counting sizes of 0 as 1, is beyond an `i64`.
fn sizes_of(shape: &[usize]) -> Option<Vec<i64>> {
    let product = shape.iter().try_fold(1i64, |product, &size| product.checked_mul(i64::try_from(size.max(1)).ok()?));
    product.and_then(|_| shape.iter().map(|&size| i64::try_from(size).ok()).collect())
}
