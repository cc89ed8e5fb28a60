//! Pools that are not registered, or not given back, and say why.

use std::fmt::Display;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive::ffi::cuda::set_allocator_settings;
use overdrive_ddp::{Backend, DdpError, MemPool};
use overdrive_fakecuda::Fake;

use super::super::processes::{Meeting, all_succeed, run, start};
use super::{RANKS, Rank, counted, sum, within};

fn fails<E: Display>(result: Result<(), E>, text: &str) -> Result<E> {
    let error = result.err().with_context(|| format!("no error: {text}"))?;
    ensure!(error.to_string().contains(text), "{error}, not {text}");
    Ok(error)
}

/// Those of a group, and of NCCL.
pub fn refused(meeting: &Meeting) -> Result<()> {
    let Rank { group, pool, tensor } = Rank::new(meeting)?;
    fails(group.deregister_mem_pool(&pool), "not registered at this group")?;
    if let Some(fake) = Fake::get() {
        const INTERNAL: i32 = 3;
        // The first is refused, and then the second of two, whose first is taken back.
        fake.fail("ncclCommRegister", 1, INTERNAL);
        fails(group.register_mem_pool(&pool), "NCCL did not register the pool")?;
        counted(0, 0)?;
        let second = within(&pool, &group)?;
        fake.fail("ncclCommRegister", 2, INTERNAL);
        fails(group.register_mem_pool(&pool), "NCCL did not register the pool")?;
        counted(1, 1)?;
        fails(group.deregister_mem_pool(&pool), "not registered at this group")?;
        group.register_mem_pool(&pool)?;
        // What NCCL does not give back stays, and the rest is registered again.
        fake.fail("ncclCommDeregister", 2, INTERNAL);
        fails(group.deregister_mem_pool(&pool), "NCCL did not give the pool back")?;
        counted(3, 2)?;
        sum(&group, &tensor)?;
        counted(4, 2)?;
        group.deregister_mem_pool(&pool)?;
        counted(4, 4)?;
        group.register_mem_pool(&pool)?;
        // What cannot be registered later is an error of the collective, which other ranks may begin with their memory.
        let third = within(&pool, &group)?;
        fake.fail("ncclCommRegister", 1, INTERNAL);
        fails(sum(&group, &tensor), "NCCL did not register the pool")?;
        counted(6, 4)?;
        [&tensor, &second, &third].into_iter().try_for_each(|tensor| sum(&group, tensor))?;
        counted(7, 4)?;
        ensure!(fake.planted().is_empty(), "{:?}", fake.planted());
    } else {
        group.register_mem_pool(&pool)?;
    }
    fails(group.register_mem_pool(&pool), "registered already")?;
    let other = MemPool::new(RANKS - 1 - meeting.rank)?;
    fails(group.register_mem_pool(&other), "and the group on device")?;
    ensure!(MemPool::new(99).is_err(), "there is no GPU 99");
    // NCCL allocates memory where the device can multicast, which the stand-in cannot.
    match group.mem_pool() {
        Ok(pool) => ensure!(pool.device() == meeting.rank),
        Err(error) => ensure!(error.to_string().contains("NCCL mem allocator is not supported"), "{error}"),
    }
    group.close()?;
    for ended in [group.register_mem_pool(&pool), group.deregister_mem_pool(&pool)] {
        let error = fails(ended, "the group was closed")?;
        ensure!(matches!(error, DdpError::Ended { .. }), "{error}");
    }
    let gloo =
        super::super::group(&Meeting { file: meeting.file.with_extension("gloo"), ..meeting.clone() }, Backend::Gloo)?;
    ensure!(matches!(gloo.register_mem_pool(&pool), Err(DdpError::Unsupported { .. })));
    ensure!(matches!(gloo.deregister_mem_pool(&pool), Err(DdpError::Unsupported { .. })));
    ensure!(matches!(gloo.mem_pool(), Err(DdpError::Unsupported { .. })));
    Ok(())
}

/// libtorch does not tell then when work is done.
pub fn with_blocking_wait(meeting: &Meeting) -> Result<()> {
    let Rank { group, pool, tensor } = Rank::new(meeting)?;
    fails(group.register_mem_pool(&pool), "TORCH_NCCL_BLOCKING_WAIT=1")?;
    counted(0, 0)?;
    sum(&group, &tensor)?;
    Ok(group.close()?)
}

/// A pool that would be in them, or will be.
pub fn in_expandable_segments(meeting: &Meeting) -> Result<()> {
    let Rank { group, pool, tensor } = Rank::new(meeting)?;
    let (on, off) = ("expandable_segments:True", "expandable_segments:False");
    set_allocator_settings(on)?;
    fails(group.register_mem_pool(&pool), "a pool in expandable segments cannot be registered")?;
    counted(0, 0)?;
    set_allocator_settings(off)?;
    group.register_mem_pool(&pool)?;
    sum(&group, &tensor)?;
    let _later = within(&pool, &group)?;
    set_allocator_settings(on)?;
    for _ in 0..2 {
        fails(sum(&group, &tensor), "a pool in expandable segments cannot be registered")?;
    }
    counted(1, 0)?;
    set_allocator_settings(off)?;
    sum(&group, &tensor)?;
    counted(2, 0)?;
    group.close()?;
    counted(2, 2)
}

pub fn pools_that_cannot_be_registered_are_errors() -> Result<()> {
    run("pools", RANKS, &["refused"])?;
    run("pools", RANKS, &["expandable segments"])?;
    let (folder, since) = (tempfile::tempdir()?, Instant::now());
    let rank = |rank| {
        let arguments = vec!["blocking wait".to_owned()];
        let meeting = Meeting { rank, size: RANKS, file: folder.path().join("meet"), arguments };
        start("pools", &meeting, &[("TORCH_NCCL_BLOCKING_WAIT", "1")])
    };
    all_succeed((0..RANKS).map(rank).collect::<Result<_>>()?, since).map(drop)
}
