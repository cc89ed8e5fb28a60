//! The main job and the comparisons with other tools; the binaries beside this library run them.
//!
//! `main_job` prepares the data, starts one process a run and reports; `job` is what such a process does; `feed` is how
//! each technique gets its batches, `trainer` how it learns from them.
#![forbid(unsafe_code)]

pub mod feed;
pub mod images;
pub mod job;
pub mod main_job;
pub mod model;
pub mod planted;
pub mod scaling;
pub mod trainer;
pub mod versus;
