//! Runs the tests (unit, integration and doc-tests, through `cargo test`), then every example, and counts the results.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::process::{ExitCode, ExitStatus};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow};
use clap::Args;

use crate::artifacts::{self, Program};
use crate::failures::Failures;
use crate::libtorch::Libtorch;
use crate::metadata;
use crate::setup;
use crate::totals::Totals;
use crate::workspace::{self, Workspace};

/// Tests of compiled steps: Python compiles for minutes where a package is not cached, so they run apart.
const APART: &str = "overdrive-compile-tests";

/// What runs for longest starts first, so that no core is idle at the end.
const LONGEST: [&str; 6] = ["ranks", "--bins", "gpu", "--doc", "gates", "planted"];

/// How many commands run side by side at most: each has as many threads as there are cores.
const AT_A_TIME: usize = 4;

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
    let base = ["test", "--workspace", "--test", "compile"];
    workspace::succeed(ws.cargo(base).arg("--no-run"))?;
    let halves: [&[&str]; 2] = [&["models::", "sizes::"], &["--skip", "models::", "--skip", "sizes::"]];
    let jobs = halves.map(|half| [&base[..], &["--"], half].concat().into_iter().map(str::to_owned).collect());
    let mut failures = Failures::default();
    let totals = side_by_side(ws, Vec::from(jobs), &mut failures)?;
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
    if args.is_empty() {
        return all(ws, failures);
    }
    let mut command = ws.cargo(["test", "--no-fail-fast"]);
    if !args.iter().any(|arg| arg.starts_with("-p") || arg.starts_with("--package")) {
        command.arg("--workspace");
    }
    counted(failures, |see| workspace::tee(command.args(args), see))
}

/// All tests but those that run apart: one command for each name of a test program, as most programs wait a lot.
fn all(ws: &Workspace, failures: &mut Failures) -> Result<Totals> {
    let base = ["test", "--no-fail-fast", "--workspace", "--exclude", APART];
    let built = counted(failures, |see| workspace::tee(ws.cargo(base).arg("--no-run"), see))?;
    if built.failed > 0 {
        return Ok(built);
    }
    let packages = metadata::packages(ws)?;
    let targets = packages.iter().filter(|package| package.name != APART).flat_map(|package| &package.targets);
    let programs: BTreeSet<_> = targets.filter(|target| target.kind == ["test"]).map(|target| &*target.name).collect();
    let mut jobs: Vec<_> = programs.into_iter().map(|name| vec!["--test", name]).collect();
    jobs.extend([vec!["--bins"], vec!["--lib"], vec!["--doc"]]);
    jobs.sort_by_key(|job| LONGEST.iter().position(|name| job.contains(name)).unwrap_or(LONGEST.len()));
    let command = |job: Vec<&str>| base.into_iter().chain(job).map(str::to_owned).collect();
    side_by_side(ws, jobs.into_iter().map(command).collect(), failures)
}

/// Runs cargo with each of these arguments, a few at a time. What a command prints is shown when it ends.
fn side_by_side(ws: &Workspace, jobs: Vec<Vec<String>>, failures: &mut Failures) -> Result<Totals> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let queue = Mutex::new(jobs.into_iter());
    let results = Mutex::new((Totals::default(), failures));
    let work = || -> Result<()> {
        let next = || queue.lock().map_or(None, |mut queue| queue.next());
        while let Some(job) = next() {
            println!("    Starting cargo {}", job.join(" "));
            let mut lines = Vec::new();
            let status = workspace::lines(&mut ws.cargo(&job), |line| lines.push(line.to_owned()))?;
            let mut results = results.lock().map_err(|_| anyhow!("another thread has panicked"))?;
            let (totals, failures) = &mut *results;
            *totals += counted(failures, |see| {
                lines.iter().for_each(|line| {
                    println!("{line}");
                    see(line);
                });
                Ok(status)
            })?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..cores.min(AT_A_TIME)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| anyhow!("a thread has panicked"))?)
    })?;
    Ok(results.into_inner().map_err(|_| anyhow!("a thread has panicked"))?.0)
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
