//! The steps of `versus step` that compare modules: the same step through `overdrive-nn` and through tch's own modules,
//! both with our optimizer.

use anyhow::Result;
use overdrive::nn::Forward as _;
use overdrive::prelude::*;
use tch::nn::{self as tch_nn, Module as _, VarStore};

use super::step::Step;
use crate::gpt::{self, BLOCKS, Gpt, LENGTH, VOCABULARY, WIDTH, attend};
use crate::model::cross_entropy;

const LAYERS: [i64; 4] = [784, 128, 128, 10];

/// Both sides start from the same values: the speed of an operator may depend on them.
fn step_of(
    params: Vec<Tensor>,
    (inputs, targets): (Tensor, Tensor),
    forward: impl Fn(&Tensor) -> Result<Tensor> + 'static,
) -> Result<Step> {
    for (number, param) in params.iter().enumerate() {
        tch::manual_seed(number as i64);
        nn::init::normal_(param, 0.0, 0.05)?;
    }
    let mut opt = Sgd::builder(params).lr(0.01).build()?;
    Ok(Box::new(move || {
        opt.zero_grad()?;
        cross_entropy(&forward(&inputs)?, &targets).backward();
        Ok(opt.step()?)
    }))
}

fn params(model: &impl Module) -> Vec<Tensor> {
    model.named_parameters().iter().map(|it| it.tensor().shallow_clone()).collect()
}

fn digits() -> (Tensor, Tensor) {
    tch::manual_seed(0);
    let inputs = Tensor::randn([16, LAYERS[0]], (Kind::Float, Device::Cpu));
    (inputs, Tensor::randint(10, [16], (Kind::Int64, Device::Cpu)))
}

pub fn mlp_nn() -> Result<Step> {
    let [a, b, c, d] = LAYERS;
    let model = sequential![nn::Linear::new(a, b)?, nn::Relu, nn::Linear::new(b, c)?, nn::Relu, nn::Linear::new(c, d)?];
    step_of(params(&model), digits(), move |x| Ok(model.forward(x)?))
}

pub fn mlp_tch() -> Result<Step> {
    let vs = VarStore::new(Device::Cpu);
    let linear =
        |number: usize| tch_nn::linear(vs.root() / number, LAYERS[number], LAYERS[number + 1], Default::default());
    let relu = |x: &Tensor| x.relu();
    let model = tch_nn::seq().add(linear(0)).add_fn(relu).add(linear(1)).add_fn(relu).add(linear(2));
    step_of(vs.trainable_variables(), digits(), move |x| Ok(model.forward(x)))
}

fn text() -> (Tensor, Tensor) {
    tch::manual_seed(0);
    gpt::batch()
}

pub fn gpt_nn() -> Result<Step> {
    let model = Gpt::new()?;
    step_of(params(&model), text(), move |tokens| Ok(model.forward(tokens)?))
}

struct TchBlock([tch_nn::LayerNorm; 2], [tch_nn::Linear; 4]);

impl TchBlock {
    fn new(vs: &tch_nn::Path<'_>) -> Self {
        let linear = |name, inputs, outputs| tch_nn::linear(vs / name, inputs, outputs, Default::default());
        Self(
            ["norm1", "norm2"].map(|name| tch_nn::layer_norm(vs / name, vec![WIDTH], Default::default())),
            [
                linear("attention", WIDTH, 3 * WIDTH),
                linear("project", WIDTH, WIDTH),
                linear("widen", WIDTH, 4 * WIDTH),
                linear("narrow", 4 * WIDTH, WIDTH),
            ],
        )
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let Self([norm1, norm2], [attention, project, widen, narrow]) = self;
        let x = x + project.forward(&attend(&attention.forward(&norm1.forward(x))));
        let wide = widen.forward(&norm2.forward(&x)).gelu("none");
        x + narrow.forward(&wide)
    }
}

pub fn gpt_tch() -> Result<Step> {
    let vs = VarStore::new(Device::Cpu);
    let root = vs.root();
    let tokens = tch_nn::embedding(&root / "tokens", VOCABULARY, WIDTH, Default::default());
    let table = tch_nn::embedding(&root / "places", LENGTH, WIDTH, Default::default());
    let blocks: Vec<_> = (0..BLOCKS).map(|block| TchBlock::new(&(&root / block))).collect();
    let norm = tch_nn::layer_norm(&root / "norm", vec![WIDTH], Default::default());
    let no_bias = tch_nn::LinearConfig { bias: false, ..Default::default() };
    let head = tch_nn::linear(&root / "head", WIDTH, VOCABULARY, no_bias);
    step_of(vs.trainable_variables(), text(), move |input| {
        let places = Tensor::arange(LENGTH, (Kind::Int64, Device::Cpu));
        let mut x = tokens.forward(input) + table.forward(&places);
        for block in &blocks {
            x = block.forward(&x);
        }
        Ok(head.forward(&norm.forward(&x)).flatten(0, 1))
    })
}
