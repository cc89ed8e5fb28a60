//! The noise scale against its definition.

use overdrive_accum::{AccumError, Accumulator, GradientNoiseScale, Samples};
use tch::{Kind, Tensor};

use crate::{CPU, Params, grads, loss, model, zero_grads};

fn number(value: f64) -> Tensor {
    Tensor::from(value)
}

#[test]
fn expected_norms_give_the_true_scale() -> Result<(), AccumError> {
    // The expected squared norm of a batch's gradient is |G|^2 + S / B.
    let (gradient, noise_sum) = (0.5, 24.0);
    let expected = |size: f64| number(gradient + noise_sum / size);
    let mut noise = GradientNoiseScale::new(0.9)?;
    assert_eq!(noise.simple_noise_scale()?, None);
    for _ in 0..3 {
        noise.update((&expected(4.0), 4.0), (&expected(32.0), 32.0))?;
        let found = noise.simple_noise_scale()?.unwrap();
        assert!((found - 48.0).abs() < 1e-9, "{found}");
    }
    // Another gradient, and a window that overflowed.
    noise.update((&number(f64::INFINITY), 4.0), (&expected(32.0), 32.0))?;
    let kept = noise.simple_noise_scale()?.unwrap();
    assert!((kept - 48.0).abs() < 1e-9, "{kept}");
    noise.update((&number(2.0), 4.0), (&number(2.0), 32.0))?;
    let share = 1.0 - 0.9f64.powi(3);
    let mixed = 0.9 * share * noise_sum / (0.9 * share * gradient + 0.1 * 2.0);
    let found = noise.tensor()?.unwrap().double_value(&[]);
    assert!((found - mixed).abs() < 1e-9, "{found}, not {mixed}");
    Ok(())
}

#[test]
fn a_window_compares_its_first_micro_batch_with_the_whole() -> Result<(), Box<dyn std::error::Error>> {
    let (vs, model) = model();
    let opt = Params { params: vs.trainable_variables(), behavior: Default::default() };
    let data = Tensor::randn([11, 5], (Kind::Float, CPU));
    let squared = |inputs: &Tensor| -> f64 {
        loss(&model, inputs).backward();
        let sum = grads(&vs).iter().map(|grad| grad.square().sum(Kind::Double).double_value(&[])).sum();
        zero_grads(&vs);
        sum
    };
    let (small, big) = (squared(&data.narrow(0, 0, 3)), squared(&data));
    let expected = (small - big) / (1.0 / 3.0 - 1.0 / 11.0) * (11.0 - 3.0) / (11.0 * big - 3.0 * small);
    let mut accum = Accumulator::new(3)?;
    let mut noise = GradientNoiseScale::new(0.5)?;
    for _ in 0..2 {
        for micro in accum.windows(data.split_with_sizes([3, 6, 2], 0)) {
            let loss = loss(&model, &micro.batch);
            let total = accum.backward(&opt, &loss, Samples(micro.batch.size()[0]), micro.closes)?;
            noise.observe(&accum, &opt, total)?;
        }
        zero_grads(&vs);
        let found = noise.simple_noise_scale()?.unwrap();
        assert!((found / expected - 1.0).abs() < 1e-4, "{found}, not {expected}");
    }
    // A window of one micro-batch, and one that is given up, add nothing.
    let before = noise.simple_noise_scale()?;
    let total = accum.backward(&opt, &loss(&model, &data), Samples(11), true)?;
    noise.observe(&accum, &opt, total)?;
    let total = accum.backward(&opt, &loss(&model, &(data * 9.0)), Samples(11), false)?;
    noise.observe(&accum, &opt, total)?;
    accum.abandon()?;
    noise.abandon();
    assert_eq!(noise.simple_noise_scale()?, before);
    Ok(())
}

#[test]
fn unusable_arguments_are_refused() -> Result<(), AccumError> {
    for decay in [-0.1, 1.0, f64::NAN] {
        assert!(matches!(GradientNoiseScale::new(decay), Err(AccumError::NoiseScale { what: "decay", .. })));
    }
    let mut noise = GradientNoiseScale::new(0.0)?;
    let one = number(1.0);
    for (small, big) in [(4.0, 4.0), (0.0, 4.0), (8.0, 4.0), (4.0, f64::NAN), (4.0, f64::INFINITY)] {
        assert!(noise.update((&one, small), (&one, big)).is_err(), "{small} and {big}");
    }
    let error = noise.update((&Tensor::from_slice(&[1.0, 2.0]), 1.0), (&one, 2.0)).unwrap_err();
    assert_eq!(error.to_string(), "a squared norm is of shape [2], but should be one number");
    assert!(noise.update((&one, 1.0), (&Tensor::new(), 2.0)).is_err());
    assert_eq!(noise.simple_noise_scale()?, None);
    Ok(())
}
