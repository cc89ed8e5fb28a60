//! The comparisons with other tools; the binary beside this library runs them.
//!
//! `versus` compares parts with other tools; `planted` are the loops that the profiler's diagnosis is tested on.
#![forbid(unsafe_code)]

pub use overdrive_bench::{digits, model};

pub mod planted;
pub mod scaling;
pub mod versus;
