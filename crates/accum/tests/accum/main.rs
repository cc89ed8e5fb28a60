//! Accumulated gradients compared with the large batch's: uneven micro-batches, several ranks, float16.

mod fit;
mod noise;
mod order;
mod state;

use std::cell::{Cell, RefCell};

use overdrive_accum::{AccumError, Accumulator, Samples, Tokens};
use overdrive_core::{AveragedBy, Behavior, GradientSync, Optimizer, OptimizerError, OptimizerId, SyncError};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn model() -> (nn::VarStore, nn::Linear) {
    tch::manual_seed(1);
    let vs = nn::VarStore::new(CPU);
    let model = nn::linear(vs.root(), 5, 3, Default::default());
    (vs, model)
}

fn loss(model: &nn::Linear, inputs: &Tensor) -> Tensor {
    model.forward(inputs).square().sum_dim_intlist(1, false, Kind::Float).mean(Kind::Float)
}

fn grads(vs: &nn::VarStore) -> Vec<Tensor> {
    vs.trainable_variables().iter().map(|param| param.grad().copy()).collect()
}

fn zero_grads(vs: &nn::VarStore) {
    for mut param in vs.trainable_variables() {
        param.zero_grad();
    }
}

/// An optimizer that only holds parameters.
struct Params {
    params: Vec<Tensor>,
    behavior: Behavior,
}

impl Params {
    fn new<'a>(params: impl IntoIterator<Item = &'a Tensor>) -> Self {
        Self { params: params.into_iter().map(Tensor::shallow_clone).collect(), behavior: Behavior::default() }
    }
}

impl Optimizer for Params {
    fn id(&self) -> OptimizerId {
        OptimizerId::new()
    }

    fn params(&self) -> Vec<Tensor> {
        self.params.iter().map(Tensor::shallow_clone).collect()
    }

    fn behavior(&self) -> Behavior {
        self.behavior
    }

    fn num_groups(&self) -> usize {
        1
    }

    fn lr(&self, _group: usize) -> Option<f64> {
        None
    }

    fn set_lr(&mut self, _group: usize, _lr: f64) -> Result<(), OptimizerError> {
        Ok(())
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }
}

fn assert_close(ours: &[Tensor], expected: &[Tensor], context: &str) {
    for (ours, expected) in ours.iter().zip(expected) {
        assert!(ours.allclose(expected, 1e-6, 1e-7, false), "{context}: {ours:?} {expected:?}");
    }
}

#[test]
fn uneven_micro_batches_equal_the_large_batch() {
    let (vs, model) = model();
    let opt = Params::new(&vs.trainable_variables());
    let data = Tensor::randn([17, 5], (Kind::Float, CPU));
    for sizes in [vec![4, 4, 4], vec![1, 7, 3], vec![8, 1], vec![3, 0, 5], vec![0, 6, 0], vec![17]] {
        let total: i64 = sizes.iter().sum();
        zero_grads(&vs);
        loss(&model, &data.narrow(0, 0, total)).backward();
        let expected = grads(&vs);

        zero_grads(&vs);
        let mut accum = Accumulator::new(sizes.len()).unwrap();
        let mut start = 0;
        let parts: Vec<_> = sizes
            .iter()
            .map(|&size| {
                start += size;
                data.narrow(0, start - size, size)
            })
            .collect();
        for micro in accum.windows(parts) {
            // The mean over no samples is NaN; it must not reach the gradients.
            accum.backward(&opt, &loss(&model, &micro.batch), Samples(micro.batch.size()[0]), micro.closes).unwrap();
        }
        assert_close(&grads(&vs), &expected, &format!("{sizes:?}"));
    }
}

