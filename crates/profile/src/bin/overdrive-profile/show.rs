//! `overdrive-profile show`.

use std::process::ExitCode;

use anyhow::Result;
use overdrive_profile::Diagnosis;

use crate::cli::ShowOptions;
use crate::hosts;

/// Prints the diagnosis of a record, and writes the page and the record if asked to.
pub fn show(options: &ShowOptions) -> Result<ExitCode> {
    let run = hosts::read(&options.records)?;
    let diagnosis = Diagnosis::of(&run);
    if let Some(path) = &options.html {
        run.write_html(&diagnosis, path)?;
    }
    if let Some(path) = &options.json {
        run.write_json(path)?;
    }
    crate::say(&diagnosis.to_string())?;
    Ok(ExitCode::SUCCESS)
}
