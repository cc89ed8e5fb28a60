//! Several nodes: launchers on this host that meet at a port of it.

use rustix::process::{Signal, kill_process};
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
    a_node_rank_that_is_taken_is_refused,
    a_lost_node_is_named,
    a_node_that_falls_silent_is_named,
    a_lost_coordinator_is_named,
    a_lost_node_can_rejoin,
    a_node_that_rejoins_early_waits_for_its_place,
    a_signal_to_one_node_ends_both,
    a_signal_after_a_failure_ends_both,
    a_signal_to_a_node_without_a_place_ends_that_node_alone,
];

/// The secret of both nodes.
pub const SECRET: &str = "nobody else knows this";

/// Nodes of a busy machine wait for each other, and for a sign of life, for ten minutes.
const PATIENT: &str = "--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120";

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
fn report_of_two(options: &[&str], first: usize, second: usize, rest: &str) -> [String; 2] {
    undisturbed(|times| {
        let folder = TempDir::new().unwrap();
        let ready = folder.path().join("ready").display().to_string();
        // A report that is late by more than the pause is taken for that of a later failure.
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
        let is_first = format!("overdrive-run: rank {first} failed: exit code 1 ");
        let is_disturbed =
            |ended: &Ended| !ended.err.contains(&is_first) || !ended.err.contains("failed by themselves");
        if ended.iter().any(is_disturbed) {
            return Err(format!("{ended:?}"));
        }
        Ok(ended.map(|ended| {
            assert_eq!(ended.code, Some(1), "{ended:?}");
            let (first, others) = ended.err.split_once("\n  failed by themselves soon after it").unwrap();
            assert!(first.ends_with("    Lost"), "{first}");
            assert!(others.contains(&format!(" s, rank {second} failed: exit code 101 ")), "{others}");
            assert!(others.contains("      panicked"), "{others}");
            others.to_owned()
        }))
    })
}

fn a_failure_soon_after_on_the_other_node_is_reported_too() {
    for (first, second) in [(0, 1), (1, 0)] {
        for others in report_of_two(&[], first, second, "") {
            assert!(!others.contains("the others:"), "{others}");
        }
    }
}

fn failures_on_two_nodes_are_in_order_of_time() {
    // Node 1 has ended and reports its failure, while node 0 still waits for rank 1, which hangs.
    for others in report_of_two(&["--nproc-per-node=2"], 0, 2, "1) sleep 1000;; 3) exit 0;;") {
        assert!(others.ends_with("  the others: rank 1: signal 15 (SIGTERM); rank 3: exit code 0\n"), "{others}");
    }
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
    refused(&["--node-rank=1", "--rdzv-id=other"], "--rdzv-id is none on node 0 and other here");
    refused(&["--node-rank=1", "--max-restarts=4"], "--max-restarts is 0 on node 0 and 4 here");
    refused(&["--node-rank=1", "--failure-window=0.5"], "--failure-window is 1 s on node 0 and 0.5 s here; both have");
    refused(&["--node-rank=1", "--rdzv-conf=timeout=600"], "the keep-alive options differ");
    refused(&["--node-rank=1", "--nnodes=3"], "--nnodes is 2 on node 0 and 3 here");
    // Refused nodes do not disturb the others.
    assert_eq!(node(port, &["--node-rank=1"], "echo $RANK").end().out, "[rank1]: 1\n");
    assert_eq!(first.end().code, Some(0));
}

/// Nodes that count as lost after 1.5 s without a sign of life, or a multiple of that. On a busy machine they may be
/// lost although they live.
fn impatient(times: f64) -> String {
    format!("--rdzv-conf=keep_alive_interval={},timeout={}", 0.5 * times, 20.0 * times)
}

/// By node 0 itself. It is refused only after it has waited for longer than it takes to notice the loss of a node.
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

/// Starts both nodes, and waits until their ranks run. An error if a launcher ends before.
fn both_at_work(options: &[&str], script: &str) -> Result<[Running; 2], String> {
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready").display().to_string();
    let running = both(options, &format!("touch {ready}.$RANK; {script}"));
    let are_ready = || (0..2).all(|rank| std::path::Path::new(&format!("{ready}.{rank}")).exists());
    wait_for("the ranks", || (are_ready() || running.iter().any(Running::has_ended)).then_some(()));
    if are_ready() { Ok(running) } else { Err(format!("{:?}", running.map(Running::end))) }
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
        let [first, second] = both_at_work(&[&impatient(times)], "sleep 1000")?;
        // As if the cable were pulled.
        freeze(&second);
        let ended = first.end();
        thaw(&second);
        let second = second.end();
        // On a busy machine, node 0 may lose itself, or node 1 may leave because it has lost node 0.
        let silent = format!("was lost: it was silent for {} s", 1.5 * times);
        if !ended.err.contains("node 1 (host ") || !ended.err.contains(&silent) {
            return Err(format!("{ended:?} {second:?}"));
        }
        assert_eq!(ended.code, Some(1));
        second.says("node 0 at 127.0.0.1:");
        Ok(())
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

/// Loses node 1 by `lose`, and starts it again. Then calls `find` for the lost one, and returns how that ended. An
/// error if the nodes did not end well, or lost each other in another way.
fn rejoin(conf: &str, lose: impl Fn(&Running), find: impl Fn(&Running)) -> Result<Ended, String> {
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
    let (again, ended) = (start("1").end(), first.end());
    find(&second);
    let second = second.end();
    let good = (again.code, again.out.as_str()) == (Some(0), "[rank1]: 1 in 1\n")
        && (ended.code, ended.out.as_str()) == (Some(0), "[rank0]: 0 in 1\n")
        && ["node 1 (host ", "; restart 1 of 1"].iter().all(|what| ended.err.contains(what));
    if good { Ok(second) } else { Err(format!("{ended:?} {second:?} {again:?}")) }
}

fn a_lost_node_can_rejoin() {
    let kill = |node: &Running| {
        node.signal(Signal::KILL);
        node.wait_until_gone();
    };
    rejoin(PATIENT, kill, |_| {}).unwrap();
}

fn a_node_that_rejoins_early_waits_for_its_place() {
    // Node 0 notices only later that the first node 1 is silent.
    let lost = undisturbed(|times| rejoin(&impatient(times), freeze, thaw));
    lost.says("node 0 at 127.0.0.1:");
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
fn threads(pid: i32, name: &str) -> usize {
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
