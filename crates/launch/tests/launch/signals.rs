//! Signals to the launcher.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::launcher::{Launcher, PROGRAM, Running, children, wait_for};

crate::tests![
    sigterm_reaches_the_ranks_and_ends_the_run,
    children_of_ranks_get_sigterm_too,
    children_of_ranks_have_the_grace_period_too,
    no_restart_follows_a_signal,
    no_restart_follows_a_signal_after_a_failure,
    a_second_interrupt_kills_at_once,
    sigusr1_is_forwarded_and_the_run_continues,
    signals_that_were_ignored_stay_ignored,
    chosen_signals_are_forwarded,
];

/// Shells start background jobs with SIGINT ignored, nohup with SIGHUP ignored, and launchers respect that. With a
/// handler here, the processes that these tests start have the default action instead.
pub fn restore_ignored() {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register_conditional_default(signal, Arc::new(true.into())).unwrap();
    }
}

fn start(options: &[&str], script: &str) -> Running {
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let running = Launcher::script(options, script).env("READY", &ready).env("HOLD", "0.2").start();
    running.wait_for_file(&ready);
    running
}

fn sigterm_reaches_the_ranks_and_ends_the_run() {
    let script = "trap 'echo told $RANK; exit 0' TERM; [ $RANK = 0 ] && touch $READY; while true; do sleep 0.01; done";
    let running = start(&[], script);
    running.signal(Signal::TERM);
    let ended = running.end();
    // The rank exited with 0, but the run did not finish.
    assert_eq!((ended.code, ended.out.as_str()), (Some(143), "[rank0]: told 0\n"));
    ended.says("ended by signal 15 (SIGTERM)");
}

/// A rank that dies of SIGTERM at once, and its child, which prints something before it exits.
const WRAPPED: &str =
    "sh -c 'trap \"sleep $HOLD; echo child; exit 0\" TERM; touch $READY; while true; do sleep 0.01; done'; exit 0";

fn children_of_ranks_get_sigterm_too() {
    let running = start(&[], WRAPPED);
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(143), "[rank0]: child\n"));
}

fn children_of_ranks_have_the_grace_period_too() {
    let running = start(&["--grace-period=0.1"], &WRAPPED.replace("$HOLD", "1000"));
    running.signal(Signal::TERM);
    assert_eq!(running.end().out, "");

    // Also if the rank itself has ended before.
    let script = format!("[ $RANK = 0 ] && {{ {} & exit 0; }}; sleep 1000", WRAPPED.trim_end_matches("; exit 0"));
    let running = start(&["--nproc-per-node=2"], &script);
    running.signal(Signal::TERM);
    assert_eq!(running.end().out, "[rank0]: child\n");
}

fn no_restart_follows_a_signal() {
    let running = start(&["--max-restarts=5"], "touch $READY; sleep 1000");
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!((ended.code, ended.err.contains("restart")), (Some(143), false));
}

/// Rank 1 fails. Rank 0 then gets SIGTERM, but ends only at the next signal, or when `$READY.go` exists.
pub const FAILS_AND_LINGERS: &str = "[ $RANK = 1 ] && { while ! [ -e $READY ]; do sleep 0.01; done; exit 5; }; \
     trap 'n=${n}x; touch $READY.$n; [ $n = xx ] && exit 0' TERM INT HUP; touch $READY; \
     while ! [ -e $READY.go ]; do sleep 0.01; done";

fn no_restart_follows_a_signal_after_a_failure() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let folder = TempDir::new().unwrap();
        let ready = folder.path().join("ready");
        let options = ["--nproc-per-node=2", "--max-restarts=5"];
        let running = Launcher::script(&options, FAILS_AND_LINGERS).env("READY", &ready).start();
        running.wait_for_file(&ready.with_extension("x"));
        running.signal(signal);
        let ended = running.end();
        // The failure is reported nevertheless.
        assert_eq!((ended.code, ended.err.contains("restart")), (Some(5), false), "{}", ended.err);
        ended.says("rank 1 failed: exit code 5");
    }
}

fn a_second_interrupt_kills_at_once() {
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let script = "trap 'touch $READY.told' INT; touch $READY; while true; do sleep 0.01; done";
    let running = Launcher::script(&["--grace-period=1000"], script).env("READY", &ready).start();
    running.wait_for_file(&ready);
    running.signal(Signal::INT);
    running.wait_for_file(&ready.with_extension("told"));
    running.signal(Signal::INT);
    assert_eq!(running.end().code, Some(130));
}

fn sigusr1_is_forwarded_and_the_run_continues() {
    let script = "trap 'echo saved; exit 0' USR1; touch $READY; while true; do sleep 0.01; done";
    let running = start(&[], script);
    running.signal(Signal::USR1);
    let ended = running.end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "[rank0]: saved\n"));
}

fn signals_that_were_ignored_stay_ignored() {
    // As under nohup.
    let folder = TempDir::new().unwrap();
    let (ready, go) = (folder.path().join("ready"), folder.path().join("go"));
    let rank = format!("touch {}; while ! [ -e {} ]; do sleep 0.01; done", ready.display(), go.display());
    let script = format!("trap '' HUP; exec {PROGRAM} sh -c '{rank}'");
    let mut child = Command::new("sh").args(["-c", &script]).spawn().unwrap();
    wait_for("the rank", || ready.exists().then_some(()));
    let launcher = rustix::process::Pid::from_child(&child);
    let guard = children(launcher.as_raw_pid())[0];
    // An ignored signal is discarded when it is sent.
    for pid in [launcher.as_raw_pid(), guard, children(guard)[0]] {
        assert!(ignores_hup(pid), "{}", fs::read_to_string(format!("/proc/{pid}/status")).unwrap());
    }
    rustix::process::kill_process(launcher, Signal::HUP).unwrap();
    fs::write(&go, "").unwrap();
    assert!(wait_for("the launcher's end", || child.try_wait().unwrap()).success());
}

fn ignores_hup(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    // One bit for each signal, from 1 on.
    u64::from_str_radix(ignored.trim(), 16).unwrap() & (1 << (Signal::HUP.as_raw() - 1)) != 0
}

fn chosen_signals_are_forwarded() {
    let script = "trap 'echo urgent; exit 0' URG; touch $READY; while true; do sleep 0.01; done";
    let running = start(&["--signals-to-handle=SIGURG,TERM"], script);
    running.signal(Signal::URG);
    let ended = running.end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "[rank0]: urgent\n"));
}
