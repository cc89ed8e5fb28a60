//! Ranks that fail, restarts, programs that cannot be started.

use std::fs;
use std::net::TcpListener;

use tempfile::TempDir;

use rustix::process::Signal;

use crate::launcher::{Launcher, undisturbed, wait_for};
use crate::port::free_port;

crate::tests![
    an_exit_code_is_reported_and_passed_on,
    a_signal_is_reported_by_name,
    the_first_by_time_is_reported,
    those_that_fail_by_themselves_soon_after_are_reported_too,
    a_signal_is_passed_on_while_others_may_still_fail,
    the_end_of_the_output_is_shown_wherever_it_goes,
    standard_output_is_shown_where_standard_error_is_empty,
    ranks_that_ignore_sigterm_are_killed_after_the_grace_period,
    restarts_are_counted_and_reported,
    a_restarted_run_can_succeed,
    a_taken_port_is_replaced_by_another,
    a_given_port_is_kept,
    programs_that_cannot_be_started,
    a_program_whose_interpreter_is_missing,
];

fn an_exit_code_is_reported_and_passed_on() {
    let ended =
        Launcher::script(&["--nproc-per-node=3"], "[ $RANK = 1 ] && { echo no >&2; exit 7; }; sleep 1000").end();
    assert_eq!(ended.code, Some(7));
    ended.says("rank 1 failed: exit code 7 (host ");
    ended.says(", local rank 1, pid ");
    ended.says("the end of its standard error:\n    no\n");
    ended.says("the others: rank 0, 2: signal 15 (SIGTERM)");
}

fn a_signal_is_reported_by_name() {
    let ended = Launcher::script(&["--nproc-per-node=2"], "[ $RANK = 0 ] && kill -SEGV $$; sleep 1000").end();
    assert_eq!(ended.code, Some(128 + 11));
    ended.says("rank 0 failed: signal 11 (SIGSEGV)");
    ended.says("it wrote nothing");
}

fn the_first_by_time_is_reported() {
    // The others fail too, because they are told to end.
    let folder = TempDir::new().unwrap();
    let script = "trap 'exit 3' TERM; touch $READY.$RANK; \
                  [ $RANK = 2 ] && { for other in 0 1 3; do while ! [ -e $READY.$other ]; do sleep 0.01; done; done; exit 9; }; \
                  while true; do sleep 0.02; done";
    let ended = Launcher::script(&["--nproc-per-node=4"], script).env("READY", folder.path().join("ready")).end();
    assert_eq!(ended.code, Some(9));
    ended.says("rank 2 failed: exit code 9");
    ended.says("the others: rank 0, 1, 3: exit code 3");
    assert!(!ended.err.contains("failed by themselves"));
}

/// Rank 0 loses its connection to rank 1, which reports its panic only after that; rank 2 hangs.
fn those_that_fail_by_themselves_soon_after_are_reported_too() {
    let script = "case $RANK in \
                  0) while ! [ -e $READY ]; do sleep 0.01; done; echo Lost >&2; echo $$ > $READY.tmp; \
                     mv $READY.tmp $READY.lost; exit 1;; \
                  1) touch $READY; while ! [ -e $READY.lost ]; do sleep 0.01; done; \
                     while kill -0 $(cat $READY.lost) 2> /dev/null; do sleep 0.01; done; \
                     i=0; while [ $i -lt 9 ]; do echo frame $i >&2; i=$((i+1)); done; exit 101;; \
                  *) sleep 1000;; esac";
    let report = undisturbed(|times| {
        let folder = TempDir::new().unwrap();
        let window = format!("--failure-window={times}");
        let launcher = Launcher::script(&["--nproc-per-node=3", &window], script);
        let ended = launcher.env("READY", folder.path().join("ready")).end();
        assert_eq!(ended.code, Some(1));
        let (_, report) = ended.err.split_once("overdrive-run: rank 0 failed: exit code 1 (host ").unwrap();
        // On a busy machine, rank 1 may be told to end before it can fail.
        if report.contains("the others: rank 1") { Err(ended.err.clone()) } else { Ok(report.to_owned()) }
    });
    let (first, others) = report.split_once("\n  failed by themselves soon after it; ").unwrap();
    assert!(first.ends_with("the end of its standard error:\n    Lost"), "{first}");
    let after = others.strip_prefix("the first to fail is not always the cause:\n  after ").unwrap();
    let (seconds, _) = after.split_once(" s, rank 1 failed: exit code 101 (host ").unwrap();
    assert!(seconds.parse::<f64>().unwrap() >= 0.0, "{others}");
    // Fewer lines than for the first failure.
    assert!(others.contains("    the end of its standard error:\n      frame 1\n"), "{others}");
    assert!(others.ends_with("      frame 8\n  the others: rank 2: signal 15 (SIGTERM)\n"), "{others}");
}

