//! Every combination of parts beside a plain loop.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::setup;
use crate::workspace::{self, Workspace};

/// Train with every combination of parts, beside a plain loop; takes an hour or more
///
/// Each is equal to the loop, or refused for a reason that is named. `test` runs those in which every three choices meet.
#[derive(Args)]
pub struct Options {
    /// Only with all of these choices, by the names that a failure prints: `"sam(sgd)" "2 ranks"`
    #[arg(value_name = "CHOICE")]
    choices: Vec<String>,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    setup::quietly(ws)?;
    let mut command = ws.cargo(["test", "--workspace", "--test", "matrix", "--", "--ignored", "--nocapture"]);
    command.env("OVERDRIVE_MATRIX", options.choices.join(" + "));
    Ok(workspace::exit_code(workspace::status(&mut command)?))
}
