//! Runs the tests (unit, integration and doc-tests, through `cargo test`), then every example, and counts the results.

use std::collections::BTreeSet;
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Result, ensure};
use clap::Args;

use crate::artifacts::{self, Program};
use crate::failures::Failures;
use crate::formats;
use crate::libtorch::Libtorch;
use crate::metadata::{self, Package};
use crate::setup;
use crate::side_by_side;
use crate::totals::Totals;
use crate::workspace::{self, Workspace};

/// Packages whose tests run apart, because they take minutes: Python compiles the steps of one, the others train on the
/// stand-in for a GPU.
const APART: [&str; 3] = ["overdrive-compile-tests", "overdrive-fault-tests", "overdrive-gpu-tests"];

/// The tests on the stand-in for a GPU: those of its package, the counts beside PyTorch's, and runs with faults.
const ON_THE_STAND_IN: [&str; 3] = ["gpu", "gates", "faults"];

/// What runs for longest starts first, so that no core is idle at the end.
const LONGEST: [&str; 6] = ["ranks", "bench", "planted", "convert", "cli", "compose"];

/// Run the tests and every example; the last line has the totals
///
/// A test that needs a GPU counts as skipped where there is none. Tests of compiled steps run apart, by
/// `cargo xtask test -- --test compile`, and so do those on the stand-in for a GPU, by `cargo xtask test -- --test gpu
/// --test gates --test faults`.
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

/// The tests on the stand-in for a GPU, which [`run`] leaves out by default.
pub fn on_the_stand_in(ws: &Workspace) -> Result<Totals> {
    setup::quietly(ws)?;
    let base = ["test", "--workspace", "--no-fail-fast"];
    let tests = ON_THE_STAND_IN.map(|name| ["--test", name]);
    workspace::succeed(ws.cargo([&base[..], &tests.concat()].concat()).arg("--no-run"))?;
    let libtorch = ws.user_libtorch().unwrap_or_else(|| ws.default_libtorch());
    let has_cuda = libtorch.join("lib/libtorch_cuda.so").exists();
    let commands = tests.map(|test| {
        let mut command = on_one_thread(ws.cargo([&base[..], &test].concat()));
        // Where libtorch has CUDA's code, nothing may be skipped for want of the stand-in.
        if has_cuda && std::env::var_os("FAKECUDA").is_none() {
            command.env("FAKECUDA", "1");
        }
        command
    });
    let mut failures = Failures::default();
    let totals = side_by_side(commands.into(), &mut failures)?;
    print!("{failures}");
    Ok(totals)
}

/// The tests of compiled steps, which [`run`] leaves out by default. Compiling takes one core, so the tests run in two
/// halves at the same time.
pub fn compiled(ws: &Workspace) -> Result<Totals> {
    setup::quietly(ws)?;
    let base = ["test", "--workspace", "--test", "compile"];
    workspace::succeed(ws.cargo(base).arg("--no-run"))?;
    let halves: [&[&str]; 2] = [&["models::", "sizes::"], &["--skip", "models::", "--skip", "sizes::"]];
    let commands = halves.map(|half| ws.cargo([&base[..], &["--"], half].concat()));
    let mut failures = Failures::default();
    let totals = side_by_side(commands.into(), &mut failures)?;
    print!("{failures}");
    Ok(totals)
}

/// The tests that read and write files together with Python's libraries. [`run`] skips those whose library is missing;
/// here the libraries are installed, and none may be skipped.
pub fn beside_python(ws: &Workspace) -> Result<Totals> {
    let libtorch = setup::quietly(ws)?;
    let python = formats::python(ws, &libtorch)?;
    let mut command = on_one_thread(ws.cargo(["test", "--no-fail-fast", "--workspace"]));
    // As [`run`] builds them.
    command.args(APART.map(|package| ["--exclude", package]).concat());
    command.args(["--test", "formats", "--", "python", "mosaic", "--nocapture"]).env("OVERDRIVE_PYTHON", python);
    let (mut failures, mut skipped) = (Failures::default(), Vec::new());
    let totals = counted(&mut failures, |see| {
        workspace::tee(&mut command, |line| {
            skipped.extend(line.split_once("skipped: ").map(|(_, reason)| reason.to_owned()));
            see(line);
        })
    })?;
    print!("{failures}");
    ensure!(skipped.is_empty(), "tests were skipped, with the Python of target/formats/: {}", skipped.join("; "));
    ensure!(totals.passed + totals.failed > 0, "there is no test with `python` or `mosaic` in its name");
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
    let packages = metadata::packages(ws)?;
    if args.is_empty() {
        let rest: Vec<_> = packages.iter().filter(|package| !APART.contains(&&*package.name)).collect();
        let exclude = APART.map(|package| ["--exclude", package]).concat();
        return of_packages(ws, &[&["--workspace"], &exclude[..]].concat(), &rest, &ON_THE_STAND_IN, failures);
    }
    if let [flag, name] = args
        && matches!(flag.as_str(), "-p" | "--package")
        && let Some(package) = packages.iter().find(|package| package.name == *name)
    {
        return of_packages(ws, &["--package", name], &[package], &[], failures);
    }
    let mut command = ws.cargo(["test", "--no-fail-fast"]);
    if !args.iter().any(|arg| arg.starts_with("-p") || arg.starts_with("--package")) {
        command.arg("--workspace");
    }
    counted(failures, |see| workspace::tee(command.args(args), see))
}

