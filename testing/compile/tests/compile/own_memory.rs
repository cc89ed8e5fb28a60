//! What compiled steps return has memory of its own, also where the compiler has left an operator out, such as a product
//! with 1.

use overdrive_compile as compile;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::beside::strict;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn outputs_are_neither_inputs_nor_one_another() {
    let Some(_alone) = crate::compiling() else { return };
    let vars = VarStore::new(Device::Cpu);
    let weight = vars.root().ones("weight", &[6]);
    let mut forward = compile::forward(&vars, |inputs| {
        let one = inputs[0].ones_like();
        let sum = &inputs[0] + &weight;
        Ok(vec![&inputs[0] * &one, &weight * &one, &sum * &one, sum])
    });
    forward = forward.options(strict());
    for call in 0..4 {
        let x = Tensor::arange(6, FLOAT);
        let outputs = forward.run(&[x.shallow_clone()]).unwrap();
        for (number, output) in outputs.iter().enumerate() {
            tch::no_grad(|| drop(output.shallow_clone().fill_(-1.0 - number as f64)));
        }
        assert_eq!(x, Tensor::arange(6, FLOAT), "call {call}");
        assert_eq!(weight, Tensor::ones([6], FLOAT), "call {call}");
        for (number, output) in outputs.iter().enumerate() {
            assert_eq!(output, &Tensor::full([6], -1.0 - number as f64, FLOAT), "call {call}");
        }
    }
}
