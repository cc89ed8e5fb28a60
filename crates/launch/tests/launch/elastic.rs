//! Elastic runs: nodes that come and go while ranks run.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::launcher::{Ended, Launcher, Running, undisturbed, wait_for};
use crate::nodes::node;
use crate::port::free_port;

crate::tests![
    a_run_begins_with_fewer_nodes_when_the_last_call_is_over,
    a_run_waits_for_all_nodes_and_no_longer_within_the_last_call,
    a_run_shrinks_when_a_node_is_lost,
    ranks_are_numbered_anew_when_a_node_between_others_is_lost,
    ranks_that_fail_because_a_node_is_lost_do_not_count_as_a_failure,
    a_run_grows_when_a_node_joins,
    a_run_shrinks_and_grows_and_resumes_from_its_checkpoint,
    failures_count_as_restarts_and_changes_of_nodes_do_not,
    a_signal_to_one_node_makes_it_leave,
    a_signal_to_node_zero_ends_the_run,
    a_node_beyond_the_most_waits_until_one_is_lost,
    a_node_that_is_not_needed_ends_with_the_run,
    too_few_nodes_are_an_error_after_the_timeout,
    too_few_nodes_after_a_loss_are_waited_for,
    too_few_nodes_after_a_loss_are_an_error_after_the_timeout,
    nodes_with_another_range_are_refused,
];

/// Begins when all nodes have joined.
const ALL: &str = "last_call_timeout=600";
/// Begins at once with the fewest nodes, and takes in new ones at once.
const AT_ONCE: &str = "last_call_timeout=0";

/// A run of `nnodes` like `1:3`, whose nodes are started one by one with the same script.
struct Run {
    port: u16,
    options: Vec<String>,
    script: String,
    folder: TempDir,
}

impl Run {
    fn new(nnodes: &str, last_call: &str, options: &[&str], script: &str) -> Self {
        let conf = format!("--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120,{last_call}");
        let common = [format!("--nnodes={nnodes}"), conf];
        let options = common.into_iter().chain(options.iter().map(|it| (*it).to_owned())).collect();
        Self { port: free_port(), options, script: script.to_owned(), folder: TempDir::new().unwrap() }
    }

    /// The path that ranks find in `$FILE`, with an ending.
    fn file(&self, ending: &str) -> PathBuf {
        self.folder.path().join(format!("file{ending}"))
    }

    fn launcher(&self, options: &[&str]) -> Launcher {
        let common = self.options.iter().map(String::as_str);
        let options: Vec<&str> = common.chain(options.iter().copied()).collect();
        node(self.port, &options, &self.script).env("FILE", self.file(""))
    }

    fn start(&self, node_rank: usize) -> Running {
        self.launcher(&["--node-rank", &node_rank.to_string()]).start()
    }

    /// Starts this many nodes, with places of their own.
    fn start_all(&self, nodes: usize) -> Vec<Running> {
        (0..nodes).map(|rank| self.start(rank)).collect()
    }
}

/// Waits for a file that a rank makes; panics if a node ends before.
pub fn wait_for_file(path: &Path, nodes: &[&Running]) {
    wait_for(&path.display().to_string(), || {
        let ended = nodes.iter().position(|node| node.has_ended());
        assert!(path.exists() || ended.is_none(), "node {ended:?} has ended before {} was there", path.display());
        path.exists().then_some(())
    });
}

fn all(nodes: &[Running]) -> Vec<&Running> {
    nodes.iter().collect()
}

/// Waits until each of the first `ranks` ranks has begun as one of `ranks`.
fn wait_for_ranks(run: &Run, ranks: usize, nodes: &[Running]) {
    for rank in 0..ranks {
        wait_for_file(&run.file(&format!(".{rank}.{ranks}")), &all(nodes));
    }
}

/// Kills a node, and waits until nothing of it is left.
pub fn lose(node: Running) {
    node.signal(Signal::KILL);
    node.wait_until_gone();
}

fn said(ended: &Ended) -> Vec<&str> {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.out.lines().collect()
}

/// Rank, number of ranks, local rank and size, node and number of nodes, restarts.
const SAY: &str = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE \
                   $ROLE_RANK/$ROLE_WORLD_SIZE $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS";

/// Says what it is, makes a file whose name has its rank and the number of ranks, and goes on until `$FILE.done` exists.
fn until_done() -> String {
    format!("{SAY}; touch $FILE.$RANK.$WORLD_SIZE; while ! [ -e $FILE.done ]; do sleep 0.01; done")
}

fn a_run_begins_with_fewer_nodes_when_the_last_call_is_over() {
    // No other node comes, so that only the end of the last call can begin the run. That it is waited for is tested below.
    let run = Run::new("1:2", "last_call_timeout=0.2", &["--nproc-per-node=2"], SAY);
    let ended = run.start(0).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.sorted(), ["[rank0]: 0/2 0/2 0/1 0/2 0/0", "[rank1]: 1/2 1/2 0/1 1/2 0/0"]);
    ended.says("starting on 1 node with 2 ranks in all (--nnodes 1:2)");
}

