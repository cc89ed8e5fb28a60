use overdrive::core::Optimizer;
use overdrive::nn::{self as nn, sequential};
use overdrive::optim::AdamW;
use overdrive_compile as compile;
use overdrive_compile::Options;
use tch::{Device, Kind, Tensor};

pub fn mlp() -> nn::Sequential {
    tch::manual_seed(1);
    sequential![
        nn::Linear::new(20, 32).unwrap(),
        nn::Relu,
        nn::Dropout::new(0.1).unwrap(),
        nn::Linear::new(32, 5).unwrap()
    ]
}

pub fn batch(step: i64) -> [Tensor; 2] {
    tch::manual_seed(100 + step);
    [Tensor::randn([16, 20], (Kind::Float, Device::Cpu)), Tensor::randint(5, [16], (Kind::Int64, Device::Cpu))]
}

#[test]
fn losses_follow_plain_ones() {
    let Some(_alone) = crate::compiling() else { return };
    let (plain, compiled) = (mlp(), mlp());
    let mut plain_opt = AdamW::builder(&plain).build().unwrap();
    let mut opt = AdamW::builder(&compiled).build().unwrap();
    let mut loss_of =
        compile::loss(&compiled, |batch| Ok(compiled.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])))
            .options(Options { strict: true, ..Options::default() });
    for step in 0..20 {
        let [x, y] = batch(step);
        tch::manual_seed(step);
        let loss = plain.forward(&x).unwrap().cross_entropy_for_logits(&y);
        loss.backward();
        plain_opt.step().unwrap();
        plain_opt.zero_grad().unwrap();
        tch::manual_seed(step);
        let other = loss_of.run(&[x, y]).unwrap();
        other.backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        let (loss, other) = (loss.double_value(&[]), other.double_value(&[]));
        assert!((loss - other).abs() <= 1e-5 * loss.abs(), "step {step}: {other}, but {loss} without compiling");
    }
}
