//! Finds what a training run waits for.
#![forbid(unsafe_code)]

mod error;

pub use error::ProfileError;
