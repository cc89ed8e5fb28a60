//! Runs the test `matrix`: training with every combination of Overdrive's parts (such as `sam(sgd)` and `2 ranks`),
//! compared with a plain training loop.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::setup;
use crate::workspace::{self, Workspace};

/// Train with every combination of Overdrive's parts, and compare with a plain loop; takes an hour or more
///
/// Each combination must equal the loop, or be refused with a reason. `test` runs a selection that covers every triple
/// of choices.
#[derive(Args)]
pub struct Options {
    /// Run only combinations with all of these choices, by the names that a failure prints: `"sam(sgd)" "2 ranks"`
    #[arg(value_name = "CHOICE")]
    choices: Vec<String>,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    setup::quietly(ws)?;
    let mut command = ws.cargo(["test", "--workspace", "--test", "matrix", "--", "--ignored", "--nocapture"]);
    command.env("OVERDRIVE_MATRIX", options.choices.join(" + "));
    Ok(workspace::exit_code(workspace::status(&mut command)?))
}
