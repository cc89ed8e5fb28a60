//! How much memory a step will need.

use overdrive_ffi::TensorList;
use overdrive_memory::account::{Category, MemoryRecorder};
use overdrive_memory::{Estimate, MemoryError};
use tch::{Device, Kind, Reduction, TchError, Tensor};

use crate::{FLOAT, alone, leaf, loss, record_step};

#[test]
fn the_peak_of_a_large_batch_is_known_from_two_small_ones() {
    let _alone = alone();
    let mut weights = [leaf(&[100, 300]), leaf(&[300, 50])];
    let estimate = Estimate::of(Device::Cpu, |batch, recorder| {
        weights.iter_mut().for_each(Tensor::zero_grad);
        let x = Tensor::f_randn([batch, 100], FLOAT)?;
        loss(&x, &weights).f_backward()?;
        recorder.tag(Category::Parameter, &weights).map_err(|_| TchError::Kind("tag".into()))
    })
    .unwrap();
    assert!(estimate.is_exact());
    for batch in [1, 16, 1000, 20_000] {
        let measured = record_step(batch, &mut weights).peak(Device::Cpu).total();
        assert_eq!(estimate.peak(batch).total(), measured, "{batch}");
    }
    let limit = estimate.peak(777).total();
    assert_eq!(estimate.largest_batch(limit), Some(777));
    assert_eq!(estimate.largest_batch(limit - 1), Some(776));
    assert_eq!(estimate.largest_batch(1000), None);
}

#[test]
fn memory_that_grows_with_the_square_of_the_batch_is_foreseen() {
    let _alone = alone();
    let w = leaf(&[10, 10]);
    let step = |batch: i64| {
        let x = Tensor::randn([batch, 10], FLOAT).matmul(&w);
        x.f_matmul(&x.tr())?.f_exp()?.f_sum(Kind::Float)?.f_backward()
    };
    let estimate = Estimate::of(Device::Cpu, |batch, _| step(batch)).unwrap();
    assert!(estimate.is_exact());
    let recorder = MemoryRecorder::begin().unwrap();
    step(700).unwrap();
    assert_eq!(estimate.peak(700).total(), recorder.end().peak(Device::Cpu).total());
}

/// The peak that was estimated and the one that is measured, for sizes that the estimate has not seen.
fn compared(estimate: &Estimate, sizes: &[i64], step: impl Fn(i64) -> Result<(), MemoryError>) -> Vec<f64> {
    let compared = |&size: &i64| {
        let recorder = MemoryRecorder::begin().unwrap();
        step(size).unwrap();
        estimate.peak(size).total() as f64 / recorder.end().peak(Device::Cpu).total() as f64
    };
    sizes.iter().map(compared).collect()
}

fn are_within_a_tenth(ratios: &[f64]) -> bool {
    ratios.iter().all(|ratio| (ratio - 1.0).abs() <= 0.1)
}

/// The scores of attention are pairs of places.
#[test]
fn the_peak_of_longer_sequences_is_known_from_short_ones() {
    let _alone = alone();
    let (table, weights) = (leaf(&[300, 32]), [leaf(&[32, 96]), leaf(&[32, 32]), leaf(&[32, 300])]);
    for is_fused in [false, true] {
        let step = |length: i64| -> Result<(), MemoryError> {
            let tokens = Tensor::f_randint(300, [4, length], (Kind::Int64, Device::Cpu))?;
            let x = Tensor::f_embedding(&table, &tokens, -1, false, false)?;
            let heads = x.f_matmul(&weights[0])?.f_view([4, length, 3, 2, 16])?.f_permute([2, 0, 3, 1, 4])?;
            let [q, k, v] = [0, 1, 2].map(|at| heads.get(at));
            let mixed = match is_fused {
                true => Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<Tensor>, 0.0, true, None, false)?,
                false => (q.f_matmul(&k.f_transpose(-2, -1)?)? / 4.0).f_softmax(-1, None)?.f_matmul(&v)?,
            };
            let x = x.f_add(&mixed.f_transpose(1, 2)?.f_reshape([4, length, 32])?.f_matmul(&weights[1])?)?;
            let logits = x.f_matmul(&weights[2])?.f_view([-1, 300])?;
            TensorList::new(&[&table, &weights[0], &weights[1], &weights[2]])?.clear_grads()?;
            let loss =
                logits.f_cross_entropy_loss(&tokens.f_view([-1])?, None::<Tensor>, Reduction::Mean, -100, 0.0)?;
            Ok(loss.f_backward()?)
        };
        let estimate = Estimate::of_sizes(Device::Cpu, [16, 32, 48, 64], |length, _| step(length)).unwrap();
        let found = compared(&estimate, &[10, 100, 257, 700], step);
        assert!(are_within_a_tenth(&found), "fused: {is_fused}, {found:?}");
        // Attention in steps allocates the same at each length.
        assert!(is_fused || estimate.is_exact() && found.iter().all(|&ratio| ratio == 1.0), "{found:?}");
    }
}

