//! What hooks of saved tensors cost.

use std::time::Instant;

use anyhow::Result;
use overdrive::memory::saved_tensors_hooks;
use overdrive::prelude::*;
use overdrive_bench_report::{Ratio, Target};
use overdrive_ffi::saved_tensors::without_history;

use super::super::turns::{Case, Findings, Program, Turns};

/// Operators in a row, each of which saves a tensor of one element.
const TENSORS: u32 = 1000;
/// So many passes of each kind, in turns, of which the fastest counts: the difference is small beside a disturbance.
const PASSES: u32 = 30;

/// Seconds of a forward and a backward pass, with hooks that keep each tensor as it is, or without.
fn chain(has_hooks: bool) -> Result<f64> {
    let x = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let begun = Instant::now();
    let y = {
        let (pack, unpack) = (without_history, |kept: &Tensor| Ok(kept.shallow_clone()));
        let _guard = has_hooks.then(|| saved_tensors_hooks(pack, unpack)).transpose()?;
        (0..TENSORS).try_fold(x.shallow_clone(), |y, _| y.f_sin())?
    };
    y.f_backward()?;
    Ok(begun.elapsed().as_secs_f64())
}

/// The cost of a saved tensor over libtorch's engine alone, beside Python's hooks that do nothing.
pub fn cost(findings: &mut Findings, program: &Program, pairs: u32) -> Result<()> {
    let mut turns = Turns::default();
    turns.ours("ours", || {
        let mut fastest = [f64::INFINITY; 2];
        for _ in 0..PASSES {
            fastest = [fastest[0].min(chain(false)?), fastest[1].min(chain(true)?)];
        }
        // Above 0 even where the two are the same.
        Ok(((fastest[1] - fastest[0]) / f64::from(TENSORS)).max(1e-12))
    });
    turns.ours("1 us", || Ok(1e-6));
    turns.peer("PyTorch, saved_tensors_hooks", program, |peer| {
        Ok((peer.measure("hooks-time", TENSORS)? / f64::from(TENSORS)).max(1e-12))
    });
    turns.take("hooks", pairs)?;
    let text = "time of a saved tensor with hooks that keep it as it is, over the engine alone";
    let case = Case { text, unit: "s", ratio: Ratio::ShareOfCost };
    for peer in ["1 us", "PyTorch, saved_tensors_hooks"] {
        turns.compare(findings, case, ("ours", peer), Some(Target::AtMost(1.0)))?;
    }
    Ok(())
}
