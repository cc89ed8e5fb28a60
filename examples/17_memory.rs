//! Activation checkpointing: training under a quarter of the memory that a plain run needs, with equal losses.
//!
//! A transformer of sixteen layers trains on a shipped play. A plain run is counted first. Then tensors may have a quarter
//! of what it had at its peak: without checkpoints that is an error, and with them it trains.
//!
//! Expect: losses that are equal to the last bit, and a peak below a quarter, in under a minute on a CPU.
//!
//!     cargo run -p overdrive-examples --example 17_memory
#![forbid(unsafe_code)]

#[allow(dead_code)] // Shared with other examples, which use more of it.
mod text;

use std::sync::Arc;

use anyhow::{Result, ensure};
use overdrive::ffi::{Error, ErrorKind, host_memory};
use overdrive::memory::checkpoint;
use overdrive::nn::{NnError, TransformerEncoderLayer};
use overdrive::prelude::*;

use text::{CONTEXT, pieces};

const LAYERS: usize = 16;
const WIDTH: i64 = 32;
const STEPS: usize = 4;

#[derive(Module)]
struct Decoder {
    bytes: nn::Embedding,
    layers: nn::ModuleList<Arc<TransformerEncoderLayer>>,
    head: nn::Linear,
}

impl Decoder {
    fn new() -> Result<Self> {
        manual_seed(1);
        let layer = || TransformerEncoderLayer::builder(WIDTH, 2).dim_feedforward(4 * WIDTH).batch_first(true).build();
        Ok(Self {
            bytes: nn::Embedding::new(256, WIDTH)?,
            layers: (0..LAYERS).map(|_| layer().map(Arc::new)).collect::<Result<_, NnError>>()?,
            head: nn::Linear::new(WIDTH, 256)?,
        })
    }

    fn forward(&self, bytes: &Tensor, checkpointed: bool) -> Result<Tensor> {
        let mut x = self.bytes.forward(bytes)?;
        for layer in self.layers.iter() {
            let layer = Arc::clone(layer);
            x = if checkpointed { checkpoint(move |[x]| layer.forward(x), [&x])? } else { layer.forward(&x)? };
        }
        Ok(self.head.forward(&x)?)
    }
}

/// The losses of some steps, and the most bytes that tensors had.
fn train(batches: &[Tensor], checkpointed: bool) -> Result<(Vec<f64>, u64)> {
    host_memory::reset_peak()?;
    let model = Decoder::new()?;
    let mut opt = AdamW::builder(&model).lr(1e-3).build()?;
    let mut losses = Vec::new();
    for bytes in batches {
        let (inputs, targets) = (bytes.narrow(1, 0, CONTEXT), bytes.narrow(1, 1, CONTEXT));
        // The layers see later bytes too: how well they learn does not matter here.
        let loss = model.forward(&inputs, checkpointed)?.flatten(0, 1).f_cross_entropy_loss::<Tensor>(
            &targets.flatten(0, 1),
            None,
            tch::Reduction::Mean,
            -100,
            0.0,
        )?;
        loss.f_backward()?;
        opt.step()?;
        opt.zero_grad()?;
        losses.push(loss.double_value(&[]));
    }
    Ok((losses, host_memory::stats()?.peak))
}

fn main() -> Result<()> {
    let loader = DataLoader::builder(pieces()).batch_size(64).shuffle(true).drop_last(true).build()?;
    let batches = loader.iter().take(STEPS).map(|batch| Ok(batch?.to_kind(Kind::Int64))).collect::<Result<Vec<_>>>()?;

    host_memory::count(usize::MAX)?;
    let (expected, peak) = train(&batches, false)?;
    println!("a plain run: losses {expected:.4?}, {:.1} MB at its peak", peak as f64 / 1e6);

    let limit = peak / 4;
    host_memory::count(limit as usize)?;
    println!("now tensors may have {:.1} MB", limit as f64 / 1e6);
    let error = train(&batches, false).expect_err("it needs four times as much");
    let kind = error.chain().find_map(|cause| cause.downcast_ref::<Error>()).map(Error::kind);
    println!("a plain run: {}", error.to_string().lines().next().unwrap_or_default());
    ensure!(kind.is_none_or(|kind| kind == ErrorKind::OutOfMemory), "{error:#}");

    let (found, peak) = train(&batches, true)?;
    println!("each layer checkpointed: losses {found:.4?}, {:.1} MB at its peak", peak as f64 / 1e6);
    ensure!(found == expected && peak <= limit);
    Ok(())
}