fn a_run_waits_for_all_nodes_and_no_longer_within_the_last_call() {
    let run = Run::new("1:2", "last_call_timeout=1000000", &[], SAY);
    let [first, second] = [0, 1].map(|rank| run.start(rank)).map(Running::end);
    assert_eq!(said(&first), ["[rank0]: 0/2 0/1 0/2 0/2 0/0"]);
    assert_eq!(said(&second), ["[rank1]: 1/2 0/1 1/2 1/2 0/0"]);
}

fn a_run_shrinks_when_a_node_is_lost() {
    let run = Run::new("1:2", ALL, &["--nproc-per-node=2"], &until_done());
    let mut nodes = run.start_all(2);
    wait_for_ranks(&run, 4, &nodes);
    lose(nodes.pop().unwrap());
    fs::write(run.file(".done"), "").unwrap();
    let first = nodes.pop().unwrap().end();
    assert_eq!(first.code, Some(0), "{first:?}");
    let ranks = ["[rank0]: 0/2 0/2 0/1 0/2 0/0", "[rank1]: 1/2 1/2 0/1 1/2 0/0"];
    assert!(ranks.iter().all(|line| first.sorted().contains(line)), "{first:?}");
    first.says("node 1 (host ");
    first.says("was lost: the connection was closed");
    first.says("starting on 1 node with 2 ranks in all (--nnodes 1:2)");
}

fn ranks_are_numbered_anew_when_a_node_between_others_is_lost() {
    let run = Run::new("2:3", ALL, &[], &until_done());
    let mut nodes = run.start_all(3);
    wait_for_ranks(&run, 3, &nodes);
    lose(nodes.remove(1));
    wait_for_file(&run.file(".1.2"), &all(&nodes));
    fs::write(run.file(".done"), "").unwrap();
    let [first, third] = [nodes.remove(0), nodes.remove(0)].map(Running::end);
    assert_eq!(said(&first), ["[rank0]: 0/3 0/1 0/3 0/3 0/0", "[rank0]: 0/2 0/1 0/2 0/2 0/0"]);
    assert_eq!(said(&third), ["[rank2]: 2/3 0/1 2/3 2/3 0/0", "[rank1]: 1/2 0/1 1/2 1/2 0/0"]);
}

fn ranks_that_fail_because_a_node_is_lost_do_not_count_as_a_failure() {
    // As over Gloo: rank 0 fails before the loss of node 1 is noticed. No restart is left for it.
    let script = "[ $WORLD_SIZE = 1 ] && exit 0; [ $RANK = 1 ] && { touch $FILE.1; exec sleep 1000; }; \
                  while ! [ -e $FILE.1 ]; do sleep 0.01; done; echo $$ > $FILE.tmp; mv $FILE.tmp $FILE; exit 3";
    let run = Run::new("1:2", ALL, &["--failure-window=600"], script);
    let mut nodes = run.start_all(2);
    wait_for_file(&run.file(""), &all(&nodes));
    let failed = format!("/proc/{}", fs::read_to_string(run.file("")).unwrap().trim());
    wait_for("the failed rank's end", || fs::metadata(&failed).is_err().then_some(()));
    lose(nodes.pop().unwrap());
    let first = nodes.pop().unwrap().end();
    assert_eq!(first.code, Some(0), "{first:?}");
    first.says("was lost: the connection was closed");
}

fn a_run_grows_when_a_node_joins() {
    // Ranks are told to end by SIGTERM, so that they can write a checkpoint.
    let script = format!("trap 'echo told; exit 0' TERM; {}", until_done());
    let run = Run::new("1:3", AT_ONCE, &[], &script);
    let first = run.start(0);
    wait_for_file(&run.file(".0.1"), &[&first]);
    let second = run.start(1);
    wait_for_file(&run.file(".1.2"), &[&first, &second]);
    fs::write(run.file(".done"), "").unwrap();
    let [first, second] = [first, second].map(Running::end);
    assert_eq!(said(&first), ["[rank0]: 0/1 0/1 0/1 0/1 0/0", "[rank0]: told", "[rank0]: 0/2 0/1 0/2 0/2 0/0"]);
    assert_eq!(said(&second), ["[rank1]: 1/2 0/1 1/2 1/2 0/0"]);
    first.says("node 1 (host ");
    first.says(") joined");
    first.says("starting on 2 nodes with 2 ranks in all (--nnodes 1:3)");
}

