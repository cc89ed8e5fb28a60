//! Checks of hosts before their ranks start.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::fake_etcd::FakeEtcd;
use crate::launcher::{Ended, Launcher, Running, wait_for};
use crate::nodes::{SECRET, node};
use crate::port::free_port;

crate::tests![
    a_check_runs_as_ranks_of_its_host_before_the_ranks,
    a_host_that_fails_its_check_starts_no_ranks,
    an_elastic_run_leaves_out_a_host_that_fails_its_check,
    a_run_of_fixed_size_ends_when_a_host_fails_its_check,
    a_host_that_fails_its_check_is_not_elected,
    a_check_that_does_not_end_is_a_failure,
    a_signal_ends_a_check,
    impossible_checks_are_refused,
];

/// A check that is a shell script.
struct Check {
    folder: TempDir,
}

impl Check {
    fn new(script: &str) -> Self {
        let check = Self { folder: TempDir::new().unwrap() };
        let file = check.folder.path().join("check");
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        check
    }

    /// The option, with arguments of the script.
    fn option(&self, arguments: &str) -> String {
        format!("--node-check={} {arguments}", self.folder.path().join("check").display())
    }
}

fn a_check_runs_as_ranks_of_its_host_before_the_ranks() {
    let check = Check::new("echo checked $1 $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE; [ -n $MASTER_PORT ]");
    let logs = TempDir::new().unwrap();
    let log_dir = format!("--log-dir={}", logs.path().display());
    let ended = Launcher::script(&[&check.option("well"), "--nproc-per-node=2", "-t=1", &log_dir], "echo ran").end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let lines: Vec<&str> = ended.out.lines().collect();
    let (mut before, mut after) = (lines[..2].to_vec(), lines[2..].to_vec());
    before.sort_unstable();
    after.sort_unstable();
    assert_eq!(before, ["check [rank0]: checked well 0/2 0/2", "check [rank1]: checked well 1/2 1/2"]);
    assert_eq!(after, ["[rank0]: ran", "[rank1]: ran"]);
    ended.says("this host has passed its check");
    let run = fs::read_dir(&logs).unwrap().next().unwrap().unwrap().path();
    for (folder, text) in [("check/1", "checked well 1/2 1/2\n"), ("attempt_0/1", "ran\n")] {
        assert_eq!(fs::read_to_string(run.join(folder).join("stdout.log")).unwrap(), text);
    }
}

fn a_host_that_fails_its_check_starts_no_ranks() {
    let check = Check::new("[ $RANK = 0 ] && sleep 1000; echo GPU 1 computes wrongly >&2; exit 5");
    let ended = Launcher::script(&[&check.option(""), "--nproc-per-node=2", "--failure-window=0"], "echo ran").end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
    ended.says("has failed its check and takes no part: rank 1 failed: exit code 5");
    ended.says("GPU 1 computes wrongly");
}

/// A launcher of a run of `nnodes`, whose check fails on the host that has `BAD` set.
fn host(port: u16, check: &Check, nnodes: &str, options: &[&str], script: &str) -> Launcher {
    let nnodes = format!("--nnodes={nnodes}");
    let conf = "--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120,last_call_timeout=600";
    node(port, &[&[nnodes.as_str(), conf, &check.option("")], options].concat(), script)
}

fn fails(check: &str) -> Check {
    Check::new(&format!("{check}; [ -z \"$BAD\" ] && exit 0; echo the link is slow >&2; exit 7"))
}

fn is_unfit(ended: &Ended) {
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
    ended.says("has failed its check and takes no part: rank 0 failed: exit code 7");
    ended.says("the link is slow");
}

fn an_elastic_run_leaves_out_a_host_that_fails_its_check() {
    let (port, check) = (free_port(), fails("true"));
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("file");
    let start = |options: &[&str]| {
        let script =
            "echo $RANK/$WORLD_SIZE; touch $FILE.$RANK.$WORLD_SIZE; while ! [ -e $FILE.done ]; do sleep 0.01; done";
        host(port, &check, "2:3", options, script).env("FILE", &file)
    };
    let first = start(&["--node-rank=0"]).start();
    let bad = start(&["--node-rank=1"]).env("BAD", "1").end();
    is_unfit(&bad);
    first.wait_until_it_says("refused node 1 (host ");
    first.wait_until_it_says("it has failed its check: local rank 0, exit code 7: the link is slow");
    // Its place is free for another host: the run begins at once when all three are there.
    let others: Vec<Running> = ["1", "2"].map(|rank| start(&["--node-rank", rank]).start()).into();
    wait_for("all ranks", || file.with_extension("2.3").exists().then_some(()));
    fs::write(file.with_extension("done"), "").unwrap();
    for ended in [first].into_iter().chain(others).map(Running::end) {
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

fn a_run_of_fixed_size_ends_when_a_host_fails_its_check() {
    let (port, check) = (free_port(), fails("true"));
    let first = host(port, &check, "2", &["--node-rank=0"], "echo ran").start();
    is_unfit(&host(port, &check, "2", &["--node-rank=1"], "echo ran").env("BAD", "1").end());
    let first = first.end();
    assert_eq!((first.code, first.out.as_str()), (Some(1), ""), "{first:?}");
    first.says("has failed its check: local rank 0, exit code 7: the link is slow");
}

fn a_host_that_fails_its_check_is_not_elected() {
    let (etcd, check) = (FakeEtcd::start(), fails("true"));
    let start = || {
        let endpoint = format!("--rdzv-endpoint=127.0.0.1:{}", etcd.port);
        let conf = "--rdzv-conf=join_timeout=600,keep_alive_max_attempt=120,last_call_timeout=0,lease_timeout=600";
        let own = ["--rdzv-backend=etcd", "--rdzv-id=job", "--nnodes=1:2", "--local-addr=127.0.0.1", conf];
        let check = check.option("");
        Launcher::script(&[&own[..], &[&endpoint, &check]].concat(), "echo ran").env("OVERDRIVE_SECRET", SECRET)
    };
    is_unfit(&start().env("BAD", "1").end());
    assert!(!etcd.has_keys());
    let ended = start().end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "[rank0]: ran\n"), "{ended:?}");
}

fn a_check_that_does_not_end_is_a_failure() {
    let check = Check::new("exec sleep 1000");
    let ended = Launcher::script(&[&check.option(""), "--node-check-timeout=0.3"], "echo ran").end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
    ended.says("has failed its check and takes no part: its check had not ended after 0.3 s");
}

fn a_signal_ends_a_check() {
    let check = Check::new("touch $FILE; exec sleep 1000");
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("file");
    let running = Launcher::script(&[&check.option("")], "echo ran").env("FILE", &file).start();
    running.wait_for_file(&file);
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(143), ""), "{ended:?}");
}

fn impossible_checks_are_refused() {
    for (options, code, what) in [
        (vec!["--node-check= "], 2, "give a command, like overdrive-node-check"),
        (vec!["--node-check=./no-such-check"], 127, "cannot start `./no-such-check`"),
        (vec!["--node-check=true", "--node-check-timeout=0"], 2, "give a number of seconds above 0"),
    ] {
        let ended = Launcher::script(&options, "echo ran").end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(code), ""), "{ended:?}");
        ended.says(what);
    }
}
