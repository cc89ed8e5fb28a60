//! What a process of a launch is: the launcher, its guard, or a rank on its way.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::{Command, exit};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process};

use crate::guard;

/// The variable that tells a process its role.
pub const ROLE: &str = "OVERDRIVE_LAUNCH_ROLE";

static CALLED: AtomicBool = AtomicBool::new(false);

/// What a child is started as.
pub enum Role {
    /// Holds the ranks, and ends them when the launcher is gone.
    Guard,
    /// Becomes the program in its arguments, and dies with the guard of this process number.
    Exec(i32),
    /// Is a rank itself, and dies with the guard of this process number.
    Rank(i32),
}

impl Role {
    pub fn to_variable(&self) -> String {
        match self {
            Self::Guard => "guard".to_owned(),
            Self::Exec(guard) => format!("exec:{guard}"),
            Self::Rank(guard) => format!("rank:{guard}"),
        }
    }

    fn from_variable(text: &OsStr) -> Option<Self> {
        let text = text.to_str()?;
        match text.split_once(':') {
            None => (text == "guard").then_some(Self::Guard),
            Some(("exec", guard)) => guard.parse().ok().map(Self::Exec),
            Some(("rank", guard)) => guard.parse().ok().map(Self::Rank),
            Some(_) => None,
        }
    }
}

/// Lets this program be its own helper: call it first in `main`.
///
/// A launch starts the running program again, as the guard that holds the ranks, and for an instant as each rank. In
/// those processes this function does the work and does not return. In a rank of [`Launch::current_program`] it sees to
/// it that the rank dies with its guard, and returns; elsewhere it returns at once.
///
/// [`Launch::current_program`]: crate::Launch::current_program
pub fn helper() {
    CALLED.store(true, Ordering::Relaxed);
    match env::var_os(ROLE).as_deref().and_then(Role::from_variable) {
        None => {}
        Some(Role::Guard) => guard::run(),
        Some(Role::Exec(guard)) => {
            die_with(guard);
            become_program()
        }
        // Variables are inherited by whatever a rank starts, so a stranger's number means nothing while it lives.
        Some(Role::Rank(guard)) => {
            let living = Pid::from_raw(guard).is_some_and(|guard| test_kill_process(guard).is_ok());
            if getppid().map(Pid::as_raw_pid) == Some(guard) || !living {
                die_with(guard);
            }
        }
    }
}

/// Whether this program can be its own helper.
pub fn has_helper() -> bool {
    CALLED.load(Ordering::Relaxed)
}

/// From here on this process, also as the program that it becomes, gets SIGKILL when the guard dies.
fn die_with(guard: i32) {
    // Where the system refuses, the guard's own care is left.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid().map(Pid::as_raw_pid) != Some(guard) {
        // The guard died before the line above.
        exit(1);
    }
}

/// The arguments are the program's file and its arguments; its name for itself is this process's.
fn become_program() -> ! {
    let mut arguments = env::args_os();
    let name = arguments.next().unwrap_or_default();
    let file = arguments.next().unwrap_or_default();
    let rest: Vec<OsString> = arguments.collect();
    let error = Command::new(&file).arg0(&name).args(rest).env_remove(ROLE).exec();
    eprintln!("overdrive-run: cannot start `{}`: {error}", file.display());
    exit(126)
}
