//! Several nodes: launchers on this host that meet at a port of it.

use rustix::process::Signal;
use tempfile::TempDir;

use crate::launcher::{Ended, Launcher, Running, undisturbed, wait_for};
use crate::port::free_port;
use crate::signals::FAILS_AND_LINGERS;

crate::tests![
    two_nodes_agree_on_ranks_and_port,
    nodes_may_differ_in_size,
    nodes_without_a_node_rank_are_numbered,
    a_failure_on_one_node_ends_the_other,
    a_failure_soon_after_on_the_other_node_is_reported_too,
    failures_on_two_nodes_are_in_order_of_time,
    a_failure_on_one_node_restarts_both,
    a_node_that_never_joins_is_named,
    a_coordinator_that_never_starts_is_named,
    nodes_with_other_options_are_refused,
    a_signal_to_one_node_ends_both,
    a_signal_after_a_failure_ends_both,
    a_signal_to_a_node_without_a_place_ends_that_node_alone,
];

/// The secret of both nodes.
pub const SECRET: &str = "nobody else knows this";

/// Nodes of a busy machine wait for each other, and for a sign of life, for ten minutes.
pub const PATIENT: &str = "--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120";

/// One of two nodes that are patient unless the options say otherwise.
pub fn node(port: u16, options: &[&str], script: &str) -> Launcher {
    let endpoint = format!("127.0.0.1:{port}");
    let common = ["--nnodes=2", "--rdzv-endpoint", &endpoint, PATIENT];
    Launcher::script(&[&common[..], options].concat(), script).env("OVERDRIVE_SECRET", SECRET)
}

/// Both nodes, with the same options and script.
pub fn both(options: &[&str], script: &str) -> [Running; 2] {
    let port = free_port();
    // Node 1 starts first, and has to wait for node 0.
    let second = node(port, &[options, &["--node-rank=1"]].concat(), script).start();
    let first = node(port, &[options, &["--node-rank=0"]].concat(), script).start();
    [first, second]
}

const SAY: &str = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE \
                   $MASTER_ADDR:$MASTER_PORT";

fn two_nodes_agree_on_ranks_and_port() {
    let [first, second] = both(&["--nproc-per-node=2"], SAY).map(Running::end);
    assert_eq!((first.code, second.code), (Some(0), Some(0)));
    let port = first.out.trim().rsplit_once(':').unwrap().1.to_owned();
    assert_eq!(
        first.sorted(),
        [format!("[rank0]: 0/4 0/2 0/2 127.0.0.1:{port}"), format!("[rank1]: 1/4 1/2 0/2 127.0.0.1:{port}")]
    );
    assert_eq!(
        second.sorted(),
        [format!("[rank2]: 2/4 0/2 1/2 127.0.0.1:{port}"), format!("[rank3]: 3/4 1/2 1/2 127.0.0.1:{port}")]
    );
}

fn nodes_may_differ_in_size() {
    let port = free_port();
    let first = node(port, &["--node-rank=0", "--nproc-per-node=1", "--master-port=1234"], SAY).start();
    let second = node(port, &["--node-rank=1", "--nproc-per-node=3"], SAY).end();
    assert_eq!(second.sorted()[2], "[rank3]: 3/4 2/3 1/2 127.0.0.1:1234");
    assert_eq!(first.end().code, Some(0));
}

fn nodes_without_a_node_rank_are_numbered() {
    let port = free_port();
    let running = [(); 2].map(|()| node(port, &["--rdzv-backend=c10d"], "echo $RANK").start());
    let mut said: Vec<String> = running.map(|it| it.end().out).into();
    said.sort();
    assert_eq!(said, ["[rank0]: 0\n", "[rank1]: 1\n"]);
}

fn a_failure_on_one_node_ends_the_other() {
    let script = "[ $RANK = 2 ] && { echo broken >&2; exit 6; }; sleep 1000";
    for ended in both(&["--nproc-per-node=2"], script).map(Running::end) {
        assert_eq!(ended.code, Some(6));
        ended.says("rank 2 failed: exit code 6");
        ended.says("    broken\n");
        ended.says("the others: rank 0, 1, 3: signal 15 (SIGTERM)");
    }
}

