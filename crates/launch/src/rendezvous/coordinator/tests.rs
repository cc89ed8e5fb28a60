//! The order of messages that decides how a run goes on, with nodes that are only connections.

use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::mpsc::Sender;

use super::super::Hello;
use super::super::election::Lease;
use super::super::etcd::Etcd;
use super::super::seal::{Nonce, Seal};
use super::super::wire::{Lines, Reader, Speaker};
use super::*;
use crate::error::RankFailure;
use crate::output::Console;
use crate::plan::Plan;

/// Only stops tests that hang.
const LIMIT: Duration = Duration::from_secs(600);

/// A run of 1 to `most` nodes.
fn plan(most: usize, last_call: Duration) -> Plan {
    let mut plan = Plan::new("train".into());
    (plan.nnodes, plan.min_nodes, plan.last_call, plan.failure_window) = (most, Some(1), last_call, LIMIT);
    plan
}

fn decider(plan: &Plan) -> (Decider, Sender<Heard>) {
    let (heard, inbox) = channel();
    let decider = Decider {
        members: Members::new(plan.clone(), Arc::new(Console::new().unwrap())),
        master_addr: "127.0.0.1".to_owned(),
        inbox,
        attempt: 0,
        restarts: 0,
        begun: false,
        expected: None,
        lease: None,
        health: Arc::default(),
        listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(),
        deposed: false,
        port: None,
        last_heartbeat: Instant::now(),
        told_to_end: false,
    };
    (decider, heard)
}

/// A node whose place is its number: what node 0 hears when it joins, and the reader of what it is told.
fn node(plan: &Plan, place: usize) -> (Heard, Reader) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let nonce = Nonce::random().unwrap();
    let seal = || Seal::pair(b"", nonce, nonce).1;
    let speaker = Speaker { stream: listener.accept().unwrap().0, seal: seal() };
    let hello = Hello::new(plan, &format!("host{place}"), Some(place), None);
    (Heard::Joined(place, speaker, hello), Reader { lines: Lines::new(there, Vec::new()), seal: seal() })
}

/// The next message that is no heartbeat.
fn told(node: &mut Reader) -> FromNodeZero {
    loop {
        match node.next(|| LIMIT).unwrap() {
            FromNodeZero::Alive => {}
            said => return said,
        }
    }
}

fn ended(id: usize, how: NodeEnd) -> Heard {
    Heard::Said(id, ToNodeZero::Ended { attempt: 0, how, ends: Vec::new() })
}

/// A run of two nodes that have started their ranks.
fn two() -> (Sender<Heard>, [Reader; 2]) {
    let plan = plan(2, LIMIT);
    let (decider, heard) = decider(&plan);
    let nodes = [0, 1].map(|place| {
        let (joined, reader) = node(&plan, place);
        heard.send(joined).unwrap();
        reader
    });
    thread::spawn(move || decider.run());
    let nodes = nodes.map(|mut node| {
        assert!(matches!(told(&mut node), FromNodeZero::Start(_)));
        node
    });
    (heard, nodes)
}

#[test]
fn a_node_that_leaves_after_its_ranks_have_succeeded_disturbs_no_one() {
    let (heard, [mut first, _]) = two();
    heard.send(ended(1, NodeEnd::Done)).unwrap();
    heard.send(Heard::Lost(1, "the connection was closed".to_owned())).unwrap();
    heard.send(ended(0, NodeEnd::Done)).unwrap();
    assert_eq!(told(&mut first), FromNodeZero::Finish(Ok(())));
}

#[test]
fn no_node_is_let_in_once_the_ranks_of_a_node_have_succeeded() {
    let plan = plan(3, Duration::ZERO);
    let (mut decider, _heard) = decider(&plan);
    let join = |decider: &mut Decider, place| {
        let (joined, reader) = node(&plan, place);
        decider.hear_before_the_attempt(joined).unwrap();
        reader
    };
    let _readers = [0, 1].map(|place| join(&mut decider, place));
    decider.members.assign_places();
    decider.begin().unwrap();
    let _third = join(&mut decider, 2);
    assert!(decider.members.let_in_at().is_some());
    assert!(decider.node_ended(1, NodeEnd::Done, Vec::new()).is_none());
    assert_eq!((decider.members.newcomers().count(), decider.members.let_in_at()), (1, None));
    // Nor after that node has left.
    assert!(decider.node_left(1, "was lost").is_none());
    assert_eq!((decider.members.newcomers().count(), decider.members.let_in_at()), (1, None));
    // In the next attempt others are.
    decider.begin().unwrap();
    let _again = join(&mut decider, 1);
    assert!(decider.members.let_in_at().is_some());
}

