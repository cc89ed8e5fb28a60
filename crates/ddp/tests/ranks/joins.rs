//! Loops of different lengths, with others that have collectives, and loops that end with the shortest.

use std::cell::Cell;

use anyhow::{Result, ensure};
use overdrive_ddp::{DdpError, DistributedDataParallel, JoinOptions, Joinable, ProcessGroup, ReduceOp};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// A sum over ranks in each iteration.
struct Summed<'a> {
    group: &'a ProcessGroup,
    answered: Cell<usize>,
    ended: Cell<Option<bool>>,
}

impl Summed<'_> {
    fn add(&self, value: f64) -> Result<f64, DdpError> {
        let mut sum = Tensor::from(value).view([1]);
        self.group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum.double_value(&[0]))
    }
}

impl Joinable for Summed<'_> {
    fn main_hook(&self) -> Result<(), DdpError> {
        self.answered.set(self.answered.get() + 1);
        self.add(0.0).map(drop)
    }

    fn post_hook(&self, is_last_joiner: bool) -> Result<(), DdpError> {
        self.ended.set(Some(is_last_joiner));
        Ok(())
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, ranks) = (group.rank(), group.size());
    let length = |rank: usize| 3 + 2 * rank;
    tch::manual_seed(1);
    let mut vs = nn::VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root(), 3, 2, Default::default());
    vs.double();
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    let pass = || -> Result<(), DdpError> {
        let loss = ddp.forward(|| linear.forward(&Tensor::ones([2, 3], DOUBLE)))?.square().mean(Kind::Double);
        ddp.backward(&loss)
    };

    let summed = Summed { group: &group, answered: Cell::new(0), ended: Cell::new(None) };
    let sums = ddp.join_with(JoinOptions::default(), &[&summed], || -> Result<Vec<f64>, DdpError> {
        let one = |_| {
            pass()?;
            summed.add(1.0)
        };
        (0..length(rank)).map(one).collect()
    })??;
    // The ranks that have not finished.
    let expected = (0..length(rank)).map(|step| (0..ranks).filter(|&rank| step < length(rank)).count() as f64);
    ensure!(expected.eq(sums.iter().copied()), "{sums:?}");
    let (answered, ended) = (summed.answered.get(), summed.ended.get());
    ensure!(answered == length(ranks - 1) - length(rank), "rank {rank} has answered {answered} times");
    ensure!(ended == Some(rank + 1 == ranks), "rank {rank}: {ended:?}");

    // As many iterations on all ranks, and an error on all.
    let options = JoinOptions { throw_on_early_termination: true, ..JoinOptions::default() };
    let made = Cell::new(0);
    let told = ddp.join_with(options, &[], || -> Result<(), DdpError> {
        for _ in 0..length(rank) {
            pass()?;
            made.set(made.get() + 1);
        }
        Ok(())
    });
    ensure!(matches!(told, Err(DdpError::InputsExhausted { .. })), "rank {rank}: {told:?}");
    ensure!(made.get() == length(0), "rank {rank} has made {} steps", made.get());
    // A loop that goes on after the error gets it again, and nothing is sent.
    let ignored = Cell::new(0);
    let told = ddp.join_with(options, &[], || {
        for _ in 0..length(rank) {
            ignored.set(ignored.get() + usize::from(pass().is_err()));
        }
    });
    ensure!(told.is_err() && ignored.get() == length(rank) - length(0), "{} errors", ignored.get());
    // Of equal lengths nothing is thrown, and training goes on.
    ddp.join_with(options, &[], || (0..3).try_for_each(|_| pass()))??;
    pass()?;
    Ok(())
}
