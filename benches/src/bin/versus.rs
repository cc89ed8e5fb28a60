//! Comparisons with other tools; `cargo xtask versus` builds and runs it.
#![forbid(unsafe_code)]

use clap::Parser;
use overdrive_benches::versus::{Options, run};

fn main() -> anyhow::Result<()> {
    run(&Options::parse())
}
