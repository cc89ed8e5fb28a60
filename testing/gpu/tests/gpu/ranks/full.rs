//! Full shards over NCCL: as over Gloo, in whatever order the devices get on, without races; and no step waits for the
//! device or asks it for memory once it is warm.

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive::shard::{FullyShardedDataParallel, OffloadPolicy};
use overdrive_ddp::Backend;
use overdrive_fakecuda::{Fake, waits};

use super::processes::{Ended, Meeting, run};
use super::{group, pace, uses_only};

const STEPS: i64 = 4;
const BLOCKS: usize = 4;
/// The third block's weight has more than 1 MiB, and is exchanged by itself.
const WIDTHS: [i64; BLOCKS + 1] = [18, 18, 512, 514, 18];
/// The eager one, the lazy one, and seeds.
const LAST_PACE: u64 = 12;
/// The first steps ask for memory, which the others use again.
const WARM: i64 = 4;

/// Trains at so many paces of the device after the eager one. The word "counts" in place of that number: many steps at
/// the eager one, and what was counted in each.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let [backend, last, place] = &meeting.arguments[..] else {
        anyhow::bail!("a backend, the last pace and a place for rows are needed")
    };
    let policy = match place.as_str() {
        "device" => OffloadPolicy::None,
        "host" => OffloadPolicy::Cpu,
        _ => OffloadPolicy::Disk(std::env::temp_dir()),
    };
    let on_nccl = backend == "nccl";
    let group = group(meeting, if on_nccl { Backend::Nccl } else { Backend::Gloo })?;
    let device = if on_nccl { Device::Cuda(meeting.rank) } else { Device::Cpu };
    if last == "counts" {
        return train(&group, device, STEPS + WARM, &policy, true).map(drop);
    }
    for pace in (0..=last.parse()?).map(pace) {
        if let Some(fake) = Fake::get() {
            fake.find_races(true);
            fake.reset();
            fake.set_pace(pace);
        }
        let at = || format!("rank {}, {pace:?}", meeting.rank);
        let result = train(&group, device, STEPS, &policy, false);
        let notes = Fake::get().map(Fake::notes).unwrap_or_default();
        ensure!(notes.is_empty(), "{}: {}", at(), notes.join("; "));
        let result = result.with_context(at)?;
        println!("result {}", result.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
    }
    if on_nccl { uses_only(meeting.rank, meeting.size) } else { Ok(()) }
}

/// The losses, and the sum of this rank's rows of each parameter.
fn train(group: &ProcessGroup, device: Device, steps: i64, policy: &OffloadPolicy, counts: bool) -> Result<Vec<f64>> {
    manual_seed(3);
    let block = |number: usize| -> Result<nn::Linear> {
        let block = nn::Linear::new(WIDTHS[number], WIDTHS[number + 1])?;
        block.to(device)?;
        Ok(block)
    };
    let blocks = (0..BLOCKS).map(block).collect::<Result<Vec<_>>>()?;
    let mut builder = FullyShardedDataParallel::builder(group)?.offload_policy(policy.clone());
    // The first block is part of the last unit.
    let mut all = blocks[0].named_parameters();
    let mut units = Vec::new();
    for (number, block) in blocks.iter().enumerate().skip(1) {
        units.push(builder.unit(&format!("block{number}"), block)?);
        all.extend(overdrive::core::prefixed(&format!("block{number}"), block));
    }
    let all = all.into_iter().enumerate().map(|(at, it)| (format!("p{at}"), it.tensor().shallow_clone()));
    let model = builder.build(all.collect::<Vec<_>>())?;
    // The epsilon is above the rounding errors that are the whole gradient of some: a GPU's products round otherwise.
    let mut opt = model.optimizer(|params| AdamW::builder(params).lr(0.01).eps(1e-4).build())?;
    let mut losses = Vec::new();
    for step in 0..steps {
        manual_seed(10 * step + group.rank() as i64);
        let inputs = Tensor::randn([6, WIDTHS[0]], (Kind::Float, Device::Cpu)).to_device(device);
        if let Some(fake) = Fake::get().filter(|_| counts) {
            fake.reset();
        }
        let outputs = model.try_forward(inputs, |x| {
            let x = blocks[0].forward(&x)?.tanh();
            let mut blocks = units.iter().zip(&blocks[1..]);
            blocks.try_fold(x, |x, (unit, block)| {
                unit.try_forward(x, |x| -> Result<Tensor> { Ok(block.forward(&x)?.tanh()) })
            })
        });
        let loss = outputs?.square().mean(Kind::Float);
        model.backward(&loss)?;
        model.clip_grad_norm_(1.0)?;
        opt.step()?;
        opt.zero_grad()?;
        if let Some(fake) = Fake::get().filter(|_| counts) {
            let counts = fake.counts();
            let asks = counts.iter().filter(|(name, _)| name.contains("alloc")).map(|(_, count)| count).sum::<u64>();
            println!("counts {} {asks} {}", waits(&counts), fake.waits().replace('\n', "; "));
        }
        losses.push(loss.detach());
    }
    let sums: Vec<Tensor> = model.parameters().iter().map(|it| it.tensor().detach().sum(Kind::Double)).collect();
    Ok(losses.iter().chain(&sums).map(|it| it.double_value(&[])).collect())
}

