//! The part of Overdrive's benchmarks that does not measure: their options, the types of their results, and the tables,
//! JSON and HTML pages made of them.
//!
//! Nothing here trains or links libtorch, so that `cargo xtask bench --help` answers in seconds and a report can be
//! tested with made-up numbers. The first line is the technique benchmark, the second the comparisons of single parts
//! with other tools (`cargo xtask versus`):
//!
//! ```text
//! BenchOptions ──▶ (the bench measures) ──▶ [Measurements] ──▶ Report::new ──▶ table::render, html::render, JSON
//! VersusOptions ──▶ (a case measures) ──▶ VersusRow::of_pairs ──▶ VersusReport ──▶ table, JSON ──▶ records::page
//! ```
//!
//! A [`Turn`] is a few seconds of steady training, a [`Whole`] is one training from start to end, a [`Mark`] is one
//! point of its curve, and a [`Span`] is one phase of a step.

#![forbid(unsafe_code)]

pub mod cli;
pub mod contender;
pub mod date;
pub mod disturbance;
pub mod html;
pub mod machine;
pub mod readme;
pub mod readme_parts;
pub mod records;
mod remarks;
pub mod report;
pub mod run;
pub mod sample;
pub mod stats;
pub mod table;
mod text;
pub mod verdict;
pub mod versus;
pub mod versus_cli;
pub mod workload;
pub mod write;

pub use cli::{BenchOptions, DeviceChoice, Size};
pub use contender::Contender;
pub use disturbance::Disturbance;
pub use machine::Machine;
pub use report::{Measurements, Report, Row, Setting, Versions, WorkloadReport};
pub use run::{DeviceKind, Mark, Measured, Span, Turn, Whole};
pub use stats::Spread;
pub use versus::{MissingPeer, Ratio, Target, VersusReport, VersusRow};
pub use versus_cli::{VersusCase, VersusOptions};
pub use workload::Workload;
pub use write::{WriteError, write_atomically};
