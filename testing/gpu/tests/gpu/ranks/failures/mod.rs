//! What fails over NCCL, and how: the rows of the table in docs/distributed.md. Rank 1 ends or stays away.
//!
//! Only the stream waits for NCCL, so libtorch's watchdog finds most failures. It ends the process after a pause in
//! which it would write what it knows: here a short one, or one that no test lives to see. A rank that was told of a
//! failure says so and is killed: it would wait for the watchdog before it ends.
//!
//! The watchdog holds a lock during its pause, and the next collective waits for that lock. So where only a next
//! collective could tell a rank, the rank is told or the watchdog ends it, whichever is first.

mod ends;
mod rank;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::PATIENCE;
use super::port::free_port;
use super::processes::{Ended, Meeting, Running, start};
use rank::{released, told_at};

pub use rank::scenario;

const SIZE: usize = 3;
/// How long ranks wait for one that stays away until they have given it up.
const SHORT: Duration = Duration::from_secs(2);
/// Between two looks at a file.
const PAUSE: Duration = Duration::from_millis(5);
/// A quarter of the watchdog's pause, in milliseconds.
const DUMP_PAUSE: &str = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC";
const AT_ONCE: &str = "1";
const SOON: &str = "100";
const NEVER: &str = "1000000";
/// How long a first collective waits for all ranks, in seconds.
const FIRST_LIMIT: &str = "TORCH_NCCL_NONBLOCKING_TIMEOUT";
const SIGABRT: i32 = 6;
const ENDED: &str = "ended by the watchdog";

fn begin(size: usize, case: &str, what: &str, pause: &str) -> Result<(tempfile::TempDir, Vec<Running>)> {
    // Without these two, ranks that meet in a file would wait for an absent one without a limit.
    let limited = [(DUMP_PAUSE, pause), ("TORCH_NCCL_USE_COMM_NONBLOCKING", "1"), (FIRST_LIMIT, "2")];
    begin_with(size, case, what, &limited[..if what == "file" { 3 } else { 1 }])
}

fn begin_with(
    size: usize,
    case: &str,
    what: &str,
    variables: &[(&str, &str)],
) -> Result<(tempfile::TempDir, Vec<Running>)> {
    let folder = tempfile::tempdir()?;
    let arguments = vec![case.to_owned(), what.to_owned()];
    let rank = |rank| {
        let meeting = Meeting { rank, size, file: folder.path().join("meet"), arguments: arguments.clone() };
        start("failures", &meeting, variables)
    };
    let ranks = (0..size).map(rank).collect::<Result<_>>()?;
    Ok((folder, ranks))
}

/// Waits for a rank's word, which does not come if the rank ends before.
fn is_told(word: &Path, rank: &mut Running, since: Instant) -> Result<bool> {
    while !word.exists() && rank.is_running()? && since.elapsed() < PATIENCE {
        std::thread::sleep(PAUSE);
    }
    Ok(word.exists())
}

/// What the ranks are told that are to be told something. All of them then end well, if the group is one that goes on.
fn told(case: &str, what: &str, size: usize, is_asked: fn(usize) -> bool, ends: bool) -> Result<Vec<String>> {
    let since = Instant::now();
    let (folder, mut ranks) = begin(size, case, what, NEVER)?;
    let word = |rank: usize| told_at(&folder.path().join("meet"), rank);
    for rank in (0..size).filter(|rank| is_asked(*rank)) {
        if !is_told(&word(rank), &mut ranks[rank], since)? {
            let mut failed = ranks.swap_remove(rank);
            failed.kill()?;
            let Ended { status, output, errors } = failed.end(since)?;
            anyhow::bail!("{case}, {what}: rank {rank} was told nothing: {status}\n{output}\n{errors}");
        }
    }
    if case.ends_with("stalls") || ["aborted", "stalled", "timed out", "in a panic", "not closed"].contains(&what) {
        ensure!(ranks[1].is_running()?, "{case}, {what}: the stalled rank has ended");
    }
    if ends {
        for (rank, running) in ranks.into_iter().enumerate().filter(|(rank, _)| is_asked(*rank)) {
            let Ended { status, output, errors } = running.end(since)?;
            ensure!(status.success(), "{case}, {what}, rank {rank}: {status}\n{output}\n{errors}");
        }
    }
    (0..size).filter(|rank| is_asked(*rank)).map(|rank| Ok(fs::read_to_string(word(rank))?)).collect()
}

