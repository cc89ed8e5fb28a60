//! `overdrive-profile diff`.

use std::process::ExitCode;

use anyhow::Result;
use overdrive_profile::Comparison;

use crate::cli::DiffOptions;
use crate::records;

/// Prints the comparison of two records.
pub fn diff(options: &DiffOptions) -> Result<ExitCode> {
    let [before, after] = [records::read(&options.before)?, records::read(&options.after)?];
    let comparison = Comparison::of(&before, &after);
    let text = match options.json {
        true => serde_json::to_string_pretty(&comparison)?,
        false => {
            let (before, after) = (options.before.display(), options.after.display());
            format!("Before: {before}\nAfter:  {after}\n\n{comparison}")
        }
    };
    crate::say(&text)?;
    Ok(ExitCode::SUCCESS)
}
