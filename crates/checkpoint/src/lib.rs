//! Checkpoints: everything that a run needs to resume where it stopped, whenever and however it stopped.
//!
//! A checkpoint is a folder: the tensors of each part (model, optimizer, ..) in a safetensors file named after it, and
//! `manifest.json` with everything else, a format version and checksums. It is written under a temporary name, synced
//! and renamed, so a crash at any moment leaves the last good checkpoint.
//!
//! ```
//! use overdrive_checkpoint::{Checkpoint, RngState};
//! use tch::{Device, nn};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let mut vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root() / "linear", 4, 2, Default::default());
//! let mut rng = RngState::new(Device::Cpu);
//!
//! let mut checkpoint = Checkpoint::builder(folder).every(10).keep(3).build()?;
//! // Parts are anything `Stateful`: also optimizers, a scaler, a schedule, a loader.
//! let resumed = checkpoint.resume(&mut [("model", &mut vs), ("rng", &mut rng)])?;
//! let first = resumed.map_or(0, |resumed| resumed.step) + 1;
//! for step in first..=25 {
//!     // .. train
//!     if checkpoint.due(step)? {
//!         checkpoint.set("best_accuracy", &0.97)?;
//!         checkpoint.save(step, &[("model", &vs), ("rng", &rng)])?;
//!     }
//!     if checkpoint.stop_requested() {
//!         break;
//!     }
//! }
//! checkpoint.finish()?;
//! # let checkpoint = Checkpoint::builder(folder).build()?;
//! # assert_eq!(checkpoint.steps()?, [10, 20]);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod aside;
mod builder;
mod checkpoint;
mod checksums;
mod consolidate;
mod digest;
mod error;
mod first;
mod folder;
mod layout;
mod load;
mod manifest;
mod names;
mod outline;
mod ranks;
mod read;
mod resume;
mod retention;
mod rng;
mod run;
mod search;
#[cfg(feature = "signal")]
mod signal;
mod stop;
mod together;
mod write;

pub use builder::CheckpointBuilder;
pub use checkpoint::Checkpoint;
pub use consolidate::{consolidate, consolidate_from_rank_0};
pub use error::CheckpointError;
pub use load::{Loaded, load, read_part};
pub use manifest::FORMAT;
pub use ranks::Writers;
pub use resume::Resumed;
pub use retention::Goal;
pub use rng::{LeftOut, RngState};
