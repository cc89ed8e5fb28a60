//! The guard: the parent process of the ranks. It kills them when the launcher dies, for whatever reason.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::exit;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use rustix::process::{getpid, set_child_subreaper, setsid};
use signal_hook::consts::SIGCHLD;
use signal_hook::iterator::Signals;

use crate::attempt::{self, Ended, Outcome, Team};
use crate::environment;
use crate::error::LaunchError;
use crate::error_file;
use crate::health::{self, Health};
use crate::host::{Event, Host};
use crate::node_check::{self, Found};
use crate::numa::{self, Binding};
use crate::output::Console;
use crate::plan::Plan;
use crate::port::{self, ReservedPort};
use crate::process;
use crate::signals;
use crate::together::together;

/// The process name, unlike the launcher's, so that `pkill overdrive-run` finds the launcher only.
pub const NAME: &str = "overdrive-guard";

/// Runs the guard. Its standard input is a socket to the launcher: the guard reads the plan from it and writes the
/// result to it; when the socket closes, the launcher has died.
pub fn run() -> ! {
    // A new session: signals to the launcher's process group, and a hang-up of its terminal, do not reach the guard.
    let _ = setsid();
    // Orphaned descendants become children of the guard, so that it can find all of them.
    let _ = set_child_subreaper(Some(getpid()));
    let _ = rustix::thread::set_name(c"overdrive-guard");
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from) else { exit(1) };
    let mut reader = BufReader::new(&socket);
    let mut line = Vec::new();
    let read = reader.read_until(b'\n', &mut line);
    let (Ok(_), Ok(plan)) = (read, serde_json::from_slice::<Plan>(&line)) else { exit(1) };

    let result = supervise(plan, &socket);
    process::end_descendants();
    if let Some(result) = result
        && let Ok(text) = serde_json::to_vec(&result)
    {
        // Ignored: only the launcher needs the result, and it may have died.
        let _ = (&socket).write_all(&text);
    }
    exit(0)
}

/// None if the launcher has died, so that no result is needed.
fn supervise(plan: Plan, socket: &UnixStream) -> Option<Result<(), LaunchError>> {
    let (sender, events) = channel();
    let host = (|| {
        watch_signals(&plan.signals, sender.clone()).map_err(LaunchError::system("listen for signals"))?;
        watch_launcher(socket, sender.clone()).map_err(LaunchError::system("watch the launcher"))?;
        let console = Arc::new(Console::new()?);
        let health = Arc::new(Health::default());
        if let Some(port) = plan.health_port {
            health::serve(port, plan.health_timeout, &health)
                .map_err(LaunchError::system(format!("listen on port {port} for health checks")))?;
        }
        let visible = plan.variable_of_ranks("CUDA_VISIBLE_DEVICES");
        let of_ranks = |binding| numa::of_ranks(binding, plan.nproc, visible.as_deref());
        let bindings = plan.numa_binding.map(of_ranks).transpose()?;
        let bindings = bindings.unwrap_or_default();
        if !bindings.is_empty() {
            let cpus: Vec<String> = bindings.iter().map(Binding::to_text).collect();
            console.say(&format!("CPUs of the local ranks: {}", cpus.join("; ")));
        }
        let threads = environment::threads_of_ranks(plan.nproc, &bindings);
        if let Some(first) = threads.first() {
            let each = match threads.iter().all(|it| it == first) {
                true => format!("{first} for each of {} ranks", threads.len()),
                false => format!(
                    "{} for the local ranks",
                    threads.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
                ),
            };
            let how = match bindings.is_empty() {
                true => "cores divided by ranks",
                false => "a rank's CPUs divided by the ranks that share them",
            };
            console.say(&format!("OMP_NUM_THREADS={each} ({how}); set it to change that"));
        }
        let logs = plan.wants_files().then(|| folder_for_logs(&plan)).transpose()?;
        if let Some(logs) = &logs {
            console.say(&format!("outputs are in {}", logs.display()));
        }
        let errors = if logs.is_none() { folder_for_errors(&plan, &console) } else { None };
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Host { plan, name, console, logs, errors, threads, bindings, health, events })
    })();
    let result = host.and_then(|host| if host.plan.nnodes == 1 { alone(&host) } else { together(&host, &sender) });
    result.map_or_else(|error| Some(Err(error)), |end| end.map(Ok))
}

