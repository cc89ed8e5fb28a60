//! What fails over NCCL, and how: the rows of the table in docs/distributed.md. Rank 1 ends or stays away.
//!
//! Only the stream waits for NCCL, so libtorch's watchdog finds most failures. It ends the process after a pause in
//! which it would write what it knows: here none, or one that no test lives to see. A rank that was told of a failure
//! says so and is killed: it would wait for the watchdog before it ends.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive::core::RankGroup;
use overdrive::prelude::*;
use overdrive_ddp::{Backend, DdpError, GradBucket, InitMethod, ReduceOp, Work};

use super::PATIENCE;
use super::processes::{Ended, Meeting, Running, start};

const SIZE: usize = 3;
/// How long ranks wait for one that stays away until they have given it up.
const SHORT: Duration = Duration::from_secs(2);
/// A quarter of the watchdog's pause, in milliseconds.
const PAUSE: &str = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC";
const AT_ONCE: &str = "1";
const NEVER: &str = "1000000";
const SIGABRT: i32 = 6;

/// A rank that has met the others, and summed with them once.
struct Rank {
    group: ProcessGroup,
    device: Device,
    sum: Tensor,
    /// What "training" trains.
    trained: Option<(Tensor, DistributedDataParallel)>,
}

impl Rank {
    fn new(meeting: &Meeting, verify: bool, trains: bool) -> Result<Self> {
        let device = Device::Cuda(meeting.rank);
        let builder = ProcessGroup::builder(Backend::Nccl).timeout(PATIENCE).verify(verify).cuda_device(meeting.rank);
        let (path, rank, world_size) = (meeting.file.clone(), meeting.rank, meeting.size);
        let group = builder.init(&InitMethod::File { path, rank, world_size })?;
        let mut sum = Tensor::ones([8], (Kind::Float, device));
        group.all_reduce(&mut sum, ReduceOp::Avg)?;
        // Two ranks have a communicator of their own for what they send each other.
        match rank {
            1 => group.send(&sum, 0, 0)?,
            0 => drop(group.recv(&mut sum, Some(1), 0)?),
            _ => {}
        }
        let trained = trains.then(|| model(&group, device, false)).transpose()?;
        // A rank that ends now would be an error of the others' last collective.
        group.store().set(&format!("{rank} has begun"), b"")?;
        let begun: Vec<String> = (0..world_size).map(|rank| format!("{rank} has begun")).collect();
        group.store().wait(&begun.iter().map(String::as_str).collect::<Vec<_>>(), PATIENCE)?;
        ensure!(sum.double_value(&[7]) == 1.0, "{sum}");
        Ok(Self { group, device, sum, trained })
    }

    /// The first error of what the ranks do, which may begin before the failure is known.
    fn first_error(&mut self, what: &str) -> Result<DdpError> {
        let Self { group, device, sum, trained } = self;
        let no_error = || format!("{what}: no error");
        let error = match what {
            "barrier" => group.barrier().err(),
            "object" => group.all_gather_object(&1).err(),
            "max" => match group.max(1).err() {
                Some(error) => Some(*error.0.downcast().map_err(|error| anyhow::anyhow!("{error}"))?),
                None => None,
            },
            "sum" => group.all_reduce(sum, ReduceOp::Sum).err(),
            "work" => group.all_reduce_async(sum, ReduceOp::Sum)?.wait_for(group.timeout()).err(),
            // The others have no communicator with rank 1.
            "receive" if group.rank() == 0 => group.recv_async(sum, Some(1), 0)?.wait_for(group.timeout()).err(),
            "receive" => group.barrier().err(),
            "sums" => (0..).find_map(|_| group.all_reduce(sum, ReduceOp::Avg).err()),
            "training" => {
                let (param, ddp) = trained.as_ref().context("no model")?;
                (0..).find_map(|_| pass(ddp, param).err())
            }
            "model" => model(group, *device, false).err().map(|error| error.downcast()).transpose()?,
            _ => anyhow::bail!("{what}"),
        };
        error.with_context(no_error)
    }
}

/// A model of one parameter, and its wrapper; with `hook` its gradients are averaged by a hook of this file.
fn model(group: &ProcessGroup, device: Device, hook: bool) -> Result<(Tensor, DistributedDataParallel)> {
    let param = Tensor::ones([4], (Kind::Float, device)).set_requires_grad(true);
    let ddp = DistributedDataParallel::builder(group)
        .build_from(vec![("w".to_owned(), param.shallow_clone())], Vec::new())?;
    if hook {
        let group = group.clone();
        ddp.register_comm_hook(move |bucket: &GradBucket| {
            let mut mean = bucket.buffer.shallow_clone();
            Ok(group.all_reduce_async(&mut mean, ReduceOp::Avg)?.and_then(move |()| Ok(mean)))
        })?;
    }
    Ok((param, ddp))
}

