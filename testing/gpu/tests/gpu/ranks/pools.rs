//! Pools of memory that are registered at NCCL's communicator.

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::{Backend, DdpError, MemPool, ReduceOp};
use overdrive_fakecuda::Fake;

use super::processes::{Meeting, run};

const RANKS: usize = 2;
/// Larger than any segment that the allocator takes for small tensors.
const LARGE: i64 = 8 << 20;

fn count(fake: Fake, what: &str) -> u64 {
    fake.counts().get(&format!("nccl {what}")).copied().unwrap_or(0)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = super::group(meeting, Backend::Nccl)?;
    let (fake, device) = (Fake::get(), group.device());
    let tensor = |numbers: i64| Tensor::full([numbers], 1.0 + group.rank() as f64, (Kind::Float, device));
    let sum_of = |mut tensor: Tensor| -> Result<Tensor> {
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        ensure!(tensor.max().double_value(&[]) == 3.0 && tensor.min().double_value(&[]) == 3.0, "{tensor}");
        Ok(tensor)
    };
    for symmetric in [false, true] {
        if let Some(fake) = fake {
            fake.reset();
        }
        let pool = MemPool::new(meeting.rank)?;
        ensure!(pool.device() == meeting.rank);
        let first = {
            let _pool = pool.begin()?;
            ensure!(pool.begin().is_err(), "a pool is used twice at once");
            tensor(LARGE)
        };
        let _elsewhere = tensor(LARGE);
        group.register_mem_pool(&pool, symmetric)?;
        let again = group.register_mem_pool(&pool, symmetric).err().context("a pool was registered twice")?;
        ensure!(again.to_string().contains("registered already"), "{again}");
        let first = sum_of(first)?;
        // Memory that the pool gets later.
        let second = {
            let _pool = pool.begin()?;
            tensor(LARGE)
        };
        let second = sum_of(second)?;
        // On the stand-in libtorch has registered nothing, so this says only that what it registers it takes back.
        let before = fake.map_or(0, |fake| count(fake, "registrations of memory"));
        group.deregister_mem_pool(&pool)?;
        let twice = group.deregister_mem_pool(&pool).err().context("a pool was deregistered twice")?;
        ensure!(twice.to_string().contains("not registered at this group"), "{twice}");
        if let Some(fake) = fake {
            ensure!(count(fake, "deregistrations of memory") == before);
        }
        // The tensors outlive the pool.
        drop(pool);
        ensure!(first.double_value(&[0]) + second.double_value(&[LARGE - 1]) == 6.0);
    }
    // NCCL allocates memory where the device can multicast, which the stand-in cannot.
    match group.mem_pool() {
        Ok(pool) => ensure!(pool.device() == meeting.rank),
        Err(error) => ensure!(error.to_string().contains("NCCL mem allocator is not supported"), "{error}"),
    }
    not_over_nccl(meeting)?;
    kept(meeting, fake)
}

/// The group keeps a pool that is registered, and deregisters its memory before that is freed.
fn kept(meeting: &Meeting, fake: Option<Fake>) -> Result<()> {
    let own = Meeting { file: meeting.file.with_extension("kept"), ..meeting.clone() };
    let group = super::group(&own, Backend::Nccl)?;
    if let Some(fake) = fake {
        fake.reset();
    }
    let pool = MemPool::new(meeting.rank)?;
    let mut tensor = {
        let _pool = pool.begin()?;
        Tensor::ones([LARGE], (Kind::Float, group.device()))
    };
    group.register_mem_pool(&pool, false)?;
    drop(pool);
    group.all_reduce(&mut tensor, ReduceOp::Sum)?;
    ensure!(tensor.double_value(&[0]) == RANKS as f64);
    drop(tensor);
    group.close()?;
    drop(group);
    if let Some(fake) = fake {
        let [taken, given] = ["registrations of memory", "deregistrations of memory"].map(|it| count(fake, it));
        ensure!(taken == given, "{taken} registrations and {given} deregistrations");
    }
    Ok(())
}

fn not_over_nccl(meeting: &Meeting) -> Result<()> {
    let own = Meeting { file: meeting.file.with_extension("gloo"), ..meeting.clone() };
    let gloo = super::group(&own, Backend::Gloo)?;
    let pool = MemPool::new(meeting.rank)?;
    ensure!(matches!(gloo.register_mem_pool(&pool, false), Err(DdpError::Unsupported { .. })));
    ensure!(matches!(gloo.mem_pool(), Err(DdpError::Unsupported { .. })));
    ensure!(MemPool::new(99).is_err(), "there is no GPU 99");
    Ok(())
}

pub fn pools_are_registered_once_and_outlive_their_tensors() -> Result<()> {
    run("pools", RANKS, &[]).map(drop)
}
