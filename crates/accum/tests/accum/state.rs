//! The accumulator's saved state.

use overdrive_accum::{Accumulator, Samples};
use overdrive_core::{StateError, Stateful};
use tch::{Kind, Tensor};

use crate::{CPU, Params};

#[test]
fn the_reference_is_saved_between_windows_but_not_inside_one() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let mut accum = Accumulator::new(2).unwrap();
    let loss = || weight.mean(Kind::Float);
    accum.backward(&opt, &loss(), Samples(3), false).unwrap();
    assert!(matches!(accum.state_dict(), Err(StateError::NotSaved { .. })));
    accum.backward(&opt, &loss(), Samples(7), true).unwrap();
    let state = accum.state_dict().unwrap();
    assert_eq!(state.float("reference").unwrap(), 10.0);
    let mut resumed = Accumulator::new(2).unwrap();
    resumed.load_state_dict(&state).unwrap();
    assert_eq!(resumed.state_dict().unwrap().float("reference").unwrap(), 10.0);
}

#[test]
fn a_state_is_not_loaded_into_an_open_window() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let mut accum = Accumulator::new(2).unwrap();
    let state = accum.state_dict().unwrap();
    accum.backward(&opt, &weight.mean(Kind::Float), Samples(3), false).unwrap();
    assert!(matches!(accum.load_state_dict(&state), Err(StateError::NotSaved { .. })));
    accum.abandon().unwrap();
    accum.load_state_dict(&state).unwrap();
    assert_eq!(accum.backward(&opt, &weight.mean(Kind::Float), Samples(4), true).unwrap(), Some(4.0));
}