fn pass(ddp: &DistributedDataParallel, param: &Tensor) -> Result<(), DdpError> {
    ddp.backward(&ddp.forward(|| param * 2)?.sum(Kind::Float))
}

/// Writes what the rank was told where the test looks for it.
fn tell(meeting: &Meeting, told: &str) -> Result<()> {
    let path = told_at(&meeting.file, meeting.rank);
    fs::write(path.with_extension("part"), told)?;
    Ok(fs::rename(path.with_extension("part"), path)?)
}

fn told_at(meeting: &Path, rank: usize) -> std::path::PathBuf {
    meeting.with_file_name(format!("told-{rank}"))
}

/// The same, and waits to be killed.
fn leave(meeting: &Meeting, told: &str) -> Result<()> {
    tell(meeting, told)?;
    stay_away()
}

fn name(error: &DdpError) -> &'static str {
    match error {
        DdpError::TimedOut { .. } => "TimedOut",
        DdpError::Lost { .. } => "Lost",
        DdpError::Mismatch { .. } => "Mismatch",
        DdpError::Rendezvous { .. } => "Rendezvous",
        DdpError::ModelMismatch { .. } => "ModelMismatch",
        DdpError::SparseGradient { .. } => "SparseGradient",
        DdpError::Hook(_) => "Hook",
        DdpError::HookHasFailed { .. } => "HookHasFailed",
        _ => "another error",
    }
}

