//! Comparisons of Overdrive with other tools. The program `overdrive-versus` runs them.
//!
//! `versus` holds the comparisons, `planted` the training loops that test the profiler's diagnosis, and `scaling` the
//! model of `docs/scaling.md`.
#![forbid(unsafe_code)]

pub use overdrive_bench::{digits, model};

mod gpt;
pub mod gpu_steps;
pub mod planted;
pub mod scaling;
pub mod versus;
