//! Colours of the ranks' prefixes on a terminal.

use std::fs::{self, File};
use std::io::Read;
use std::process::Stdio;

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use tempfile::TempDir;

use crate::launcher::{PROGRAM, limited};

crate::tests![
    prefixes_have_colours_on_a_terminal_only,
    no_color_and_a_dumb_terminal_have_no_colours,
    files_have_no_colours,
];

/// Runs two ranks with standard output on a terminal and standard error in a pipe. Returns both as text.
fn on_terminal(options: &[&str], variables: &[(&str, &str)]) -> (String, String) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let terminal = openpt(flags).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let program_side = ioctl_tiocgptpeer(&terminal, flags).unwrap();
    let mut command = limited(PROGRAM);
    command.args(options).args(["--nproc-per-node=2", "sh", "-c", "echo out $RANK; echo err $RANK >&2"]);
    command.env_remove("NO_COLOR").env("TERM", "xterm").envs(variables.iter().copied());
    let mut child = command.stdin(Stdio::null()).stdout(program_side).stderr(Stdio::piped()).spawn().unwrap();
    // The command still holds the program's side of the terminal.
    drop(command);
    let (mut out, mut err, mut chunk) = (Vec::new(), String::new(), [0; 4096]);
    let mut terminal = File::from(terminal);
    // Reading fails when the last process has closed its side.
    while let Ok(read) = terminal.read(&mut chunk)
        && read > 0
    {
        out.extend_from_slice(&chunk[..read]);
    }
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(child.wait().unwrap().success(), "{err}");
    (String::from_utf8(out).unwrap(), err)
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

const PLAIN: [&str; 2] = ["[rank0]: out 0", "[rank1]: out 1"];

fn prefixes_have_colours_on_a_terminal_only() {
    for variables in [&[][..], &[("NO_COLOR", "")]] {
        let (out, err) = on_terminal(&[], variables);
        assert_eq!(sorted(&out), ["\x1b[33m[rank1]: \x1b[0mout 1", "\x1b[36m[rank0]: \x1b[0mout 0"]);
        // Standard error is not a terminal.
        assert!(err.contains("[rank1]: err 1\n") && !err.contains('\x1b'), "{err}");
    }
}

fn no_color_and_a_dumb_terminal_have_no_colours() {
    for variable in [("NO_COLOR", "1"), ("NO_COLOR", "0"), ("TERM", "dumb")] {
        assert_eq!(sorted(&on_terminal(&[], &[variable]).0), PLAIN, "{variable:?}");
    }
}

fn files_have_no_colours() {
    let base = TempDir::new().unwrap();
    let folder = base.path().to_str().unwrap();
    let (out, _) = on_terminal(&["--tee=3", "--duplicate-stdout-filters=out", "--log-dir", folder], &[]);
    assert!(out.contains("\x1b[36m[rank0]: \x1b[0mout 0"), "{out:?}");
    let run = fs::read_dir(&base).unwrap().next().unwrap().unwrap().path().join("attempt_0");
    assert_eq!(fs::read_to_string(run.join("0/stdout.log")).unwrap(), "out 0\n");
    assert_eq!(sorted(&fs::read_to_string(run.join("filtered_stdout.log")).unwrap()), PLAIN);
}