#[test]
fn a_run_whose_ranks_have_succeeded_is_not_started_again_for_a_node_that_joins() {
    let plan = plan(2, Duration::ZERO);
    let (decider, heard) = decider(&plan);
    let (joined, mut first) = node(&plan, 0);
    heard.send(joined).unwrap();
    thread::spawn(move || decider.run());
    assert!(matches!(told(&mut first), FromNodeZero::Start(_)));
    let (joined, mut second) = node(&plan, 1);
    heard.send(joined).unwrap();
    assert_eq!(told(&mut first), FromNodeZero::Stop { attempt: 0 });
    // Its ranks had ended before it was told.
    heard.send(ended(0, NodeEnd::Done)).unwrap();
    assert_eq!(told(&mut first), FromNodeZero::Finish(Ok(())));
    assert_eq!(told(&mut second), FromNodeZero::Finish(Ok(())));
}

#[test]
fn a_failure_before_a_signal_to_all_nodes_is_reported() {
    let (heard, [mut first, mut second]) = two();
    let failure = RankFailure {
        rank: 0,
        local_rank: 0,
        host: "host0".to_owned(),
        pid: 1,
        end: RankEnd::Code(7),
        attempt: 0,
        after: Duration::ZERO,
        stream: "standard error".to_owned(),
        output: Vec::new(),
        error: None,
        log: None,
    };
    let failed = NodeEnd::Failed { age: Duration::ZERO, first: failure, also: Vec::new(), told_to_end: true };
    heard.send(ended(0, failed)).unwrap();
    heard.send(ended(1, NodeEnd::Interrupted(15))).unwrap();
    let FromNodeZero::Finish(Err(error)) = told(&mut first) else { panic!("the run goes on") };
    assert_eq!(error.exit_code(), 7, "{error}");
    assert!(matches!(told(&mut second), FromNodeZero::Finish(Err(LaunchError::Interrupted { signal: 15, .. }))));
}

#[test]
fn a_node_that_joins_as_the_run_ends_is_told_how_it_ended() {
    let plan = plan(2, LIMIT);
    let (decider, heard) = decider(&plan);
    let (joined, mut late) = node(&plan, 1);
    // Nothing has read this when the run ends.
    heard.send(joined).unwrap();
    drop(heard);
    decider.end(&Ok(()));
    assert_eq!(told(&mut late), FromNodeZero::Finish(Ok(())));
}

#[test]
fn a_node_that_does_not_end_its_ranks_in_time_is_told_so() {
    let plan = plan(2, LIMIT);
    let (mut decider, _heard) = decider(&plan);
    let [_first, mut second] = [0, 1].map(|place| {
        let (joined, reader) = node(&plan, place);
        decider.hear_before_the_attempt(joined).unwrap();
        reader
    });
    decider.members.assign_places();
    decider.begin().unwrap();
    assert!(matches!(told(&mut second), FromNodeZero::Start(_)));
    decider.node_ended(0, NodeEnd::Stopped, Vec::new());
    decider.members.drop_late();
    let FromNodeZero::Finish(Err(LaunchError::NodeLost(why))) = told(&mut second) else { panic!("not told") };
    assert_eq!(why, "node 1 (host host1) did not end its ranks in time");
    assert_eq!(decider.members.nodes.len(), 1);
}

#[test]
fn a_deposed_node_zero_leaves_the_others_before_it_waits_for_etcd() {
    // Connections are made, but nothing is answered.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let etcd = Etcd::new("127.0.0.1", silent.local_addr().unwrap().port(), Default::default(), LIMIT);
    let plan = plan(2, LIMIT);
    let (mut decider, heard) = decider(&plan);
    let lease = Lease { etcd, id: "7".to_owned(), time: LIMIT, renewed: Instant::now() };
    decider.lease = Some(lease.keep(heard.clone()).unwrap());
    let address = decider.listener.local_addr().unwrap();
    let [mut first, mut late] = [0, 1].map(|place| {
        let (joined, reader) = node(&plan, place);
        heard.send(joined).unwrap();
        if place == 0 {
            heard.send(Heard::Deposed("no answer".to_owned())).unwrap();
        }
        reader
    });
    let end = thread::spawn(move || decider.run());
    for node in [&mut first, &mut late] {
        assert_eq!(node.next::<FromNodeZero>(|| LIMIT).unwrap_err(), "the connection was closed");
    }
    // No node joins it any more, until it knows whether another one is node 0.
    assert!(TcpStream::connect(address).is_err());
    // It waits for etcd's answer.
    let (mut asked, _) = silent.accept().unwrap();
    assert!(asked.read(&mut [0; 1]).unwrap() == 1 && !end.is_finished());
    drop((asked, silent));
    end.join().unwrap();
}