fn a_run_shrinks_and_grows_and_resumes_from_its_checkpoint() {
    // Rank 0 writes the number of its steps. It stops at step 10 with two ranks and at step 20 alone, and ends at 40.
    let script = "[ $RANK = 1 ] && { touch $FILE.1; while ! [ -e $FILE.end ]; do sleep 0.01; done; exit; }; \
                  step=$(cat $FILE.steps); echo from $step of $WORLD_SIZE; while [ $step -lt 40 ]; do \
                     [ $step = 10 ] && [ $WORLD_SIZE = 2 ] && { touch $FILE.shrink; sleep 1000; }; \
                     [ $step = 20 ] && [ $WORLD_SIZE = 1 ] && { touch $FILE.grow; sleep 1000; }; \
                     step=$((step+1)); echo $step > $FILE.tmp; mv $FILE.tmp $FILE.steps; done; touch $FILE.end";
    let run = Run::new("1:2", ALL, &[], script);
    fs::write(run.file(".steps"), "0\n").unwrap();
    let mut nodes = run.start_all(2);
    for ending in [".1", ".shrink"] {
        wait_for_file(&run.file(ending), &all(&nodes));
    }
    lose(nodes.pop().unwrap());
    wait_for_file(&run.file(".grow"), &all(&nodes));
    nodes.push(run.start(1));
    let [first, second] = [nodes.remove(0), nodes.remove(0)].map(Running::end);
    assert_eq!(second.code, Some(0), "{second:?}");
    assert_eq!(said(&first), ["[rank0]: from 0 of 2", "[rank0]: from 10 of 1", "[rank0]: from 20 of 2"]);
    assert_eq!(fs::read_to_string(run.file(".steps")).unwrap(), "40\n");
}

fn failures_count_as_restarts_and_changes_of_nodes_do_not() {
    let script = format!("{SAY}; touch $FILE.$RANK.$WORLD_SIZE; [ $WORLD_SIZE = 1 ] || sleep 1000; exit 4");
    let base = TempDir::new().unwrap();
    let logs = ["--max-restarts=1", "-t", "1", "--log-dir", base.path().to_str().unwrap()];
    let run = Run::new("1:2", ALL, &logs, &script);
    let mut nodes = run.start_all(2);
    wait_for_ranks(&run, 2, &nodes);
    lose(nodes.pop().unwrap());
    let ended = nodes.pop().unwrap().end();
    assert_eq!(ended.code, Some(4), "{ended:?}");
    let lines: Vec<&str> = ended.out.lines().collect();
    let of_one = |restarts| format!("[rank0]: 0/1 0/1 0/1 0/1 {restarts}/1");
    assert_eq!(lines, ["[rank0]: 0/2 0/1 0/2 0/2 0/1", &of_one(0), &of_one(1)]);
    ended.says("restart 1 of 1");
    ended.says("after 1 restart");
    // Each start has files of its own.
    let folders: Vec<PathBuf> = fs::read_dir(&base).unwrap().map(|folder| folder.unwrap().path()).collect();
    let count = |attempt: usize| {
        let file = format!("attempt_{attempt}/0/stdout.log");
        folders.iter().filter(|folder| folder.join(&file).exists()).count()
    };
    assert_eq!([0, 1, 2, 3].map(count), [2, 1, 1, 0]);
}

fn a_signal_to_one_node_makes_it_leave() {
    let run = Run::new("1:2", ALL, &[], &until_done());
    let mut nodes = run.start_all(2);
    wait_for_ranks(&run, 2, &nodes);
    let second = nodes.pop().unwrap();
    second.signal(Signal::TERM);
    let second = second.end();
    assert_eq!(second.code, Some(143), "{second:?}");
    second.says("ended by signal 15 (SIGTERM)");
    wait_for_file(&run.file(".0.1"), &all(&nodes));
    fs::write(run.file(".done"), "").unwrap();
    let first = nodes.pop().unwrap().end();
    assert_eq!(said(&first).last(), Some(&"[rank0]: 0/1 0/1 0/1 0/1 0/0"));
    first.says("has left: its launcher got a signal");
}

fn a_signal_to_node_zero_ends_the_run() {
    let run = Run::new("1:2", ALL, &["--max-restarts=3"], &until_done());
    let nodes = run.start_all(2);
    wait_for_ranks(&run, 2, &nodes);
    nodes[0].signal(Signal::TERM);
    for ended in nodes.into_iter().map(Running::end) {
        assert_eq!(ended.code, Some(143), "{ended:?}");
        ended.says("ended by signal 15 (SIGTERM)");
    }
}

/// Starts a third node for a run of at most two, and waits until `zero` has heard it: then it waits for a place.
fn start_spare(run: &Run, zero: &Running) -> Running {
    let third = run.launcher(&[]).start();
    let guard = zero.guard().as_raw_pid();
    wait_for("the third node's connection", || (crate::nodes::threads(guard, "from-node") == 3).then_some(()));
    third
}

