//! What a rank does, and what it is told.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use overdrive::core::{GradientSync, RankGroup, SyncError};
use overdrive::prelude::*;
use overdrive_ddp::{Backend, DdpError, GradBucket, InitMethod, ReduceOp, Work};
use overdrive_fakecuda::Fake;
use rustix::process::{Signal, getpid, kill_process};

use super::super::PATIENCE;
use super::super::processes::Meeting;
use super::ends::{comes_late, drops, goes_on_without_a_rank, waits_again};
use super::{PAUSE, SHORT};

/// A rank that has met the others, and summed with them once.
pub struct Rank {
    pub group: ProcessGroup,
    pub device: Device,
    pub sum: Tensor,
    /// What "training" trains.
    trained: Option<(Tensor, DistributedDataParallel)>,
}

impl Rank {
    fn new(meeting: &Meeting, verify: bool, what: &str) -> Result<Self> {
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
        let trained = (what == "training").then(|| model(&group, device, false)).transpose()?;
        ensure!(sum.double_value(&[7]) == 1.0, "{sum}");
        // The first sum of counts connects the hosts.
        if what != "first window" {
            ensure!(GradientSync::sum(&group, 1.0)? == world_size as f64);
        }
        // A rank that ends before would be an error of the others' last collective.
        group.store().set(&format!("{rank} has begun"), b"")?;
        let begun: Vec<String> = (0..world_size).map(|rank| format!("{rank} has begun")).collect();
        group.store().wait(&begun.iter().map(String::as_str).collect::<Vec<_>>(), PATIENCE)?;
        Ok(Self { group, device, sum, trained })
    }

