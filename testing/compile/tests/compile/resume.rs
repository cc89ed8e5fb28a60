//! Checkpoints of compiled runs that resume uncompiled, and the other way round.

use std::cell::Cell;
use std::path::Path;

use overdrive::prelude::*;
use overdrive_compile as compile;

use crate::beside::strict;
use crate::losses::mlp;

/// Continues from the last checkpoint in the folder, trains up to this step, and saves. The checkpoint has the random
/// generator that draws batches and dropout. Returns the losses, and how often the closure was called.
fn train(folder: &Path, until: u64, is_compiled: bool) -> (Vec<f64>, usize) {
    let mut model = mlp();
    let mut opt = AdamW::builder(&model).lr(0.01).build().unwrap();
    let mut sched = LrScheduler::new(&mut opt, CosineAnnealingLr::new(24)).unwrap();
    let mut rng = RngState::new(Device::Cpu);
    let mut checkpoint = Checkpoint::builder(folder).every(8).build().unwrap();
    let parts: &mut [(&str, &mut dyn Stateful)] =
        &mut [("model", &mut model), ("optimizer", &mut opt), ("schedule", &mut sched), ("rng", &mut rng)];
    let first = checkpoint.resume(parts).unwrap().map_or(1, |resumed| resumed.step + 1);
    let (model, calls) = (&model, Cell::new(0));
    let loss = |batch: &[Tensor]| -> compile::LossResult {
        calls.set(calls.get() + 1);
        Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]))
    };
    let mut step = compile::step(model, loss).options(strict());
    let mut losses = Vec::new();
    for number in first..=until {
        let batch =
            [Tensor::randn([16, 20], (Kind::Float, Device::Cpu)), Tensor::randint(5, [16], (Kind::Int64, Device::Cpu))];
        let loss = if is_compiled {
            step.run(&mut opt, &batch).unwrap()
        } else {
            let loss = loss(&batch).unwrap();
            loss.backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
            loss
        };
        sched.step(&mut opt).unwrap();
        losses.push(loss.double_value(&[]));
        if checkpoint.due(number).unwrap() {
            let parts: &[(&str, &dyn Stateful)] =
                &[("model", model), ("optimizer", &opt), ("schedule", &sched), ("rng", &rng)];
            checkpoint.save(number, parts).unwrap();
        }
    }
    checkpoint.finish().unwrap();
    (losses, calls.get())
}

#[test]
fn a_checkpoint_goes_from_compiled_steps_to_uncompiled_ones_and_back() {
    let Some(_alone) = crate::compiling() else { return };
    let whole = tempfile::tempdir().unwrap();
    tch::manual_seed(3);
    let (expected, _) = train(whole.path(), 24, false);
    for starts_compiled in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        tch::manual_seed(3);
        let mut found = Vec::new();
        for (until, is_compiled) in [(8, starts_compiled), (16, !starts_compiled), (24, starts_compiled)] {
            let (losses, calls) = train(folder.path(), until, is_compiled);
            assert_eq!((losses.len(), calls), (8, if is_compiled { 3 } else { 8 }));
            found.extend(losses);
            // The next run takes the generator's state from the checkpoint, not this one.
            tch::manual_seed(99);
        }
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let is_close = (found - expected).abs() <= 1e-5 * expected;
            assert!(is_close, "compiled first: {starts_compiled}, step {step}: {found}, but {expected} in one go");
        }
    }
}
