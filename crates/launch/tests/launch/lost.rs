//! Nodes that are lost, and those that wait for their places.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::launcher::{Ended, Running, undisturbed, wait_for};
use crate::nodes::{PATIENT, both, both_at_work, node};
use crate::port::free_port;

crate::tests![
    a_node_rank_that_is_taken_is_refused,
    a_lost_node_is_named,
    a_node_that_falls_silent_is_named,
    a_lost_coordinator_is_named,
    a_lost_coordinator_is_named_after_a_failure_too,
    a_lost_node_can_rejoin,
    a_node_that_rejoins_early_waits_for_its_place,
];

/// Nodes that count as lost after 1.5 s without a sign of life, or a multiple of that. On a busy machine they may be
/// lost although they live.
fn impatient(times: f64) -> String {
    format!("--rdzv-conf=keep_alive_interval={},timeout={}", 0.5 * times, 20.0 * times)
}

/// How long they wait for a place that is taken, at least.
fn wait_for_a_place(times: f64) -> Duration {
    Duration::from_secs_f64(2.5 * times)
}

/// What nodes say when a busy machine keeps them from answering or meeting in time. One line that node 1 was silent is
/// left out: that node is frozen.
fn disturbances<'a>(nodes: &[&'a Ended]) -> Vec<&'a str> {
    let is_late = |line: &&str| line.contains(" was lost: it was silent for ") || line.contains(" within ");
    let mut late: Vec<&str> = nodes.iter().flat_map(|node| node.err.lines()).filter(is_late).collect();
    if let Some(expected) = late.iter().position(|line| line.contains("node 1 (host ")) {
        late.remove(expected);
    }
    late
}

/// Node 0 refuses a second node 0, but only after a wait that is longer than it takes to notice the loss of a node.
fn a_node_rank_that_is_taken_is_refused() {
    undisturbed(|times| {
        let (port, conf) = (free_port(), impatient(times));
        let first = node(port, &["--node-rank=0", &conf], "echo $RANK").start();
        let is_there = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() || first.has_ended();
        wait_for("node 0", || is_there().then_some(()));
        let again = node(port, &["--node-rank=0", &format!("{conf},is_host=false")], "echo never").end();
        let second = node(port, &["--node-rank=1", &conf], "echo $RANK").end();
        let first = first.end();
        if [&first, &again, &second].iter().any(|it| it.err.contains("was lost") || it.err.contains(" within ")) {
            return Err(format!("{first:?} {again:?} {second:?}"));
        }
        assert_eq!((again.code, again.out.as_str()), (Some(1), ""));
        again.says("refused this node: node 0 (host ");
        assert_eq!((first.code, second.out.as_str()), (Some(0), "[rank1]: 1\n"));
        Ok(())
    });
}

fn a_lost_node_is_named() {
    let [first, second] = both_at_work(&[], "sleep 1000").unwrap();
    second.signal(Signal::KILL);
    second.wait_until_gone();
    let ended = first.end();
    assert_eq!(ended.code, Some(1));
    ended.says("node 1 (host ");
    ended.says("was lost: the connection was closed");
}

fn a_node_that_falls_silent_is_named() {
    undisturbed(|times| {
        let [first, second] = match both_at_work(&[&impatient(times)], "sleep 1000") {
            Ok([first, second]) => {
                // As if the cable were pulled.
                freeze(&second);
                let first = first.end();
                thaw(&second);
                [first, second.end()]
            }
            Err(ended) => *ended,
        };
        let silent = format!("was lost: it was silent for {} s", 1.5 * times);
        let good = first.code == Some(1)
            && ["node 1 (host ", &silent].iter().all(|what| first.err.contains(what))
            && second.err.contains("node 0 at 127.0.0.1:");
        if good {
            return Ok(());
        }
        let seen = format!("{first:?} {second:?}");
        assert!(!disturbances(&[&first, &second]).is_empty(), "{seen}");
        Err(seen)
    });
}