#[test]
fn the_last_partial_window_equals_a_smaller_large_batch() {
    let (vs, model) = model();
    let opt = Params::new(&vs.trainable_variables());
    let data = Tensor::randn([11, 5], (Kind::Float, CPU));
    let mut accum = Accumulator::new(3).unwrap();
    let mut windows = Vec::new();
    zero_grads(&vs);
    for micro in accum.windows(data.split(2, 0)) {
        accum.backward(&opt, &loss(&model, &micro.batch), Samples(micro.batch.size()[0]), micro.closes).unwrap();
        if micro.closes {
            windows.push(grads(&vs));
            zero_grads(&vs);
        }
    }
    assert_eq!(windows.len(), 2);
    for (window, (start, len)) in windows.iter().zip([(0, 6), (6, 5)]) {
        zero_grads(&vs);
        loss(&model, &data.narrow(0, start, len)).backward();
        assert_close(window, &grads(&vs), &format!("from {start}"));
    }
}

/// Simulates two ranks in one process, one after the other; the test itself averages their gradients.
struct TwoRanks<'a> {
    other_counts: &'a RefCell<Vec<f64>>,
    held: &'a Cell<Option<bool>>,
    closed_with_nothing: Cell<bool>,
}

impl<'a> TwoRanks<'a> {
    fn new(other_counts: &'a RefCell<Vec<f64>>, held: &'a Cell<Option<bool>>) -> Self {
        Self { other_counts, held, closed_with_nothing: Cell::new(false) }
    }
}

impl GradientSync for TwoRanks<'_> {
    fn world_size(&self) -> usize {
        2
    }

    fn averaged_by(&self) -> AveragedBy {
        AveragedBy::Backward
    }

    fn hold_back(&self, hold: bool) -> Result<(), SyncError> {
        self.held.set(Some(hold));
        Ok(())
    }

    fn close_with_nothing(&self) -> Result<(), SyncError> {
        self.closed_with_nothing.set(true);
        Ok(())
    }

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        let mut others = self.other_counts.borrow_mut();
        if others.is_empty() {
            return Err(SyncError::from(Box::<dyn std::error::Error + Send + Sync>::from("rank 1 is gone")));
        }
        Ok(value + others.remove(0))
    }
}

#[test]
fn ranks_with_different_counts_equal_the_large_batch_over_all() {
    let (vs, model) = model();
    let opt = Params::new(&vs.trainable_variables());
    let data = Tensor::randn([12, 5], (Kind::Float, CPU));
    zero_grads(&vs);
    loss(&model, &data).backward();
    let expected = grads(&vs);

    // Rank 0 has 4 + 1 samples, rank 1 has 2 + 5. Then what the other rank adds to the sums: reference, then total.
    let ranks = [([(0, 4), (4, 1)], [4.0, 7.0]), ([(5, 2), (7, 5)], [8.0, 5.0])];
    let mut averaged: Vec<Tensor> = expected.iter().map(Tensor::zeros_like).collect();
    for (parts, other_counts) in ranks {
        let (other_counts, held) = (RefCell::new(other_counts.to_vec()), Cell::new(None));
        let sync = TwoRanks::new(&other_counts, &held);
        zero_grads(&vs);
        let mut accum = Accumulator::new(2).unwrap().with_sync(sync);
        for (micro, (start, len)) in parts.into_iter().enumerate() {
            let closes = micro == 1;
            accum.backward(&opt, &loss(&model, &data.narrow(0, start, len)), Samples(len), closes).unwrap();
            assert_eq!(held.get(), Some(!closes), "held back until the last backward pass");
        }
        averaged = averaged.iter().zip(grads(&vs)).map(|(sum, grad)| sum + grad / 2.0).collect();
    }
    assert_close(&averaged, &expected, "two ranks");
}

#[test]
fn a_lost_rank_is_an_error_and_the_window_can_be_abandoned() {
    let (vs, model) = model();
    let opt = Params::new(&vs.trainable_variables());
    let (others, held) = (RefCell::new(vec![4.0]), Cell::new(None));
    let sync = TwoRanks::new(&others, &held);
    let mut accum = Accumulator::new(2).unwrap().with_sync(sync);
    let batch = Tensor::randn([2, 5], (Kind::Float, CPU));
    accum.backward(&opt, &loss(&model, &batch), Samples(2), false).unwrap();
    accum.abandon().unwrap();
    assert_eq!(held.get(), Some(false));
    let error = accum.backward(&opt, &loss(&model, &batch), Samples(2), true).unwrap_err();
    assert!(error.to_string().contains("rank 1 is gone"), "{error}");
}

