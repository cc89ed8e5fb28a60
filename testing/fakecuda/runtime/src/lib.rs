//! A stand-in for the CUDA runtime and its libraries, to test CUDA code without a GPU.
//!
//! The unmodified libtorch_cuda runs on it. Device memory is host memory behind a window of addresses that the host may
//! not touch; copies are real; every call, launch and byte is counted. Work can wait in its stream until something
//! waits for it, and each access is ordered by vector clocks, so that a missing wait is found whichever order it
//! happens to run in. No time that is measured on it is a GPU's.
//!
//! One library holds all stand-ins. libtorch's references carry the version of the library that they expect
//! (`cublasCreate_v2@libcublas.so.13`); the linker looks the pair up in every library that is loaded, so this one
//! defines all versions, and empty libraries bear the other names.
#![allow(non_snake_case, reason = "the names of C functions")]

mod api;
mod capture;
mod capturing;
mod clock;
mod entry;
mod environment;
mod error;
mod faults;
mod graph;
mod guard;
mod issue;
mod issued;
mod memory;
mod nccl;
mod numbers;
mod nvml;
mod operation;
mod peers;
mod poison;
mod progress;
mod trace;
mod waiting;
mod waits;
mod world;