    /// The first error of what the ranks do, which may begin before the failure is known.
    fn first_error(&mut self, what: &str) -> Result<DdpError> {
        let Self { group, device, sum, trained } = self;
        let no_error = || format!("{what}: no error");
        let error = match what {
            "barrier" => group.barrier().err(),
            "object" => group.all_gather_object(&1).err(),
            "max" => group.max(1).err().map(of_ranks).transpose()?,
            "sum of counts" | "first window" => GradientSync::sum(group, 1.0).err().map(of_ranks).transpose()?,
            "sum" => group.all_reduce(sum, ReduceOp::Sum).err(),
            "work" => {
                let work = group.all_reduce_async(sum, ReduceOp::Sum);
                work.and_then(|work| work.wait_for(group.timeout())).err()
            }
            // The others have no communicator with rank 1.
            "receive" if group.rank() == 0 => {
                let work = group.recv_async(sum, Some(1), 0);
                work.and_then(|work| work.wait_for(group.timeout())).err()
            }
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

fn of_ranks(error: SyncError) -> Result<DdpError> {
    Ok(*error.0.downcast().map_err(|error| anyhow::anyhow!("{error}"))?)
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
pub fn tell(meeting: &Meeting, told: &str) -> Result<()> {
    let path = told_at(&meeting.file, meeting.rank);
    fs::write(path.with_extension("part"), told)?;
    Ok(fs::rename(path.with_extension("part"), path)?)
}

pub fn told_at(meeting: &Path, rank: usize) -> PathBuf {
    meeting.with_file_name(format!("told-{rank}"))
}

/// The same, and waits to be killed.
pub fn leave(meeting: &Meeting, told: &str) -> Result<()> {
    tell(meeting, told)?;
    stay_away()
}

pub fn name(error: &DdpError) -> &'static str {
    match error {
        DdpError::TimedOut { .. } => "TimedOut",
        DdpError::Lost { .. } => "Lost",
        DdpError::Mismatch { .. } => "Mismatch",
        DdpError::Ended { .. } => "Ended",
        DdpError::Rendezvous { .. } => "Rendezvous",
        DdpError::ModelMismatch { .. } => "ModelMismatch",
        DdpError::SparseGradient { .. } => "SparseGradient",
        DdpError::Hook(_) => "Hook",
        DdpError::HookHasFailed { .. } => "HookHasFailed",
        _ => "another error",
    }
}

pub fn stay_away() -> ! {
    loop {
        std::thread::park();
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let [case, what] = &meeting.arguments[..] else { anyhow::bail!("a case and its argument are needed") };
    if case == "absent" {
        let (rank, world_size) = (meeting.rank, meeting.size + 1);
        let method = match what.parse() {
            Ok(port) => InitMethod::Tcp { host: "127.0.0.1".to_owned(), port, rank, world_size },
            Err(_) => InitMethod::File { path: meeting.file.clone(), rank, world_size },
        };
        let builder = ProcessGroup::builder(Backend::Nccl).timeout(SHORT).cuda_device(rank);
        let mut sum = Tensor::ones([8], (Kind::Float, Device::Cuda(rank)));
        // Those that are there begin together: for one that comes when another has given up, nobody listens.
        let begins = |rank| meeting.file.with_file_name(format!("begins-{rank}"));
        fs::write(begins(rank), "")?;
        while !(0..meeting.size).all(|rank| begins(rank).exists()) {
            std::thread::sleep(PAUSE);
        }
        let error = builder
            .init(&method)
            .and_then(|group| group.all_reduce(&mut sum, ReduceOp::Sum))
            .err()
            .context("it met")?;
        return leave(meeting, name(&error));
    }
    if case == "frozen" {
        return freezes(meeting, what.parse()?);
    }
    let mut rank = Rank::new(meeting, case.starts_with("verified"), what)?;
    match case.as_str() {
        "dead" if meeting.rank == 1 => std::process::abort(),
        "dead" => {
            let meets_anew = ["model", "first window"].contains(&what.as_str());
            if meets_anew {
                rank.group.set_timeout(SHORT)?;
            }
            let error = rank.first_error(what)?;
            let next = rank.group.barrier().err().context("the group works without a rank")?;
            ensure!(meets_anew || matches!(next, DdpError::Lost { .. } | DdpError::Ended { .. }), "{next}");
            leave(meeting, name(&error))
        }
        "dead, ends" if meeting.rank == 1 => std::process::abort(),
        "dead, ends" => Err(rank.first_error(what)?.into()),
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
        "cut" => {
            if meeting.rank == 1 {
                Fake::get().context("only a fake link is cut")?.cut_links();
            }
            rank.group.set_timeout(SHORT)?;
            let error = rank.first_error(what)?;
            leave(meeting, name(&error))
        }
        "mismatch" | "verified mismatch" => mismatch(&mut rank, meeting, what),
        "model" => model_failures(&rank, meeting, what),
        "orders" => orders(&mut rank, meeting, what),
        "drop" => drops(rank, meeting, what),
        "first" => comes_late(&mut rank, meeting, what),
        "late" => waits_again(&mut rank, meeting),
        "rebuilt" => goes_on_without_a_rank(&mut rank, meeting),
        _ => anyhow::bail!("{case}"),
    }
}

/// Rank 0, which serves the store, freezes when the program of the other asks the store nothing any more.
fn freezes(meeting: &Meeting, port: u16) -> Result<()> {
    let (rank, world_size) = (meeting.rank, meeting.size);
    let method = InitMethod::Tcp { host: "127.0.0.1".to_owned(), port, rank, world_size };
    let group = ProcessGroup::builder(Backend::Nccl).timeout(PATIENCE).cuda_device(rank).init(&method)?;
    let mut sum = Tensor::ones([8], (Kind::Float, Device::Cuda(rank)));
    group.all_reduce(&mut sum, ReduceOp::Avg)?;
    ensure!(sum.double_value(&[7]) == 1.0, "{sum}");
    group.set_timeout(SHORT)?;
    tell(meeting, "met")?;
    if rank == 0 {
        while !told_at(&meeting.file, 1).exists() {
            std::thread::sleep(PAUSE);
        }
        kill_process(getpid(), Signal::STOP)?;
    }
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    println!("read {sum}");
    Ok(())
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

/// Collectives of two groups, which rank 1 begins in the other order.
fn orders(rank: &mut Rank, meeting: &Meeting, what: &str) -> Result<()> {
    let Rank { group, sum, .. } = rank;
    let second = group.new_group(&[0, 1, 2])?.context("every rank is a member")?;
    let mut other = sum.ones_like();
    // Makes its communicator.
    second.all_reduce(&mut other, ReduceOp::Avg)?;
    let opposite = what == "opposite" && group.rank() == 1;
    let [mut one, mut two] = [(&*group, sum), (&second, &mut other)];
    if opposite {
        std::mem::swap(&mut one, &mut two);
    }
    let begin = |(group, sum): (&ProcessGroup, &mut Tensor)| group.all_reduce_async(sum, ReduceOp::Avg);
    for work in [begin(one)?, begin(two)?] {
        work.wait()?;
    }
    ensure!(rank.sum.double_value(&[0]) + other.double_value(&[0]) == 2.0);
    let notes = Fake::get().context("only a fake device tells")?.notes();
    tell(meeting, if notes.iter().any(|note| note.contains("of another communicator")) { "noted" } else { "nothing" })
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

/// Its file lets rank 1 come.
pub fn released(meeting: &Path) -> PathBuf {
    meeting.with_file_name("released")
}
