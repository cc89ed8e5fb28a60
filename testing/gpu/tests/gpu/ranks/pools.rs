//! Pools of memory that are registered at NCCL's communicator: what is registered, and how pools end. In all of it no rank may
//! end by itself, and no memory may be freed while it is registered.

mod refusals;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use overdrive::ffi::cuda::empty_cache;
use overdrive::prelude::*;
use overdrive_ddp::{Backend, DdpError, MemPool, ReduceOp};
use overdrive_fakecuda::Fake;

use super::processes::{Meeting, run};
pub use refusals::pools_that_cannot_be_registered_are_errors;

const RANKS: usize = 2;
/// More than any segment that the allocator takes for small tensors.
const LARGE: i64 = 8 << 20;
/// How long a rank waits for one that stays away.
const SHORT: Duration = Duration::from_secs(2);
/// Between two looks at a file.
const PAUSE: Duration = Duration::from_millis(5);

/// A rank, and a pool of its GPU in which a tensor is.
struct Rank {
    group: ProcessGroup,
    pool: MemPool,
    tensor: Tensor,
}

impl Rank {
    fn new(meeting: &Meeting) -> Result<Self> {
        let group = super::group(meeting, Backend::Nccl)?;
        if let Some(fake) = Fake::get() {
            fake.reset();
        }
        let pool = MemPool::new(meeting.rank)?;
        let tensor = within(&pool, &group)?;
        Ok(Self { group, pool, tensor })
    }

    /// Frees the tensor and the user's pool, and then all that the allocator has cached.
    fn free(tensor: Tensor, pool: MemPool) -> Result<()> {
        drop((tensor, pool));
        Ok(empty_cache()?)
    }
}

/// A new tensor of this rank.
fn full(group: &ProcessGroup) -> Tensor {
    Tensor::full([LARGE], 1.0 + group.rank() as f64, (Kind::Float, group.device()))
}

/// One of the pool.
fn within(pool: &MemPool, group: &ProcessGroup) -> Result<Tensor> {
    let _pool = pool.begin()?;
    // It is no scope of its own, which would have to end.
    ensure!(pool.begin().is_err(), "two scopes of a pool at once");
    Ok(full(group))
}

fn sum(group: &ProcessGroup, tensor: &Tensor) -> Result<()> {
    let mut tensor = tensor.shallow_clone();
    let expected = f64::from(1 << group.size()) - 1.0;
    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
    let found = [tensor.min(), tensor.max()].map(|it| it.double_value(&[]));
    ensure!(found == [expected; 2], "{found:?} and not {expected}");
    let _filled = tensor.fill_(1.0 + group.rank() as f64);
    Ok(())
}

/// Fails if the stand-in has counted another number of registrations and of deregistrations, or memory that was freed while
/// it was registered.
fn counted(registrations: u64, deregistrations: u64) -> Result<()> {
    let Some(fake) = Fake::get() else { return Ok(()) };
    let counts = fake.counts();
    let count = |what: &str| counts.get(&format!("nccl {what}")).copied().unwrap_or(0);
    let found = ["registrations of memory", "deregistrations of memory", "memory freed while registered"].map(count);
    ensure!(found == [registrations, deregistrations, 0], "{found:?}, not {registrations} and {deregistrations}");
    Ok(())
}

/// The bytes of this rank's device that are in use. Those of a real GPU are not known.
fn used(meeting: &Meeting) -> usize {
    Fake::get().map_or(0, |fake| fake.used_bytes(meeting.rank))
}

/// Fails if the pool's memory is not free, or not kept, now that nobody uses it.
fn is_free(meeting: &Meeting, before: usize, free: bool) -> Result<()> {
    let (bytes, after) = (LARGE as usize * 4, used(meeting));
    let is_free = after + bytes <= before;
    ensure!(
        Fake::get().is_none() || is_free == free,
        "{before} bytes before, {after} after, of which the pool had {bytes}"
    );
    Ok(())
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let what = meeting.arguments.first().context("no case")?.as_str();
    match what {
        "registered" => registered(meeting),
        "refused" => refusals::refused(meeting),
        "blocking wait" => refusals::with_blocking_wait(meeting),
        "expandable segments" => refusals::in_expandable_segments(meeting),
        "ends" => ends(meeting),
        "twice" => twice(meeting),
        "threads" => threads(meeting),
        _ => aborted(meeting, what),
    }?;
    // The device still works.
    let tensor = Tensor::ones([4], (Kind::Float, Device::Cuda(meeting.rank)));
    ensure!(tensor.sum(Kind::Float).double_value(&[]) == 4.0);
    Ok(empty_cache()?)
}

