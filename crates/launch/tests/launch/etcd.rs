//! Runs whose nodes elect node 0 by etcd, and survive its loss. Most use a stand-in whose leases end when a test says
//! so.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::elastic::{lose, wait_for_file};
use crate::fake_etcd::FakeEtcd;
use crate::launcher::{Launcher, Running, wait_for};
use crate::nodes::{SECRET, threads};
use crate::port::free_port;

crate::tests![
    nodes_elect_node_zero,
    the_loss_of_node_zero_is_survived,
    a_lost_node_zero_comes_back_as_another_node,
    ten_nodes_are_lost_in_turn_and_come_back,
    node_zero_hands_over_when_it_gets_a_signal,
    nodes_meet_again_when_node_zero_loses_its_lease,
    nodes_meet_again_when_etcd_comes_back,
    in_a_run_of_fixed_size_the_loss_of_node_zero_counts_as_a_restart,
    nodes_zero_that_are_lost_before_the_next_start_count_once,
    without_restarts_the_loss_of_node_zero_ends_a_run_of_fixed_size,
    an_etcd_that_is_not_there_is_named,
    an_address_that_other_hosts_cannot_reach_is_refused,
];

/// Tests of etcd itself.
pub const OF_ETCD: &[crate::Test] =
    &[("launch::etcd::the_loss_of_node_zero_is_survived_with_etcd_itself", the_loss_is_survived_with_etcd_itself)];

/// A run of `nnodes` whose launchers say in `$NODE` which they are.
pub struct Run {
    port: u16,
    options: Vec<String>,
    script: &'static str,
    folder: TempDir,
}

/// Each rank leaves its node's number in `$FILE.<rank>.<ranks>.<restarts>`, and goes on until `$FILE.done` exists.
const UNTIL_DONE: &str = "name=$FILE.$RANK.$WORLD_SIZE.$TORCHELASTIC_RESTART_COUNT; echo $NODE > $name.tmp; \
                          mv $name.tmp $name; while ! [ -e $FILE.done ]; do sleep 0.01; done";

impl Run {
    fn new(port: u16, nnodes: &str, options: &[&str]) -> Self {
        // The stand-in ends a lease when it is told to.
        Self::with_lease(600, port, nnodes, options)
    }

    /// Node 0 renews its lease every sixth of it. `lease` is in seconds.
    pub fn with_lease(lease: usize, port: u16, nnodes: &str, options: &[&str]) -> Self {
        let conf = "--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120,last_call_timeout=600,lease_timeout=";
        let endpoint = format!("--rdzv-endpoint=127.0.0.1:{port}");
        let here = "--local-addr=127.0.0.1".to_owned();
        let own = [format!("--nnodes={nnodes}"), endpoint, here, format!("{conf}{lease}")];
        let options = own.into_iter().chain(options.iter().map(|it| (*it).to_owned())).collect();
        Self { port, options, script: UNTIL_DONE, folder: TempDir::new().unwrap() }
    }

    fn file(&self, ending: &str) -> PathBuf {
        self.folder.path().join(format!("file{ending}"))
    }

    pub fn start(&self, node: usize) -> Running {
        let own = ["--rdzv-backend=etcd", "--rdzv-id=job"];
        let options: Vec<&str> = own.into_iter().chain(self.options.iter().map(String::as_str)).collect();
        let launcher = Launcher::script(&options, self.script).env("OVERDRIVE_SECRET", SECRET);
        launcher.env("FILE", self.file("")).env("NODE", node.to_string()).start()
    }

    fn start_all(&self, nodes: usize) -> Vec<Running> {
        (0..nodes).map(|node| self.start(node)).collect()
    }

    /// Starts so many nodes, and when all of their ranks run, kills node 0. Returns which that was, and the others.
    fn start_and_lose_zero(&self, nodes: usize) -> (usize, Vec<Running>) {
        let mut nodes = self.start_all(nodes);
        let zero = self.nodes_of(nodes.len(), 0, &all(&nodes))[0];
        lose(nodes.remove(zero));
        (zero, nodes)
    }

    /// Waits until all of so many ranks run; returns the nodes by rank.
    fn nodes_of(&self, ranks: usize, restarts: usize, nodes: &[&Running]) -> Vec<usize> {
        let file = |rank| self.file(&format!(".{rank}.{ranks}.{restarts}"));
        (0..ranks).for_each(|rank| wait_for_file(&file(rank), nodes));
        (0..ranks).map(|rank| fs::read_to_string(file(rank)).unwrap().trim().parse().unwrap()).collect()
    }

    fn forget(&self, ranks: usize) {
        (0..ranks).for_each(|rank| fs::remove_file(self.file(&format!(".{rank}.{ranks}.0"))).unwrap());
    }

