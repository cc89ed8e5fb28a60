//! The process that forks the others, and what it is asked.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{ChildStdin, ChildStdout, Command, ExitCode, Stdio, Termination};
use std::sync::{LazyLock, Mutex, PoisonError};

use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, set_parent_process_death_signal, waitpid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use serde_json::{Value, json};

/// Set in the process that forks.
const TOLD: &str = "OVERDRIVE_TEST_FORKS";

/// It ends when there can be no more requests, which is when this process has ended.
struct Server {
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
}

/// Asks the process that forks, which the first call starts.
pub(crate) fn ask(request: &Value) -> io::Result<Value> {
    static SERVER: LazyLock<io::Result<Mutex<Server>>> = LazyLock::new(|| start().map(Mutex::new));
    let server = SERVER.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    let Server { requests, replies } = &mut *server.lock().unwrap_or_else(PoisonError::into_inner);
    writeln!(requests, "{request}")?;
    let mut line = String::new();
    replies.read_line(&mut line)?;
    match serde_json::from_str(&line)? {
        Value::String(error) => Err(io::Error::other(error)),
        reply => Ok(reply),
    }
}

fn start() -> io::Result<Server> {
    let mut command = Command::new(std::env::current_exe()?);
    let command = command.env(TOLD, "1").env("OMP_NUM_THREADS", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let (Some(requests), Some(replies)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::Error::other("the process that forks others has no pipes"));
    };
    Ok(Server { requests, replies: BufReader::new(replies) })
}

/// Forks processes as this process is told, if it is the one that does so. `main` has to call it before anything else,
/// because a forked process has none of the threads of this one.
///
/// `Some` has what `main` should return: of a forked process what `main_of_one` has returned.
pub fn serve_if_told<T: Termination>(main_of_one: impl FnOnce() -> T) -> Option<ExitCode> {
    std::env::var_os(TOLD)?;
    // SAFETY: there are no other threads, see above.
    unsafe { std::env::remove_var(TOLD) };
    let served = serve().map(|end| match end {
        End::OfRequests => ExitCode::SUCCESS,
        End::InForked => catch_unwind(AssertUnwindSafe(|| main_of_one().report())).unwrap_or(ExitCode::from(101)),
    });
    Some(served.unwrap_or_else(|error| {
        eprintln!("the process that forks others: {error}");
        ExitCode::FAILURE
    }))
}

/// Why the loop of requests was left.
enum End {
    OfRequests,
    InForked,
}

fn serve() -> io::Result<End> {
    let (own, threads) = (getpid(), fs::read_dir("/proc/self/task")?.count());
    for line in io::stdin().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        let reply = match request["pid"].as_i64() {
            Some(pid) => Ok(status(pid)?),
            None if threads > 1 => Err(format!("{threads} threads run before `main`, and a fork would lack them")),
            // SAFETY: this process has one thread, which goes on in the forked one.
            None => match unsafe { libc::fork() } {
                0 => return end_with(own).and_then(|()| become_one(&request)).map(|()| End::InForked),
                -1 => Err(io::Error::last_os_error().to_string()),
                pid => Ok(json!(pid)),
            },
        };
        let mut output = io::stdout().lock();
        writeln!(output, "{}", reply.unwrap_or_else(Value::String))?;
        output.flush()?;
    }
    Ok(End::OfRequests)
}

/// Lets this process, which was just made, be killed when its parent ends: a test program that is killed itself drops
/// nothing. Allocates nothing.
pub(crate) fn end_with(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
}

/// The status of a process that has ended, as `waitpid` tells it.
fn status(pid: i64) -> io::Result<Value> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    let ended = waitpid(Some(pid), WaitOptions::NOHANG)?;
    Ok(ended.map_or(Value::Null, |(_, status)| json!(status.as_raw())))
}

/// Gives this process, which was just forked, its own variables and standard streams.
fn become_one(request: &Value) -> io::Result<()> {
    let file = |key: &str| File::options().append(true).open(request[key].as_str().unwrap_or_default());
    dup2_stdout(file("output")?)?;
    dup2_stderr(file("errors")?)?;
    dup2_stdin(File::open("/dev/null")?)?;
    for variable in request["variables"].as_array().into_iter().flatten() {
        let name = variable[0].as_str().unwrap_or_default();
        match variable[1].as_str() {
            // SAFETY: this process has one thread.
            Some(value) => unsafe { std::env::set_var(name, value) },
            // SAFETY: as above.
            None => unsafe { std::env::remove_var(name) },
        }
    }
    Ok(())
}
