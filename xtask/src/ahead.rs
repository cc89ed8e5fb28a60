//! Compiles what does not need libtorch while libtorch is being installed.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use crate::workspace::Workspace;

/// A build that fails at torch-sys, as long as there is no libtorch, and goes on with everything else.
pub struct Ahead(Option<Child>);

impl Ahead {
    /// Starts `cargo build` with these arguments, without output. A build that cannot start is done later, with its
    /// errors.
    pub fn start(ws: &Workspace, build: &[&str]) -> Self {
        // With a low priority: pip is what everything else waits for.
        let mut command = ws.command("nice");
        command.args(["-n", "10"]).arg(ws.cargo([""; 0]).get_program()).args(["build", "--keep-going", "--quiet"]);
        command.args(build).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // A group of its own, so that its compilers end with it.
        Self(command.process_group(0).spawn().ok())
    }
}

impl Drop for Ahead {
    /// Ends the build: from now on cargo can compile everything, what needs libtorch first.
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let group = format!("-{}", child.id());
            let _ = Command::new("kill").args(["-TERM", "--", &group]).stderr(Stdio::null()).status();
            let _ = child.wait();
        }
    }
}
