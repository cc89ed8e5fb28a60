//! The launcher process: it starts the guard, forwards signals to it, and waits for the result.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::getpid;

use crate::error::LaunchError;
use crate::forwarding::Forwarding;
use crate::launch::Launch;
use crate::plan::Plan;
use crate::roles::{self, ROLE, Role};
use crate::{environment, error_file, guard, process, signals};

impl Launch {
    /// Starts the ranks, restarts them after failures if allowed, and waits until all have succeeded.
    ///
    /// When it returns, all processes that the ranks have started have ended. If the calling process dies, even by
    /// SIGKILL, the ranks and all that they have started get SIGKILL.
    ///
    /// # Errors
    /// See [`LaunchError`]. The program and options are checked before anything is started.
    ///
    /// # Syncs
    /// Blocks until the run has ended.
    pub fn run(&self) -> Result<(), LaunchError> {
        let mut plan = self.plan.clone();
        plan.check()?;
        plan.mark = unique_mark();
        if !roles::has_helper() {
            return Err(LaunchError::Guard(
                "this program cannot be started as the guard: call overdrive_launch::helper() first in its main".into(),
            ));
        }
        let (mut guard, mut socket) = start_guard(&plan)?;
        // Without a thread or descriptor for this, signals keep their default action; the ranks still end with the
        // launcher.
        let forwarding = plan.forward_signals.then(|| Forwarding::start(&plan.signals, &guard).ok()).flatten();
        let result = converse(&plan, &mut socket);
        // Ends the guard if it did not end by itself.
        drop(socket);
        let status = guard.wait();
        let interrupted = forwarding.and_then(Forwarding::stop);
        match result {
            Some(result) => result,
            None => {
                process::end_marked(&plan.mark);
                error_file::Folder::remove_left(&plan.mark);
                Err(guard_lost(status, interrupted))
            }
        }
    }
}

/// Different for every launch on this host.
fn unique_mark() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}", getpid().as_raw_pid(), now.as_nanos())
}

fn start_guard(plan: &Plan) -> Result<(Child, UnixStream), LaunchError> {
    let failed = |error: std::io::Error| LaunchError::Guard(format!("cannot start the guard process: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    // This program, even if its file has been replaced since.
    let mut command = Command::new("/proc/self/exe");
    command.arg0(guard::NAME).env(ROLE, Role::Guard.to_variable());
    // The guard carries the mark as well, so that it is found with the launch's other processes.
    command.env(process::MARK, &plan.mark).env_remove(environment::SECRET).env_remove(environment::ETCD_PASSWORD);
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    let guard = command.spawn().map_err(failed)?;
    // `command` still holds the guard's end of the socket; without it, the socket closes when the guard dies.
    drop(command);
    Ok((guard, ours))
}

/// Sends the plan and waits for the result; None if the guard dies before it sends one.
fn converse(plan: &Plan, socket: &mut UnixStream) -> Option<Result<(), LaunchError>> {
    let mut text = serde_json::to_vec(plan).ok()?;
    text.push(b'\n');
    socket.write_all(&text).ok()?;
    let mut result = Vec::new();
    socket.read_to_end(&mut result).ok()?;
    serde_json::from_slice(&result).ok()
}

fn guard_lost(status: std::io::Result<ExitStatus>, interrupted: Option<i32>) -> LaunchError {
    if let Some(signal) = interrupted {
        return LaunchError::Interrupted { signal, host: None };
    }
    let how = match status {
        Ok(status) => match status.signal() {
            Some(signal) => format!("was ended by {}", signals::describe(signal)),
            None => format!("exited early ({status})"),
        },
        Err(error) => format!("was lost: {error}"),
    };
    LaunchError::Guard(format!("the guard process {how}; the ranks were ended"))
}