/// What the ranks are told of which [`SIZE`] meet: a word, or [`ENDED`] where the watchdog was faster.
fn told_or_ended(case: &str, what: &str, is_asked: fn(usize) -> bool) -> Result<Vec<String>> {
    let since = Instant::now();
    let (folder, ranks) = begin(SIZE, case, what, SOON)?;
    let mut words = Vec::new();
    for (rank, mut running) in ranks.into_iter().enumerate().filter(|(rank, _)| is_asked(*rank)) {
        let word = told_at(&folder.path().join("meet"), rank);
        if is_told(&word, &mut running, since)? {
            words.push(fs::read_to_string(word)?);
            continue;
        }
        running.kill()?;
        let Ended { status, output, errors } = running.end(since)?;
        let by_watchdog = status.signal() == Some(SIGABRT) && errors.contains("taking the entire process down");
        ensure!(by_watchdog, "{case}, {what}: rank {rank} was told nothing: {status}\n{output}\n{errors}");
        words.push(ENDED.to_owned());
    }
    Ok(words)
}

fn all(_: usize) -> bool {
    true
}

fn others(rank: usize) -> bool {
    rank != 1
}

fn is_lost(word: impl AsRef<str>) -> bool {
    ["Lost", ENDED].contains(&word.as_ref())
}

/// Over tcp:// rank 0 waits for the others before NCCL does. Otherwise they meet in their first collective.
pub fn an_absent_rank_is_a_rendezvous_error() -> Result<()> {
    let is_either = |word: &String| ["TimedOut", "Lost"].contains(&word.as_str());
    let port = free_port().to_string();
    let over_tcp = told("absent", &port, SIZE - 1, all, false)?;
    ensure!(over_tcp[0] == "Rendezvous" && is_either(&over_tcp[1]), "{over_tcp:?}");
    let in_first = told("absent", "file", SIZE - 1, all, false)?;
    ensure!(in_first.iter().all(is_either) && in_first.iter().any(|word| word == "TimedOut"), "{in_first:?}");
    Ok(())
}

/// At once where the host waits, and otherwise in one of the next collectives.
pub fn a_dead_rank_is_lost() -> Result<()> {
    for what in ["barrier", "object", "max", "sum of counts", "work", "receive"] {
        let told = told("dead", what, SIZE, others, false)?;
        ensure!(told == ["Lost"; SIZE - 1], "{what}: {told:?}");
    }
    for what in ["sums", "training"] {
        let told = told_or_ended("dead", what, others)?;
        ensure!(told.iter().all(is_lost), "{what}: {told:?}");
    }
    Ok(())
}

/// The error is returned from `main`, or the watchdog is faster: either way the process ends, and not well.
pub fn a_rank_that_has_lost_another_ends() -> Result<()> {
    let since = Instant::now();
    for what in ["barrier", "sums"] {
        let (_folder, ranks) = begin(SIZE, "dead, ends", what, AT_ONCE)?;
        for running in ranks {
            let Ended { status, output, errors } = running.end(since)?;
            ensure!(!status.success(), "{what}: {status}\n{output}\n{errors}");
        }
    }
    Ok(())
}

/// Where the ranks meet anew: to wrap a model, and to connect their hosts for the accumulator's counts.
pub fn where_ranks_meet_anew_a_dead_one_times_out() -> Result<()> {
    for what in ["model", "first window"] {
        let told = told("dead", what, SIZE, others, false)?;
        ensure!(told == ["TimedOut"; SIZE - 1], "{what}: {told:?}");
    }
    Ok(())
}