/// What both nodes report when rank `first` fails and `second` fails after it; `rest` is the script of other ranks.
/// Returns the part after the first failure.
fn report_of_two(options: &[&str], first: usize, second: usize, rest: &str) -> String {
    undisturbed(|times| {
        let folder = TempDir::new().unwrap();
        let ready = folder.path().join("ready").display().to_string();
        let (pause, window) = (0.2 * times, format!("--failure-window={}", 1.5 * times));
        let script = format!(
            "case $RANK in \
             {first}) while ! [ -e {ready} ]; do sleep 0.01; done; echo Lost >&2; echo $$ > {ready}.tmp; \
                mv {ready}.tmp {ready}.lost; exit 1;; \
             {second}) touch {ready}; while ! [ -e {ready}.lost ]; do sleep 0.01; done; \
                while kill -0 $(cat {ready}.lost) 2> /dev/null; do sleep 0.01; done; sleep {pause}; \
                echo panicked >&2; exit 101;; \
             {rest} esac"
        );
        let ended = both(&[options, &[window.as_str()]].concat(), &script).map(Running::end);
        let [(code, report), other] = ended.each_ref().map(|ended| (ended.code, report(ended)));
        assert_eq!((code, report), other);
        let failed = |rank: usize, code: i32| format!("rank {rank} failed: exit code {code} (host ");
        let (cause, others) = report.split_once("\n  failed by themselves soon after it").unwrap_or((report, ""));
        let is_first = |rank, exit| code == Some(exit) && cause.starts_with(&failed(rank, exit));
        let is_other = |rank, exit| others.contains(&format!(" s, {}", failed(rank, exit)));
        if is_first(first, 1) && is_other(second, 101) {
            assert!(cause.ends_with("    Lost") && others.contains("      panicked"), "{report}");
            return Ok(others.to_owned());
        }
        // On a busy machine, the second failure may come after the window. Or the report of the first is late by more
        // than the pause: then the first is taken for the later one.
        let end = |rank| end_in(report, rank).unwrap_or_default();
        let second_is_late = is_first(first, 1) && ["exit code 101", "signal 15 (SIGTERM)"].contains(&end(second));
        let first_is_late = is_first(second, 101) && (is_other(first, 1) || end(first) == "exit code 1");
        assert!(second_is_late || first_is_late, "{report}");
        Err(report.to_owned())
    })
}

/// The report of failed ranks.
fn report(ended: &Ended) -> &str {
    let start = "overdrive-run: ";
    let place = ended.err.find(&format!("{start}rank ")).unwrap_or_else(|| panic!("no rank has failed: {ended:?}"));
    &ended.err[place + start.len()..]
}

/// How a rank ended, if a report lists it under "the others".
fn end_in(report: &str, rank: usize) -> Option<&str> {
    let (_, others) = report.split_once("\n  the others: ")?;
    others.lines().next()?.split("; ").find_map(|group| {
        let (ranks, end) = group.strip_prefix("rank ")?.split_once(": ")?;
        ranks.split(", ").any(|it| it == rank.to_string()).then_some(end)
    })
}

fn a_failure_soon_after_on_the_other_node_is_reported_too() {
    for (first, second) in [(0, 1), (1, 0)] {
        let others = report_of_two(&[], first, second, "");
        assert!(!others.contains("the others:"), "{others}");
    }
}

fn failures_on_two_nodes_are_in_order_of_time() {
    // Node 1 has ended and reports its failure, while node 0 still waits for rank 1, which hangs.
    let others = report_of_two(&["--nproc-per-node=2"], 0, 2, "1) sleep 1000;; 3) exit 0;;");
    assert!(others.ends_with("  the others: rank 1: signal 15 (SIGTERM); rank 3: exit code 0\n"), "{others}");
}

fn a_failure_on_one_node_restarts_both() {
    let folder = TempDir::new().unwrap();
    let script = format!(
        "echo $RANK in $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; \
         [ $RANK = 0 ] && {{ touch {0}; sleep 1000; }}; while ! [ -e {0} ]; do sleep 0.01; done; exit 1",
        folder.path().join("ready").display()
    );
    let [first, second] = both(&["--max-restarts=1"], &script).map(Running::end);
    assert_eq!((first.code, second.code), (Some(0), Some(0)), "{first:?} {second:?}");
    assert_eq!(first.out, "[rank0]: 0 in 0\n[rank0]: 0 in 1\n");
    assert_eq!(second.out, "[rank1]: 1 in 0\n[rank1]: 1 in 1\n");
    first.says("restart 1 of 1");
}

fn a_node_that_never_joins_is_named() {
    undisturbed(|times| {
        let (endpoint, timeout) = (format!("127.0.0.1:{}", free_port()), 0.5 * times);
        let conf = format!("--rdzv-conf=join_timeout={timeout}");
        let options = ["--nnodes=3", "--node-rank=0", "--rdzv-endpoint", &endpoint, &conf];
        let ended = Launcher::script(&options, "echo never").env("OVERDRIVE_SECRET", SECRET).end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        // On a busy machine, not even node 0 itself may join in time.
        if !ended.err.contains("1 of 3 nodes joined") {
            return Err(ended.err);
        }
        ended.says(&format!("1 of 3 nodes joined within {timeout} s: node 0 (host "));
        ended.says("missing: node 1, 2");
        Ok(())
    });
}

fn a_coordinator_that_never_starts_is_named() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let options = ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint", &endpoint, "--rdzv-conf=timeout=0.3"];
    let ended = Launcher::script(&options, "echo never").env("OVERDRIVE_SECRET", SECRET).end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
    ended.says(&format!("node 0 could not be reached at {endpoint} within 0.3 s"));
}

