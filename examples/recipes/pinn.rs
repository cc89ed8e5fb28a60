//! A physics-informed network: Burgers' equation `u_t + u u_x = nu u_xx`, by Adam, then L-BFGS.
//!
//! Its losses are those of `parity/recipes/pinn.py`: `cargo xtask parity recipes`.
//!
//!     cargo run -p overdrive-examples --example recipe_pinn
#![forbid(unsafe_code)]

use std::f64::consts::PI;

use anyhow::Result;
use overdrive::dataload::TensorDataset;
use overdrive::nn::{autograd::grad, init};
use overdrive::optim::{Lbfgs, LineSearch};
use overdrive::prelude::*;

// Model

#[derive(Module)]
struct Net {
    layers: nn::Sequential,
}

impl Net {
    fn new(width: i64, depth: i64) -> Result<Self> {
        let mut layers = sequential![nn::Linear::new(2, width)?, nn::Tanh];
        for _ in 0..depth - 1 {
            layers.push(nn::Linear::new(width, width)?);
            layers.push(nn::Tanh);
        }
        layers.push(nn::Linear::new(width, 1)?);
        layers.apply(|module| match module.downcast_ref::<nn::Linear>() {
            Some(layer) => {
                init::xavier_normal_(&layer.weight, 1.0)?;
                layer.bias.as_deref().map_or(Ok(()), init::zeros_)
            }
            None => Ok(()),
        })?;
        Ok(Self { layers })
    }

    fn forward(&self, x: &Tensor, t: &Tensor) -> Result<Tensor> {
        Ok(self.layers.forward(&Tensor::cat(&[x, t], 1))?)
    }
}

// Data

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn points(count: i64) -> (Tensor, Tensor) {
    let x = Tensor::rand([count, 1], CPU) * 2 - 1;
    (x, Tensor::rand([count, 1], CPU))
}

// Training

const NU: f64 = 0.01 / PI;
const ADAM_EPOCHS: usize = 2;
const LBFGS_STEPS: usize = 5;

/// Where the start and the edges are known.
struct Known {
    x0: Tensor,
    edge: Tensor,
    t_edge: Tensor,
}

fn residual(net: &Net, x: &Tensor, t: &Tensor) -> Result<Tensor> {
    let (x, t) = (x.set_requires_grad(true), t.set_requires_grad(true));
    let u = net.forward(&x, &t)?;
    let ones = u.ones_like();
    let [u_x, u_t] = grad(&u, [&x, &t]).grad_outputs([&ones]).create_graph(true).run()?;
    let [u_xx] = grad(&u_x, [&x]).grad_outputs([&ones]).create_graph(true).run()?;
    Ok(u_t + u * u_x - u_xx * NU)
}

fn loss_of(net: &Net, x: &Tensor, t: &Tensor, known: &Known) -> Result<Tensor> {
    let physics = residual(net, x, t)?.square().mean(Kind::Float);
    let Known { x0, edge, t_edge } = known;
    let start = (net.forward(x0, &x0.zeros_like())? + (x0 * PI).sin()).square().mean(Kind::Float);
    let edges = net.forward(edge, t_edge)?.square().mean(Kind::Float);
    Ok(physics + start + edges)
}

fn main() -> Result<()> {
    tch::manual_seed(0);
    let net = Net::new(20, 4)?;
    let (x, t) = points(2000);
    let data = TensorDataset::new((x.shallow_clone(), t.shallow_clone()))?;
    let loader = data.loader().batch_size(200).shuffle(true).generator(None).build()?;
    let ones = Tensor::ones([50, 1], CPU);
    let known = Known {
        x0: Tensor::linspace(-1, 1, 100, CPU).unsqueeze(1),
        edge: Tensor::cat(&[-&ones, ones], 0),
        t_edge: Tensor::linspace(0, 1, 50, CPU).repeat([2]).unsqueeze(1),
    };

    let mut adam = Adam::builder(&net).lr(1e-3).build()?;
    for epoch in 0..ADAM_EPOCHS {
        for batch in &loader {
            let (x, t) = batch?;
            adam.zero_grad()?;
            let loss = loss_of(&net, &x, &t, &known)?;
            loss.backward();
            adam.step()?;
            println!("Adam, epoch {epoch}: loss {}", loss.double_value(&[]));
        }
    }

    let lbfgs = Lbfgs::builder(&net).max_iter(5).history_size(10).line_search_fn(LineSearch::StrongWolfe);
    let mut lbfgs = lbfgs.build()?;
    for step in 0..LBFGS_STEPS {
        let loss = lbfgs.step_with(|| -> Result<_> {
            let loss = loss_of(&net, &x, &t, &known)?;
            loss.backward();
            Ok(loss)
        })?;
        println!("L-BFGS, step {step}: loss {loss}");
    }
    Ok(())
}
