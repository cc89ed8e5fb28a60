use overdrive::core::Optimizer;
use overdrive::optim::AdamW;
use overdrive_compile as compile;
use overdrive_compile::Options;
use tch::Tensor;

use crate::losses::{batch, mlp};

/// One uncompiled step with AdamW.
pub fn plain_step(model: &overdrive::nn::Sequential, opt: &mut AdamW, [x, y]: &[Tensor; 2]) -> f64 {
    let loss = model.forward(x).unwrap().cross_entropy_for_logits(y);
    loss.backward();
    opt.step().unwrap();
    opt.zero_grad().unwrap();
    loss.double_value(&[])
}

#[test]
fn whole_steps_follow_plain_ones_under_a_schedule() {
    let Some(_alone) = crate::compiling() else { return };
    let (plain, compiled) = (mlp(), mlp());
    let mut plain_opt = AdamW::builder(&plain).build().unwrap();
    let mut opt = AdamW::builder(&compiled).build().unwrap();
    let mut step =
        compile::step(&compiled, |batch| Ok(compiled.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])))
            .options(Options { strict: true, ..Options::default() });
    for number in 0..30 {
        let batch = batch(number);
        for opt in [&mut plain_opt, &mut opt] {
            opt.set_lr(0, 1e-3 / (1.0 + number as f64)).unwrap();
            opt.set_momentum(0, 0.9 - 0.01 * number as f64).unwrap();
        }
        tch::manual_seed(number);
        let expected = plain_step(&plain, &mut plain_opt, &batch);
        tch::manual_seed(number);
        let found = step.run(&mut opt, &batch).unwrap().double_value(&[]);
        assert!((found - expected).abs() <= 1e-5 * expected.abs(), "step {number}: {found}, but {expected} uncompiled");
    }
    assert_eq!(step.why_eager(), None);
}