fn nodes_with_other_options_are_refused() {
    let port = free_port();
    let first = node(port, &["--node-rank=0"], "echo $RANK").start();
    let refused = |options: &[&str], why: &str| {
        let ended = node(port, options, "echo never").end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        ended.says("refused this node: ");
        ended.says(why);
    };
    refused(&["--node-rank=1", "--rdzv-id=other"], "--rdzv-id is none on node 0 and other on host ");
    refused(&["--node-rank=1", "--max-restarts=4"], "--max-restarts is 0 on node 0 and 4 on host ");
    refused(&["--node-rank=1", "--failure-window=0.5"], "--failure-window is 1 s on node 0 and 0.5 s on host ");
    refused(
        &["--node-rank=1", "--rdzv-conf=timeout=600"],
        "keep_alive_max_attempt of --rdzv-conf is not the same on node 0 and on host ",
    );
    refused(&["--node-rank=1", "--nnodes=3"], "--nnodes is 2 on node 0 and 3 on host ");
    // Refused nodes do not disturb the others.
    assert_eq!(node(port, &["--node-rank=1"], "echo $RANK").end().out, "[rank1]: 1\n");
    assert_eq!(first.end().code, Some(0));
}

/// Starts both nodes, and waits until their ranks run. An error if a launcher ends before.
pub fn both_at_work(options: &[&str], script: &str) -> Result<[Running; 2], Box<[Ended; 2]>> {
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready").display().to_string();
    let running = both(options, &format!("touch {ready}.$RANK; {script}"));
    let are_ready = || (0..2).all(|rank| std::path::Path::new(&format!("{ready}.{rank}")).exists());
    wait_for("the ranks", || (are_ready() || running.iter().any(Running::has_ended)).then_some(()));
    if are_ready() { Ok(running) } else { Err(Box::new(running.map(Running::end))) }
}

fn a_signal_to_one_node_ends_both() {
    for told in 0..2 {
        let running = both_at_work(&["--max-restarts=3"], "sleep 1000").unwrap();
        running[told].signal(Signal::TERM);
        for ended in running.map(Running::end) {
            assert_eq!(ended.code, Some(143), "{ended:?}");
            ended.says("ended by signal 15 (SIGTERM)");
        }
    }
}

/// Node 1's rank has failed, and node 1 waits for node 0, which is still ending its own rank.
fn a_signal_after_a_failure_ends_both() {
    for told in 0..2 {
        let folder = TempDir::new().unwrap();
        let ready = folder.path().join("ready");
        let port = free_port();
        let [first, second] = ["--node-rank=0", "--node-rank=1"]
            .map(|rank| node(port, &[rank, "--max-restarts=3"], FAILS_AND_LINGERS).env("READY", &ready).start());
        first.wait_for_file(&ready.with_extension("x"));
        let (first, second) = if told == 0 {
            first.signal(Signal::TERM);
            (first.end(), second.end())
        } else {
            second.signal(Signal::TERM);
            let second = second.end();
            // One thread follows each node, and ends when it has passed on all that the node has said.
            let guard = first.guard().as_raw_pid();
            wait_for("node 0 to notice", || (threads(guard, "from-node") == 1).then_some(()));
            std::fs::write(ready.with_extension("go"), "").unwrap();
            (first.end(), second)
        };
        assert_eq!((first.code, second.code), (Some(5), Some(if told == 0 { 5 } else { 143 })), "{first:?} {second:?}");
        first.says("rank 1 failed: exit code 5");
        assert!(!first.err.contains("restart") && !second.err.contains("restart"), "{first:?} {second:?}");
    }
}

/// How many threads of this name a process has.
pub fn threads(pid: i32, name: &str) -> usize {
    let all = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let names = all.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|it| it.trim() == name).count()
}

fn a_signal_to_a_node_without_a_place_ends_that_node_alone() {
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && { echo $RANK; exit 0; }; touch $READY.$RANK; \
                  while ! [ -e $READY.go ]; do sleep 0.01; done; exit 1";
    let port = free_port();
    let start =
        |rank: &str| node(port, &["--max-restarts=1", "--node-rank", rank], script).env("READY", &ready).start();
    let [first, second] = [start("0"), start("1")];
    first.wait_for_file(&ready.with_extension("0"));
    first.wait_for_file(&ready.with_extension("1"));
    // It waits for a place, in case the second node is lost.
    let third = start("1");
    let guard = third.guard().as_raw_pid();
    wait_for("the third node's connection", || (threads(guard, "heartbeat") == 1).then_some(()));
    third.signal(Signal::TERM);
    assert_eq!(third.end().code, Some(143));
    std::fs::write(ready.with_extension("go"), "").unwrap();
    for (rank, ended) in [first, second].map(Running::end).iter().enumerate() {
        assert_eq!((ended.code, ended.out.clone()), (Some(0), format!("[rank{rank}]: {rank}\n")), "{}", ended.err);
    }
}
