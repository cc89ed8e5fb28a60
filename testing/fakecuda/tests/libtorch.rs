//! The tests of the build script's search.
#![allow(dead_code, reason = "the build script uses the rest")]

#[path = "../libtorch.rs"]
mod libtorch;
