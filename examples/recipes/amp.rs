//! PyTorch's automatic mixed precision recipe: autocast, `GradScaler`, clipping and a saved scaler.
//!
//! Its losses are those of `parity/recipes/amp.py`: `cargo xtask parity recipes`.
//!
//!     cargo run -p overdrive-examples --example recipe_amp
#![forbid(unsafe_code)]

use anyhow::Result;
use overdrive::prelude::*;
use tch::Reduction;

// Model

fn make_model(in_size: i64, out_size: i64, num_layers: usize) -> Result<nn::Sequential> {
    let mut layers = nn::Sequential::new();
    for _ in 0..num_layers - 1 {
        layers.push(nn::Linear::new(in_size, in_size)?);
        layers.push(nn::Relu);
    }
    layers.push(nn::Linear::new(in_size, out_size)?);
    Ok(layers)
}

// Data

const BATCH_SIZE: i64 = 64;
const IN_SIZE: i64 = 256;
const OUT_SIZE: i64 = 16;
const NUM_LAYERS: usize = 3;
const NUM_BATCHES: usize = 10;

fn batches(device: Device) -> Vec<(Tensor, Tensor)> {
    let draw = |size| (0..NUM_BATCHES).map(move |_| Tensor::randn([BATCH_SIZE, size], (Kind::Float, device)));
    let data: Vec<_> = draw(IN_SIZE).collect();
    data.into_iter().zip(draw(OUT_SIZE)).collect()
}

// Training

const EPOCHS: usize = 3;

fn main() -> Result<()> {
    tch::manual_seed(0);
    let device = Device::cuda_if_available();
    let dtype = if device.is_cuda() { Kind::Half } else { Kind::BFloat16 };
    let data = batches(device);

    let mut net = make_model(IN_SIZE, OUT_SIZE, NUM_LAYERS)?;
    net.to(device)?;
    let mut opt = Sgd::builder(&net).lr(0.01).momentum(0.9).build()?;
    let mut scaler = GradScaler::new(device);
    for epoch in 0..EPOCHS {
        for (input, target) in &data {
            let loss = {
                let _autocast = AutocastGuard::new(device, dtype)?;
                let output = net.forward(input)?;
                output.mse_loss(target, Reduction::Mean)
            };
            scaler.scale(&loss)?.backward();
            scaler.unscale_(&mut opt)?;
            clip_grad_norm_(&net, 0.1)?;
            scaler.step(&mut opt)?;
            scaler.update()?;
            opt.zero_grad()?;
            println!("epoch {epoch}: loss {}", loss.double_value(&[]));
        }
    }

    let (model, optimizer, saved) = (net.state_dict()?, opt.state_dict()?, scaler.state_dict()?);
    net.load_state_dict(&model)?;
    opt.load_state_dict(&optimizer)?;
    scaler.load_state_dict(&saved)?;
    Ok(())
}
