//! Tests of the hooks of saved tensors.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind};

use super::*;
use crate::autograd::{GradOptions, backward, grad};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn leaf() -> Tensor {
    Tensor::rand([4], FLOAT).set_requires_grad(true)
}

/// Keeps tensors in another dtype.
struct Smaller;

impl Hooks for Smaller {
    fn pack(&self, tensor: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        Ok(Some(Box::new(Small(Mutex::new(tensor.f_to_kind(Kind::BFloat16)?)))))
    }
}

struct Small(Mutex<Tensor>);

impl Packed for Small {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        Ok(self.0.lock().unwrap().f_to_kind(Kind::Float)?)
    }
}

/// Leaves tensors as they are, and counts them.
#[derive(Default)]
struct Counted(AtomicUsize);

impl Hooks for Counted {
    fn pack(&self, _: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(None)
    }
}

fn gradient(y: &Tensor, x: &Tensor) -> Tensor {
    grad::<Tensor>(&[&y.sum(Kind::Float)], &[x], &[], GradOptions::default()).unwrap().remove(0)
}

#[test]
fn tensors_are_packed_while_the_guard_lives() {
    let x = leaf();
    let y = {
        let _hooks = HooksGuard::new(Arc::new(Smaller)).unwrap();
        x.square()
    };
    let rounded = x.to_kind(Kind::BFloat16).to_kind(Kind::Float) * 2.0;
    assert_eq!(gradient(&y, &x), rounded.detach());
    assert_eq!(gradient(&x.square(), &x), (&x * 2.0).detach());
}

#[test]
fn only_the_last_hooks_are_asked_and_guards_may_end_in_any_order() {
    let (x, counts) = (leaf(), [0, 1].map(|_| Arc::new(Counted::default())));
    let [first, second] = [&counts[0], &counts[1]].map(|it| HooksGuard::new(Arc::clone(it) as _).unwrap());
    let _ = x.square();
    drop(first);
    let y = x.square().square();
    drop(second);
    let _ = x.square();
    assert_eq!(counts.map(|it| it.0.load(Ordering::SeqCst)), [0, 3]);
    assert!(gradient(&y, &x).allclose(&(x.pow_tensor_scalar(3) * 4.0), 1e-5, 1e-6, false));
}

#[test]
fn a_tensor_that_is_left_as_it_is_must_not_change() {
    let x = leaf();
    let y = {
        let _hooks = HooksGuard::new(Arc::new(Counted::default())).unwrap();
        x.exp()
    };
    let _ = tch::no_grad(|| y.shallow_clone().zero_());
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

struct Wrong(fn() -> Tensor);

impl Hooks for Wrong {
    fn pack(&self, _: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        Ok(Some(Box::new(Wrong(self.0))))
    }
}

impl Packed for Wrong {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        Ok((self.0)())
    }
}

#[test]
fn another_tensor_than_was_saved_is_an_error() {
    let wrong: [fn() -> Tensor; 3] =
        [|| Tensor::ones([1], FLOAT), || Tensor::ones([4], (Kind::Double, Device::Cpu)), Tensor::new];
    for wrong in wrong {
        let y = {
            let _hooks = HooksGuard::new(Arc::new(Wrong(wrong))).unwrap();
            leaf().square()
        };
        let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
        assert!(error.contains("where Float [4] on cpu was saved"), "{error}");
    }
}

struct Failing;

impl Hooks for Failing {
    fn pack(&self, _: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        Err("the disk is full".into())
    }
}

#[test]
fn errors_and_panics_of_hooks_come_out() {
    let x = leaf();
    let error = {
        let _hooks = HooksGuard::new(Arc::new(Failing)).unwrap();
        x.f_square().unwrap_err().to_string()
    };
    assert!(error.contains("the disk is full"), "{error}");
    let loss = {
        let _hooks = HooksGuard::new(Arc::new(Wrong(|| panic!("not today")))).unwrap();
        x.square().sum(Kind::Float)
    };
    let pass = std::panic::AssertUnwindSafe(|| backward::<Tensor>(&[&loss], &[], GradOptions::default()));
    let panic = std::panic::catch_unwind(pass).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"not today"));
}