    /// Of two nodes, with leases of etcd itself, which end by themselves.
    pub fn loses_node_zero_and_gets_it_back(&self) {
        let (zero, mut nodes) = self.start_and_lose_zero(2);
        // On a busy machine, node 0 may have changed before.
        wait_for("the other node", || (self.nodes_of(1, 0, &all(&nodes)) != [zero]).then_some(()));
        self.forget(2);
        nodes.push(self.start(zero));
        self.nodes_of(2, 0, &all(&nodes));
        self.end(nodes);
    }

    fn end(&self, nodes: Vec<Running>) {
        fs::write(self.file(".done"), "").unwrap();
        for ended in nodes.into_iter().map(Running::end) {
            assert_eq!(ended.code, Some(0), "{ended:?}");
        }
    }
}

fn all(nodes: &[Running]) -> Vec<&Running> {
    nodes.iter().collect()
}

fn nodes_elect_node_zero() {
    let etcd = FakeEtcd::start();
    let run = Run::new(etcd.port, "3", &[]);
    let nodes = run.start_all(3);
    let mut ranks = run.nodes_of(3, 0, &all(&nodes));
    assert!(etcd.has_keys());
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2]);
    run.end(nodes);
    // For the next run of this name.
    wait_for("the end of the lease", || (!etcd.has_keys()).then_some(()));
}

fn the_loss_of_node_zero_is_survived() {
    let etcd = FakeEtcd::start();
    let run = Run::new(etcd.port, "2:3", &[]);
    let (zero, nodes) = run.start_and_lose_zero(3);
    etcd.expire();
    // Without a restart that counts, although none is allowed.
    let left = run.nodes_of(2, 0, &all(&nodes));
    assert!(!left.contains(&zero), "{left:?}");
    run.end(nodes);
}

fn a_lost_node_zero_comes_back_as_another_node() {
    let etcd = FakeEtcd::start();
    let run = Run::new(etcd.port, "2:3", &[]);
    let (zero, mut nodes) = run.start_and_lose_zero(3);
    etcd.expire();
    run.nodes_of(2, 0, &all(&nodes));
    run.forget(3);
    nodes.push(run.start(zero));
    let ranks = run.nodes_of(3, 0, &all(&nodes));
    assert_eq!(ranks.last(), Some(&zero), "{ranks:?}");
    run.end(nodes);
}

/// Every rank is lost several times, that of node 0 too.
fn ten_nodes_are_lost_in_turn_and_come_back() {
    let etcd = FakeEtcd::start();
    let run = Run::new(etcd.port, "2:3", &[]);
    let mut nodes: Vec<Option<Running>> = (0..3).map(|node| Some(run.start(node))).collect();
    let living = |nodes: &[Option<Running>], ranks| run.nodes_of(ranks, 0, &nodes.iter().flatten().collect::<Vec<_>>());
    let mut by_rank = living(&nodes, 3);
    for loss in 0..10 {
        let lost = by_rank[loss % 3];
        run.forget(3);
        lose(nodes[lost].take().unwrap());
        if loss % 3 == 0 {
            etcd.expire();
        }
        let mut left = living(&nodes, 2);
        run.forget(2);
        nodes[lost] = Some(run.start(lost));
        by_rank = living(&nodes, 3);
        left.push(lost);
        left.sort_unstable();
        assert_eq!(left, [0, 1, 2]);
    }
    run.end(nodes.into_iter().flatten().collect());
}

fn node_zero_hands_over_when_it_gets_a_signal() {
    let etcd = FakeEtcd::start();
    let run = Run::new(etcd.port, "1:2", &[]);
    let mut nodes = run.start_all(2);
    let zero = run.nodes_of(2, 0, &all(&nodes))[0];
    let first = nodes.remove(zero);
    first.signal(Signal::TERM);
    let first = first.end();
    assert_eq!(first.code, Some(143), "{first:?}");
    // The lease has not ended by itself.
    let left = run.nodes_of(1, 0, &all(&nodes));
    assert_ne!(left, [zero]);
    run.end(nodes);
}

fn nodes_meet_again_when_node_zero_loses_its_lease() {
    let etcd = FakeEtcd::start();
    let run = Run::with_lease(8, etcd.port, "2:3", &[]);
    let nodes = run.start_all(3);
    run.nodes_of(3, 0, &all(&nodes));
    run.forget(3);
    etcd.expire();
    // Two or all of them begin, and those that come later join.
    run.nodes_of(3, 0, &all(&nodes));
    run.end(nodes);
}

