//! Hooks of saved tensors that are closures.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_memory::saved_tensors_hooks;
use tch::{Kind, TchError, Tensor};

use crate::{FLOAT, alone, grads, leaf};

#[test]
fn closures_pack_and_unpack() {
    let _alone = alone();
    let x = leaf(&[4]);
    let calls = [0, 1].map(|_| Arc::new(AtomicUsize::new(0)));
    let [packs, unpacks] = calls.clone();
    let y = {
        let pack = move |tensor: &Tensor| {
            packs.fetch_add(1, Ordering::SeqCst);
            Vec::<f32>::try_from(tensor)
        };
        let unpack = move |packed: &Vec<f32>| {
            unpacks.fetch_add(1, Ordering::SeqCst);
            Tensor::f_from_slice(packed)
        };
        let _guard = saved_tensors_hooks(pack, unpack).unwrap();
        x.sin().exp()
    };
    assert_eq!(grads(&y.sum(Kind::Float), &[&x]), grads(&x.sin().exp().sum(Kind::Float), &[&x]));
    // `sin` saves its input, `exp` its output.
    assert_eq!(calls.map(|count| count.load(Ordering::SeqCst)), [2, 2]);
}

/// `data` has a count of its own.
#[test]
fn closures_may_keep_data_of_a_tensor_that_was_changed_before() {
    let _alone = alone();
    let x = leaf(&[4]);
    let _ = tch::no_grad(|| x.shallow_clone().f_add_(&Tensor::from(1f32)));
    let y = {
        let pack = |tensor: &Tensor| Ok::<_, TchError>(tensor.data());
        let _guard = saved_tensors_hooks(pack, |kept: &Tensor| Ok(kept.shallow_clone())).unwrap();
        x.sin()
    };
    assert_eq!(grads(&y.sum(Kind::Float), &[&x])[0], x.cos().detach());
}

/// libtorch leaves the check to hooks, and Python's do not make it.
#[test]
fn closures_that_keep_memory_which_changes_are_errors() {
    let _alone = alone();
    let x = leaf(&[4]);
    let mut y = {
        let pack = |tensor: &Tensor| tensor.f_detach();
        let _guard = saved_tensors_hooks(pack, |kept: &Tensor| Ok(kept.shallow_clone())).unwrap();
        x.exp()
    };
    let loss = y.sum(Kind::Float);
    let _ = tch::no_grad(|| y.zero_());
    let error = loss.f_backward().unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation: a hook of saved tensors has kept the memory"), "{error}");
}

/// Another shape would broadcast.
#[test]
fn closures_that_give_something_else_are_errors() {
    let _alone = alone();
    let x = leaf(&[4]);
    let y = {
        let _guard = saved_tensors_hooks(|_| Ok::<_, TchError>(()), |()| Ok(Tensor::ones([1], FLOAT))).unwrap();
        x.exp()
    };
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("has unpacked Float [1] on cpu, where Float [4] on cpu was saved"), "{error}");
}