fn watch_signals(forwarded: &[i32], events: Sender<Event>) -> io::Result<()> {
    let wanted = signals::not_ignored(forwarded);
    let mut signals = Signals::new(wanted.iter().chain([&SIGCHLD]))?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

fn watch_launcher(socket: &UnixStream, events: Sender<Event>) -> io::Result<()> {
    let mut socket = socket.try_clone()?;
    thread::Builder::new().name("launcher".to_owned()).spawn(move || {
        // The launcher sends nothing after the plan, so this waits until the socket closes.
        let _ = io::copy(&mut socket, &mut io::sink());
        let _ = events.send(Event::LauncherGone);
    })?;
    Ok(())
}

/// Creates a folder for this run, as torchrun does, so that runs and nodes can share `--log-dir`.
fn folder_for_logs(plan: &Plan) -> Result<PathBuf, LaunchError> {
    let base = plan.log_dir.as_ref().map_or_else(std::env::temp_dir, PathBuf::from);
    let failed = || LaunchError::system(format!("make a folder for logs in {}", base.display()));
    std::fs::create_dir_all(&base).map_err(failed())?;
    // A slash would make it a path into another folder.
    let id = plan.run_id.replace('/', "_");
    let folder = tempfile::Builder::new().prefix(&format!("{id}_")).tempdir_in(&base).map_err(failed())?;
    Ok(folder.keep())
}

/// Without the folder, ranks run as well, but cannot record their errors.
fn folder_for_errors(plan: &Plan, console: &Console) -> Option<error_file::Folder> {
    let made = error_file::Folder::create(&plan.mark);
    made.inspect_err(|error| console.say(&format!("ranks cannot record errors: no temporary folder: {error}"))).ok()
}

/// `Ok(None)`: the launcher has died.
pub type End = Result<Option<()>, LaunchError>;

/// All ranks are on this host.
fn alone(host: &Host) -> End {
    let plan = &host.plan;
    match node_check::run(host)? {
        Found::Fit => {}
        Found::LauncherGone => return Ok(None),
        Found::Unfit(fault) => return Err(fault.into_error(host)),
    }
    let (mut attempt, mut ports_taken) = (0, 0);
    loop {
        host.beat();
        let reserved = if plan.master_port.is_none() { Some(ReservedPort::new()?) } else { None };
        let team = Team {
            attempt,
            restarts: attempt,
            node_rank: 0,
            nnodes: 1,
            first_rank: 0,
            world_size: plan.nproc,
            master_addr: plan.master_addr.clone().unwrap_or_else(|| "127.0.0.1".to_owned()),
            master_port: reserved.as_ref().map(|it| it.number).or(plan.master_port).unwrap_or_default(),
        };
        let Ended { outcome, ends, told_to_end, .. } = attempt::run(host, &team)?;
        let failures = match outcome {
            Outcome::Done | Outcome::NodeZero(_) => return Ok(Some(())),
            Outcome::LauncherGone => return Ok(None),
            Outcome::Interrupted(signal) => return Err(LaunchError::Interrupted { signal, host: None }),
            Outcome::Failed(failures) => failures,
        };
        let first = &failures.first;
        let taken = reserved.is_some() && first.rank == 0 && port::reports_taken(&first.output);
        if told_to_end.is_some() {
            return Err(LaunchError::Rank(Box::new(failures.report(ends, attempt))));
        } else if taken && ports_taken < port::MOST_RETRIES {
            ports_taken += 1;
            host.console.say(&format!("port {} was taken; trying another one", team.master_port));
        } else if attempt < plan.max_restarts {
            attempt += 1;
            host.console.say(&format!("{}; restart {attempt} of {}", failures.summary(), plan.max_restarts));
        } else {
            return Err(LaunchError::Rank(Box::new(failures.report(ends, attempt))));
        }
    }
}
