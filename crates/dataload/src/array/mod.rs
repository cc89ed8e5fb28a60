//! Arrays in files of their own: npy, and safetensors.

mod npy;
mod npy_header;
#[cfg(feature = "safetensors")]
mod safetensors;
mod widen;

pub use npy::{decode_npy, read_npy};
#[cfg(feature = "safetensors")]
pub use safetensors::SafeTensorsFile;

/// A shape in libtorch's numbers; None when an array of it could not be counted even if its zeros were ones.
fn sizes_of(shape: &[usize]) -> Option<Vec<i64>> {
    let product = shape.iter().try_fold(1i64, |product, &size| product.checked_mul(i64::try_from(size.max(1)).ok()?));
    product.and_then(|_| shape.iter().map(|&size| i64::try_from(size).ok()).collect())
}