/// Sides are divided by four: only sizes that are multiples of it follow a rule.
#[test]
fn the_peak_of_larger_images_is_known_from_small_ones() {
    let _alone = alone();
    let weights = [leaf(&[8, 3, 3, 3]), leaf(&[16, 8, 3, 3]), leaf(&[16, 10])];
    let step = |side: i64| -> Result<(), MemoryError> {
        let mut x = Tensor::f_randn([2, 3, side, side], FLOAT)?;
        for weight in &weights[..2] {
            x = x.f_conv2d(weight, None::<Tensor>, [1], [1], [1], 1)?.f_relu()?.f_max_pool2d(
                [2, 2],
                [2],
                [0],
                [1],
                false,
            )?;
        }
        let means = x.f_mean_dim([2, 3].as_slice(), false, Kind::Float)?;
        TensorList::new(&weights)?.clear_grads()?;
        Ok(means.f_matmul(&weights[2])?.f_square()?.f_sum(Kind::Float)?.f_backward()?)
    };
    let estimate = Estimate::of_sizes(Device::Cpu, [16, 24, 32, 40], |side, _| step(side)).unwrap();
    let found = compared(&estimate, &[64, 100, 222, 360], step);
    assert!(are_within_a_tenth(&found), "{found:?}");
    assert!(!Estimate::of_sizes(Device::Cpu, [17, 22, 31, 43], |side, _| step(side)).unwrap().is_exact());
}

/// Each place is an operator of its own: the order of allocations depends on the length.
#[test]
fn a_loop_over_places_is_prolonged_and_said_to_be_inexact() {
    let _alone = alone();
    let weight = leaf(&[64, 64]);
    let step = |length: i64| -> Result<(), MemoryError> {
        let mut state = Tensor::f_zeros([16, 64], FLOAT)?;
        for _ in 0..length {
            state = state.f_matmul(&weight)?.f_add(&Tensor::f_randn([16, 64], FLOAT)?)?.f_tanh()?;
        }
        TensorList::new(&[&weight])?.clear_grads()?;
        Ok(state.f_sum(Kind::Float)?.f_backward()?)
    };
    let estimate = Estimate::of_sizes(Device::Cpu, [16, 24, 32, 40], |length, _| step(length)).unwrap();
    let found = compared(&estimate, &[60, 150, 400], step);
    assert!(!estimate.is_exact() && are_within_a_tenth(&found), "{found:?}");
}

#[test]
fn memory_that_follows_no_rule_is_said_to_be_inexact() {
    let _alone = alone();
    let step = |batch: i64, _: &MemoryRecorder| Tensor::f_zeros([batch * batch * batch], FLOAT).map(drop);
    assert!(!Estimate::of(Device::Cpu, step).unwrap().is_exact());
}

#[test]
fn a_device_that_the_step_does_not_use_is_refused() {
    let _alone = alone();
    let step = |batch: i64, _: &MemoryRecorder| Tensor::f_zeros([batch], FLOAT).map(drop);
    assert!(matches!(Estimate::of(Device::Cuda(7), step), Err(MemoryError::NothingThere { .. })));
}

