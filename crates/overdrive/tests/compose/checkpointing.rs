//! Activation checkpointing with modules, optimizers and accumulation.

use std::sync::Arc;

use overdrive::core::TorchErrorKind;
use overdrive::memory::{ActivationCheckpoint, MemoryError, Policy, checkpoint, checkpoint_sequential};
use overdrive::nn::{Forward, NnError, TransformerEncoder, TransformerEncoderLayer};
use overdrive::prelude::*;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

#[derive(Module)]
struct Block {
    conv: nn::Conv2d,
    norm: nn::BatchNorm2d,
    dropout: nn::Dropout,
}

impl Block {
    fn new() -> Self {
        let (norm, dropout) = (nn::BatchNorm2d::new(4).unwrap(), nn::Dropout::new(0.2).unwrap());
        Self { conv: nn::Conv2d::builder(4, 4, 3).padding(1).build().unwrap(), norm, dropout }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        self.dropout.forward(&self.norm.forward(&self.conv.forward(x)?)?.relu())
    }
}

/// How the blocks run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Plain,
    Each,
    Products,
    Segments,
}

#[derive(Module)]
struct Model {
    blocks: nn::ModuleList<Arc<Block>>,
    head: nn::Linear,
}

impl Model {
    fn new() -> Self {
        manual_seed(2);
        Self { blocks: (0..4).map(|_| Arc::new(Block::new())).collect(), head: nn::Linear::new(4, 3).unwrap() }
    }

    fn forward(&self, x: &Tensor, way: Way) -> Tensor {
        let owned = self.blocks.iter().map(Arc::clone);
        let x = match way {
            Way::Plain => owned.fold(x.shallow_clone(), |x, block| block.forward(&x).unwrap()),
            Way::Each => {
                owned.fold(x.shallow_clone(), |x, block| checkpoint(move |[x]| block.forward(x), [&x]).unwrap())
            }
            Way::Products => owned.fold(x.shallow_clone(), |x, block| {
                let options = ActivationCheckpoint::default().keep(Policy::Products);
                options.run(move |[x]| block.forward(x), [&x]).unwrap()
            }),
            Way::Segments => {
                checkpoint_sequential(owned.map(|block| move |x: &Tensor| block.forward(x)), 2, x).unwrap()
            }
        };
        self.head.forward(&x.mean_dim([2, 3].as_slice(), false, Kind::Float)).unwrap()
    }
}

/// Weights, running statistics and losses after steps of two micro-batches each.
fn train(way: Way) -> (Vec<f64>, Vec<(String, Tensor)>, Tensor) {
    let model = Model::new();
    let mut opt = AdamW::builder(&model).lr(1e-2).build().unwrap();
    let mut accum = Accumulator::new(2).unwrap();
    let batches =
        (0..6).map(|_| (Tensor::randn([3, 4, 6, 6], FLOAT), Tensor::randint(3, [3], (Kind::Int64, Device::Cpu))));
    let batches: Vec<_> = batches.collect();
    let mut losses = Vec::new();
    for micro in accum.windows(&batches) {
        let (x, y) = micro.batch;
        let loss = model.forward(x, way).cross_entropy_for_logits(y);
        accum.backward(&opt, &loss, Samples(3), micro.closes).unwrap();
        losses.push(loss.double_value(&[]));
        if micro.closes {
            clip_grad_norm_(opt.params(), 1.0).unwrap();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
    }
    let parameters = model.named_parameters();
    let parameters = parameters.iter().map(|it| (it.name().unwrap().to_owned(), it.tensor().detach().copy()));
    let buffers = model.named_buffers().into_iter().map(|(name, buffer)| (name, buffer.copy()));
    (losses, parameters.chain(buffers).collect(), Tensor::rand([4], FLOAT))
}

/// To the bit, running statistics and the generator of random numbers among it.
#[test]
fn training_is_the_same_however_blocks_are_checkpointed() {
    let _turn = crate::turn();
    let plain = train(Way::Plain);
    for way in [Way::Each, Way::Products, Way::Segments] {
        assert_eq!(train(way), plain, "{way:?}");
    }
}

/// `TransformerEncoder` with its layers checkpointed, as in the book.
#[derive(Module)]
struct Encoder {
    layers: nn::ModuleList<Arc<TransformerEncoderLayer>>,
}

impl Forward for Encoder {
    fn forward(&self, src: &Tensor) -> Result<Tensor, NnError> {
        let mut x = src.shallow_clone();
        for layer in self.layers.iter() {
            let layer = Arc::clone(layer);
            x = checkpoint(move |[x]| layer.forward(x), [&x])?;
        }
        Ok(x)
    }
}

fn encoder_layer() -> TransformerEncoderLayer {
    TransformerEncoderLayer::builder(8, 2).dim_feedforward(16).batch_first(true).build().unwrap()
}

/// The output, the gradients, and what the generator draws next.
fn trained(encoder: &impl Forward, x: &Tensor) -> (Tensor, Vec<Tensor>, Tensor) {
    manual_seed(8);
    let y = encoder.forward(x).unwrap();
    y.square().sum(Kind::Float).backward();
    let grads = encoder.named_parameters().iter().map(|it| it.tensor().grad().copy()).collect();
    (y.detach(), grads, Tensor::rand([2], FLOAT))
}

/// It loads the state of the one that is not checkpointed.
#[test]
fn an_encoder_of_checkpointed_layers_is_the_encoder_to_the_bit() {
    let _turn = crate::turn();
    manual_seed(5);
    let plain = TransformerEncoder::new(&encoder_layer(), 3).unwrap();
    let mut checkpointed = Encoder { layers: (0..3).map(|_| Arc::new(encoder_layer())).collect() };
    checkpointed.load_state_dict(&plain.state_dict().unwrap()).unwrap();
    let x = Tensor::randn([4, 5, 8], FLOAT);
    assert_eq!(trained(&checkpointed, &x), trained(&plain, &x));
}

/// `?` keeps what failed, and where.
#[test]
fn an_error_of_a_checkpointed_layer_is_the_modules() {
    let _turn = crate::turn();
    let encoder = Encoder { layers: (0..2).map(|_| Arc::new(encoder_layer())).collect() };
    let error = encoder.forward(&Tensor::ones([4, 5, 7], FLOAT)).unwrap_err();
    let NnError::Part(part) = &error else { panic!("{error:?}") };
    let Some(MemoryError::Function { scope, source }) = part.downcast_ref() else { panic!("{error:?}") };
    assert!(scope.contains("checkpointing.rs:") && source.downcast_ref::<NnError>().is_some(), "{error}");
    assert_eq!(error.to_string(), format!("{scope}: {source}"));
    // libtorch's own errors stay what they are.
    let refused = Tensor::ones([2], FLOAT).f_view([3]).unwrap_err();
    let error = NnError::from(MemoryError::from(refused));
    assert!(matches!(&error, NnError::Torch(error) if error.kind() == TorchErrorKind::Other), "{error:?}");
}
