//! Tests alone; `tests/gpu` has them.
#![forbid(unsafe_code)]
