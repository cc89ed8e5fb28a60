//! Strangers: programs without the secret that connect to the launchers' endpoint.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use std::thread;

use tempfile::TempDir;

use crate::launcher::{Running, wait_for};
use crate::nodes::{SECRET, both, node};
use crate::port::free_port;

crate::tests![
    strangers_that_send_garbage_do_no_harm,
    a_refused_stranger_cannot_end_the_run,
    a_flood_of_strangers_keeps_no_node_out,
    a_wrong_secret_is_reported_on_both_nodes,
    ranks_do_not_get_the_secret,
    several_nodes_need_a_secret_or_insecure,
    replayed_messages_are_refused,
    a_loopback_endpoint_listens_on_that_address_only,
];

fn connect(port: u16) -> TcpStream {
    wait_for("the port", || TcpStream::connect(("127.0.0.1", port)).ok())
}

fn strangers_that_send_garbage_do_no_harm() {
    let port = free_port();
    let first = node(port, &["--node-rank=0"], "echo $RANK").start();
    let mut strangers: Vec<TcpStream> = (0..3).map(|_| connect(port)).collect();
    strangers[0].write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    strangers[1].write_all(&[0xff; 1000]).unwrap();
    assert_eq!(node(port, &["--node-rank=1"], "echo $RANK").end().code, Some(0));
    assert_eq!(first.end().code, Some(0));
}

/// The greeting of an older launcher, which had no secrets, for another run; and then a message that ends the run.
const ENDS_THE_RUN: &str = concat!(
    r#"{"Hello":{"protocol":3,"run_id":"other","nnodes":2,"node_rank":1,"nproc":1,"max_restarts":0,"#,
    r#""keep_alive":[5000,15000],"host":"stranger"}}"#,
    "\n",
    r#"{"Ended":{"attempt":0,"how":{"Interrupted":15},"ends":[]}}"#,
    "\n"
);

fn a_refused_stranger_cannot_end_the_run() {
    let port = free_port();
    let first = node(port, &["--node-rank=0"], "echo $RANK").start();
    let mut stranger = connect(port);
    stranger.write_all(ENDS_THE_RUN.as_bytes()).unwrap();
    // Until node 0 closes the connection: then everything that was sent has had its effect.
    let _closed = stranger.read_to_end(&mut Vec::new());
    assert_eq!(node(port, &["--node-rank=1"], "echo $RANK").end().code, Some(0));
    assert_eq!(first.end().code, Some(0));
}

fn a_flood_of_strangers_keeps_no_node_out() {
    let port = free_port();
    let first = node(port, &["--node-rank=0"], "echo $RANK").start();
    let silent: Vec<TcpStream> = (0..600).map(|_| connect(port)).collect();
    // Node 0 keeps a few of them and closes the others.
    let open = || fs::read_dir(format!("/proc/{}/fd", first.guard().as_raw_pid())).unwrap().count();
    wait_for("most connections to close", || (open() < 250).then_some(()));
    assert_eq!(node(port, &["--node-rank=1"], "echo $RANK").end().code, Some(0));
    assert_eq!(first.end().code, Some(0));
    drop(silent);
}

fn a_wrong_secret_is_reported_on_both_nodes() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("secret");
    fs::write(&file, "another secret of theirs").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let port = free_port();
    let first = node(port, &["--node-rank=0"], "echo $RANK").start();
    // From here on, node 0 listens.
    drop(connect(port));
    // The file wins over the variable.
    let wrong = ["--node-rank=1", "--secret-file", file.to_str().unwrap(), "--rdzv-conf=join_timeout=0.3"];
    let insecure = ["--node-rank=1", "--insecure", "--rdzv-conf=join_timeout=0.3"];
    for (options, why) in
        [(&wrong[..], "is its secret the same as here?"), (&insecure, "is it started with --insecure too?")]
    {
        wait_for(why, || {
            let ended = node(port, options, "echo never").end();
            assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
            let is_refused = ended.err.contains(&format!("the connection was closed; {why}"));
            // On a busy machine, node 0 may not answer in time.
            assert!(is_refused || ended.err.contains(": it was silent for "), "{ended:?}");
            is_refused.then_some(())
        });
    }
    assert_eq!(node(port, &["--node-rank=1"], "echo $RANK").end().out, "[rank1]: 1\n");
    let first = first.end();
    assert_eq!(first.code, Some(0));
    first.says("refused 127.0.0.1, which does not know this run's secret");
}