#[test]
fn backward_returns_the_windows_total_when_it_closes() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let mut accum = Accumulator::new(2).unwrap();
    let loss = || weight.mean(Kind::Float);
    assert_eq!(accum.backward(&opt, &loss(), Samples(3), false).unwrap(), None);
    assert_eq!(accum.backward(&opt, &loss(), Samples(4), true).unwrap(), Some(7.0));
    assert_eq!(accum.backward(&opt, &loss(), Samples(0), true).unwrap(), Some(0.0), "nothing to step with");
}

/// Two ranks, of which this one has only masked tokens.
#[test]
fn a_rank_that_counts_nothing_takes_part_without_running_backward() {
    let weight = Tensor::ones([3], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let (others, held) = (RefCell::new(vec![8.0, 4.0]), Cell::new(None));
    let sync = TwoRanks::new(&others, &held);
    let mut accum = Accumulator::new(2).unwrap().with_sync(&sync);
    let mask = Tensor::zeros([3], (Kind::Float, CPU));
    let loss = (&weight * &mask).sum(Kind::Float) / mask.sum(Kind::Float);
    assert_eq!(accum.backward(&opt, &loss, Samples(0), true).unwrap(), Some(4.0));
    assert!(sync.closed_with_nothing.get() && !weight.grad().defined(), "a loss of NaN must not reach the gradients");
}

#[test]
fn a_window_whose_first_count_is_tiny_stays_in_float16s_range() {
    for first in [0, 1] {
        let weight = Tensor::ones([1], (Kind::Half, CPU)).set_requires_grad(true);
        let opt = Params::new([&weight]);
        let mut accum = Accumulator::new(2).unwrap();
        // Two windows, because the second one's reference is the first one's total.
        for window in 0..2 {
            for (count, closes) in [(first, false), (4096, true)] {
                accum.backward(&opt, &(&weight * 64.0).mean(Kind::Half), Samples(count), closes).unwrap();
            }
            let grad = weight.grad().double_value(&[0]);
            if first == 0 || window == 1 {
                assert!((grad - 64.0).abs() < 0.1, "first {first}, window {window}: {grad}");
            }
            weight.shallow_clone().zero_grad();
        }
    }
}

#[test]
fn a_failed_first_backward_can_be_abandoned_too() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let (others, held) = (RefCell::new(vec![4.0]), Cell::new(None));
    let sync = TwoRanks::new(&others, &held);
    let mut accum = Accumulator::new(2).unwrap().with_sync(sync);
    assert!(accum.backward(&opt, &Tensor::from(1f32), Samples(2), false).is_err(), "no graph");
    assert_eq!(held.get(), Some(true));
    accum.abandon().unwrap();
    assert_eq!(held.get(), Some(false));
}

