//! Compares speed and memory with PyTorch and other peers, interleaved in one run.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, Parser};
use overdrive_bench_report::{VersusCase, VersusOptions, records, write_atomically};

use crate::workspace::{self, Workspace};
use crate::{python, setup};

/// The Rust version that this peer needs, newer than the workspace's; with an older one, the peer is left out.
const DATALOADER_RS_NEEDS: (u32, u32) = (1, 95);

/// Measure one case against PyTorch and other peers, interleaved in one run
///
/// Prints medians of ratios, and writes them with `--json PATH`. A peer that is not installed is reported as missing. A
/// missed target is reported, but is not a failure.
#[derive(Args)]
#[command(after_help = after_help())]
pub struct Options {
    /// Build the benches with this feature, such as `libjpeg-turbo`; goes before the case
    #[arg(long, value_name = "FEATURE")]
    features: Vec<String>,
    /// Measure nothing: make one page of all comparisons in `benches/record`, `target/versus.html`
    #[arg(long, exclusive = true)]
    all: bool,
    /// The case, one of those below, then its options: `CASE --help` lists them
    #[arg(value_name = "CASE", trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    if options.all {
        let (records, page) = (records::read(&ws.join("benches/record"))?, ws.join("target/versus.html"));
        write_atomically(&page, records::page(&records).as_bytes())?;
        println!("page of all records: {}", page.display());
        return Ok(ExitCode::SUCCESS);
    }
    parse_case(&options.args)?;
    let libtorch = setup::quietly(ws)?;
    if options.args.first().is_some_and(|case| case == "ddp") {
        // This case measures the launcher, which has to be built next to it.
        let built = workspace::status(&mut ws.cargo_here(["build", "--release", "--package", "overdrive-launch"]))?;
        if !built.success() {
            return Ok(workspace::exit_code(built));
        }
    }
    let run = ["run", "--release", "--package", "overdrive-benches", "--bin", "overdrive-versus"];
    let mut command = ws.cargo_here(run);
    for feature in &options.features {
        command.args(["--features", feature]);
    }
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = workspace::capture(ws.command(rustc).arg("--version"))?;
    if parse(&version).is_some_and(|version| version >= DATALOADER_RS_NEEDS) {
        command.args(["--features", "dataloader-rs"]);
    }
    command.env("OVERDRIVE_PYTHON", python::with_torch(ws, &libtorch)?).arg("--").args(&options.args);
    Ok(workspace::exit_code(workspace::status(&mut command)?))
}

fn after_help() -> String {
    format!("Cases:\n{}", VersusCase::list())
}

/// Parsed here too, so that help and wrong options are reported before minutes of building.
fn parse_case(args: &[OsString]) -> Result<()> {
    if args.is_empty() {
        bail!("give a case, or --all for a page of what is recorded\n\n{}", after_help());
    }
    let name = OsString::from("cargo xtask versus");
    Ok(VersusOptions::parse_from([name].iter().chain(args)).check()?)
}

/// The version in `rustc 1.95.0 (59807616e 2026-04-14)`, without the patch.
fn parse(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.strip_prefix("rustc ")?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_case_or_none_is_answered_before_anything_is_built() {
        let parsed = |args: &[&str]| {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            parse_case(&args).map_err(|error| error.to_string())
        };
        let said = parsed(&[]).unwrap_err();
        assert!(said.starts_with("give a case") && said.contains("\n  loader "), "{said}");
        assert_eq!(parsed(&["step", "--part", "link"]).unwrap_err(), "--part is only for `ddp`, not for `step`");
        assert_eq!(parsed(&["step", "--pairs", "5"]), Ok(()));
    }

    #[test]
    fn the_compiler_s_version_decides_which_peers_are_built() {
        assert_eq!(parse("rustc 1.95.0 (59807616e 2026-04-14)\n"), Some((1, 95)));
        assert_eq!(parse("rustc 2.0.0-nightly (1234 2030-01-01)"), Some((2, 0)));
        assert_eq!(parse("clippy 0.1"), None);
        assert!(parse("rustc 1.89.0").unwrap() < DATALOADER_RS_NEEDS);
    }
}