/// Stops a node's guard, until it is thawed. Does nothing if it has ended, as it may have on a busy machine.
fn freeze(node: &Running) {
    let _ended = node.living_guard().map(|guard| kill_process(guard, Signal::STOP));
}

fn thaw(node: &Running) {
    let _ended = node.living_guard().map(|guard| kill_process(guard, Signal::CONT));
}

fn a_lost_coordinator_is_named() {
    let [first, second] = both_at_work(&["--max-restarts=2"], "sleep 1000").unwrap();
    first.signal(Signal::KILL);
    first.wait_until_gone();
    let ended = second.end();
    assert_eq!(ended.code, Some(1));
    ended.says("node 0 at 127.0.0.1:");
    ended.says("was lost");
}

/// As over Gloo: a rank of node 1 fails before the loss of node 0 is noticed, and another one is still running.
fn a_lost_coordinator_is_named_after_a_failure_too() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("failed");
    let script =
        format!("[ $RANK = 2 ] && {{ echo $$ > {0}.tmp; mv {0}.tmp {0}; exit 3; }}; sleep 1000", file.display());
    let [first, second] = both(&["--nproc-per-node=2", "--failure-window=600", "--max-restarts=2"], &script);
    second.wait_for_file(&file);
    let failed = format!("/proc/{}", std::fs::read_to_string(&file).unwrap().trim());
    wait_for("the failed rank's end", || std::fs::metadata(&failed).is_err().then_some(()));
    first.signal(Signal::KILL);
    first.wait_until_gone();
    let ended = second.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    ended.says("node 0 at 127.0.0.1:");
    ended.says("was lost: the connection was closed");
}

/// Loses node 1 by `lose`, and starts it again. Then calls `find` for the lost one, and returns how that ended. An
/// error if a busy machine has disturbed the nodes. `place` is how long nodes wait for a place.
fn rejoin((conf, place): (&str, Duration), lose: impl Fn(&Running), find: impl Fn(&Running)) -> Result<Ended, String> {
    let port = free_port();
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let script = format!(
        "touch {}.$RANK; [ $TORCHELASTIC_RESTART_COUNT = 0 ] && sleep 1000; echo $RANK in $TORCHELASTIC_RESTART_COUNT",
        ready.display()
    );
    let start = |rank: &str| node(port, &["--max-restarts=1", conf, "--node-rank", rank], &script).start();
    let [first, second] = [start("0"), start("1")];
    let file = ready.with_extension("1");
    wait_for("rank 1", || (file.exists() || first.has_ended() || second.has_ended()).then_some(()));
    lose(&second);
    let asked = Instant::now();
    let again = start("1").end();
    let waited = asked.elapsed();
    let first = first.end();
    find(&second);
    let second = second.end();
    let good = (again.code, again.out.as_str()) == (Some(0), "[rank1]: 1 in 1\n")
        && (first.code, first.out.as_str()) == (Some(0), "[rank0]: 0 in 1\n")
        && ["node 1 (host ", "; restart 1 of 1"].iter().all(|what| first.err.contains(what));
    if good {
        return Ok(second);
    }
    let seen = format!("{first:?} {second:?} {again:?} after {waited:?}");
    // Node 0 may notice the loss only after it has refused the new node. It may not refuse it sooner than it should.
    let refused_late = again.err.contains("has already joined") && waited >= place;
    assert!(refused_late || !disturbances(&[&first, &second, &again]).is_empty(), "{seen}");
    Err(seen)
}

fn a_lost_node_can_rejoin() {
    let kill = |node: &Running| {
        node.signal(Signal::KILL);
        node.wait_until_gone();
    };
    rejoin((PATIENT, Duration::from_secs(610)), kill, |_| {}).unwrap();
}

fn a_node_that_rejoins_early_waits_for_its_place() {
    // Node 0 notices only later that the first node 1 is silent.
    let lost = undisturbed(|times| rejoin((&impatient(times), wait_for_a_place(times)), freeze, thaw));
    lost.says("node 0 at 127.0.0.1:");
}
