//! Masks, which take one bit an element.

use overdrive_ffi::host_memory;
use overdrive_memory::{Compression, SavedTensors};
use tch::{Device, Kind, Tensor};

use crate::{FLOAT, alone, grads, leaf};

/// The mask decides which elements get a gradient.
#[test]
fn masks_are_kept_exactly() {
    let _alone = alone();
    let x = leaf(&[5, 7]);
    for other in [0.0, f64::NEG_INFINITY] {
        let mask = Tensor::rand([5, 7], FLOAT).gt(0.5);
        let expected = mask.logical_not().to_kind(Kind::Float);
        let y = {
            let _guard = SavedTensors::compressed(Compression::Int8).min_bytes(0).begin().unwrap();
            x.masked_fill(&mask, other)
        };
        drop(mask);
        let sum = y.masked_fill(&y.isfinite().logical_not(), 0.0).sum(Kind::Float);
        assert_eq!(grads(&sum, &[&x])[0], expected);
    }
}

/// What another operator saves of the same tensor has its values, a small number the least one of its block.
#[test]
fn what_relu_saves_is_one_bit_and_exact() {
    let _alone = alone();
    let x = Tensor::from_slice(&[-1.0f32, 0.0, 1e-6, 1000.0, f32::NAN, -2.0, 3.0]).set_requires_grad(true);
    let run = || x.relu() * Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    let _guard = SavedTensors::compressed(Compression::BFloat16).min_bytes(0).begin().unwrap();
    assert_eq!(grads(&run().sum(Kind::Float), &[&x])[0], Tensor::from_slice(&[0f32, 0.0, 3.0, 4.0, 5.0, 0.0, 7.0]));
    let finite = Tensor::from_slice(&[-1.0f32, 1e-6, 1000.0]).set_requires_grad(true);
    let _guard = SavedTensors::compressed(Compression::Int8).min_bytes(0).begin().unwrap();
    assert_eq!(grads(&finite.relu().sum(Kind::Float), &[&finite])[0], Tensor::from_slice(&[0f32, 1.0, 1.0]));
    let y = finite.relu();
    assert_eq!(
        grads(&(&y * &y).sum(Kind::Float), &[&finite])[0],
        Tensor::from_slice(&[0f32, 2.0 * 1000.0 / 127.0, 2000.0])
    );
}

/// A loss of what is computed with compressed tensors, and the bytes that its graph takes.
fn compressed(compression: Compression, run: impl FnOnce() -> Tensor) -> (Tensor, u64) {
    host_memory::count(usize::MAX).unwrap();
    let allocated = || host_memory::stats().unwrap().allocated;
    let before = allocated();
    let loss = {
        let _guard = SavedTensors::compressed(compression).min_bytes(0).begin().unwrap();
        run()
    };
    (loss, allocated() - before)
}

/// Nothing else keeps the result of ReLU or the mask of dropout.
#[test]
fn one_bit_is_all_that_dropout_and_relu_keep() {
    let _alone = alone();
    let x = leaf(&[1 << 20]);
    for compression in [Compression::Masks, Compression::BFloat16, Compression::Float8, Compression::Int8] {
        for run in [|x: &Tensor| x.dropout(0.1, true), Tensor::relu] {
            let (loss, found) = compressed(compression, || run(&x).sum(Kind::Float));
            assert!((1 << 17..(1 << 17) + 4096).contains(&found), "{compression:?}: {found} bytes");
            drop(loss);
        }
    }
}

/// A model of which nothing is rounded: products have saved what they need, and masks are exact.
#[test]
fn dropout_takes_a_bit_an_element_and_gradients_are_the_same_to_the_bit() {
    const ELEMENTS: u64 = 64 * 128;
    let _alone = alone();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        let tensor = |size: [i64; 2]| Tensor::randn(size, (kind, Device::Cpu)).set_requires_grad(true);
        let (x, weights) = (tensor([64, 128]), [tensor([128, 128]), tensor([128, 128]), tensor([128, 128])]);
        let all = [&x, &weights[0], &weights[1], &weights[2]];
        let run = || {
            tch::manual_seed(5);
            let layer = |y: Tensor, weight: &Tensor| y.matmul(weight).relu().dropout(0.3, true);
            weights.iter().fold(x.shallow_clone(), layer).sum(kind)
        };
        host_memory::count(usize::MAX).unwrap();
        let before = host_memory::stats().unwrap().allocated;
        let loss = run();
        let plain = host_memory::stats().unwrap().allocated - before;
        let expected = grads(&loss, &all);
        drop(loss);
        // A compression to what the tensors are anyway, too.
        let compressions = [Compression::Masks, Compression::BFloat16];
        for compression in compressions.into_iter().take(if kind == Kind::BFloat16 { 2 } else { 1 }) {
            let (loss, found) = compressed(compression, run);
            // Of each layer, three masks' elements: dropout's, ReLU's, and the result that the next product saves.
            let bytes = kind.elt_size_in_bytes() as u64;
            let (most, least) = (8 * ELEMENTS * bytes, (2 * bytes) * ELEMENTS + 6 * ELEMENTS / 8);
            assert!(plain >= most && (least..least + 8192).contains(&found), "{kind:?}: {found} of {plain}, {least}");
            assert_eq!(grads(&loss, &all), expected, "{kind:?}, {compression:?}");
        }
    }
}