fn stay_away() -> ! {
    loop {
        std::thread::park();
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let [case, what] = &meeting.arguments[..] else { anyhow::bail!("a case and its argument are needed") };
    if case == "absent" {
        let (host, port, rank, world_size) = ("127.0.0.1".to_owned(), what.parse()?, meeting.rank, meeting.size + 1);
        let builder = ProcessGroup::builder(Backend::Nccl).timeout(SHORT).cuda_device(rank);
        let mut sum = Tensor::ones([8], (Kind::Float, Device::Cuda(rank)));
        let met = builder.init(&InitMethod::Tcp { host, port, rank, world_size });
        let error = met.and_then(|group| group.all_reduce(&mut sum, ReduceOp::Sum)).err().context("it met")?;
        return tell(meeting, name(&error));
    }
    let mut rank = Rank::new(meeting, case.starts_with("verified"), what == "training")?;
    match case.as_str() {
        "dead" if meeting.rank == 1 => std::process::abort(),
        "dead" => {
            if what == "model" {
                rank.group.set_timeout(SHORT)?;
            }
            let error = rank.first_error(what)?;
            let next = rank.group.barrier().err().context("the group works without a rank")?;
            ensure!(what == "model" || matches!(next, DdpError::Lost { .. }), "{next}");
            leave(meeting, name(&error))
        }
        "dead, no leave" if meeting.rank == 1 => std::process::abort(),
        "dead, no leave" => Err(rank.first_error(what)?.into()),
        "stalls" | "verified stalls" if meeting.rank == 1 => stay_away(),
        "stalls" | "verified stalls" => {
            rank.group.set_timeout(SHORT)?;
            if what == "read" {
                rank.group.all_reduce(&mut rank.sum, ReduceOp::Sum)?;
                println!("read {}", rank.sum);
                return Ok(());
            }
            let error = rank.first_error(what)?;
            leave(meeting, name(&error))
        }
        "mismatch" | "verified mismatch" => mismatch(&mut rank, meeting, what),
        "model" => model_failures(&rank, meeting, what),
        "drop" => drops(rank, meeting, what),
        _ => anyhow::bail!("{case}"),
    }
}

/// Rank 1 runs another collective, or one of another shape.
fn mismatch(rank: &mut Rank, meeting: &Meeting, what: &str) -> Result<()> {
    let Rank { group, device, sum, .. } = rank;
    let mut other = Tensor::ones([9], (Kind::Float, *device));
    let ran = match (group.rank(), what) {
        (1, "shape") => group.all_reduce(&mut other, ReduceOp::Avg),
        (1, _) => group.broadcast(sum, 0),
        _ => group.all_reduce(sum, ReduceOp::Avg),
    };
    let Err(error) = ran else {
        // Nothing waited for it; whatever comes next fails.
        let next = (0..).find_map(|_| group.all_reduce(sum, ReduceOp::Avg).err()).context("no error")?;
        return leave(meeting, name(&next));
    };
    group.all_reduce(sum, ReduceOp::Avg)?;
    ensure!(sum.double_value(&[0]) == 1.0, "the group that told the mismatch does not work: {sum}");
    tell(meeting, name(&error))
}

/// What each rank, or rank 1 alone, finds in its own model or hook.
fn model_failures(rank: &Rank, meeting: &Meeting, what: &str) -> Result<()> {
    let Rank { group, device, .. } = rank;
    if what == "differs" {
        let shape = [4 + i64::from(group.rank() == 1)];
        let param = Tensor::ones(shape, (Kind::Float, *device)).set_requires_grad(true);
        let built = DistributedDataParallel::builder(group).build_from(vec![("w".to_owned(), param)], Vec::new());
        return tell(meeting, name(&built.err().context("the models are taken to be equal")?));
    }
    if what == "sparse" {
        let rows = Tensor::ones([4, 2], (Kind::Float, *device)).set_requires_grad(true);
        let params = vec![("rows".to_owned(), rows.shallow_clone())];
        let ddp = DistributedDataParallel::builder(group).build_from(params, Vec::new())?;
        let used = Tensor::from_slice(&[1i64, 3]).to_device(*device);
        let loss = ddp.forward(|| Tensor::embedding(&rows, &used, -1, false, true))?.sum(Kind::Float);
        return tell(meeting, name(&ddp.backward(&loss).err().context("a sparse gradient was averaged")?));
    }
    let (param, ddp) = model(group, *device, group.rank() != 1)?;
    if group.rank() != 1 {
        // The failed rank's process ends, and with it this rank's wait.
        let error = (0..).find_map(|_| pass(&ddp, &param).err()).context("no error")?;
        let within = if let DdpError::Hook(inner) = &error { inner.downcast_ref() } else { None };
        return leave(meeting, name(within.unwrap_or(&error)));
    }
    let panics = what == "panics";
    ddp.register_comm_hook(move |_: &GradBucket| -> Result<Work<Tensor>, DdpError> {
        assert!(!panics, "planted in a hook");
        Err(DdpError::NoLauncher)
    })?;
    let told = match catch_unwind(AssertUnwindSafe(|| pass(&ddp, &param))) {
        Ok(ran) => name(&ran.err().context("no error")?),
        Err(panic) => panic.downcast_ref::<&str>().copied().unwrap_or("another panic"),
    };
    let later = pass(&ddp, &param).err().context("a pass after the failed one was allowed")?;
    tell(meeting, &format!("{told}, then {}", name(&later)))?;
    std::process::abort()
}

/// Work and a group that are dropped while they are under way.
fn drops(rank: Rank, meeting: &Meeting, what: &str) -> Result<()> {
    let Rank { group, mut sum, .. } = rank;
    let work = |sum: &mut Tensor| group.all_reduce_async(sum, ReduceOp::Sum);
    if what == "finished" {
        drop(work(&mut sum)?);
        let last = work(&mut sum)?;
        drop(group);
        last.wait()?;
        ensure!(sum.double_value(&[0]) == (SIZE * SIZE) as f64, "{sum}");
        return tell(meeting, "nothing");
    }
    if group.rank() == 1 {
        stay_away();
    }
    let under_way = work(&mut sum)?;
    ensure!(!under_way.is_completed(), "a rank is missing");
    group.abort()?;
    let next = group.all_reduce(&mut sum, ReduceOp::Sum).err().context("an aborted group works")?;
    drop((group, under_way));
    tell(meeting, name(&next))
}

fn begin(size: usize, case: &str, what: &str, pause: &str) -> Result<(tempfile::TempDir, Vec<Running>)> {
    let folder = tempfile::tempdir()?;
    let arguments = vec![case.to_owned(), what.to_owned()];
    let rank = |rank| {
        let meeting = Meeting { rank, size, file: folder.path().join("meet"), arguments: arguments.clone() };
        start("failures", &meeting, &[(PAUSE, pause)])
    };
    let ranks = (0..size).map(rank).collect::<Result<_>>()?;
    Ok((folder, ranks))
}

/// What the ranks are told that are to be told something. All of them then end well, if the group is one that goes on.
fn told(case: &str, what: &str, size: usize, is_told: fn(usize) -> bool, ends: bool) -> Result<Vec<String>> {
    let since = Instant::now();
    let (folder, mut ranks) = begin(size, case, what, NEVER)?;
    let is_there = |rank: usize| told_at(&folder.path().join("meet"), rank).exists();
    for rank in (0..size).filter(|rank| is_told(*rank)) {
        // It ends without having been told if it fails.
        while !is_there(rank) && ranks[rank].is_running()? && since.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        if !is_there(rank) {
            let mut failed = ranks.swap_remove(rank);
            failed.kill()?;
            let Ended { status, output, errors } = failed.end(since)?;
            anyhow::bail!("{case}, {what}: rank {rank} was told nothing: {status}\n{output}\n{errors}");
        }
    }
    if case.ends_with("stalls") || what == "aborted" {
        ensure!(ranks[1].is_running()?, "{case}, {what}: the stalled rank has ended");
    }
    if ends {
        for (rank, running) in ranks.into_iter().enumerate().filter(|(rank, _)| is_told(*rank)) {
            let Ended { status, output, errors } = running.end(since)?;
            ensure!(status.success(), "{case}, {what}, rank {rank}: {status}\n{output}\n{errors}");
        }
    }
    let told = (0..size).filter(|rank| is_told(*rank)).map(|rank| told_at(&folder.path().join("meet"), rank));
    told.map(|path| Ok(fs::read_to_string(path)?)).collect()
}

fn all(_: usize) -> bool {
    true
}

fn others(rank: usize) -> bool {
    rank != 1
}

/// Over tcp:// rank 0 waits for the others before NCCL does. They wait for its first collective, or lose its store.
pub fn an_absent_rank_is_a_rendezvous_error() -> Result<()> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let told = told("absent", &port, SIZE - 1, all, true)?;
    ensure!(told[0] == "Rendezvous" && ["TimedOut", "Lost"].contains(&told[1].as_str()), "{told:?}");
    Ok(())
}

