//! Which device a rank uses where no launcher has given it a local rank.

use anyhow::{Result, ensure};
use overdrive::core::{GradientSync, RankGroup};
use overdrive::prelude::*;
use overdrive_ddp::{Backend, InitMethod};

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
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    run("devices", RANKS, &[&port]).map(drop)
}
