//! Runs the same computations here and in Python's PyTorch, with the same libtorch, and compares number by number.
//!
//! `parity/cases/*.py` has one function per case; `src/cases` has one of the same name. Python writes
//! the inputs and expected values of one after the other; this program reads them, computes, compares, and ends with
//! `N passed, M failed`.
#![forbid(unsafe_code)]

mod cases;
mod compare;
mod recipes;
mod record;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

use crate::record::{Given, Record};

/// Compares this workspace with Python's PyTorch from the same install, number by number.
#[derive(Parser)]
#[command(name = "parity")]
struct Options {
    /// Runs only the cases whose name contains this text
    #[arg(default_value = "")]
    filter: String,
    /// Prints every value compared, not only those that differ
    #[arg(long)]
    verbose: bool,
    /// The folder with the Python half [default: the workspace's `parity/cases`]
    #[arg(long, value_name = "DIR")]
    cases: Option<PathBuf>,
    /// The folder with the shipped MNIST images [default: the workspace's `data/mnist`]
    #[arg(long, value_name = "DIR")]
    mnist: Option<PathBuf>,
    /// Runs the recipes and not the cases, with the examples' programs in this folder; the launcher is above it
    #[arg(long, value_name = "DIR")]
    recipes: Option<PathBuf>,
    /// The Python that has torch 2.11.0
    #[arg(long, env = "OVERDRIVE_PYTHON", default_value = "python3")]
    python: PathBuf,
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run() -> Result<ExitCode> {
    if let Some(told) = cases::other_rank() {
        return told.map(|()| ExitCode::SUCCESS);
    }
    let options = Options::parse();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's folder")?;
    let cases_dir = options.cases.clone().unwrap_or_else(|| workspace.join("parity/cases"));
    let mnist_dir = options.mnist.clone().unwrap_or_else(|| workspace.join("data/mnist"));
    if let Some(programs) = options.recipes {
        return recipes::run(&recipes::Options {
            filter: options.filter,
            python: options.python,
            programs,
            workspace: workspace.into(),
        });
    }
    tch::set_num_threads(1);

    let mut cases: Vec<_> = cases::ALL.iter().filter(|(name, _)| name.contains(&options.filter)).collect();
    ensure!(!cases.is_empty(), "no case's name contains {:?}", options.filter);
    let known: Vec<&str> = cases.iter().map(|(name, _)| *name).collect();
    let out = tempfile::tempdir().context("a temporary folder for what Python writes")?;
    let started = Instant::now();
    let mut python = start_python(&options, &cases_dir, &mnist_dir, out.path())?;
    let (mut passed, mut failed) = (0, 0);
    let mut run = |&(name, function): &(&str, cases::Case)| {
        let verdict = run_case(name, function, out.path(), &mnist_dir, options.verbose);
        let (case_passed, case_failed) = verdict.unwrap_or_else(|error| {
            println!("{name}: {error:#}");
            (0, 1)
        });
        passed += case_passed;
        failed += case_failed;
    };
    // Python computes the next case meanwhile.
    for line in BufReader::new(python.stdout.take().context("Python has no output")?).lines() {
        let line = line.context("cannot read what Python prints")?;
        if let Some(place) = cases.iter().position(|(name, _)| *name == line) {
            run(cases.remove(place));
        }
    }
    let status = python.wait().context("Python")?;
    if !status.success() {
        bail!("Python's half failed ({status}); its message is above");
    }
    // Those that this Python cannot run, and those that it does not have.
    cases.into_iter().for_each(run);
    failed += report_missing(out.path(), &known)?;
    println!("{:.1} s", started.elapsed().as_secs_f64());
    println!("{passed} passed, {failed} failed");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Starts Python's half, which prints the name of each case that it has written.
fn start_python(options: &Options, cases: &Path, mnist: &Path, out: &Path) -> Result<Child> {
    let script = cases.join("harness.py");
    ensure!(script.is_file(), "{} is missing: give the Python half's folder with --cases", script.display());
    let mut command = Command::new(&options.python);
    command.arg(&script).args([out.as_os_str(), options.filter.as_ref()]).env("OVERDRIVE_MNIST", mnist);
    // This program's loader path has our libtorch; Python must load its own.
    command.env_remove("LD_LIBRARY_PATH").stdout(Stdio::piped()).spawn().with_context(|| {
        format!("cannot run {}: `cargo xtask parity` finds a Python with torch 2.11.0", options.python.display())
    })
}

/// Runs a case; returns how many of its values agree with Python's, and how many do not.
fn run_case(name: &str, function: cases::Case, out: &Path, mnist: &Path, verbose: bool) -> Result<(usize, usize)> {
    let record = Record::read(out, name).context("Python has no case of this name")?;
    if let Some(package) = &record.missing {
        println!("{name}: skipped: this Python has no {package}");
        return Ok((0, 0));
    }
    if let Some(failure) = &record.failure {
        bail!("Python's half failed:\n{failure}");
    }
    let started = Instant::now();
    let found = function(&Given::new(&record, out, mnist))?;
    let (passed, failed, worst) = compare::all(name, &record, &found, verbose);
    let seconds = started.elapsed().as_secs_f64();
    ensure!(passed + failed > 0, "Python expects nothing");
    println!("{name}: {passed} passed, {failed} failed, worst relative difference {worst:.1e}, {seconds:.1} s");
    Ok((passed, failed))
}

/// Reports and counts the cases that only Python has.
fn report_missing(out: &Path, cases: &[&str]) -> Result<usize> {
    let mut missing = 0;
    for entry in std::fs::read_dir(out)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let is_record = path.extension().is_some_and(|extension| extension == "json");
        if is_record && !cases.contains(&name) {
            println!("{name}: has no Rust function of this name");
            missing += 1;
        }
    }
    Ok(missing)
}
