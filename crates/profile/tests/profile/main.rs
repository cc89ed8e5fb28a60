//! The profiler, checked from outside.