fn a_node_beyond_the_most_waits_until_one_is_lost() {
    let run = Run::new("1:2", ALL, &[], &until_done());
    let mut nodes = run.start_all(2);
    wait_for_ranks(&run, 2, &nodes);
    let third = start_spare(&run, &nodes[0]);
    fs::remove_file(run.file(".1.2")).unwrap();
    lose(nodes.pop().unwrap());
    wait_for_file(&run.file(".1.2"), &[&nodes[0], &third]);
    fs::write(run.file(".done"), "").unwrap();
    assert_eq!(said(&third.end()), ["[rank1]: 1/2 0/1 1/2 1/2 0/0"]);
    assert_eq!(nodes.pop().unwrap().end().code, Some(0));
}

fn a_node_that_is_not_needed_ends_with_the_run() {
    let run = Run::new("1:2", ALL, &[], &until_done());
    let nodes = run.start_all(2);
    wait_for_ranks(&run, 2, &nodes);
    let third = start_spare(&run, &nodes[0]);
    fs::write(run.file(".done"), "").unwrap();
    let third = third.end();
    assert_eq!((third.code, third.out.as_str()), (Some(0), ""), "{third:?}");
    assert!(nodes.into_iter().all(|node| node.end().code == Some(0)));
}

/// A run of at least `fewest` of 3 nodes that wait for each other for a short time, and `nodes` of them.
fn impatient(fewest: usize, nodes: usize, times: f64) -> (Run, Vec<Running>) {
    let mut run = Run::new(&format!("{fewest}:3"), AT_ONCE, &[], "touch $FILE.$RANK; sleep 1000");
    run.options.push(format!("--rdzv-conf=join_timeout={times},keep_alive_max_attempt=120,{AT_ONCE}"));
    let nodes = run.start_all(nodes);
    (run, nodes)
}

fn too_few_nodes_are_an_error_after_the_timeout() {
    undisturbed(|times| {
        let (_run, mut nodes) = impatient(2, 1, 0.5 * times);
        let ended = nodes.pop().unwrap().end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        // On a busy machine, not even node 0 itself may join in time.
        if !ended.err.contains("1 of at least 2 nodes were there") {
            return Err(ended.err);
        }
        ended.says(&format!("1 of at least 2 nodes were there within {} s: node 0 (host ", 0.5 * times));
        ended.says("start overdrive-run on more hosts, or give fewer in --nnodes 2:3");
        Ok(())
    });
}

fn too_few_nodes_after_a_loss_are_waited_for() {
    let run = Run::new("2:3", AT_ONCE, &[], &until_done());
    let mut nodes = run.start_all(2);
    wait_for_ranks(&run, 2, &nodes);
    fs::remove_file(run.file(".1.2")).unwrap();
    lose(nodes.pop().unwrap());
    nodes[0].wait_until_it_says("1 of at least 2 nodes are there; waiting for more");
    nodes.push(run.start(2));
    wait_for_file(&run.file(".1.2"), &all(&nodes));
    fs::write(run.file(".done"), "").unwrap();
    let [first, third] = [nodes.remove(0), nodes.remove(0)].map(Running::end);
    assert_eq!(said(&first), ["[rank0]: 0/2 0/1 0/2 0/2 0/0"; 2]);
    assert_eq!(said(&third), ["[rank1]: 1/2 0/1 1/2 1/2 0/0"]);
}

fn too_few_nodes_after_a_loss_are_an_error_after_the_timeout() {
    undisturbed(|times| {
        let (run, mut nodes) = impatient(2, 2, times);
        let are_ready = || (0..2).all(|rank| run.file(&format!(".{rank}")).exists());
        wait_for("the ranks", || (are_ready() || nodes.iter().any(Running::has_ended)).then_some(()));
        let second = nodes.pop().unwrap();
        second.signal(Signal::KILL);
        second.wait_until_gone();
        let ended = nodes.pop().unwrap().end();
        assert_eq!(ended.code, Some(1));
        // On a busy machine, the nodes may not meet in time.
        if !ended.err.contains("was lost: the connection was closed") {
            return Err(ended.err);
        }
        ended.says(&format!("1 of at least 2 nodes were there within {times} s: node 0 (host "));
        Ok(())
    });
}

fn nodes_with_another_range_are_refused() {
    let run = Run::new("1:2", ALL, &[], SAY);
    let first = run.start(0);
    for other in ["2", "1:3", "2:2"] {
        let ended = run.launcher(&["--node-rank=1", &format!("--nnodes={other}")]).end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        let other = if other == "2:2" { "2" } else { other };
        ended.says(&format!("refused this node: --nnodes is 1:2 on node 0 and {other} on host "));
    }
    assert_eq!(said(&run.start(1).end()), ["[rank1]: 1/2 0/1 1/2 1/2 0/0"]);
    assert_eq!(first.end().code, Some(0));
}
