//! A compiled training step: the small transformer of example 11, its forward pass, gradients and AdamW's update in one
//! graph.
//!
//! The first three steps run as ever and are recorded. Python compiles them once, about a minute; the package is kept, and
//! the next run of this example needs no Python. A schedule changes the learning rate at each step as usual.
//!
//! Expect: compiled losses that follow those of uncompiled steps to 1e-4, and a loss per byte that falls below 3.2.
//!
//!     cargo run -p overdrive-examples --example 16_compiled
#![forbid(unsafe_code)]

mod text;

use anyhow::{Result, ensure};
use overdrive::compile;
use overdrive::prelude::*;
use overdrive::sched::WarmupCosineLr;

use text::{CONTEXT, Decoder, pieces};

const STEPS: usize = 60;

fn loss(model: &Decoder, bytes: &Tensor) -> Result<Tensor, overdrive::nn::NnError> {
    let (inputs, targets) = (bytes.narrow(1, 0, CONTEXT), bytes.narrow(1, 1, CONTEXT));
    Ok(model.forward(&inputs)?.flatten(0, 1).cross_entropy_for_logits(&targets.flatten(0, 1)))
}

fn main() -> Result<()> {
    if let Err(error) = compile::check_compiler() {
        println!("steps are not compiled here: {error}");
    }
    let make = || {
        tch::manual_seed(1);
        Decoder::new()
    };
    let (model, plain) = (make()?, make()?);
    let mut opt = AdamW::builder(&model).lr(3e-3).build()?;
    let mut plain_opt = AdamW::builder(&plain).lr(3e-3).build()?;
    let mut sched = LrScheduler::new(&mut opt, WarmupCosineLr::new(20, STEPS as u64))?;

    let mut step = compile::step(&model, |batch| Ok(loss(&model, &batch[0])?))
        .before_update(|opt| Ok(clip_grad_norm_(opt.params(), 1.0).map(drop)?));

    let loader = DataLoader::builder(pieces()).batch_size(16).shuffle(true).drop_last(true).build()?;
    let mut last = f64::NAN;
    for (number, batch) in loader.iter().take(STEPS).enumerate() {
        let batch = [batch?.to_kind(Kind::Int64)];
        plain_opt.set_lr(0, opt.lr(0).unwrap_or_default())?;
        let found = step.run(&mut opt, &batch)?.double_value(&[]);
        sched.step(&mut opt)?;

        let expected = loss(&plain, &batch[0])?;
        expected.backward();
        clip_grad_norm_(plain_opt.params(), 1.0)?;
        plain_opt.step()?;
        plain_opt.zero_grad()?;
        let expected = expected.double_value(&[]);
        if number % 10 == 0 {
            println!("step {number}: loss {found:.4}, without compiling {expected:.4}");
        }
        ensure!((found - expected).abs() <= 1e-4 * expected, "step {number}: {found}, without compiling {expected}");
        last = found;
    }
    println!("after {STEPS} steps: {last:.3}{}", if step.why_eager().is_some() { ", not compiled" } else { "" });
    ensure!(last < 3.2, "it should have learned more");
    println!("\n{}", model.write("  Ham. ", 100, Device::Cpu)?);
    Ok(())
}