#[test]
fn runs_in_different_orders_are_prolonged_and_said_to_be_inexact() {
    let _alone = alone();
    let estimate = Estimate::of_sizes(Device::Cpu, [2, 4, 6, 8], |batch, _| {
        let parts: Vec<_> = (0..batch).map(|_| Tensor::zeros([1000], FLOAT)).collect();
        drop(parts);
        Ok::<_, TchError>(())
    })
    .unwrap();
    assert!(!estimate.is_exact());
    assert_eq!(estimate.peak(10).total(), 10 * 4000);
}

#[test]
fn a_forecast_names_what_would_make_a_batch_fit() {
    let _alone = alone();
    let weights = [leaf(&[100, 300]), leaf(&[300, 50])];
    let state = [Tensor::zeros([100, 300], FLOAT), Tensor::zeros([300, 50], FLOAT)];
    let estimate = Estimate::of(Device::Cpu, |batch, recorder| {
        TensorList::new(&weights)?.clear_grads()?;
        loss(&Tensor::randn([batch, 100], FLOAT), &weights).backward();
        recorder.tag(Category::OptimizerState, &state)?;
        recorder.tag(Category::Parameter, &weights)
    })
    .unwrap();
    let limit = estimate.peak(260).total();
    let forecast = estimate.forecast(1000, Some(limit));
    assert_eq!((forecast.peak_bytes, forecast.largest_batch), (estimate.peak(1000).total(), Some(260)));
    let at_peak = |name: &str| forecast.uses.iter().find(|it| it.name == name).map_or(0, |it| it.at_peak);
    assert_eq!(at_peak("optimizer state"), 4 * 45_000);
    assert_eq!(forecast.uses.iter().map(|it| it.at_peak).sum::<u64>(), forecast.peak_bytes);
    assert_eq!(forecast.uses.iter().map(|it| it.bytes.len()).max(), Some(forecast.seconds.len()));
    // In halves, the first size that fits: what a step with such parts needs. Inputs are not tagged here.
    let micro = forecast.techniques.iter().find(|it| it.name.starts_with("micro-batches of ")).unwrap();
    let size: i64 = micro.name.split([' ', ':']).nth(2).unwrap().parse().unwrap();
    TensorList::new(&weights).unwrap().clear_grads().unwrap();
    let recorder = MemoryRecorder::begin().unwrap();
    for _ in 0..1000 / size {
        loss(&Tensor::randn([size, 100], FLOAT), &weights).backward();
    }
    recorder.tag(Category::Parameter, &weights).unwrap();
    recorder.tag(Category::OptimizerState, &state).unwrap();
    assert_eq!((micro.peak_bytes, micro.is_rough), (recorder.end().peak(Device::Cpu).total(), false), "{size}");
    let eight_bit = forecast.techniques.iter().find(|it| it.name.contains("8-bit") && !it.name.contains("together"));
    let saved = forecast.peak_bytes - eight_bit.unwrap().peak_bytes;
    assert!((saved as f64 / (4.0 * 45_000.0) - 0.746).abs() < 0.001, "{saved}");
    // What fits comes first, and what saves nothing is left out.
    let fits: Vec<_> = forecast.techniques.iter().map(|it| it.peak_bytes <= limit).collect();
    assert!(fits.is_sorted_by(|one, other| one >= other) && fits[0], "{fits:?}");
    assert!(estimate.forecast(1000, None).largest_batch.is_none());
}

#[test]
fn sizes_that_show_nothing_are_refused() {
    for sizes in [[0, 4, 5, 6], [4, 4, 5, 6], [8, 4, 10, 12]] {
        let refused = Estimate::of_sizes(Device::Cpu, sizes, |_, _| Ok::<_, TchError>(()));
        assert!(matches!(refused, Err(MemoryError::Sizes { .. })), "{sizes:?}");
    }
}
