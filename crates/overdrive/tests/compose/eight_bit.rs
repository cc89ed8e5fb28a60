//! 8-bit averages learn as well as 32-bit ones.

use overdrive::prelude::*;
use tch::nn::{self, Module};

use crate::{CPU, turn};

/// Trains two models with the same initial weights and batches, and returns the mean of the last 50 losses of each.
fn last_losses(
    model: impl Fn(&nn::Path<'_>) -> nn::Sequential,
    batch: impl Fn(i64) -> (Tensor, Tensor),
    steps: i64,
) -> anyhow::Result<[f64; 2]> {
    let [full, eight] = [(); 2].map(|()| nn::VarStore::new(CPU));
    let models = [model(&full.root()), model(&eight.root())];
    tch::no_grad(|| {
        let start = full.variables();
        eight.variables().into_iter().for_each(|(name, mut variable)| variable.copy_(&start[&name]));
    });
    let mut opts: [Box<dyn Optimizer>; 2] = [
        Box::new(AdamW::builder(full.trainable_variables()).lr(2e-3).build()?),
        Box::new(overdrive::optim::AdamW8Bit::builder(eight.trainable_variables()).lr(2e-3).build()?),
    ];
    let mut sums = [0.0; 2];
    for step in 0..steps {
        let (inputs, targets) = batch(step);
        for ((model, opt), sum) in models.iter().zip(&mut opts).zip(&mut sums) {
            let loss = model.forward(&inputs).cross_entropy_for_logits(&targets);
            loss.backward();
            opt.step()?;
            opt.zero_grad()?;
            if step >= steps - 50 {
                *sum += loss.double_value(&[]) / 50.0;
            }
        }
    }
    Ok(sums)
}

/// The mean over two initializations; float32 runs of different initializations differ by more than `noise`.
fn assert_learned_alike(what: &str, untrained: f64, noise: f64, run: impl Fn() -> anyhow::Result<[f64; 2]>) {
    let (mut full, mut eight) = (0.0, 0.0);
    for _ in 0..2 {
        let [one, other] = run().unwrap();
        full += one / 2.0;
        eight += other / 2.0;
    }
    println!("{what}: loss {full:.4} with 32-bit averages, {eight:.4} with 8-bit ones");
    assert!(full < untrained / 1.5, "{what}: {full}");
    assert!((eight - full).abs() < noise, "{what}: {full} {eight}");
}

#[test]
fn eight_bit_averages_learn_digits_and_text_as_well_as_32_bit_ones() -> anyhow::Result<()> {
    let _turn = turn();
    // On a busy machine, small steps are slow with threads that wait for each other.
    tch::set_num_threads(1);
    let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let digits = Mnist::open(workspace.join("data/mnist"))?.train.first(4000);
    let images = Tensor::from_slice(digits.images()).reshape([-1, 784]).to_kind(Kind::Float) / 255.0;
    let labels = Tensor::from_slice(digits.labels()).to_kind(Kind::Int64);
    let mlp = |root: &nn::Path<'_>| {
        let hidden = nn::linear(root / "hidden", 784, 128, Default::default());
        nn::seq().add(hidden).add_fn(Tensor::relu).add(nn::linear(root / "out", 128, 10, Default::default()))
    };
    let batch = |step: i64| {
        let start = step * 100 % 4000;
        (images.narrow(0, start, 100), labels.narrow(0, start, 100))
    };
    assert_learned_alike("MNIST", 10f64.ln(), 0.02, || last_losses(mlp, batch, 200));

    // Predicts the next byte from the previous eight.
    let text: Vec<i64> = std::fs::read(workspace.join("data/text/hamlet.txt"))?.into_iter().map(i64::from).collect();
    let windows = Tensor::from_slice(&text).unfold(0, 9, 1);
    let count = windows.size()[0];
    let reader = |root: &nn::Path<'_>| {
        let embedding = nn::embedding(root / "embedding", 128, 32, Default::default());
        let hidden = nn::linear(root / "hidden", 256, 256, Default::default());
        nn::seq().add(embedding).add_fn(|x| x.flatten(1, -1)).add(hidden).add_fn(Tensor::relu).add(nn::linear(
            root / "out",
            256,
            128,
            Default::default(),
        ))
    };
    let batch = |step: i64| {
        let places = (Tensor::arange(128, (Kind::Int64, CPU)) * 7919 + step * 104_729).remainder(count);
        let rows = windows.index_select(0, &places);
        (rows.narrow(1, 0, 8), rows.select(1, 8))
    };
    assert_learned_alike("text", 128f64.ln(), 0.1, || last_losses(reader, batch, 200));
    Ok(())
}
