//! Whatever is killed, no process is left. `Running::end` checks that at the end of every test.

use std::thread::sleep;
use std::time::Duration;

use rustix::process::{Signal, kill_process, kill_process_group};
use tempfile::TempDir;

use crate::launcher::{Launcher, Running, children, wait_for};

crate::tests![
    a_killed_launcher_leaves_nothing,
    a_killed_guard_leaves_nothing,
    a_killed_process_group_leaves_nothing,
    launcher_and_guard_killed_at_once_leave_no_rank,
    a_launcher_killed_at_any_moment_leaves_nothing,
    background_processes_end_with_the_run,
    hidden_processes_are_found,
];

/// A rank with a child, a child in another session, and an orphan in another session that has a child itself.
const FAMILY: &str = "sleep 1000 & setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &) ; \
                      touch $READY.$RANK; wait";

/// Starts two such ranks, and waits until all processes run.
fn family() -> (Running, TempDir) {
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let running = Launcher::script(&["--nproc-per-node=2"], FAMILY).env("READY", &ready).start();
    running.wait_for_file(&ready.with_extension("0"));
    running.wait_for_file(&ready.with_extension("1"));
    // The launcher, the guard, and per rank: itself, two sleepers, and a shell with two more. A shell may replace
    // itself by its last command: hence 2 fewer.
    wait_for("the family", || (running.left().len() >= 14 - 2).then_some(()));
    (running, folder)
}

fn a_killed_launcher_leaves_nothing() {
    let (running, _folder) = family();
    running.signal(Signal::KILL);
    running.wait_until_gone();
    assert_eq!(running.end().code, None);
}

fn a_killed_guard_leaves_nothing() {
    let (running, _folder) = family();
    kill_process(running.guard(), Signal::KILL).unwrap();
    let ended = running.end();
    assert_eq!(ended.code, Some(1));
    ended.says("the guard process was ended by signal 9 (SIGKILL); the ranks were ended");
}

fn a_killed_process_group_leaves_nothing() {
    // As `timeout -s KILL` and a shell's `kill %1` do it.
    let (running, _folder) = family();
    kill_process_group(running.pid(), Signal::KILL).unwrap();
    running.wait_until_gone();
    assert_eq!(running.end().code, None);
}

fn launcher_and_guard_killed_at_once_leave_no_rank() {
    // No process is left to search for descendants, but the kernel kills the ranks by their parent-death signal.
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let script = "touch $READY.$RANK; exec sleep 1000";
    let running = Launcher::script(&["--nproc-per-node=2"], script).env("READY", &ready).start();
    running.wait_for_file(&ready.with_extension("0"));
    running.wait_for_file(&ready.with_extension("1"));
    let guard = running.guard();
    assert_eq!(children(guard.as_raw_pid()).len(), 2);
    // Both are stopped first, so that neither notices the other's death.
    kill_process(guard, Signal::STOP).unwrap();
    running.signal(Signal::STOP);
    kill_process(guard, Signal::KILL).unwrap();
    running.signal(Signal::KILL);
    running.wait_until_gone();
    assert_eq!(running.end().code, None);
}

fn a_launcher_killed_at_any_moment_leaves_nothing() {
    for moment in 0..25 {
        let running = Launcher::script(&["--nproc-per-node=3"], "sleep 1000 & sleep 1000").start();
        sleep(Duration::from_micros(moment * 700));
        running.signal(Signal::KILL);
        running.wait_until_gone();
        assert_eq!(running.end().code, None);
    }
}

fn background_processes_end_with_the_run() {
    // The background processes also hold the rank's output pipes open.
    let ended = Launcher::script(&["--nproc-per-node=2"], "(setsid sleep 1000 &); sleep 1000 & echo done").end();
    assert_eq!((ended.code, ended.out.lines().count()), (Some(0), 2));
}

fn hidden_processes_are_found() {
    // A process with an empty environment, in another session, whose parent has ended. This test finds it by its
    // arguments, the guard as a descendant.
    let folder = TempDir::new().unwrap();
    let script = "(setsid env -i sh -c \"touch $READY.$RANK; sleep 1000; :\" $TOKEN &); \
                  while ! [ -e $READY.0 ] || ! [ -e $READY.1 ]; do sleep 0.01; done; [ $RANK = 1 ] && exit 1; sleep 1000";
    let ended = Launcher::script(&["--nproc-per-node=2"], script).env("READY", folder.path().join("ready")).end();
    assert_eq!(ended.code, Some(1));
}
