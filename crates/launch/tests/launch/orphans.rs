//! Whatever is killed, nothing is left. Every test ends with that check, which `Running::end` makes.

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
    what_ranks_leave_behind_is_ended_with_the_run,
    what_hides_is_found,
];

/// Two ranks, each with a child, a grandchild in a session of its own, and one that nobody waits for.
const FAMILY: &str = "sleep 1000 & setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &) ; \
                      touch $READY.$RANK; wait";

/// Waits until the whole family is there.
fn family() -> (Running, TempDir) {
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let running = Launcher::script(&["--nproc-per-node=2"], FAMILY).env("READY", &ready).start();
    running.wait_for_file(&ready.with_extension("0"));
    running.wait_for_file(&ready.with_extension("1"));
    // The launcher, the guard, and two times a rank, two sleepers, a shell with two more.
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
    // Nobody is left to look for anything but the ranks themselves: the kernel ends those.
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let script = "touch $READY.$RANK; exec sleep 1000";
    let running = Launcher::script(&["--nproc-per-node=2"], script).env("READY", &ready).start();
    running.wait_for_file(&ready.with_extension("0"));
    running.wait_for_file(&ready.with_extension("1"));
    let guard = running.guard();
    assert_eq!(children(guard.as_raw_pid()).len(), 2);
    // Stopped first, so that neither sees the other die.
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

fn what_ranks_leave_behind_is_ended_with_the_run() {
    // They hold the rank's outputs open, too.
    let ended = Launcher::script(&["--nproc-per-node=2"], "(setsid sleep 1000 &); sleep 1000 & echo done").end();
    assert_eq!((ended.code, ended.out.lines().count()), (Some(0), 2));
}

fn what_hides_is_found() {
    // Without environment, in a session of its own, its parent gone. Found by its arguments here, by the guard as a
    // descendant.
    let folder = TempDir::new().unwrap();
    let script = "(setsid env -i sh -c \"touch $READY.$RANK; sleep 1000; :\" $TOKEN &); \
                  while ! [ -e $READY.0 ] || ! [ -e $READY.1 ]; do sleep 0.01; done; [ $RANK = 1 ] && exit 1; sleep 1000";
    let ended = Launcher::script(&["--nproc-per-node=2"], script).env("READY", folder.path().join("ready")).end();
    assert_eq!(ended.code, Some(1));
}
