//! `overdrive-profile run`.

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Context as _, Result};
use overdrive_profile::Diagnosis;

use crate::child;
use crate::cli::RunOptions;
use crate::folder::Folder;
use crate::records::Records;

/// Runs the program and prints the diagnosis of its record. The exit code is the program's.
pub fn run(options: &RunOptions) -> Result<ExitCode> {
    let folder = Folder::prepare(&options.out)?;
    let (program, args) = options.command.split_first().context("give a program to run")?;
    let mut command = Command::new(program);
    command.args(args).env("OVERDRIVE_PROFILE", folder.recording());
    let counts = [("OVERDRIVE_PROFILE_BEFORE", options.before), ("OVERDRIVE_PROFILE_STEPS", options.steps)];
    for (name, count) in counts {
        if let Some(count) = count {
            command.env(name, count.to_string());
        }
    }
    let status = match child::run(&mut command) {
        Ok(status) => status,
        Err(error) => {
            folder.discard();
            eprintln!("overdrive-profile: cannot start {}: {error}", program.display());
            return Ok(ExitCode::from(if error.kind() == ErrorKind::NotFound { 127 } else { 126 }));
        }
    };
    let code = exit_code(status);
    if let Err(error) = report(folder, status) {
        eprintln!("overdrive-profile: {error:#}");
        return Ok(ExitCode::from(code.max(1)));
    }
    Ok(ExitCode::from(code))
}

/// The exit code as in shells: 128 plus the signal's number after a signal.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Writes the page and prints the diagnosis.
fn report(folder: Folder, status: ExitStatus) -> Result<()> {
    let read = Records::read(folder.recording());
    let Ok(Some(mut records)) = read else {
        folder.discard();
        return Err(read.err().unwrap_or_else(|| anyhow::anyhow!(no_record(status))));
    };
    if !status.success() {
        records.run.notes.push(format!("the program ended early, with {status}: the record may be incomplete"));
    }
    let diagnosis = Diagnosis::of(&records.run);
    let paths = folder.complete(&records, &diagnosis)?;
    eprintln!("\n{}\n", diagnosis.to_string().trim_end());
    for path in paths {
        eprintln!("{}", path.display());
    }
    Ok(())
}

/// Why there may be no record, and what to do.
fn no_record(status: ExitStatus) -> String {
    let end = if status.success() { "exited with 0".to_owned() } else { format!("ended with {status}") };
    format!(
        "the program {end}, but left no record. It leaves one if\n\
         - it was built with the feature `record`: cargo build --features overdrive/record, or \
         overdrive-profile/record;\n\
         - its training loop calls timer.step(samples) of a StepTimer, or steps an optimizer of these crates (if\n  \
         the program uses no item of overdrive-profile, `use overdrive_profile as _;` links it);\n\
         - it returned from main: after std::process::exit or a signal, there is only a record if the profiled\n  \
         steps were over by then (--before 0 profiles the first steps)"
    )
}
