//! Fast deep-learning training in Rust, over [tch](https://docs.rs/tch) and libtorch.
//!
//! This crate only re-exports the others; depend on a single one if that is all you need. Every feature adds one crate
//! and does not change the others.
//!
//! | feature | crate | what it gives |
//! |---|---|---|
//! | `amp` | `overdrive-amp` | autocast, GradScaler |
//! | `accum` | `overdrive-accum` | gradient accumulation, exact under uneven micro-batches |
//! | `checkpoint` | `overdrive-checkpoint` | checkpoints that survive crashes, written in the background |
//! | `compile` | `overdrive-compile` | steps compiled by PyTorch's Inductor, run without Python; not a default feature |
//! | `dataload` | `overdrive-dataload` | datasets, streams, decoding, caches, a parallel loader with exact resume |
//! | `ddp` | `overdrive-ddp` | process groups, collectives, data-parallel training; not a default feature |
//! | `deepspeed` | | the module `shard::deepspeed`, which reads DeepSpeed's JSON; not a default feature |
//! | `memory` | `overdrive-memory` | activation checkpointing, saved tensors compressed or on disk, smaller batches where memory runs out |
//! | `nn` | `overdrive-nn` | modules with PyTorch's names, options and initial values |
//! | `optim` | `overdrive-optim` | fused and foreach optimizers, 8-bit states, clipping, averages of weights |
//! | `profile` | `overdrive-profile` | the torch profiler, step phases, a diagnosis; not a default feature |
//! | `sched` | `overdrive-sched` | learning rate schedules, early stopping, curricula |
//! | `shard` | `overdrive-shard` | training state partitioned over ranks; not a default feature |
#![cfg_attr(all(feature = "amp", feature = "accum", feature = "dataload", feature = "optim"), doc = include_str!("recipe.md"))]
#![forbid(unsafe_code)]

#[cfg(feature = "accum")]
pub use overdrive_accum as accum;
#[cfg(feature = "amp")]
pub use overdrive_amp as amp;
#[cfg(feature = "checkpoint")]
pub use overdrive_checkpoint as checkpoint;
#[cfg(feature = "compile")]
pub use overdrive_compile as compile;
pub use overdrive_core as core;
#[cfg(feature = "dataload")]
pub use overdrive_dataload as dataload;
#[cfg(feature = "ddp")]
pub use overdrive_ddp as ddp;
pub use overdrive_ffi as ffi;
#[cfg(feature = "memory")]
pub use overdrive_memory as memory;
#[cfg(feature = "nn")]
pub use overdrive_nn as nn;
#[cfg(feature = "optim")]
pub use overdrive_optim as optim;
#[cfg(feature = "profile")]
pub use overdrive_profile as profile;
#[cfg(feature = "sched")]
pub use overdrive_sched as sched;
#[cfg(feature = "shard")]
pub use overdrive_shard as shard;
pub use tch;

/// Compiles README's recipe.
#[cfg(all(doctest, feature = "accum", feature = "amp", feature = "dataload", feature = "nn", feature = "optim"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Runs the program in the book.
#[cfg(all(doctest, feature = "dataload", feature = "nn", feature = "optim", feature = "sched"))]
#[doc = include_str!("../../../docs/coming-from-pytorch.md")]
struct ComingFromPytorch;

pub mod prelude {
    //! The names that a training loop uses, including tch's basic ones.

    #[cfg(feature = "accum")]
    pub use overdrive_accum::{Accumulator, Samples, Tokens};
    #[cfg(feature = "amp")]
    pub use overdrive_amp::{Autocast, AutocastGuard, GradScaler, autocast};
    #[cfg(feature = "checkpoint")]
    pub use overdrive_checkpoint::{Checkpoint, RngState};
    pub use overdrive_core::{GradientSync, Optimizer, StateDict, Stateful, TchOptimizer};
    #[cfg(feature = "dataload")]
    pub use overdrive_dataload::{
        Auto, Cached, DataLoader, Dataset, ImageFolder, ImagePipeline, IterableDataset, Mnist, OnError, TensorDataset,
        ToFloat,
    };
    #[cfg(feature = "ddp")]
    pub use overdrive_ddp::{DistributedDataParallel, ProcessGroup, init_process_group};
    #[cfg(feature = "nn")]
    pub use overdrive_nn::{self as nn, Module, sequential};
    #[cfg(feature = "optim")]
    pub use overdrive_optim::{Adam, AdamW, AveragedModel, Averaging, Sgd, clip_grad_norm_, clip_grad_value_};
    #[cfg(feature = "profile")]
    pub use overdrive_profile::{Monitor, Phase, Profiler, StepTimer, record_function};
    #[cfg(feature = "sched")]
    pub use overdrive_sched::{
        ChainedScheduler, CosineAnnealingLr, EarlyStopping, LinearLr, LrScheduler, OneCycleLr, ReduceLrOnPlateau,
        SequentialLr, StepLr,
    };
    pub use tch::{Device, Kind, Tensor, manual_seed, no_grad};
}