fn registered(meeting: &Meeting) -> Result<()> {
    let Rank { group, pool, tensor } = Rank::new(meeting)?;
    ensure!(pool.device() == meeting.rank);
    let elsewhere = full(&group);
    group.register_mem_pool(&pool)?;
    counted(1, 0)?;
    sum(&group, &tensor)?;
    // Memory that the pool gets later is registered when the next collective begins, that of no pool never.
    let later = within(&pool, &group)?;
    counted(1, 0)?;
    sum(&group, &later)?;
    sum(&group, &elsewhere)?;
    counted(2, 0)?;
    // So is memory that a tensor gives back to the pool and the next one takes.
    drop(later);
    let again = within(&pool, &group)?;
    sum(&group, &again)?;
    counted(2, 0)?;
    group.deregister_mem_pool(&pool)?;
    counted(2, 2)?;
    sum(&group, &again)?;
    group.register_mem_pool(&pool)?;
    sum(&group, &again)?;
    group.deregister_mem_pool(&pool)?;
    counted(4, 4)?;
    let before = used(meeting);
    drop(again);
    Rank::free(tensor, pool)?;
    is_free(meeting, before, true)?;
    Ok(group.close()?)
}

/// What ends first: the user's pool, its tensor, or the group, which is closed or dropped.
fn ends(meeting: &Meeting) -> Result<()> {
    for order in ["pool tensor close", "close tensor pool", "pool close tensor", "tensor drop pool", "drop tensor pool"]
    {
        let file = meeting.file.with_extension(order.replace(' ', "-"));
        let Rank { group, pool, tensor } = Rank::new(&Meeting { file, ..meeting.clone() })?;
        group.register_mem_pool(&pool)?;
        sum(&group, &tensor)?;
        let before = used(meeting);
        let (mut group, mut pool, mut tensor) = (Some(group), Some(pool), Some(tensor));
        for part in order.split(' ') {
            match part {
                "pool" => drop(pool.take()),
                "tensor" => drop(tensor.take()),
                "close" => group.as_ref().context("a group")?.close()?,
                _ => drop(group.take()),
            }
            empty_cache()?;
            is_free(meeting, before, order.ends_with(part)).context(order)?;
        }
        counted(1, 1).context(order)?;
        // The threads in which groups end have used no other rank's device.
        let others = (0..RANKS).filter(|&device| device != meeting.rank);
        let mut contexts = others.map(|device| format!("contexts on device {device}"));
        let counts = Fake::get().map(Fake::counts).unwrap_or_default();
        ensure!(contexts.all(|name| !counts.contains_key(&name)), "{order}: {counts:?}");
    }
    Ok(())
}

/// A file that tells rank 1 that rank 0 is done.
fn over(meeting: &Meeting) -> PathBuf {
    meeting.file.with_extension("over")
}

/// A communicator that is aborted keeps the pool's memory.
fn aborted(meeting: &Meeting, what: &str) -> Result<()> {
    let Rank { group, pool, tensor } = Rank::new(meeting)?;
    group.register_mem_pool(&pool)?;
    sum(&group, &tensor)?;
    if meeting.rank > 0 {
        // It stays away, and ends when the other one has.
        while !over(meeting).exists() {
            std::thread::sleep(PAUSE);
        }
        group.abort()?;
        return Rank::free(tensor, pool);
    }
    let before = used(meeting);
    let under_way = group.all_reduce_async(&mut tensor.shallow_clone(), ReduceOp::Sum)?;
    match what {
        "abort" => {
            group.abort()?;
            let error = group.deregister_mem_pool(&pool).err().context("an aborted group works")?;
            ensure!(matches!(error, DdpError::Ended { .. }), "{error}");
            group.close()?;
        }
        "not closed" => {
            group.set_timeout(SHORT)?;
            let error = group.close().err().context("a rank is missing")?;
            ensure!(matches!(error, DdpError::TimedOut { .. }), "{error}");
        }
        "stalled" => {
            group.set_timeout(SHORT)?;
            let error = group.barrier().err().context("a rank is missing")?;
            ensure!(matches!(error, DdpError::TimedOut { .. }), "{error}");
            // libtorch has aborted the communicator, and the group does not know.
            ensure!(group.deregister_mem_pool(&pool).is_err(), "the communicator works");
        }
        "deregistered" => {
            group.set_timeout(SHORT)?;
            let error = group.deregister_mem_pool(&pool).err().context("a rank is missing")?;
            ensure!(matches!(error, DdpError::TimedOut { .. }), "{error}");
            group.abort()?;
        }
        "in a panic" => {
            let panicking = AssertUnwindSafe(move || {
                let _dropped = (group, under_way);
                panic!("planted");
            });
            ensure!(catch_unwind(panicking).is_err());
            return kept(meeting, before, tensor, pool);
        }
        _ => bail!("no such case: {what}"),
    }
    drop((group, under_way));
    kept(meeting, before, tensor, pool)
}

