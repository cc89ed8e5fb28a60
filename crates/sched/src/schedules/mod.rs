//! The schedules, each a value with its options that computes the rate at a step.

pub mod cosine;
pub mod cyclic;
pub mod decay;
pub mod lambda;
pub mod one_cycle;
pub mod ramps;
pub mod swa;
pub mod warmup;
