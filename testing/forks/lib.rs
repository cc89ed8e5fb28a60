//! Processes of tests, such as ranks. A test program that starts itself again loads libtorch each time, which takes 0.6 s
//! of a core; so one process of the program loads it and forks the others.
//!
//! A forked process is as one that was started: it has its own variables, standard output and errors, runs on its main
//! thread what [`serve_if_told`] was given, and exits. Only what libtorch reads from variables while it is loaded
//! (`TORCH_DISTRIBUTED_DEBUG`, `OMP_NUM_THREADS`) is as in the process that has forked it.

mod server;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, getpid, kill_process};
use serde_json::json;
use tempfile::{NamedTempFile, TempPath};

pub use server::serve_if_told;

/// Between two looks at a process that was killed.
const PAUSE: Duration = Duration::from_millis(1);

/// A process under way. It is killed when this is dropped, and when the program or the thread that has started it ends.
pub struct Process {
    kind: Kind,
    status: Option<ExitStatus>,
    output: TempPath,
    errors: TempPath,
}

enum Kind {
    Started(Child),
    Forked(Pid),
}

impl Process {
    /// Starts a program. Its standard input is empty.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(mut command: Command) -> io::Result<Self> {
        let [output, errors] = [NamedTempFile::new()?, NamedTempFile::new()?];
        let append = |file: &NamedTempFile| File::options().append(true).open(file.path());
        let own = getpid();
        // SAFETY: between fork and exec it makes two system calls, and allocates nothing.
        unsafe { command.pre_exec(move || server::end_with(own)) };
        let child = command.stdin(Stdio::null()).stdout(append(&output)?).stderr(append(&errors)?).spawn()?;
        Ok(Self::of(Kind::Started(child), output, errors))
    }

    /// Forks a process that has the variables of this command, whose program and arguments are not used. Its standard
    /// input is empty.
    ///
    /// # Errors
    /// When the process that forks cannot be started, has ended, or cannot fork.
    pub fn fork(command: &Command) -> io::Result<Self> {
        let [output, errors] = [NamedTempFile::new()?, NamedTempFile::new()?];
        let text = |it: &OsStr| it.to_string_lossy().into_owned();
        let variables: Vec<_> = command.get_envs().map(|(name, value)| (text(name), value.map(text))).collect();
        let request = json!({ "variables": variables, "output": output.path(), "errors": errors.path() });
        let pid = server::ask(&request)?.as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let pid = pid.ok_or_else(|| io::Error::other("no process was forked"))?;
        Ok(Self::of(Kind::Forked(pid), output, errors))
    }

    fn of(kind: Kind, output: NamedTempFile, errors: NamedTempFile) -> Self {
        Self { kind, status: None, output: output.into_temp_path(), errors: errors.into_temp_path() }
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When that cannot be found out.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = match &mut self.kind {
                Kind::Started(child) => child.try_wait()?,
                Kind::Forked(pid) => {
                    let status = server::ask(&json!({ "pid": pid.as_raw_nonzero().get() }))?;
                    status.as_i64().map(|status| ExitStatus::from_raw(status as i32))
                }
            };
        }
        Ok(self.status)
    }

    /// Kills it, if it has not ended, and waits for its end.
    ///
    /// # Errors
    /// See [`try_wait`](Self::try_wait).
    pub fn kill(&mut self) -> io::Result<()> {
        // Its number is its own until it was seen to have ended; also where the process that forks cannot tell.
        if !matches!(self.try_wait(), Ok(Some(_))) {
            match &mut self.kind {
                Kind::Started(child) => child.kill()?,
                Kind::Forked(pid) => kill_process(*pid, Signal::KILL)?,
            }
        }
        while self.try_wait()?.is_none() {
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// What it has written to its standard output and errors so far.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn written(&self) -> io::Result<[String; 2]> {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok([text(fs::read(&self.output)?), text(fs::read(&self.errors)?)])
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Where even that fails, there is nothing left to do.
        let _ = self.kill();
    }
}
