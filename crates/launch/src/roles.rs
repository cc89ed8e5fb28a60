//! The role of a process in a launch: launcher, guard, or a process that becomes a rank.

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
    /// Is the parent of the ranks, and kills them when the launcher dies.
    Guard,
    /// Becomes the program in its arguments by `exec`, and dies with the guard of this process ID.
    Exec(i32),
    /// Is a rank itself, and dies with the guard of this process ID.
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

/// Makes [`Launch`] usable in this program: call it first in `main`.
///
/// A launch starts the running program again: as the guard, the parent process of the ranks, and as each rank, until
/// `exec` replaces it by the rank's program. In those processes this function does the work and does not return. In a
/// rank of [`Launch::current_program`] it makes the rank die with its guard, and returns. Otherwise it returns at once.
///
/// [`Launch`]: crate::Launch
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
        // Children of a rank inherit the variable too. The guard is not their parent, so while it lives they are left
        // alone.
        Some(Role::Rank(guard)) => {
            let living = Pid::from_raw(guard).is_some_and(|guard| test_kill_process(guard).is_ok());
            if getppid().map(Pid::as_raw_pid) == Some(guard) || !living {
                die_with(guard);
            }
        }
    }
}

/// Whether `main` has called [`helper`], so that this program can be started as the guard.
pub fn has_helper() -> bool {
    CALLED.load(Ordering::Relaxed)
}

/// From here on, also after `exec`, this process gets SIGKILL when the guard dies.
fn die_with(guard: i32) {
    // If this fails, the launcher still kills the rank when the guard dies.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid().map(Pid::as_raw_pid) != Some(guard) {
        // The guard died before the line above.
        exit(1);
    }
}

/// This process's arguments are the program's file and then the program's own; its `argv[0]` is passed on.
fn become_program() -> ! {
    let mut arguments = env::args_os();
    let name = arguments.next().unwrap_or_default();
    let file = arguments.next().unwrap_or_default();
    let rest: Vec<OsString> = arguments.collect();
    let error = Command::new(&file).arg0(&name).args(rest).env_remove(ROLE).exec();
    eprintln!("overdrive-run: cannot start `{}`: {error}", file.display());
    exit(126)
}
