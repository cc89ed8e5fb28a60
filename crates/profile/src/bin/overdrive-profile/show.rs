//! `overdrive-profile show`.

use std::process::ExitCode;

use anyhow::Result;
use overdrive_profile::Diagnosis;

use crate::cli::ShowOptions;
use crate::records;

/// Prints the diagnosis of a record, and writes the page where that is asked for.
pub fn show(options: &ShowOptions) -> Result<ExitCode> {
    let run = records::read(&options.record)?;
    let diagnosis = Diagnosis::of(&run);
    if let Some(path) = &options.html {
        run.write_html(&diagnosis, path)?;
    }
    crate::say(&diagnosis.to_string())?;
    Ok(ExitCode::SUCCESS)
}