/// The memory is there when nobody uses the pool any more, and the other rank may end.
fn kept(meeting: &Meeting, before: usize, tensor: Tensor, pool: MemPool) -> Result<()> {
    Rank::free(tensor, pool)?;
    is_free(meeting, before, false)?;
    counted(1, 0)?;
    Ok(fs::write(over(meeting), "")?)
}

/// A pool that two groups have registered, and parts of a group.
fn twice(meeting: &Meeting) -> Result<()> {
    let Rank { group, pool, tensor } = Rank::new(meeting)?;
    let all = [0, 1];
    let other = group.new_group(&all)?.context("every rank is a member")?;
    let part = group.split_group(&[&all])?.context("every rank is a member")?;
    let alone = group.split_group(&[&[0], &[1]])?.context("every rank is a member")?;
    for group in [&group, &other, &part, &alone] {
        group.register_mem_pool(&pool)?;
    }
    for group in [&group, &other, &part] {
        sum(group, &tensor)?;
    }
    counted(4, 0)?;
    let before = used(meeting);
    part.deregister_mem_pool(&pool)?;
    counted(4, 1)?;
    alone.close()?;
    counted(4, 2)?;
    // Its communicators go on, with the pool.
    let error = alone.deregister_mem_pool(&pool).err().context("a closed group works")?;
    ensure!(matches!(error, DdpError::Ended { .. }), "{error}");
    sum(&other, &tensor)?;
    other.abort()?;
    drop(other);
    counted(4, 2)?;
    sum(&group, &tensor)?;
    group.close()?;
    counted(4, 3)?;
    Rank::free(tensor, pool)?;
    // The one that was aborted keeps it.
    is_free(meeting, before, false)
}

/// Scopes on other threads.
fn threads(meeting: &Meeting) -> Result<()> {
    let Rank { group, pool, tensor } = Rank::new(meeting)?;
    group.register_mem_pool(&pool)?;
    let before = used(meeting);
    let ((begun, has_begun), (go_on, may_go_on)) = (channel(), channel());
    std::thread::scope(|scope| -> Result<()> {
        // Dropped after a failure too, for which the thread does not wait then.
        let go_on = go_on;
        let (pool, group) = (&pool, &group);
        let other = scope.spawn(move || -> Result<Tensor> {
            let _pool = pool.begin()?;
            begun.send(())?;
            may_go_on.recv()?;
            // The group has ended.
            let tensor = Tensor::ones([LARGE], (Kind::Float, Device::Cuda(pool.device())));
            ensure!(tensor.double_value(&[0]) == 1.0);
            Ok(tensor)
        });
        has_begun.recv()?;
        ensure!(pool.begin().is_err(), "a pool is used by two threads at once");
        sum(group, &tensor)?;
        sum(group, &full(group))?;
        counted(1, 0)?;
        group.close()?;
        counted(1, 1)?;
        go_on.send(())?;
        drop(other.join().map_err(|_| anyhow::anyhow!("the thread has panicked"))??);
        Ok(())
    })?;
    // A scope that is never ended: the pool is leaked.
    std::mem::forget(pool.begin()?);
    drop(group);
    Rank::free(tensor, pool)?;
    is_free(meeting, before, false)
}

pub fn memory_of_registered_pools_is_registered_before_collectives() -> Result<()> {
    run("pools", RANKS, &["registered"]).map(drop)
}

pub fn pools_end_before_and_after_their_groups() -> Result<()> {
    run("pools", RANKS, &["ends"]).map(drop)
}

pub fn aborted_communicators_keep_their_pools() -> Result<()> {
    for what in ["abort", "not closed", "stalled", "deregistered", "in a panic"] {
        run("pools", RANKS, &[what]).with_context(|| what.to_owned())?;
    }
    Ok(())
}

pub fn several_groups_register_one_pool() -> Result<()> {
    run("pools", RANKS, &["twice"]).map(drop)
}

pub fn pools_are_used_by_one_thread_at_a_time() -> Result<()> {
    run("pools", RANKS, &["threads"]).map(drop)
}
