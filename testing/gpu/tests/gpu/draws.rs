//! Random numbers of the device's generator.

use anyhow::{Result, ensure};
use overdrive::prelude::*;

use crate::{FLOAT, GPU};

type Draw = fn() -> Tensor;

const WHOLE: (Kind, Device) = (Kind::Int64, GPU);

/// 64 numbers each.
const DRAWS: [(&str, Draw); 7] = [
    ("normal", || Tensor::randn([64], FLOAT)),
    ("uniform", || Tensor::rand([64], FLOAT)),
    ("whole", || Tensor::randint(1 << 20, [64], WHOLE)),
    ("permutation", || Tensor::randperm(64, WHOLE)),
    ("coins", || Tensor::full([64], 0.5, FLOAT).bernoulli()),
    ("dropout", || Tensor::ones([64], FLOAT).dropout(0.5, true)),
    ("choice", || Tensor::ones([1000], FLOAT).multinomial(64, false)),
];

fn host(tensor: &Tensor) -> Tensor {
    tensor.to_device(Device::Cpu)
}

pub fn draws_differ_and_are_those_of_the_seed() -> Result<()> {
    for (name, draw) in DRAWS {
        let three = |seed| {
            manual_seed(seed);
            [(); 3].map(|()| host(&draw()))
        };
        let (first, again, other) = (three(1), three(1), three(2));
        ensure!(first.iter().zip(&again).all(|(a, b)| a.equal(b)), "{name}: other numbers by the same seed");
        let all: Vec<&Tensor> = first.iter().chain(&other).collect();
        let are_equal = |at: usize| all[..at].iter().any(|earlier| earlier.equal(all[at]));
        ensure!(!(1..all.len()).any(are_equal), "{name}: two draws are equal");
    }
    Ok(())
}

/// What was drawn of one kind moves the generator for the next one.
pub fn draws_of_several_kinds_depend_on_their_order() -> Result<()> {
    for (name, before) in DRAWS {
        manual_seed(3);
        let alone = host(&Tensor::randn([64], FLOAT));
        manual_seed(3);
        drop(before());
        ensure!(!host(&Tensor::randn([64], FLOAT)).equal(&alone), "{name} leaves the generator where it was");
    }
    Ok(())
}

pub fn the_hosts_generator_does_not_move_for_the_device() -> Result<()> {
    for (name, draw) in DRAWS {
        let of_host = || Tensor::randn([64], (Kind::Float, Device::Cpu));
        manual_seed(4);
        let alone = of_host();
        manual_seed(4);
        let on_device = host(&draw());
        ensure!(of_host().equal(&alone), "{name} moves it");
        ensure!(on_device.to_kind(Kind::Float).ne_tensor(&alone).any().int64_value(&[]) == 1, "{name}: the host's");
    }
    Ok(())
}