/// NCCL makes a communicator without a limit: the timeout of a first exchange does not count, and it is done once the
/// stalled rank has come.
pub fn a_first_exchange_waits_for_a_stalled_rank_without_a_limit() -> Result<()> {
    for what in ["receive", "sub-group"] {
        let since = Instant::now();
        let (folder, mut ranks) = begin(SIZE, "first", what, NEVER)?;
        let meeting = folder.path().join("meet");
        let word = |rank| told_at(&meeting, rank);
        ensure!(is_told(&word(0), &mut ranks[0], since)?, "{what}: rank 0 was told nothing");
        ensure!(fs::read_to_string(word(0))? == "TimedOut", "{what}: {}", fs::read_to_string(word(0))?);
        ensure!(!word(2).exists() && ranks[2].is_running()?, "{what}: rank 2 did not wait");
        fs::write(released(&meeting), "")?;
        for rank in [1, 2] {
            ensure!(is_told(&word(rank), &mut ranks[rank], since)?, "{what}: rank {rank} has not come");
            ensure!(fs::read_to_string(word(rank))? == "done");
        }
    }
    Ok(())
}

/// Who comes last loses those that have given up before.
pub fn a_stalled_rank_times_out_where_the_host_waits() -> Result<()> {
    let waits = ["barrier", "object", "max", "sum of counts", "work", "receive"].map(|what| ("stalls", what));
    for (case, what) in waits.into_iter().chain([("verified stalls", "sum")]) {
        let told = told(case, what, SIZE, others, false)?;
        let is_either = told.iter().all(|word| ["TimedOut", "Lost"].contains(&word.as_str()));
        ensure!(is_either && told.iter().any(|word| word == "TimedOut"), "{case}, {what}: {told:?}");
    }
    Ok(())
}

/// Rank 1 lives and takes part, but nothing of it arrives, and nothing at it: it has stalled for the others, and they for
/// it.
pub fn a_cut_link_times_out_where_the_host_waits() -> Result<()> {
    for what in ["barrier", "max", "work"] {
        let told = told("cut", what, SIZE, all, false)?;
        let is_either = told.iter().all(|word| ["TimedOut", "Lost"].contains(&word.as_str()));
        ensure!(is_either && told[1] == "TimedOut", "{what}: {told:?}");
    }
    Ok(())
}

/// The watchdog ends the process: nobody else could end the host's wait for the device.
pub fn a_stalled_rank_ends_the_others_where_the_device_waits() -> Result<()> {
    let since = Instant::now();
    let (_folder, ranks) = begin(SIZE, "stalls", "read", AT_ONCE)?;
    the_others_end(ranks, 1, since)
}

/// libtorch waits without a limit for a store that does not answer, and its watchdog waits for whoever asks the store, or
/// asks itself.
pub fn a_frozen_rank_that_serves_the_store_ends_the_others() -> Result<()> {
    for propagates in ["0", "1"] {
        let since = Instant::now();
        // The store is asked at once.
        let often = [("TORCH_NCCL_COORD_CHECK_MILSEC", "10"), ("TORCH_NCCL_PROPAGATE_ERROR", propagates)];
        let variables = [&[(DUMP_PAUSE, AT_ONCE)], &often[..]].concat();
        let (_folder, ranks) = begin_with(2, "frozen", &free_port().to_string(), &variables)?;
        the_others_end(ranks, 0, since)?;
    }
    Ok(())
}

fn the_others_end(mut ranks: Vec<Running>, stalled: usize, since: Instant) -> Result<()> {
    let mut stalled = ranks.remove(stalled);
    for running in ranks {
        let Ended { status, output, errors } = running.end(since)?;
        ensure!(status.signal() == Some(SIGABRT), "{status}\n{output}\n{errors}");
        ensure!(!output.contains("read"), "what never came was read: {output}");
        ensure!(errors.contains("taking the entire process down"), "{errors}");
    }
    ensure!(stalled.is_running()?, "the stalled rank has ended");
    Ok(())
}