fn ranks_do_not_get_the_secret() {
    for ended in both(&[], "env; cat /proc/$PPID/environ /proc/$PPID/cmdline | tr '\\0' '\\n'").map(Running::end) {
        assert_eq!(ended.code, Some(0));
        assert!(ended.out.contains("MASTER_ADDR=127.0.0.1") && !ended.out.contains(SECRET), "{}", ended.out);
    }
}

fn several_nodes_need_a_secret_or_insecure() {
    let port = free_port();
    let without = |options: &[&str]| node(port, options, "echo $RANK").env("OVERDRIVE_SECRET", "");
    let ended = without(&[]).end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""));
    ended.says("2 nodes need a secret, the same on all of them");
    let short = without(&[]).env("OVERDRIVE_SECRET", "short").end();
    assert_eq!(short.code, Some(2));
    short.says("the secret has 5 characters; give 16 to 4096");
    let first = without(&["--insecure", "--node-rank=0"]).start();
    assert_eq!(without(&["--insecure", "--node-rank=1"]).end().out, "[rank1]: 1\n");
    assert_eq!(first.end().code, Some(0));
}

/// Forwards bytes between a node and `port`, and keeps what the node has sent over its latest connection: on a busy
/// machine it may connect again.
fn overhear(listener: TcpListener, port: u16) -> Arc<Mutex<Vec<u8>>> {
    let heard: Arc<Mutex<Vec<u8>>> = Arc::default();
    let kept = Arc::clone(&heard);
    thread::spawn(move || {
        for node in listener.incoming() {
            let (mut node, mut node_zero, mut chunk) = (node.unwrap(), connect(port), [0; 4096]);
            kept.lock().unwrap().clear();
            let (mut from, mut to) = (node_zero.try_clone().unwrap(), node.try_clone().unwrap());
            thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            while let Ok(read) = node.read(&mut chunk)
                && read > 0
            {
                kept.lock().unwrap().extend_from_slice(&chunk[..read]);
                let _ = node_zero.write_all(&chunk[..read]);
            }
            let _ = node_zero.shutdown(Shutdown::Both);
        }
    });
    heard
}

fn replayed_messages_are_refused() {
    let (port, listener) = (free_port(), TcpListener::bind("127.0.0.1:0").unwrap());
    let relay = listener.local_addr().unwrap().port();
    let first = node(port, &["--node-rank=0"], "exit 3").start();
    let overheard = overhear(listener, port);
    let second = node(relay, &["--node-rank=1"], "exit 3").end();
    assert_eq!((first.end().code, second.code), (Some(3), Some(3)));
    let heard = overheard.lock().unwrap().clone();
    assert!(String::from_utf8_lossy(&heard).contains("\"Ended\""));

    // The same run again: the recorded messages neither join it nor end it.
    let again = node(port, &["--node-rank=0"], "echo $RANK").start();
    let mut stranger = connect(port);
    stranger.write_all(&heard).unwrap();
    let _closed = stranger.read_to_end(&mut Vec::new());
    assert_eq!(node(port, &["--node-rank=1"], "echo $RANK").end().out, "[rank1]: 1\n");
    let again = again.end();
    assert_eq!(again.code, Some(0));
    again.says("refused 127.0.0.1, which does not know");
}

fn a_loopback_endpoint_listens_on_that_address_only() {
    let port = free_port();
    let first = node(port, &["--node-rank=0"], "echo $RANK").start();
    drop(connect(port));
    // Another address of this host.
    assert!(TcpStream::connect(("127.0.0.2", port)).is_err());
    assert_eq!(node(port, &["--node-rank=1"], "echo $RANK").end().code, Some(0));
    assert_eq!(first.end().code, Some(0));
}
