//! The tests of the crates with `unsafe` code or many threads, under AddressSanitizer.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use crate::setup;
use crate::workspace::{self, Workspace};

/// Run the tests of ffi, ddp and dataload under AddressSanitizer; builds everything anew in target/sanitize
///
/// Rust and the C++ of these crates are checked; libtorch is not, but what it allocates and frees is.
#[derive(Args)]
pub struct Options {
    /// Arguments for `cargo test`: `-p PACKAGE` instead of the three crates, a name to filter by, ..
    #[arg(last = true)]
    args: Vec<String>,
}

const PACKAGES: [&str; 3] = ["overdrive-ffi", "overdrive-ddp", "overdrive-dataload"];

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    setup::quietly(ws)?;
    // With a target of its own, build scripts and procedural macros run without the sanitizer.
    let target = workspace::capture(ws.command("rustc").args(["--print", "host-tuple"]))?.trim().to_owned();
    let mut command = ws.cargo(["test", "--no-fail-fast", "--target", &target, "--target-dir", "target/sanitize"]);
    if !options.args.iter().any(|arg| arg.starts_with("-p") || arg.starts_with("--package")) {
        command.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    }
    // Sanitizers are an unstable option of a compiler that has them built in.
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address -Cforce-frame-pointers=yes");
    command.env("RUSTDOCFLAGS", "-Zsanitizer=address");
    let cxxflags = format!("CXXFLAGS_{}", target.replace('-', "_"));
    command.env(cxxflags, "-fsanitize=address -fno-omit-frame-pointer");
    // libtorch keeps much until the process ends, its CUDA libraries reserve the shadow's addresses, and some tests ask
    // for more memory than there is.
    command.env("ASAN_OPTIONS", ["detect_leaks=0", "protect_shadow_gap=0", "allocator_may_return_null=1"].join(":"));
    let status = workspace::status(command.args(&options.args)).context("cannot run the tests")?;
    Ok(workspace::exit_code(status))
}
