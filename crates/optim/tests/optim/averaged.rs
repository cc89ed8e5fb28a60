//! Averages of weights.

use std::panic::{AssertUnwindSafe, catch_unwind};

use overdrive_core::{Entry, OptimizerError, Stateful};
use overdrive_optim::{AveragedModel, Averaging};
use tch::{Kind, Tensor, nn};

use crate::CPU;

/// A model with a weight and a running statistic.
fn model() -> (nn::VarStore, Tensor, Tensor) {
    let mut vs = nn::VarStore::new(CPU);
    let weight = vs.root().zeros("weight", &[3]);
    let statistic = vs.root().zeros_no_train("running_mean", &[2]);
    vs.double();
    (vs, weight, statistic)
}

fn set(tensor: &Tensor, value: f64) {
    tch::no_grad(|| drop(tensor.shallow_clone().fill_(value)));
}

fn first(tensor: &Tensor) -> f64 {
    tensor.double_value(&[0])
}

#[test]
fn ema_and_swa_average_from_the_first_update_on() {
    for (averaging, expected) in [
        (Averaging::Ema { decay: 0.75 }, [8.0, 8.0 * 0.75 + 4.0 * 0.25, (8.0 * 0.75 + 1.0) * 0.75 + 0.25]),
        (Averaging::Swa, [8.0, 6.0, 13.0 / 3.0]),
    ] {
        let (vs, weight, statistic) = model();
        let mut averaged = AveragedModel::new(&vs, averaging).unwrap();
        let mut all = AveragedModel::builder(&vs, averaging).use_buffers(true).build().unwrap();
        for (value, expected) in [8.0, 4.0, 1.0].into_iter().zip(expected) {
            set(&weight, value);
            set(&statistic, value);
            averaged.update().unwrap();
            all.update().unwrap();
            let averages = averaged.averages().unwrap();
            assert_eq!(averages.iter().map(|it| it.name().unwrap()).collect::<Vec<_>>(), ["weight", "running_mean"]);
            assert!((first(averages[0].tensor()) - expected).abs() < 1e-15, "{averaging:?}");
            assert_eq!(first(averages[1].tensor()), value, "a buffer is copied");
            let averages = all.averages().unwrap();
            assert_eq!(averages.iter().map(|it| it.name().unwrap()).collect::<Vec<_>>(), ["running_mean", "weight"]);
            assert!(averages.iter().all(|it| (first(it.tensor()) - expected).abs() < 1e-15), "{averaging:?}");
        }
        assert_eq!((averaged.n_averaged(), first(&weight)), (3, 1.0));
    }
}

#[test]
fn the_model_gets_the_averages_temporarily_or_permanently() {
    let (vs, weight, _) = model();
    let mut averaged = AveragedModel::new(&vs, Averaging::Swa).unwrap();
    for value in [1.0, 3.0] {
        set(&weight, value);
        averaged.update().unwrap();
    }
    assert_eq!((averaged.apply(|| first(&weight)).unwrap(), first(&weight)), (2.0, 3.0));
    let panicked = catch_unwind(AssertUnwindSafe(|| averaged.apply(|| panic!("in an evaluation"))));
    assert!(panicked.is_err());
    assert_eq!(first(&weight), 3.0, "the model has its own weights again");
    assert_eq!(averaged.apply(|| first(&weight)).unwrap(), 2.0);
    averaged.copy_to_model().unwrap();
    assert_eq!(first(&weight), 2.0);
    assert!(weight.requires_grad());
}

/// Two variables of the same memory, as `set_data` makes them, are swapped twice.
#[test]
fn tied_weights_are_given_back() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let mut vs = nn::VarStore::new(CPU);
        let (one, other) = (vs.root().zeros("one", &[3]), vs.root().zeros("other", &[3]));
        vs.set_kind(kind);
        other.shallow_clone().set_data(&one);
        let mut averaged = AveragedModel::new(&vs, Averaging::Swa).unwrap();
        for value in [1.0, 3.0] {
            set(&one, value);
            averaged.update().unwrap();
        }
        for _ in 0..2 {
            assert_eq!(averaged.apply(|| [first(&one), first(&other)]).unwrap(), [2.0; 2], "{kind:?}");
            assert_eq!([first(&one), first(&other)], [3.0; 2], "{kind:?}");
            assert!(averaged.averages().unwrap().iter().all(|it| first(it.tensor()) == 2.0), "{kind:?}");
        }
    }
}