#[test]
fn float16_losses_do_not_overflow() {
    // Losses weighted by raw counts would exceed float16's 65,504; weighted by `count / reference` they stay small.
    let weight = Tensor::ones([1], (Kind::Half, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let mut accum = Accumulator::new(4).unwrap();
    for micro in 0..4 {
        let loss = (&weight * 20_000.0).mean(Kind::Half);
        accum.backward(&opt, &loss, Samples(50_000), micro == 3).unwrap();
    }
    assert_eq!(weight.grad().double_value(&[0]), 20_000.0);
}

#[test]
fn bad_arguments_are_refused_before_backward() {
    let weight = Tensor::ones([2], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    assert!(matches!(Accumulator::new(0), Err(AccumError::Steps { found: 0 })));
    let mut accum = Accumulator::new(2).unwrap();
    assert!(matches!(
        accum.backward(&opt, &weight.sum(Kind::Float), Samples(-1), true),
        Err(AccumError::Count { found: -1 })
    ));
    assert!(matches!(accum.backward(&opt, &(&weight * 2.0), Samples(2), true), Err(AccumError::LossShape { .. })));
    assert!(matches!(accum.backward(&opt, &Tensor::new(), Samples(2), true), Err(AccumError::UndefinedLoss)));
    assert!(!weight.grad().defined());
    assert!(
        accum.backward(&opt, &weight.sum(Kind::Float), Samples(i64::MAX), false).is_ok(),
        "a huge count does not overflow"
    );
    assert!(accum.backward(&opt, &weight.sum(Kind::Float), Samples(i64::MAX), true).is_ok());
    let no_graph = Tensor::from(1f32);
    assert!(matches!(accum.backward(&opt, &no_graph, Samples(2), true), Err(AccumError::Torch(_))));
}

#[test]
fn a_full_window_after_a_short_one_has_the_same_loss_weights_as_the_others() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let mut accum = Accumulator::new(4).unwrap();
    let mut first_shares = Vec::new();
    for len in [4, 4, 1, 4] {
        for micro in 0..len {
            accum.backward(&opt, &weight.mean(Kind::Float), Samples(8), micro + 1 == len).unwrap();
            if (micro, len) == (0, 4) {
                // The factor on the activations' gradients.
                first_shares.push(weight.grad().double_value(&[0]));
            }
        }
        assert_eq!(weight.grad().double_value(&[0]), 1.0, "the mean");
        weight.shallow_clone().zero_grad();
    }
    assert_eq!(first_shares, [0.25; 3], "larger factors could overflow float16");
}

#[test]
fn parameters_added_to_the_optimizer_later_are_divided_too() {
    let fresh = || Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let (one, other) = (fresh(), fresh());
    let mut opt = Params::new([&one]);
    let mut accum = Accumulator::new(2).unwrap();
    accum.backward(&opt, &one.mean(Kind::Float), Samples(4), true).unwrap();
    opt.params.push(other.shallow_clone());
    one.shallow_clone().zero_grad();
    let loss = || (&one + &other).mean(Kind::Float);
    accum.backward(&opt, &loss(), Samples(4), false).unwrap();
    accum.backward(&opt, &loss(), Samples(1), true).unwrap();
    assert_eq!((one.grad().double_value(&[0]), other.grad().double_value(&[0])), (1.0, 1.0));
}

#[test]
fn samples_and_tokens_cannot_be_mixed() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let mut accum = Accumulator::new(2).unwrap();
    let loss = || weight.mean(Kind::Float);
    accum.backward(&opt, &loss(), Tokens(100), false).unwrap();
    let error = accum.backward(&opt, &loss(), Samples(2), true).unwrap_err();
    assert!(matches!(error, AccumError::Unit { expected: "tokens", found: "samples" }), "{error}");
}

/// This rank closes with a count of 0 while the other rank's first window is still open, with a count of 0 so far.
#[test]
fn ranks_with_different_numbers_of_micro_batches_agree_on_the_reference() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    // The other rank's numbers: a count of 0, still open (1); 5 samples times 2 micro-batches; its total.
    let (others, held) = (RefCell::new(vec![0.0, 1.0, 10.0, 5.0]), Cell::new(None));
    let sync = TwoRanks::new(&others, &held);
    let mut accum = Accumulator::new(2).unwrap().with_sync(&sync);
    assert_eq!(accum.backward(&opt, &weight.mean(Kind::Float), Samples(0), true).unwrap(), Some(5.0));
    assert!(others.borrow().is_empty() && sync.closed_with_nothing.get());
    // Both ranks close with a count of 0.
    let others = RefCell::new(vec![0.0, 0.0, 0.0]);
    let sync = TwoRanks::new(&others, &held);
    let mut accum = Accumulator::new(2).unwrap().with_sync(&sync);
    assert_eq!(accum.backward(&opt, &weight.mean(Kind::Float), Samples(0), true).unwrap(), Some(0.0));
    assert!(others.borrow().is_empty());
}