/// The tests of these packages, which the arguments select, but for the programs with these names: one command for each
/// name, because most programs wait a lot.
fn of_packages(
    ws: &Workspace,
    select: &[&str],
    packages: &[&Package],
    but: &[&str],
    failures: &mut Failures,
) -> Result<Totals> {
    let base = [&["test", "--no-fail-fast"], select].concat();
    let built = counted(failures, |see| workspace::tee(ws.cargo(&base).arg("--no-run"), see))?;
    if built.failed > 0 {
        return Ok(built);
    }
    let targets = || packages.iter().flat_map(|package| &package.targets);
    let has = |kind: &str| targets().any(|target| target.kind.iter().any(|it| it == kind));
    let programs: BTreeSet<_> =
        targets().filter(|target| target.kind == ["test"]).map(|target| &*target.name).collect();
    let mut jobs: Vec<_> =
        programs.into_iter().filter(|name| !but.contains(name)).map(|name| vec!["--test", name]).collect();
    if has("bin") {
        jobs.push(vec!["--bins"]);
    }
    // Cargo's `kind` of a library is its crate type.
    if ["lib", "rlib", "proc-macro"].into_iter().any(has) {
        jobs.extend([vec!["--lib"], vec!["--doc"]]);
    }
    jobs.sort_by_key(|job| LONGEST.iter().position(|name| job.contains(name)).unwrap_or(LONGEST.len()));
    side_by_side(jobs.into_iter().map(|job| on_one_thread(ws.cargo([&base[..], &job].concat()))).collect(), failures)
}

/// Has libtorch compute on one thread, unless the user has set how many: two threads that wait for each other take many
/// times as long where a core is busy.
fn on_one_thread(mut command: Command) -> Command {
    const THREADS: &str = "OMP_NUM_THREADS";
    if std::env::var_os(THREADS).is_none() {
        command.env(THREADS, "1");
    }
    command
}

/// Runs commands of cargo a few at a time. What a command prints is shown when it ends.
fn side_by_side(commands: Vec<Command>, failures: &mut Failures) -> Result<Totals> {
    let mut totals = Totals::default();
    side_by_side::run(commands, |ended| {
        totals += counted(failures, |see| {
            ended.lines.iter().for_each(|line| {
                println!("{line}");
                see(line);
            });
            Ok(ended.status)
        })?;
        Ok(())
    })?;
    Ok(totals)
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
    let mut programs = artifacts::build(ws, &["build", "--workspace", "--examples"])?;
    programs.retain(|program| is_example(ws, program));
    let command = |example: &Program| {
        let mut command = ws.command(ws.join(".cargo/with-libtorch"));
        command.arg(&example.path).env("LIBTORCH", &libtorch.dir);
        on_one_thread(command)
    };
    side_by_side::run(programs.iter().map(command).collect(), |ended| {
        let (name, passed) = (&programs[ended.number].name, ended.status.success());
        println!("\nexample {name}\n{}", ended.lines.join("\n"));
        let verdict = if passed { "ok" } else { "FAILED" };
        println!("example {name} ... {verdict} ({:.1} s)", ended.time.as_secs_f64());
        totals += Totals { passed: passed.into(), failed: (!passed).into(), skipped: 0 };
        Ok(())
    })?;
    Ok(totals)
}

/// Whether a program is an example of the `examples/` folder. The packages that own these are elsewhere, so their paths
/// contain `..`.
fn is_example(ws: &Workspace, program: &Program) -> bool {
    let folder = ws.join("examples").canonicalize();
    let source = program.source.canonicalize();
    folder.is_ok_and(|folder| source.is_ok_and(|source| source.starts_with(folder)))
}
