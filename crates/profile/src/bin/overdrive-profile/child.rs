//! Runs the program to record, and forwards signals to it.

use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use procfs::process::Process;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::flag::register_conditional_default;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;

const FORWARDED: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];

/// Runs the program to its end, and forwards signals.
///
/// # Errors
/// When the program cannot be started.
pub fn run(command: &mut Command) -> io::Result<ExitStatus> {
    let forwarded = not_ignored();
    let mut signals = SignalsInfo::<WithOrigin>::new(&forwarded)?;
    let handle = signals.handle();
    let mut child = command.spawn()?;
    // The process ID, until the program has ended.
    let living = Mutex::new(Some(Pid::from_child(&child)));
    let status = thread::scope(|scope| {
        scope.spawn(|| {
            for signal in signals.forever() {
                // A terminal sends its signals to the program as well; forwarding them would double a Ctrl-C.
                let is_from_terminal = signal.process.is_none();
                let living = living.lock().unwrap_or_else(PoisonError::into_inner);
                if let (Some(pid), Some(signal), false) =
                    (*living, Signal::from_named_raw(signal.signal), is_from_terminal)
                {
                    // Ignored: the program may have just ended.
                    let _ = kill_process(pid, signal);
                }
            }
        });
        let status = wait(&mut child, &living);
        handle.close();
        status
    });
    // From here on signals end this program as usual.
    for signal in forwarded {
        register_conditional_default(signal, Arc::new(AtomicBool::new(true)))?;
    }
    status
}

/// Waits for the child. Clears `living` before it reaps the child, because the process ID can be reused from then on.
fn wait(child: &mut Child, living: &Mutex<Option<Pid>>) -> io::Result<ExitStatus> {
    let pid = WaitId::Pid(Pid::from_child(child));
    while let Err(Errno::INTR) = waitid(pid.clone(), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {}
    *living.lock().unwrap_or_else(PoisonError::into_inner) = None;
    child.wait()
}

/// The signals to forward: not those that this program inherited as ignored, such as SIGHUP under `nohup`, because the
/// child inherits that too.
fn not_ignored() -> Vec<i32> {
    let ignored = Process::myself().and_then(|it| it.status()).map_or(0, |status| status.sigign);
    FORWARDED.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect()
}
