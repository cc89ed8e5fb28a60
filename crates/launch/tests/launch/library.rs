//! The library; the ranks are this program.

use std::env;
use std::fs;
use std::process::exit;
use std::time::Duration;

use overdrive_launch::{Launch, LaunchError, RankEnd, Streams};
use tempfile::TempDir;

use crate::port::free_port;

crate::tests![
    a_program_can_be_its_own_ranks,
    errors_can_be_matched_on,
    options_are_checked_before_anything_starts,
    times_may_have_any_length,
    launches_do_not_disturb_one_another,
];

/// The variable with a rank's task.
const TASK: &str = "OVERDRIVE_TEST_TASK";

/// In a rank of [`Launch::current_program`]: does the task and exits.
pub fn be_a_rank_if_told() {
    let Ok(task) = env::var(TASK) else { return };
    let rank = env::var("RANK").unwrap();
    match task.split_once(' ') {
        Some(("write", folder)) => fs::write(format!("{folder}/{rank}"), env::var("WORLD_SIZE").unwrap()).unwrap(),
        Some(("fail", which)) if which == rank => {
            eprintln!("rank {rank} fails");
            exit(5);
        }
        Some(("fail", _)) => std::thread::sleep(Duration::from_secs(1000)),
        _ => exit(99),
    }
    exit(0)
}

fn ranks(task: &str) -> Launch {
    // Not shown on the console, where their output would mix with the tests' results.
    Launch::current_program().env(TASK, task).local_ranks_filter([]).grace_period(Duration::from_secs(600))
}

fn a_program_can_be_its_own_ranks() {
    let folder = TempDir::new().unwrap();
    ranks(&format!("write {}", folder.path().display())).nproc(3).run().unwrap();
    for rank in 0..3 {
        assert_eq!(fs::read_to_string(folder.path().join(rank.to_string())).unwrap(), "3");
    }
}

fn errors_can_be_matched_on() {
    let folder = TempDir::new().unwrap();
    let error = ranks("fail 1").nproc(3).redirects(Streams::Err).log_dir(folder.path()).run().unwrap_err();
    assert_eq!(error.exit_code(), 5);
    let LaunchError::Rank(report) = error else { panic!("{error}") };
    let first = &report.first;
    assert_eq!((first.rank, first.local_rank, first.end, first.attempt), (1, 1, RankEnd::Code(5), 0));
    assert_eq!(first.output, ["rank 1 fails"]);
    assert_eq!(fs::read_to_string(first.log.as_ref().unwrap()).unwrap(), "rank 1 fails\n");
    // The others were ended.
    assert!(report.also.is_empty());
    assert_eq!(report.others, [(0, RankEnd::Signal(15)), (2, RankEnd::Signal(15))]);

    let missing = Launch::new("no-such-program").run().unwrap_err();
    assert!(matches!(&missing, LaunchError::Program { missing: true, .. }), "{missing}");
}

fn options_are_checked_before_anything_starts() {
    for launch in [
        Launch::new("true").nproc(0),
        Launch::new("true").nnodes(2),
        Launch::new("true").node_rank(1),
        Launch::new("true").local_ranks_filter([1]),
        Launch::new("true").signals([0]),
        Launch::new("true").master_addr("a b"),
        Launch::new("true").master_port(0),
        Launch::new("true").nnodes(2).rdzv_endpoint("", 29500),
    ] {
        assert!(matches!(launch.run(), Err(LaunchError::Options(_))));
    }
}

fn times_may_have_any_length() {
    let longest = Duration::MAX;
    let long = |launch: Launch| launch.grace_period(longest).join_timeout(longest).keep_alive(longest, u32::MAX);
    let alone = long(ranks("fail 0").nproc(2)).run();
    assert!(matches!(alone, Err(LaunchError::Rank(_))), "{alone:?}");
    // One host of an elastic run.
    let elastic = ranks("fail 0").nproc(2).nnodes(2).min_nodes(1).last_call(Duration::ZERO).insecure();
    let elastic = long(elastic.rdzv_endpoint("127.0.0.1", free_port())).run();
    assert!(matches!(elastic, Err(LaunchError::Rank(_))), "{elastic:?}");
}

fn launches_do_not_disturb_one_another() {
    let folder = TempDir::new().unwrap();
    let task = format!("write {}", folder.path().display());
    std::thread::scope(|scope| {
        let failing = scope.spawn(|| ranks("fail 0").nproc(2).run());
        for _ in 0..4 {
            let good = scope.spawn(|| ranks(&task).nproc(2).run());
            assert_eq!(good.join().unwrap(), Ok(()));
        }
        assert!(failing.join().unwrap().is_err());
    });
}
