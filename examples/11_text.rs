//! A small transformer that learns to write like Hamlet, byte by byte.
//!
//! Trains a two-layer decoder on the shipped play (163 kB) with AdamW, a warm-up and a cosine, clipping and windows of
//! two micro-batches; then writes some lines. `-- --eight-bit` keeps AdamW's averages in eight bits.
//!
//! Expect: a loss per byte that falls from about 4.9 to below 2.1, and lines with some real words, in under a minute on
//! a CPU.
//!
//!     cargo run -p overdrive-examples --example 11_text
#![forbid(unsafe_code)]

mod text;

use anyhow::{Result, ensure};
use overdrive::optim::AdamW8Bit;
use overdrive::prelude::*;
use overdrive::sched::WarmupCosineLr;

use text::{CONTEXT, Decoder, pieces};

const STEPS: u64 = 400;
/// Micro-batches per step: together 32 pieces of text.
const WINDOW: usize = 2;

fn main() -> Result<()> {
    tch::manual_seed(1);
    let device = Device::cuda_if_available();
    let eight_bit = std::env::args().any(|arg| arg == "--eight-bit");

    let model = Decoder::new()?;
    model.to(device)?;
    let mut opt: Box<dyn Optimizer> = match eight_bit {
        true => Box::new(AdamW8Bit::builder(&model).lr(3e-3).build()?),
        false => Box::new(AdamW::builder(&model).lr(3e-3).build()?),
    };
    let mut sched = LrScheduler::new(&mut *opt, WarmupCosineLr::new(20, STEPS))?;
    let mut accum = Accumulator::new(WINDOW)?;

    let loader = DataLoader::builder(pieces()).batch_size(16).shuffle(true).drop_last(true).num_workers(1).build()?;
    let (mut step, mut recent) = (0, Vec::new());
    'training: loop {
        for micro in accum.windows(&loader) {
            let batch = micro.batch?.to_device(device).to_kind(Kind::Int64);
            let (inputs, targets) = (batch.narrow(1, 0, CONTEXT), batch.narrow(1, 1, CONTEXT));
            let logits = model.forward(&inputs)?;
            let loss = logits.flatten(0, 1).cross_entropy_for_logits(&targets.flatten(0, 1));
            accum.backward(&opt, &loss, Samples(inputs.size()[0]), micro.closes)?;
            recent.push(loss.detach());
            if !micro.closes {
                continue;
            }
            clip_grad_norm_(opt.params(), 1.0)?;
            opt.step()?;
            opt.zero_grad()?;
            sched.step(&mut *opt)?;
            step += 1;
            if step % 50 == 0 {
                let loss = Tensor::stack(&recent, 0).mean(Kind::Float).double_value(&[]);
                println!("step {step}: loss {loss:.3}, learning rate {:.1e}", sched.last_lr()[0]);
                recent.clear();
                if step == STEPS {
                    ensure!(loss < 2.1, "it should have learned more");
                    break 'training;
                }
            }
        }
    }
    println!("\n{}", model.write("  Ham. ", 300, device)?);
    Ok(())
}
