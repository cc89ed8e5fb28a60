//! Two ranks train a small transformer on Hamlet, in windows of two micro-batches with one all-reduce each.
//!
//! The accumulator holds back the all-reduce until a window closes (`no_sync`), and weights each rank's micro-batches
//! by the window's count over all ranks; so both ranks take the step of the whole batch of 32, as `11_text` does in one
//! process. It also runs under `overdrive-run` or torchrun, even on several hosts.
//!
//! Expect: a loss per byte that falls from about 4.9 to below 2.6, the amount of data sent, and the same weights on
//! both ranks, in under a minute on a CPU.
//!
//!     cargo run -p overdrive-examples --example 13_ddp_text
#![forbid(unsafe_code)]

mod text;

use anyhow::{Result, ensure};
use overdrive::dataload::{Dataset, DistributedSampler};
use overdrive::ddp::{Backend, DistributedDataParallel, InitMethod, ProcessGroup, ReduceOp, init_process_group, spawn};
use overdrive::prelude::*;
use overdrive::sched::WarmupCosineLr;

use text::{CONTEXT, Decoder, pieces};

const STEPS: u64 = 250;
/// The micro-batch size of all ranks together.
const MICRO_BATCH: usize = 16;
/// Micro-batches per step.
const WINDOW: usize = 2;

fn main() -> Result<()> {
    Ok(spawn(2, train)?)
}

fn train() -> Result<()> {
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    ensure!(MICRO_BATCH.is_multiple_of(group.size()), "{MICRO_BATCH} pieces cannot be divided evenly among the ranks");
    let sampler = DistributedSampler::shuffled(pieces().len(), group.size(), group.rank(), 7)?;
    let loader = DataLoader::builder(pieces()).batch_size(MICRO_BATCH / group.size()).sampler(sampler).build()?;

    let model = Decoder::new()?;
    let ddp = DistributedDataParallel::new(&model, &group)?; // copies rank 0's weights to all ranks
    let mut opt = AdamW::builder(&model).lr(3e-3).build()?;
    let mut sched = LrScheduler::new(&mut opt, WarmupCosineLr::new(20, STEPS))?;
    let mut accum = Accumulator::new(WINDOW)?.with_sync(&ddp);

    let (mut step, mut recent) = (0, Vec::new());
    'training: loop {
        for micro in accum.windows(&loader) {
            let batch = micro.batch?.to_kind(Kind::Int64);
            let (inputs, targets) = (batch.narrow(1, 0, CONTEXT), batch.narrow(1, 1, CONTEXT));
            let logits = ddp.forward(|| model.forward(&inputs))??;
            let loss = logits.flatten(0, 1).cross_entropy_for_logits(&targets.flatten(0, 1));
            accum.backward(&opt, &loss, Samples(inputs.size()[0]), micro.closes)?; // all-reduces if the window closes
            recent.push(loss.detach());
            if !micro.closes {
                continue;
            }
            clip_grad_norm_(opt.params(), 1.0)?;
            opt.step()?;
            opt.zero_grad()?;
            sched.step(&mut opt)?;
            step += 1;
            if step % 50 == 0 {
                let loss = mean_over_ranks(&recent, &group)?;
                recent.clear();
                if group.rank() == 0 {
                    println!("step {step}: loss {loss:.3}");
                }
                if step == STEPS {
                    ensure!(loss < 2.6, "it should have learned more");
                    break 'training;
                }
            }
        }
    }
    check_equal(&opt.params(), &group)?;
    if group.rank() == 0 {
        let megabytes = |windows: u64| (windows * 4 * model.num_parameters() as u64) as f64 / 1e6;
        let (once, always) = (megabytes(STEPS), megabytes(STEPS * WINDOW as u64));
        println!(
            "both ranks have the same weights; {once:.0} MB of gradients were averaged, without windows {always:.0}"
        );
        println!("\n{}", model.write("  Ham. ", 200, Device::Cpu)?);
    }
    Ok(())
}

fn mean_over_ranks(losses: &[Tensor], group: &ProcessGroup) -> Result<f64> {
    let mut mean = Tensor::stack(losses, 0).mean(Kind::Float);
    group.all_reduce(&mut mean, ReduceOp::Avg)?;
    Ok(mean.double_value(&[]))
}

/// An error unless every rank has rank 0's weights, bit for bit.
fn check_equal(params: &[Tensor], group: &ProcessGroup) -> Result<()> {
    for param in params {
        let mut first = param.detach().copy();
        group.broadcast(&mut first, 0)?;
        ensure!(first.equal(&param.detach()), "rank {} has other weights than rank 0", group.rank());
    }
    Ok(())
}
