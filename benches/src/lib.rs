//! The main job and the comparisons with other tools; the binaries beside this library run them.
#![forbid(unsafe_code)]

pub mod model;