#[test]
fn averages_are_saved_and_resumed() {
    let (vs, weight, _) = model();
    let mut averaged = AveragedModel::new(&vs, Averaging::Swa).unwrap();
    for value in [1.0, 3.0] {
        set(&weight, value);
        averaged.update().unwrap();
    }
    let state = averaged.state_dict().unwrap();
    assert_eq!(
        state.iter().map(|(name, _)| name).collect::<Vec<_>>(),
        ["module.running_mean", "module.weight", "n_averaged"]
    );
    let mut resumed = AveragedModel::new(&vs, Averaging::Swa).unwrap();
    resumed.load_state_dict(&state).unwrap();
    set(&weight, 5.0);
    resumed.update().unwrap();
    assert_eq!(first(resumed.averages().unwrap()[0].tensor()), 3.0);
    assert_eq!(first(averaged.averages().unwrap()[0].tensor()), 2.0, "loading copies");

    let mut bad = averaged.state_dict().unwrap();
    bad.insert("module.weight", Entry::Tensor(Tensor::zeros([3], (Kind::Float, CPU))));
    assert!(resumed.load_state_dict(&bad).unwrap_err().to_string().contains("module.weight"));
    let mut bad = averaged.state_dict().unwrap();
    bad.insert("n_averaged", Entry::Int(-1));
    assert!(resumed.load_state_dict(&bad).unwrap_err().to_string().contains("n_averaged"));
    assert_eq!(resumed.n_averaged(), 3);
    for decay in [-0.1, 1.1, f64::NAN] {
        let error = AveragedModel::new(&vs, Averaging::Ema { decay }).unwrap_err();
        assert!(matches!(error, OptimizerError::InvalidOption { option: "decay", .. }), "{error}");
    }
}

#[test]
fn frozen_parameters_are_averaged_too() {
    let (mut vs, weight, _) = model();
    vs.freeze();
    let mut averaged = AveragedModel::new(&vs, Averaging::Ema { decay: 0.5 }).unwrap();
    vs.unfreeze();
    for value in [1.0, 3.0] {
        set(&weight, value);
        averaged.update().unwrap();
    }
    assert_eq!(first(averaged.averages().unwrap()[0].tensor()), 2.0);
}

#[test]
fn averages_of_bfloat16_weights_keep_updates_too_small_for_bfloat16() {
    let (mut vs, weight, statistic) = model();
    vs.bfloat16();
    set(&weight, 1.0);
    let mut averaged = AveragedModel::new(&vs, Averaging::Ema { decay: 0.999 }).unwrap();
    averaged.update().unwrap();
    set(&weight, 2.0);
    for _ in 0..1000 {
        averaged.update().unwrap();
    }
    let expected = 2.0 - 0.999f64.powi(1000);
    let average = averaged.averages().unwrap()[0].tensor().double_value(&[0]);
    assert!((average - expected).abs() < 1e-4, "{average}");
    let inside = averaged
        .apply(|| {
            set(&statistic, 7.0); // an evaluation that recomputes statistics
            first(&weight)
        })
        .unwrap();
    assert!((inside - expected).abs() < 0.01, "rounded to bfloat16: {inside}");
    assert_eq!((first(&weight), first(&statistic)), (2.0, 0.0), "the model's own values again");
    let averages = averaged.averages().unwrap();
    assert_eq!(first(averages[0].tensor()), average, "not rounded");
    assert_eq!(first(averages[1].tensor()), 7.0, "kept in the averages");

    // A state of PyTorch's, whose averages have the model's dtype.
    let mut state = averaged.state_dict().unwrap();
    state.insert("module.weight", Entry::Tensor(Tensor::ones([3], (Kind::BFloat16, CPU))));
    averaged.load_state_dict(&state).unwrap();
    assert_eq!(averaged.averages().unwrap()[0].tensor().kind(), Kind::Float);
}

#[test]
fn a_decay_that_warms_up_forgets_the_first_weights() {
    let (vs, weight, _) = model();
    let mut averaged =
        AveragedModel::builder(&vs, Averaging::Ema { decay: 0.999 }).warm_up(true).device(CPU).build().unwrap();
    averaged.update().unwrap();
    set(&weight, 1.0);
    let mut expected = 0.0;
    for n in 1..20 {
        averaged.update().unwrap();
        let decay = f64::min(0.999, f64::from(1 + n) / f64::from(10 + n));
        expected = expected * decay + 1.0 - decay;
        assert!((first(averaged.averages().unwrap()[0].tensor()) - expected).abs() < 1e-12);
    }
}