/// The group that told it goes on.
pub fn a_mismatch_is_told_to_every_rank_that_verifies() -> Result<()> {
    for what in ["shape", "other"] {
        let told = told("verified mismatch", what, SIZE, all, true)?;
        ensure!(told == ["Mismatch"; SIZE], "{what}: {told:?}");
    }
    Ok(())
}

/// NCCL does not look for it: on a device the ranks wait, or compute nonsense.
pub fn a_mismatch_without_verifying_is_found_by_the_fake() -> Result<()> {
    for what in ["shape", "other"] {
        let told = told_or_ended("mismatch", what, all)?;
        ensure!(told.iter().all(is_lost), "{what}: {told:?}");
    }
    Ok(())
}

/// Two groups that NCCL would let wait for each other.
pub fn collectives_of_two_groups_in_opposite_orders_are_found_by_the_fake() -> Result<()> {
    for (what, expected) in [("opposite", "noted"), ("equal", "nothing")] {
        let told = told("orders", what, SIZE, all, true)?;
        ensure!(told == [expected; SIZE], "{what}: {told:?}");
    }
    Ok(())
}

pub fn a_model_that_differs_is_told_to_every_rank() -> Result<()> {
    let differs = told("model", "differs", SIZE, all, true)?;
    ensure!(differs == ["ModelMismatch"; SIZE], "{differs:?}");
    let sparse = told("model", "sparse", SIZE, all, true)?;
    ensure!(sparse == ["SparseGradient"; SIZE], "{sparse:?}");
    Ok(())
}

/// The other ranks learn of it when the failed one has ended.
pub fn a_hook_that_fails_is_told_where_it_fails() -> Result<()> {
    for (what, own) in [("fails", "Hook, then HookHasFailed"), ("panics", "planted in a hook, then HookHasFailed")] {
        let told = told_or_ended("model", what, all)?;
        ensure!(told[1] == own && is_lost(&told[0]) && is_lost(&told[2]), "{what}: {told:?}");
    }
    Ok(())
}

/// Work that can be finished is; what cannot be is aborted, by name or at the group's timeout.
pub fn what_is_under_way_can_be_dropped() -> Result<()> {
    for (what, expected) in [("finished", "nothing"), ("closed", "closed")] {
        let told = told("drop", what, SIZE, all, true)?;
        ensure!(told == [expected; SIZE], "{what}: {told:?}");
    }
    let ends = [("aborted", "Ended"), ("stalled", "dropped"), ("not closed", "TimedOut, then Ended")];
    for (what, expected) in ends {
        let told = told("drop", what, SIZE, others, true)?;
        ensure!(told == [expected; SIZE - 1], "{what}: {told:?}");
    }
    Ok(())
}

/// libtorch's watchdog knows of the timeout too, and would end the process when its pause is over.
pub fn a_group_can_be_dropped_after_a_failure_and_in_a_panic() -> Result<()> {
    for what in ["timed out", "lost", "in a panic"] {
        let told = told("drop", what, SIZE, others, true)?;
        ensure!(told == ["dropped"; SIZE - 1], "{what}: {told:?}");
    }
    Ok(())
}

/// A wait that ends too early aborts nothing.
pub fn a_work_can_be_waited_for_again() -> Result<()> {
    let told = told("late", "work", SIZE, all, true)?;
    ensure!(told == ["done"; SIZE], "{told:?}");
    Ok(())
}

pub fn those_that_live_go_on_in_a_new_group() -> Result<()> {
    let told = told("rebuilt", "group", SIZE, others, true)?;
    ensure!(told == ["went on"; SIZE - 1], "{told:?}");
    Ok(())
}
