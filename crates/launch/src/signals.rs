//! Signals by number and by name.

use std::fs;

use rustix::process::Signal;
use signal_hook::consts;
use signal_hook::low_level::signal_name;

/// The signals that a launcher forwards by default.
pub const FORWARDED: [i32; 6] =
    [consts::SIGINT, consts::SIGTERM, consts::SIGHUP, consts::SIGQUIT, consts::SIGUSR1, consts::SIGUSR2];

/// Signals that end the run; the others are only forwarded.
const ENDING: [i32; 4] = [consts::SIGINT, consts::SIGTERM, consts::SIGHUP, consts::SIGQUIT];

pub fn ends_the_run(signal: i32) -> bool {
    ENDING.contains(&signal)
}

/// `signal 9 (SIGKILL)`.
pub fn describe(signal: i32) -> String {
    match signal_name(signal) {
        Some(name) => format!("signal {signal} ({name})"),
        None => format!("signal {signal}"),
    }
}

/// The number of the signal with a name like `SIGTERM` or `TERM`; None if there is no such signal, or if a launcher
/// cannot forward it.
pub fn by_name(name: &str) -> Option<i32> {
    let upper = name.trim().to_ascii_uppercase();
    let full = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    // SIGKILL and SIGSTOP cannot be caught, the launcher needs SIGCHLD itself, and the others report faults of the
    // launcher's own code.
    let not_forwardable = ["SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"];
    if not_forwardable.contains(&full.as_str()) {
        return None;
    }
    (1..32).find(|&number| signal_name(number) == Some(full.as_str()))
}

pub fn from_number(number: i32) -> Option<Signal> {
    Signal::from_named_raw(number)
}

/// Drops the signals that this process inherited as ignored: SIGHUP under `nohup`, SIGINT in a shell's background job.
/// The ranks inherit that as well.
pub fn not_ignored(signals: &[i32]) -> Vec<i32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored_mask(&status);
    signals.iter().copied().filter(|signal| ignored & (1 << (signal - 1)) == 0).collect()
}

fn ignored_mask(status: &str) -> u64 {
    let field = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    field.and_then(|field| u64::from_str_radix(field.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_with_and_without_their_prefix() {
        assert_eq!(by_name("SIGTERM"), Some(15));
        assert_eq!(by_name(" usr1"), Some(consts::SIGUSR1));
        assert_eq!(by_name("SIGKILL"), None);
        assert_eq!(by_name("SIGSOON"), None);
        assert_eq!(describe(9), "signal 9 (SIGKILL)");
    }

    #[test]
    fn ignored_signals_are_read_from_the_mask() {
        assert_eq!(ignored_mask("Name:\tx\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored_mask("Name:\tx\n"), 0);
    }
}
