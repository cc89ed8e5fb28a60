//! Which device a rank uses where no launcher has given it a local rank.

use anyhow::{Result, bail, ensure};
use overdrive::core::{GradientSync, RankGroup};
use overdrive::prelude::*;
use overdrive_ddp::{Backend, DdpError, InitMethod};

use super::port::free_port;
use super::processes::{Meeting, run};
use super::{PATIENCE, uses_only};

const RANKS: usize = 2;

/// As the book begins: `tcp://host:port?rank=0&world_size=2`, and no word about devices.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let [port] = &meeting.arguments[..] else { anyhow::bail!("a port is needed") };
    let (rank, world_size) = (meeting.rank, meeting.size);
    let method = InitMethod::Tcp { host: "127.0.0.1".to_owned(), port: port.parse()?, rank, world_size };
    let group = ProcessGroup::builder(Backend::Nccl).timeout(PATIENCE).init(&method)?;
    let _used = Tensor::ones([1 << 10], (Kind::Float, Device::Cuda(rank)));
    group.barrier()?;
    uses_only(rank, world_size)?;
    ensure!(group.device() == Device::Cuda(rank), "rank {rank} is to use {:?}", group.device());
    ensure!(RankGroup::max(&group, rank as i64)? == 1 && GradientSync::sum(&group, 0.5)? == 1.0);
    ensure!(group.all_gather_object(&rank)? == [0, 1]);
    uses_only(rank, world_size)
}

pub fn without_a_launcher_each_rank_uses_its_own_device() -> Result<()> {
    run("devices", RANKS, &[&free_port().to_string()]).map(drop)
}

/// All ranks name one device.
pub fn shared(meeting: &Meeting) -> Result<()> {
    let (path, rank, world_size) = (meeting.file.clone(), meeting.rank, meeting.size);
    let method = InitMethod::File { path, rank, world_size };
    let builder = |device| ProcessGroup::builder(Backend::Nccl).timeout(PATIENCE).cuda_device(device);
    let Err(DdpError::NoSuchDevice { device: 99, .. }) = builder(99).init(&method) else { bail!("there is no GPU 99") };
    match builder(0).init(&method) {
        Ok(_) => println!("has it"),
        Err(DdpError::SharedDevice { device: 0, other, .. }) if other != rank => println!("told {other}"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

pub fn each_rank_has_a_device_of_its_own_or_is_told() -> Result<()> {
    let ended = run("shared device", RANKS, &[])?;
    let has_it: Vec<usize> = (0..RANKS).filter(|rank| ended[*rank].output.contains("has it")).collect();
    let [holder] = has_it[..] else { bail!("the ranks {has_it:?} have one device") };
    let told = &ended[1 - holder].output;
    ensure!(told.contains(&format!("told {holder}")), "{told}");
    Ok(())
}