fn nodes_meet_again_when_etcd_comes_back() {
    let etcd = FakeEtcd::start();
    let run = Run::with_lease(8, etcd.port, "2:3", &[]);
    let nodes = run.start_all(3);
    run.nodes_of(3, 0, &all(&nodes));
    run.forget(3);
    etcd.set_down(true);
    // The ranks end: nobody knows whether another node is node 0.
    let guards: Vec<i32> = nodes.iter().map(|node| node.guard().as_raw_pid()).collect();
    for guard in guards {
        wait_for("the ranks' end", || crate::launcher::children(guard).is_empty().then_some(()));
    }
    etcd.expire();
    etcd.set_down(false);
    run.nodes_of(3, 0, &all(&nodes));
    run.end(nodes);
}

fn in_a_run_of_fixed_size_the_loss_of_node_zero_counts_as_a_restart() {
    let etcd = FakeEtcd::start();
    let run = Run::new(etcd.port, "2", &["--max-restarts=1"]);
    let (zero, mut nodes) = run.start_and_lose_zero(2);
    etcd.expire();
    nodes.push(run.start(zero));
    let mut ranks = run.nodes_of(2, 1, &all(&nodes));
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1]);
    run.end(nodes);
}

fn nodes_zero_that_are_lost_before_the_next_start_count_once() {
    let etcd = FakeEtcd::start();
    let run = Run::new(etcd.port, "3", &["--max-restarts=1"]);
    let (_, mut nodes) = run.start_and_lose_zero(3);
    etcd.expire();
    // One of the two that are left is node 0, and waits for the third with the other one.
    let zero = wait_for("the next node 0", || {
        let has_both = |node: &Running| threads(node.guard().as_raw_pid(), "from-node") == 2;
        nodes.iter().position(has_both)
    });
    lose(nodes.remove(zero));
    etcd.expire();
    nodes.extend(run.start_all(2));
    run.nodes_of(3, 1, &all(&nodes));
    run.end(nodes);
}

fn without_restarts_the_loss_of_node_zero_ends_a_run_of_fixed_size() {
    let etcd = FakeEtcd::start();
    let run = Run::new(etcd.port, "2", &[]);
    let (_, mut nodes) = run.start_and_lose_zero(2);
    let ended = nodes.remove(0).end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    ended.says("node 0 at 127.0.0.1:");
    ended.says("was lost: the connection was closed");
}

fn an_etcd_that_is_not_there_is_named() {
    let run = Run::new(free_port(), "1:2", &["--rdzv-conf=join_timeout=0.3"]);
    let ended = run.start(0).end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
    let port = run.port;
    ended.says(&format!(
        "the launchers did not meet within 0.3 s by etcd at 127.0.0.1:{port}: etcd at 127.0.0.1:{port}: "
    ));
    ended.says("Connection refused");
}

fn an_address_that_other_hosts_cannot_reach_is_refused() {
    let etcd = FakeEtcd::start();
    let mut run = Run::new(etcd.port, "1:2", &["--rdzv-conf=last_call_timeout=0"]);
    run.options.retain(|option| !option.starts_with("--local-addr"));
    let ended = run.start(0).end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""));
    ended.says(&format!(
        "etcd at 127.0.0.1:{} is reached from 127.0.0.1, where other hosts cannot reach this one; give --local-addr",
        etcd.port
    ));
    assert!(!etcd.has_keys());
}

/// Why the tests of etcd itself cannot run here.
pub fn missing() -> Option<String> {
    let has_etcd = Command::new("etcd").arg("--version").output().is_ok_and(|output| output.status.success());
    (!has_etcd).then(|| "no etcd".to_owned())
}

pub struct Etcd {
    server: Child,
    pub port: u16,
    _folder: TempDir,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Etcd {
    /// Serves clients by `http` or `https`.
    pub fn start(protocol: &str, options: &[String]) -> Self {
        Self::start_beside(protocol, options, None)
    }

    /// As `start`; by HTTP too at the port `plain`.
    pub fn start_beside(protocol: &str, options: &[String], plain: Option<u16>) -> Self {
        let (folder, port, peers) = (TempDir::new().unwrap(), free_port(), free_port());
        let mut clients = format!("{protocol}://127.0.0.1:{port}");
        if let Some(plain) = plain {
            clients += &format!(",http://127.0.0.1:{plain}");
        }
        let peers = format!("http://127.0.0.1:{peers}");
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(folder.path().join("data")).args(["--name=one", "--log-level=error"]);
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]).args(options);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.arg(format!("--initial-cluster=one={peers}"));
        let server = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Self { server, port, _folder: folder }
    }
}

/// Its lease ends eight seconds after the loss.
fn the_loss_is_survived_with_etcd_itself() {
    let etcd = Etcd::start("http", &[]);
    Run::with_lease(8, etcd.port, "1:2", &[]).loses_node_zero_and_gets_it_back();
}
