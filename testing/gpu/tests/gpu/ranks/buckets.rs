//! When gradients are exchanged, and in which buckets: as PyTorch's DDP does it, counted on the same fake device.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::Backend;
use overdrive_fakecuda::Fake;

use super::group;
use super::processes::{Ended, Meeting, Running, all_succeed, run};

/// Cap in MiB, whether unused parameters are searched for, and whether gradients are views of the buckets; for both
/// programs. The default cap is 25 MiB after a first bucket of 1.
const CASES: [&str; 5] = ["default:all:copy", "1:all:copy", "3:all:view", "1:unused:copy", "default:unused:copy"];
/// The first step has other buckets than the later ones, and the second one agrees on them.
const STEPS: usize = 4;
const WIDTHS: [i64; 5] = [32, 512, 1024, 512, 8];

/// The collectives and products of each step, as buckets.py prints them.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let fake = Fake::get().context("only a fake device keeps the order")?;
    let group = group(meeting, Backend::Nccl)?;
    let device = Device::Cuda(meeting.rank);
    for (number, case) in CASES.iter().enumerate() {
        let [cap, unused, view] = case.split(':').collect::<Vec<_>>()[..] else { anyhow::bail!("{case}") };
        let linear = |index: usize| nn::Linear::new(WIDTHS[index], WIDTHS[index + 1]);
        let model = sequential![linear(0)?, nn::Relu, linear(1)?, nn::Relu, linear(2)?, nn::Relu, linear(3)?];
        model.to(device)?;
        let builder = DistributedDataParallel::builder(&group);
        let builder = if cap == "default" { builder } else { builder.bucket_cap_mb(cap.parse()?) };
        let builder = builder.find_unused_parameters(unused == "unused").gradient_as_bucket_view(view == "view");
        let ddp = builder.build(&model)?;
        let mut opt = Sgd::builder(&model).lr(0.0).build()?;
        for step in 0..STEPS {
            let inputs = Tensor::ones([4, 32], (Kind::Float, device));
            fake.keep_order(true);
            drop(fake.issued());
            let loss = ddp.forward(|| model.forward(&inputs))??.square().mean(Kind::Float);
            ddp.backward(&loss)?;
            println!("order {number} {step} {}", told(&fake.issued()).join(";"));
            fake.keep_order(false);
            opt.zero_grad()?;
        }
    }
    Ok(())
}

/// The collectives and products.
fn told(issued: &[String]) -> Vec<&str> {
    let word = |line| {
        if str::starts_with(line, "cublas") { Some("product") } else { line.strip_prefix("nccl ").map(|_| line) }
    };
    issued.iter().filter_map(|line| word(line)).collect()
}

/// What each step of each case issues, by case and step.
type Orders = BTreeMap<(usize, usize), Vec<String>>;

fn orders(ended: &Ended) -> Result<Orders> {
    let order = |line: &str| {
        let mut words = line.splitn(3, ' ');
        let mut next = || words.next().context("a line without its words");
        let (case, step) = (next()?.parse()?, next()?.parse()?);
        Ok(((case, step), next()?.split(';').map(str::to_owned).collect()))
    };
    let orders: Orders = ended.lines("order").into_iter().map(order).collect::<Result<_>>()?;
    ensure!(orders.len() == CASES.len() * STEPS, "{} steps were told: {}", orders.len(), ended.output);
    Ok(orders)
}

/// Those of our ranks, which are the same each time: so they run once for all tests.
fn owns(size: usize) -> Result<Vec<Orders>> {
    static KNOWN: Mutex<BTreeMap<usize, Vec<Orders>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = known.get(&size) {
        return Ok(known.clone());
    }
    let own = run("buckets", size, &[])?.iter().map(orders).collect::<Result<Vec<_>>>()?;
    Ok(known.entry(size).or_insert(own).clone())
}

/// The Python that `cargo xtask setup` has made, or the one that is given.
pub fn python() -> Option<PathBuf> {
    let given = std::env::var_os("OVERDRIVE_PYTHON").map(PathBuf::from);
    given.or_else(|| {
        Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.libtorch/bin/python")).filter(|it| it.exists())
    })
}

fn pytorchs(size: usize) -> Result<Vec<Ended>> {
    let python = python().context("no Python with torch")?;
    let (folder, since) = (tempfile::tempdir()?, Instant::now());
    let rank = |rank: usize| {
        let mut command = Command::new(&python);
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpu/ranks/buckets.py"));
        command.args([rank, size].map(|it| it.to_string())).arg(folder.path().join("meet")).arg(STEPS.to_string());
        Running::start(
            {
                command.args(CASES);
                command
            },
            size,
        )
    };
    all_succeed((0..size).map(rank).collect::<Result<_>>()?, since)
}

/// Each rank's collectives are PyTorch's, of the same numbers of elements, after as many products of the pass.
pub fn exchanges_are_pytorchs() -> Result<()> {
    for size in [2, 4] {
        let (own, pytorchs) = (owns(size)?, pytorchs(size)?);
        for (rank, (own, pytorchs)) in own.iter().zip(&pytorchs).enumerate() {
            for ((case, step), expected) in &orders(pytorchs)? {
                let found = &own[&(*case, *step)];
                let case = CASES[*case];
                ensure!(
                    found == expected,
                    "rank {rank} of {size}, {case}, step {step}: {found:?}, PyTorch: {expected:?}"
                );
            }
        }
    }
    Ok(())
}

/// From the second step on, or from the first if the buckets stay, there are products after the first exchange.
pub fn exchanges_begin_before_backward_ends() -> Result<()> {
    for orders in owns(2)? {
        for ((case, step), order) in orders {
            let is_exchange = |line: &String| line.starts_with("nccl AllReduce");
            let begins = order.iter().position(is_exchange).context("no exchange")?;
            let later = order[begins..].iter().filter(|line| *line == "product").count();
            let exchanges = order.iter().filter(|line| is_exchange(line)).count();
            let is_split = step > 0 || CASES[case].contains("unused");
            ensure!((later > 0) == is_split, "{}, step {step}: {order:?}", CASES[case]);
            ensure!((exchanges > 1) == is_split, "{}, step {step}: {exchanges} exchanges", CASES[case]);
        }
    }
    Ok(())
}
