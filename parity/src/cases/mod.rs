//! One function a case, under the name of its Python half.

mod accum;
mod amp;
mod dataload;
mod mnist;
mod optim;
mod samplers;

use anyhow::Result;

use crate::record::{Found, Given};

/// Computes from what Python gave what Python expects.
pub type Case = fn(&Given<'_>) -> Result<Found>;

/// Every case by name.
pub const ALL: &[(&str, Case)] = &[
    ("autocast_dtypes", amp::autocast_dtypes),
    ("grad_scaler_histories", amp::grad_scaler_histories),
    ("accumulation_is_the_large_batch", accum::accumulation_is_the_large_batch),
    ("fused_adamw", optim::fused_adamw),
    ("fused_sgd", optim::fused_sgd),
    ("clip_grad_norm", optim::clip_grad_norm),
    ("mnist_cnn_losses", mnist::mnist_cnn_losses),
    ("dataload_jpeg", dataload::dataload_jpeg),
    ("dataload_resized_crop", dataload::dataload_resized_crop),
    ("dataload_dct_scaling", dataload::dataload_dct_scaling),
    ("dataload_exif", dataload::dataload_exif),
    ("dataload_evaluation", dataload::dataload_evaluation),
    ("dataload_color_jitter", dataload::dataload_color_jitter),
    ("dataload_mix", dataload::dataload_mix),
    ("sampler_distributed", samplers::sampler_distributed),
    ("sampler_batches", samplers::sampler_batches),
    ("sampler_random", samplers::sampler_random),
    ("sampler_weighted", samplers::sampler_weighted),
    ("collate_stack", samplers::collate_stack),
];
