//! Losses over tokens, whose parts weigh unequally.

use overdrive_core::{Optimizer, TchOptimizer};
use overdrive_ffi::host_memory;
use overdrive_memory::{AutoMicroBatch, MemoryError};
use tch::nn::{Module, OptimizerConfig};
use tch::{Device, Kind, TchError, Tensor, nn};

use crate::{FLOAT, Limit, NONE, is_zero};

/// Sequences of 0 to 40 tokens, padded with -100 as in PyTorch, and a model in double precision.
struct Padded {
    embedding: nn::Embedding,
    head: nn::Linear,
    opt: TchOptimizer,
    batch: [Tensor; 2],
}

impl Padded {
    fn new(lengths: &[i64]) -> Self {
        let mut vs = nn::VarStore::new(Device::Cpu);
        tch::manual_seed(6);
        let embedding = nn::embedding(vs.root(), 50, 32, Default::default());
        let head = nn::linear(vs.root(), 32, 50, Default::default());
        vs.double();
        let tokens = |_| Tensor::randint(50, [lengths.len() as i64, 40], (Kind::Int64, Device::Cpu));
        let [inputs, targets] = [0, 1].map(tokens);
        let places = Tensor::arange(40, (Kind::Int64, Device::Cpu)).unsqueeze(0);
        let targets = targets.masked_fill(&places.ge_tensor(&Tensor::from_slice(lengths).unsqueeze(1)), -100);
        let opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1).unwrap());
        Self { embedding, head, opt, batch: [inputs, targets] }
    }

    fn tokens(part: &[Tensor]) -> Result<i64, TchError> {
        part[1].f_ne(-100)?.f_sum(Kind::Int64)?.f_int64_value(&[])
    }

    /// The mean over all tokens that are no padding.
    fn loss(embedding: &nn::Embedding, head: &nn::Linear, part: &[Tensor]) -> Result<Tensor, TchError> {
        let logits = head.forward(&embedding.forward(&part[0]).tanh()).flatten(0, 1);
        logits.f_cross_entropy_loss(&part[1].flatten(0, 1), None::<Tensor>, tch::Reduction::Mean, -100, 0.0)
    }

    /// The loss of a batch and its gradients.
    fn pass(&mut self, micro: &mut AutoMicroBatch, by_tokens: bool) -> (Tensor, Vec<Tensor>) {
        let Self { embedding, head, opt, batch } = self;
        let loss = |part: &[Tensor]| Self::loss(embedding, head, part);
        let loss = match by_tokens {
            true => micro.backward_weighted(opt, batch, Self::tokens, loss),
            false => micro.backward(opt, batch, loss),
        };
        (loss.unwrap(), opt.params().iter().map(|param| param.grad().copy()).collect())
    }
}

/// Whether two passes have the same numbers but for rounding.
fn are_close(one: &(Tensor, Vec<Tensor>), other: &(Tensor, Vec<Tensor>)) -> bool {
    let close = |one: &Tensor, other: &Tensor| one.allclose(other, 1e-11, 1e-13, false);
    close(&one.0, &other.0) && one.1.iter().zip(&other.1).all(|(one, other)| close(one, other))
}

/// Two samples are all padding, and so is a part of them alone.
#[test]
fn a_loss_over_tokens_is_that_of_the_whole_batch_while_parts_shrink_and_grow() {
    let _limit = Limit::none();
    let mut model = Padded::new(&[40, 1, 7, 0, 0, 33, 2, 19, 40, 5, 28]);
    let expected = model.pass(&mut AutoMicroBatch::new(100), true);
    let plain = Padded::loss(&model.embedding, &model.head, &model.batch).unwrap();
    assert!(plain.allclose(&expected.0, 1e-12, 0.0, false));
    // Samples of few tokens would weigh too much.
    assert!(!are_close(&model.pass(&mut AutoMicroBatch::new(2), false), &expected));

    let used = |model: &mut Padded, size| {
        host_memory::reset_peak().unwrap();
        let before = host_memory::stats().unwrap().allocated;
        let found = model.pass(&mut AutoMicroBatch::new(size), true);
        assert!(are_close(&found, &expected), "parts of {size}");
        host_memory::stats().unwrap().peak - before
    };
    let [of_3, of_6] = [3, 6].map(|size| used(&mut model, size));
    let mut micro = AutoMicroBatch::new(12).grow_after(1);
    let mut sizes = Vec::new();
    while sizes.last() != Some(&11) && sizes.len() < 60 {
        Limit::set(if sizes.len() < 2 { (of_3 + of_6) / 2 } else { NONE });
        let found = model.pass(&mut micro, true);
        Limit::set(NONE);
        assert!(are_close(&found, &expected), "parts of {}", micro.size());
        sizes.push(micro.size());
    }
    assert!(sizes[0] < 6 && sizes.last() == Some(&11), "{sizes:?}");
}

#[test]
fn weights_of_samples_are_the_default_and_others_have_to_add_up() {
    let _limit = Limit::none();
    let mut model = Padded::new(&[3; 10]);
    let mut micro = AutoMicroBatch::new(4);
    let by_tokens = model.pass(&mut micro, true);
    assert_eq!(model.pass(&mut micro, false), by_tokens, "each sample has three tokens");
    let mut with = |weight: fn(&[Tensor]) -> Result<i64, TchError>| {
        let Padded { embedding, head, opt, batch } = &mut model;
        let error =
            micro.backward_weighted(opt, batch, weight, |part| Padded::loss(embedding, head, part)).unwrap_err();
        assert!(opt.params().iter().all(is_zero), "{error}");
        error
    };
    assert!(matches!(with(|_| Ok(-1)), MemoryError::Weight { found: -1 }));
    assert!(matches!(with(|_| Ok(0)), MemoryError::Weight { found: 0 }));
    let error = with(|_| Ok(7));
    let MemoryError::Function { source, .. } = &error else { panic!("{error}") };
    assert!(matches!(source.downcast_ref(), Some(MemoryError::Weights { batch: 7, parts: 21 })), "{error}");
    let error = with(|_| Tensor::zeros([2], FLOAT).f_view([3]).map(|_| 1)).to_string();
    assert!(error.starts_with("the weight of a batch: "), "{error}");
}
