//! Runs every test: unit, integration and doc-tests through `cargo test`, then every example, and counts the results.

use std::process::{ExitCode, ExitStatus};
use std::time::Instant;

use anyhow::{Result, anyhow};
use clap::Args;

use crate::artifacts::{self, Program};
use crate::failures::Failures;
use crate::libtorch::Libtorch;
use crate::setup;
use crate::totals::Totals;
use crate::workspace::{self, Workspace};

/// Tests of compiled steps: Python compiles for minutes where a package is not cached, so they run apart.
const APART: &str = "overdrive-compile-tests";

/// Run the tests and every example; the last line has the totals
///
/// A test that needs a GPU counts as skipped where there is none. Tests of compiled steps run apart, by
/// `cargo xtask test -- --test compile`.
#[derive(Args, Default)]
pub struct Options {
    /// Arguments for `cargo test`: a name to filter by, `-p PACKAGE`, ..; the examples are not run then
    #[arg(last = true)]
    args: Vec<String>,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    let totals = totals(ws, options)?;
    println!("{totals}");
    Ok(if totals.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The tests that [`run`] leaves out by default. Compiling takes one core, so two halves of them run at a time.
pub fn apart(ws: &Workspace) -> Result<Totals> {
    setup::quietly(ws)?;
    let cargo = |args: &[&str]| {
        let mut command = ws.cargo(["test", "--workspace", "--test", "compile"]);
        command.args(args);
        command
    };
    workspace::succeed(&mut cargo(&["--no-run"]))?;
    let mut failures = Failures::default();
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            let mut lines = Vec::new();
            let mut command = cargo(&["--", "--skip", "models::", "--skip", "sizes::"]);
            let status = workspace::lines(&mut command, |line| lines.push(line.to_owned()));
            status.map(|status| (status, lines))
        });
        let mut command = cargo(&["--", "models::", "sizes::"]);
        let first = counted(&mut failures, |see| workspace::tee(&mut command, see));
        (first, second.join())
    });
    let (status, lines) = second.map_err(|_| anyhow!("the other half of the tests panicked"))??;
    let mut totals = first?;
    totals += counted(&mut failures, |see| {
        lines.iter().for_each(|line| {
            println!("{line}");
            see(line);
        });
        Ok(status)
    })?;
    print!("{failures}");
    Ok(totals)
}

pub fn totals(ws: &Workspace, options: &Options) -> Result<Totals> {
    let libtorch = setup::quietly(ws)?;
    let mut failures = Failures::default();
    let mut totals = tests(ws, &options.args, &mut failures)?;
    // If no test has passed, the workspace does not build, and the examples would only repeat the errors.
    if options.args.is_empty() && totals.passed > 0 {
        let of_examples = examples(ws, &libtorch);
        print!("{failures}");
        totals += of_examples?;
        return Ok(totals);
    }
    print!("{failures}");
    Ok(totals)
}

fn tests(ws: &Workspace, args: &[String], failures: &mut Failures) -> Result<Totals> {
    let mut command = ws.cargo(["test", "--no-fail-fast"]);
    if !args.iter().any(|arg| arg.starts_with("-p") || arg.starts_with("--package")) {
        command.arg("--workspace");
    }
    // With a filter, tests are not many.
    if args.is_empty() {
        command.args(["--exclude", APART]);
    }
    counted(failures, |see| workspace::tee(command.args(args), see))
}

/// Counts the results in the lines of a `cargo test`.
fn counted(failures: &mut Failures, run: impl FnOnce(&mut dyn FnMut(&str)) -> Result<ExitStatus>) -> Result<Totals> {
    let (mut totals, died) = (Totals::default(), failures.died);
    let status = run(&mut |line| {
        totals += Totals::of_line(line);
        failures.see(line);
    })?;
    failures.ended();
    // Programs that died, and a failed build, have printed no result line that was counted.
    totals.failed += failures.died - died;
    if !status.success() && totals.failed == 0 {
        totals.failed = 1;
    }
    Ok(totals)
}

/// An example passes when it exits with 0.
///
/// They are built together with the workspace, like the tests; built alone, they would need the crates with other
/// features.
fn examples(ws: &Workspace, libtorch: &Libtorch) -> Result<Totals> {
    let mut totals = Totals::default();
    let programs = artifacts::build(ws, &["build", "--workspace", "--examples"])?;
    for example in programs.iter().filter(|program| is_example(ws, program)) {
        println!("\nexample {}", example.name);
        let start = Instant::now();
        let mut command = ws.command(ws.join(".cargo/with-libtorch"));
        let passed = workspace::status(command.arg(&example.path).env("LIBTORCH", &libtorch.dir))?.success();
        let verdict = if passed { "ok" } else { "FAILED" };
        println!("example {} ... {verdict} ({:.1} s)", example.name, start.elapsed().as_secs_f64());
        totals += Totals { passed: passed.into(), failed: (!passed).into(), skipped: 0 };
    }
    Ok(totals)
}

/// Whether a program is an example of the `examples/` folder. The packages that own these are elsewhere, so their paths
/// contain `..`.
fn is_example(ws: &Workspace, program: &Program) -> bool {
    let folder = ws.join("examples").canonicalize();
    let source = program.source.canonicalize();
    folder.is_ok_and(|folder| source.is_ok_and(|source| source.starts_with(folder)))
}