#[test]
fn hooks_are_dropped_with_what_they_packed() {
    let counts = Arc::new(Counted::default());
    let y = {
        let _hooks = HooksGuard::new(Arc::clone(&counts) as _).unwrap();
        leaf().exp()
    };
    assert_eq!(Arc::strong_count(&counts), 2);
    drop(y);
    assert_eq!(Arc::strong_count(&counts), 1);
}

#[test]
fn a_saved_tensor_keeps_its_place_in_the_graph() {
    let x = leaf();
    let y = x.sin();
    let saved = SavedTensor::new(&y).unwrap();
    assert_eq!(gradient(&saved.unpack().unwrap(), &x), x.cos().detach());
    let _ = tch::no_grad(|| y.shallow_clone().zero_());
    assert!(saved.unpack().unwrap_err().to_string().contains("modified by an inplace operation"));
    assert!(!SavedTensor::new(&Tensor::new()).unwrap().unpack().unwrap().defined());
}

#[test]
fn a_tensor_is_known_by_its_memory_its_place_and_its_version() {
    let mut x = Tensor::rand([4, 4], FLOAT);
    let same = SameTensor::of(&x).unwrap();
    assert!(same.is(&x) && same.is(&x.shallow_clone()) && same.is(&x.view([4, 4])));
    assert!(!same.is(&x.tr()) && !same.is(&x.narrow(0, 0, 2)) && !same.is(&x.copy()));
    let _ = x.zero_();
    assert!(!same.is(&x), "it was changed");
    // Freed memory is given out again.
    for _ in 0..100 {
        let known = SameTensor::of(&Tensor::rand([4, 4], FLOAT)).unwrap();
        assert!(!known.is(&Tensor::rand([4, 4], FLOAT)));
    }
}

/// Notes which tensors ReLU saves.
#[derive(Default)]
struct Relus(Mutex<Vec<bool>>);

impl Hooks for Relus {
    fn pack(&self, tensor: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        self.0.lock().unwrap().push(is_relu_saving(tensor));
        Ok(None)
    }
}

#[test]
fn relu_is_known_where_it_saves_its_result() {
    let (x, noted) = (leaf(), Arc::new(Relus::default()));
    let said = || std::mem::take(&mut *noted.0.lock().unwrap());
    let before = x.relu();
    let _hooks = HooksGuard::new(Arc::clone(&noted) as _).unwrap();
    let _ = SavedTensor::new(&before).unwrap();
    assert_eq!(said(), [false], "no operator saves it");
    let _ = before.exp();
    assert_eq!(said(), [false], "`exp` saves its own result");
    let _ = before.sin();
    assert_eq!(said(), [false], "`sin` saves it");
    let y = x.relu();
    let _ = SavedTensor::new(&y).unwrap();
    let _ = y.sin();
    assert_eq!(said(), [true, false, false]);
    let _ = (&x * 1.0).relu_().sin();
    assert_eq!(said(), [true, false]);
    // The numbers of nodes count for each thread.
    let (y, noted) = (x.relu(), Arc::clone(&noted));
    std::thread::spawn(move || {
        let _hooks = HooksGuard::new(Arc::clone(&noted) as _).unwrap();
        let leaf = Tensor::ones([4], FLOAT).set_requires_grad(true);
        (0..64).for_each(|_| drop((&leaf * 1.0, y.sin())));
        assert_eq!(noted.0.lock().unwrap().iter().filter(|&&is_relu| is_relu).count(), 1);
    })
    .join()
    .unwrap();
}

#[test]
fn views_of_parameters_are_parameters() {
    let weight = Tensor::rand([4, 4], FLOAT).set_requires_grad(true);
    assert!(is_parameter(&weight) && is_parameter(&weight.tr()) && is_parameter(&weight.view([2, 8]).narrow(0, 0, 1)));
    assert!(!is_parameter(&weight.sin()) && !is_parameter(&weight.detach()));
}
