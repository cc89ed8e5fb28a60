//! How much memory a step will need.

use overdrive_ffi::TensorList;
use overdrive_memory::account::{Category, MemoryRecorder};
use overdrive_memory::{Estimate, MemoryError};
use tch::{Device, Kind, TchError, Tensor};

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
