//! Tests alone; `tests/faults` has them.
#![forbid(unsafe_code)]
