//! What Overdrive's benchmarks say about themselves: their options, the rows that they measured, and the tables, JSON
//! and pages made of them.
//!
//! Nothing here trains or links libtorch, so that `cargo xtask bench --help` answers in seconds and a report can be
//! tested with made-up numbers. The flow is
//!
//! ```text
//! BenchOptions ──▶ (the bench measures) ──▶ [Run] ──▶ Report::from_runs ──▶ table::render, html::render, JSON
//! ```

#![forbid(unsafe_code)]

pub mod advice;
pub mod cli;
pub mod date;
pub mod html;
pub mod machine;
mod notes;
pub mod report;
pub mod run;
pub mod sample;
pub mod stats;
pub mod table;
pub mod technique;
mod text;
pub mod versus;
pub mod write;

pub use cli::{BenchOptions, DeviceChoice};
pub use machine::Machine;
pub use report::{Config, Dataset, Report, ReportError, Row, Setting, Versions};
pub use run::{DeviceKind, EpochMark, Run};
pub use stats::Spread;
pub use technique::Technique;
pub use versus::{MissingPeer, Ratio, Target, VersusReport, VersusRow};
pub use write::{WriteError, write_atomically};