fn results(ended: &Ended) -> Result<Vec<Vec<f64>>> {
    let numbers = |line: &str| line.split_whitespace().map(|word| Ok(word.parse()?)).collect();
    ended.lines("result").into_iter().map(numbers).collect()
}

fn as_over_gloo(size: usize, place: &str) -> Result<()> {
    let last = if Fake::get().is_some() { LAST_PACE } else { 0 };
    let over_gloo = run("full", size, &["gloo", "0", "device"])?;
    let over_nccl = run("full", size, &["nccl", &last.to_string(), place])?;
    for (rank, (gloo, nccl)) in over_gloo.iter().zip(&over_nccl).enumerate() {
        let (expected, found) = (results(gloo)?, results(nccl)?);
        let expected = expected.first().context("nothing over Gloo")?;
        ensure!(expected.len() == STEPS as usize + 2 * BLOCKS, "{expected:?}");
        ensure!(found.len() == last as usize + 1, "{} results of rank {rank}", found.len());
        for (number, found) in found.iter().enumerate() {
            let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            ensure!(
                found.len() == expected.len() && found.iter().zip(expected).all(is_near),
                "rank {rank}, {:?}: {found:?} over NCCL, {expected:?} over Gloo",
                pace(number as u64)
            );
        }
    }
    Ok(())
}

pub fn full_shards_of_1_over_nccl_equal_gloos() -> Result<()> {
    as_over_gloo(1, "device")
}

pub fn full_shards_of_2_over_nccl_equal_gloos() -> Result<()> {
    as_over_gloo(2, "device")
}

pub fn full_shards_of_4_over_nccl_equal_gloos() -> Result<()> {
    as_over_gloo(4, "device")
}

pub fn full_shards_of_2_on_the_host_equal_gloos() -> Result<()> {
    as_over_gloo(2, "host")
}

pub fn full_shards_of_2_on_disk_equal_gloos() -> Result<()> {
    as_over_gloo(2, "disk")
}

/// How often each step waits for the device once it is warm; it asks for no memory.
fn waits_are(place: &str, expected: u64) -> Result<()> {
    for (rank, ended) in run("full", 2, &["nccl", "counts", place])?.iter().enumerate() {
        let lines = ended.lines("counts");
        ensure!(lines.len() == (STEPS + WARM) as usize, "{lines:?}");
        for (step, line) in lines.iter().enumerate().skip(WARM as usize) {
            let expected = format!("{expected} 0 ");
            ensure!(line.starts_with(&expected), "rank {rank}, step {step}: waits and requests for memory: {line}");
        }
    }
    Ok(())
}

pub fn no_step_of_full_shards_waits_or_asks_for_memory() -> Result<()> {
    waits_are("device", 0)
}

/// Until the means of gradients are on the host, and the factor of clipping.
pub fn a_step_of_full_shards_on_the_host_waits_twice() -> Result<()> {
    waits_are("host", 2)
}
