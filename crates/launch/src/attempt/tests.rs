use std::env;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

use rustix::process::{WaitId, WaitIdOptions, waitid};

use super::*;
use crate::output::{Console, Route};
use crate::plan::Plan;

/// A process that ends with this code, and has ended when this returns.
#[expect(clippy::zombie_processes, reason = "the attempt waits for it")]
fn ended(code: i32) -> Running {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exit {code}")]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let pid = Pid::from_child(&child);
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
    let route = |kind| Route {
        kind,
        prefix: Vec::new(),
        plain_prefix: Vec::new(),
        console: None,
        file: None,
        filtered: None,
        progress: Arc::default(),
    };
    let outputs = [
        Output::start(child.stdout.take().unwrap(), route(Kind::Out)).unwrap(),
        Output::start(child.stderr.take().unwrap(), route(Kind::Err)).unwrap(),
    ];
    Running { rank: 0, pid, end: None, outputs, logs: [None, None], error_file: None }
}

/// What an attempt says of a rank that has ended with this code when node 0 stops the attempt.
fn stopped_after(code: i32) -> Outcome {
    let team = Team {
        attempt: 0,
        restarts: 0,
        node_rank: 0,
        nnodes: 1,
        first_rank: 0,
        world_size: 1,
        master_addr: String::new(),
        master_port: 1,
    };
    let host = Host {
        plan: Plan::new("train".into()),
        name: "host0".to_owned(),
        console: Arc::new(Console::new().unwrap()),
        logs: None,
        errors: None,
        threads: Vec::new(),
        bindings: Vec::new(),
        health: Arc::default(),
        events: channel().1,
    };
    let mut attempt = Attempt::new(&host, &team, [None, None], None);
    attempt.ranks.push(ended(code));
    attempt.handle(Event::NodeZero(FromNodeZero::Stop { attempt: 0 }));
    attempt.wait();
    attempt.ended().outcome
}

#[test]
fn ranks_that_have_ended_before_they_are_stopped_count() {
    // All children of the process are waited for, also those of other tests, so this is done in a process of its own.
    const ALONE: &str = "OVERDRIVE_TEST_ALONE";
    if env::var_os(ALONE).is_none() {
        let name = "attempt::tests::ranks_that_have_ended_before_they_are_stopped_count";
        let mut alone = Command::new(env::current_exe().unwrap());
        let output = alone.args(["--exact", name]).env(ALONE, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    assert!(matches!(stopped_after(0), Outcome::Done));
    let Outcome::Failed(failures) = stopped_after(7) else { panic!("the failure was lost") };
    assert_eq!(failures.first.end, RankEnd::Code(7));
}
