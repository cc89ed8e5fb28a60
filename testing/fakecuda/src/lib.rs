//! Tests of CUDA code on a machine without a GPU.
#![allow(missing_docs)]
pub const LIBRARIES: &str = env!("FAKECUDA_LIBRARIES");