fn a_signal_is_passed_on_while_others_may_still_fail() {
    let folder = TempDir::new().unwrap();
    let ready = folder.path().join("ready");
    let script = "[ $RANK = 1 ] || { while ! [ -e $READY.1 ]; do sleep 0.01; done; \
                  echo $$ > $READY.tmp; mv $READY.tmp $READY; exit 1; }; \
                  trap 'echo interrupted; exit 4' INT; trap 'echo told to end; exit 5' TERM; touch $READY.1; \
                  while true; do sleep 0.01; done";
    let options = ["--nproc-per-node=2", "--failure-window=600"];
    let running = Launcher::script(&options, script).env("READY", &ready).start();
    running.wait_for_file(&ready);
    let failed = format!("/proc/{}", fs::read_to_string(&ready).unwrap().trim());
    wait_for("the failed rank's end", || fs::metadata(&failed).is_err().then_some(()));
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), "[rank1]: interrupted\n"));
    ended.says("the others: rank 1: exit code 4");
}

fn the_end_of_the_output_is_shown_wherever_it_goes() {
    let base = TempDir::new().unwrap();
    let script = "i=0; while [ $i -lt 50 ]; do echo line $i >&2; i=$((i+1)); done; exit 1";
    let ended = Launcher::script(&["-r", "3", "--log-dir", base.path().to_str().unwrap()], script).end();
    assert!(!ended.err.contains("line 29\n") && !ended.err.contains("[rank0]"));
    ended.says("\n    line 30\n");
    ended.says("\n    line 49\n");
    let log = ended.err.lines().find_map(|line| line.trim().strip_prefix("full log: ")).unwrap();
    assert_eq!(fs::read_to_string(log).unwrap().lines().count(), 50);
}

fn standard_output_is_shown_where_standard_error_is_empty() {
    let ended = Launcher::script(&[], "echo last words; exit 1").end();
    ended.says("the end of its standard output:\n    last words");
}

fn ranks_that_ignore_sigterm_are_killed_after_the_grace_period() {
    let folder = TempDir::new().unwrap();
    let script = "[ $RANK = 0 ] && { while ! [ -e $READY ]; do sleep 0.01; done; exit 1; }; \
                  trap '' TERM; touch $READY; while true; do sleep 1; done";
    let launcher = Launcher::script(&["--nproc-per-node=2", "--grace-period=0.3"], script);
    let ended = launcher.env("READY", folder.path().join("ready")).end();
    assert_eq!(ended.code, Some(1));
    ended.says("rank 1: signal 9 (SIGKILL)");
}

fn restarts_are_counted_and_reported() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS at $MASTER_PORT; exit 4";
    let ended = Launcher::script(&["--max-restarts", "2"], script).end();
    assert_eq!(ended.code, Some(4));
    let lines: Vec<&str> = ended.out.lines().collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    for (attempt, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("[rank0]: {attempt} of 2 at ")), "{line}");
    }
    ended.says("restart 1 of 2");
    ended.says("restart 2 of 2");
    ended.says("after 2 restarts");
}

fn a_restarted_run_can_succeed() {
    let folder = TempDir::new().unwrap();
    let done = folder.path().join("done");
    // All ranks start again, including those that had succeeded.
    let script = format!(
        "echo $RANK in $TORCHELASTIC_RESTART_COUNT; [ $RANK = 0 ] && exit 0; [ -e {0} ] || {{ touch {0}; exit 1; }}",
        done.display()
    );
    let ended = Launcher::script(&["--nproc-per-node=2", "--max-restarts=3"], &script).end();
    assert_eq!(ended.code, Some(0));
    assert_eq!(ended.out.matches("1 in ").count(), 2);
    assert!(ended.out.contains("0 in 1"));
}

fn a_taken_port_is_replaced_by_another() {
    let folder = TempDir::new().unwrap();
    let seen = folder.path().join("ports");
    // The error of a store whose port is taken.
    let script = format!(
        "echo $MASTER_PORT >> {0}; [ $(wc -l < {0}) = 3 ] || {{ echo 'EADDRINUSE: address already in use' >&2; exit 1; }}",
        seen.display()
    );
    let ended = Launcher::script(&[], &script).end();
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    ended.says("was taken; trying another one");
    let ports = fs::read_to_string(&seen).unwrap();
    assert_eq!(ports.lines().count(), 3);

    // Only three times, and never if the user chose the port.
    let ended = Launcher::script(&[], "echo Address already in use >&2; exit 5").end();
    assert_eq!((ended.code, ended.err.matches("trying another").count()), (Some(5), 3));
    let port = free_port().to_string();
    let ended = Launcher::script(&["--master-port", &port], "echo Address already in use >&2; exit 5").end();
    assert_eq!((ended.code, ended.err.matches("trying another").count()), (Some(5), 0));
}

fn a_given_port_is_kept() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let options = ["--master_addr=localhost", "--master_port", &port];
    let ended = Launcher::script(&options, "echo $MASTER_ADDR:$MASTER_PORT").end();
    assert_eq!(ended.out, format!("[rank0]: localhost:{port}\n"));
}

fn programs_that_cannot_be_started() {
    let ended = Launcher::new(&["--nproc-per-node=2", "no-such-program"]).end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(127), ""));
    ended.says("cannot start `no-such-program`: it is not in PATH");
    let ended = Launcher::new(&["/etc/passwd"]).end();
    assert_eq!(ended.code, Some(126));
    ended.says("not executable");
}

fn a_program_whose_interpreter_is_missing() {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().unwrap();
    let program = folder.path().join("program");
    fs::write(&program, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let ended = Launcher::new(&[program.to_str().unwrap()]).end();
    assert_eq!(ended.code, Some(126));
    ended.says("cannot start");
}
