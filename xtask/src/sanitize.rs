//! The tests of the crates with `unsafe` code or many threads, under AddressSanitizer.

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
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

/// What each option is for: libtorch keeps memory until the process ends; its CUDA libraries reserve addresses in the
/// gap of the shadow memory; some tests ask for more memory than there is.
const ASAN_OPTIONS: &str = "detect_leaks=0:protect_shadow_gap=0:allocator_may_return_null=1";
const CXXFLAGS: [&str; 2] = ["-fsanitize=address", "-fno-omit-frame-pointer"];
const RUSTFLAGS: [&str; 2] = ["-Zsanitizer=address", "-Cforce-frame-pointers=yes"];

/// The stable compiler has sanitizers built in, but their option is unstable: this variable allows it.
const UNSTABLE: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    setup::quietly(ws)?;
    finds_planted_errors(ws)?;
    // With a target of its own, build scripts and procedural macros run without the sanitizer.
    let target = workspace::capture(ws.command("rustc").args(["--print", "host-tuple"]))?.trim().to_owned();
    let mut command = ws.cargo(["test", "--no-fail-fast", "--target", &target, "--target-dir", "target/sanitize"]);
    if !options.args.iter().any(|arg| arg.starts_with("-p") || arg.starts_with("--package")) {
        command.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    }
    command.env(UNSTABLE.0, UNSTABLE.1).env("RUSTFLAGS", RUSTFLAGS.join(" "));
    command.env("RUSTDOCFLAGS", RUSTFLAGS[0]).env("ASAN_OPTIONS", ASAN_OPTIONS);
    command.env(format!("CXXFLAGS_{}", target.replace('-', "_")), CXXFLAGS.join(" "));
    let status = workspace::status(command.args(&options.args)).context("cannot run the tests")?;
    Ok(workspace::exit_code(status))
}

/// Builds and runs programs that read freed memory. A sanitizer that does not stop them would pass every test.
fn finds_planted_errors(ws: &Workspace) -> Result<()> {
    let (source, built) = (ws.join("testing/sanitize"), ws.join("target/sanitize/planted"));
    std::fs::create_dir_all(&built).with_context(|| format!("cannot make {}", built.display()))?;
    let object = built.join("errors.o");
    let mut compile = ws.command("c++");
    compile.args(CXXFLAGS).arg("-c").arg(source.join("errors.cpp")).arg("-o").arg(&object);
    workspace::succeed(&mut compile)?;
    let program = built.join("errors");
    let mut build = ws.command("rustc");
    build.env(UNSTABLE.0, UNSTABLE.1).args(["--edition", "2024"]).args(RUSTFLAGS);
    build.arg(format!("-Clink-arg={}", object.display())).arg(source.join("errors.rs")).arg("-o").arg(&program);
    workspace::succeed(&mut build)?;
    for language in ["rust", "c++"] {
        let mut run = Command::new(&program);
        let run = run.arg(language).env("ASAN_OPTIONS", ASAN_OPTIONS).stdout(Stdio::null());
        let output = run.output().context("cannot run the planted errors")?;
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && told.contains("heap-use-after-free"),
            "AddressSanitizer does not see {language} code: it let a read of freed memory pass ({})\n{told}",
            output.status
        );
        println!("a planted error in {language} is found");
    }
    Ok(())
}
