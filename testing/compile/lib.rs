//! Tests alone; `tests/compile` has them.
#![forbid(unsafe_code)]
