//! Compiles what does not need libtorch while libtorch is being installed.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use crate::workspace::Workspace;

/// Runs its arguments, and ends them with all that they have started when its input ends. The input is a pipe from
/// xtask, which ends with it in any way: after Ctrl-C, which reaches only the terminal's own group, nothing is left.
const UNTIL_INPUT_ENDS: &str = r#""$@" & read -r _; trap '' TERM; kill -TERM 0; wait"#;

/// A build that fails at torch-sys, as long as there is no libtorch, and goes on with everything else.
pub struct Ahead(Option<Child>);

impl Ahead {
    /// Starts `cargo build` with these arguments, without output. A build that cannot start is done later, with its
    /// errors.
    pub fn start(ws: &Workspace, build: &[&str]) -> Self {
        let mut command = ws.command("sh");
        until_input_ends(&mut command);
        // With a low priority: pip is what everything else waits for.
        command.args(["nice", "-n", "10"]).arg(ws.cargo([""; 0]).get_program());
        command.args(["build", "--keep-going", "--quiet"]).args(build).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().ok())
    }
}

impl Drop for Ahead {
    /// Ends the build: from now on cargo can compile everything, what needs libtorch first.
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }
}

/// Makes a shell run the arguments that follow until its input ends.
fn until_input_ends(shell: &mut Command) {
    // A group of its own, so that cargo's compilers end with it, and xtask does not.
    shell.args(["-c", UNTIL_INPUT_ENDS, "sh"]).stdin(Stdio::piped()).process_group(0);
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn what_a_build_has_started_ends_with_xtask() {
        let mut command = Command::new("sh");
        until_input_ends(&mut command);
        // A program that starts another one, as cargo starts compilers. Both have the output open.
        let started = command.args(["sh", "-c", "(sleep 20; echo over) & echo begun; wait"]).stdout(Stdio::piped());
        let mut child = started.spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        let mut begun = [0; 6];
        output.read_exact(&mut begun).unwrap();
        // As when xtask is killed: its end of the pipe is closed, and nothing else is done.
        drop(child.stdin.take());
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert_eq!((&begun, rest.as_str()), (b"begun\n", ""));
        child.wait().unwrap();
    }
}