/// At once where the host waits, and otherwise in one of the next collectives.
pub fn a_dead_rank_is_lost() -> Result<()> {
    for what in ["barrier", "object", "max", "work", "receive", "sums", "training"] {
        let told = told("dead", what, SIZE, others, false)?;
        ensure!(told == ["Lost"; SIZE - 1], "{what}: {told:?}");
    }
    Ok(())
}

/// The error is returned from `main`, or the watchdog is faster: either way the process ends, and not well.
pub fn a_rank_that_has_lost_another_ends() -> Result<()> {
    let since = Instant::now();
    for what in ["barrier", "sums"] {
        let (_folder, ranks) = begin(SIZE, "dead, no leave", what, AT_ONCE)?;
        for running in ranks {
            let Ended { status, output, errors } = running.end(since)?;
            ensure!(!status.success(), "{what}: {status}\n{output}\n{errors}");
        }
    }
    Ok(())
}

pub fn a_model_that_a_dead_rank_does_not_wrap_times_out() -> Result<()> {
    let told = told("dead", "model", SIZE, others, false)?;
    ensure!(told == ["TimedOut"; SIZE - 1], "{told:?}");
    Ok(())
}

/// Who comes last loses those that have given up before.
pub fn a_stalled_rank_times_out_where_the_host_waits() -> Result<()> {
    let waits = ["barrier", "object", "max", "work", "receive"].map(|what| ("stalls", what));
    for (case, what) in waits.into_iter().chain([("verified stalls", "sum")]) {
        let told = told(case, what, SIZE, others, false)?;
        let is_either = told.iter().all(|word| ["TimedOut", "Lost"].contains(&word.as_str()));
        ensure!(is_either && told.iter().any(|word| word == "TimedOut"), "{case}, {what}: {told:?}");
    }
    Ok(())
}

/// The watchdog ends the process: nobody else could end the host's wait for the device.
pub fn a_stalled_rank_ends_the_others_where_the_device_waits() -> Result<()> {
    let since = Instant::now();
    let (_folder, mut ranks) = begin(SIZE, "stalls", "read", AT_ONCE)?;
    let last = ranks.pop().context("no rank")?;
    let mut stalled = ranks.pop().context("no rank")?;
    let first = ranks.pop().context("no rank")?;
    for running in [first, last] {
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
        let told = told("mismatch", what, SIZE, all, false)?;
        ensure!(told == ["Lost"; SIZE], "{what}: {told:?}");
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
        let told = told("model", what, SIZE, all, false)?;
        ensure!(told == ["Lost", own, "Lost"], "{what}: {told:?}");
    }
    Ok(())
}

/// Work that can be finished is; what cannot be needs `abort`.
pub fn what_is_under_way_can_be_dropped() -> Result<()> {
    let finished = told("drop", "finished", SIZE, all, true)?;
    ensure!(finished == ["nothing"; SIZE], "{finished:?}");
    let aborted = told("drop", "aborted", SIZE, others, true)?;
    ensure!(aborted == ["Lost"; SIZE - 1], "{aborted:?}");
    Ok(())
}
