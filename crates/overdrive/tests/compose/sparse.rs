//! Sparse gradients of an embedding.

use overdrive::optim::SparseAdam;
use overdrive::prelude::*;

use crate::{CPU, turn};

fn table() -> Tensor {
    Tensor::arange(10, (Kind::Float, CPU)).sin().reshape([5, 2]).set_requires_grad(true)
}

fn loss(table: &Tensor, rows: &Tensor, factor: f64) -> Tensor {
    let taken = Tensor::embedding(table, rows, -1, false, true);
    taken.square().sum(Kind::Float) * (factor / rows.size()[0] as f64)
}

#[test]
fn sparse_gradients_are_accumulated_unscaled_and_skipped_when_infinite() -> anyhow::Result<()> {
    let _turn = turn();
    let (plain, scaled) = (table(), table());
    let mut plain_opt = SparseAdam::builder([&plain]).lr(0.1).build()?;
    let mut scaled_opt = SparseAdam::builder([&scaled]).lr(0.1).build()?;
    let mut scaler = GradScaler::builder(CPU).init_scale(1024.0).build()?;
    let mut accum = Accumulator::new(2)?;
    let rows = Tensor::from_slice(&[1i64, 2, 1, 4]);
    for factor in [1.0, f64::INFINITY, 0.3, 2.0] {
        if factor.is_finite() {
            loss(&plain, &rows, factor).backward();
            plain_opt.step()?;
            plain_opt.zero_grad()?;
        }
        for micro in accum.windows(rows.split_with_sizes([3i64, 1], 0)) {
            let loss = scaler.scale(&loss(&scaled, &micro.batch, factor))?;
            accum.backward(&scaled_opt, &loss, Samples(micro.batch.size()[0]), micro.closes)?;
        }
        assert!(scaled.grad().is_sparse());
        let outcome = scaler.step(&mut scaled_opt)?;
        assert_eq!(outcome.skipped()?, factor.is_infinite());
        scaler.update()?;
        scaled_opt.zero_grad()?;
        assert!(scaled.allclose(&plain, 1e-5, 1e-6, false), "factor {factor}: {scaled} {plain}");
        assert!(!scaled.equal(&table()));
    }
    Ok(())
}
