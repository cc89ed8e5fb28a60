//! The C++ interface: exceptions of every kind become `Err`, and the functions that tch leaves out work as documented.

use overdrive_ffi::autocast::{self, Region, State};
use overdrive_ffi::{
    Arg, ErrorKind, GradHook, Op, TensorList, Value, adamw8bit, context, cuda, empty_pinned, test_throw,
};
use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Any operator; the tests call it only with valid arguments.
fn any_op(name: &str, overload: &str) -> Result<Op, overdrive_ffi::Error> {
    // SAFETY: as above.
    unsafe { Op::find_unchecked(name, overload) }
}

#[test]
fn every_cpp_exception_becomes_an_error_of_its_kind() {
    let planted = [
        (0, ErrorKind::OutOfMemory, "planted out of memory"),
        (1, ErrorKind::Cuda, "planted CUDA error"),
        (2, ErrorKind::Distributed, "planted distributed error"),
        (3, ErrorKind::Other, "planted value error"),
        (4, ErrorKind::OutOfMemory, "std::bad_alloc"),
        (5, ErrorKind::Other, "planted runtime error"),
        (6, ErrorKind::Other, "a C++ exception of unknown type"),
    ];
    for (what, kind, message) in planted {
        let error = test_throw(what).expect_err("it throws");
        assert_eq!(error.kind(), kind, "{message}");
        assert_eq!(error.message(), message);
    }
    assert!(test_throw(-1).is_ok());
}

#[test]
fn the_stack_trace_is_not_in_the_message_but_in_the_source_with_rust_backtrace() {
    const NAME: &str = "the_stack_trace_is_not_in_the_message_but_in_the_source_with_rust_backtrace";
    const RAISED: &str = "Exception raised from";
    let error = test_throw(3).expect_err("it throws");
    assert!(!error.to_string().contains(RAISED), "{error}");
    assert!(error.trace().to_string().contains(RAISED), "{}", error.trace());
    if std::env::var_os("OVERDRIVE_TEST_SOURCE").is_some() {
        println!("the source is {}", error.source().map_or("none".to_owned(), ToString::to_string));
        return;
    }
    for (asked, shown) in [(None, "the source is none"), (Some("0"), "the source is none"), (Some("1"), RAISED)] {
        let mut process = std::process::Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", "--nocapture", NAME]);
        process.env("OVERDRIVE_TEST_SOURCE", "").env_remove("RUST_BACKTRACE");
        let output = process.envs(asked.map(|value| ("RUST_BACKTRACE", value))).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains(shown), "{asked:?}: {said}");
    }
}

#[test]
fn an_exhausted_host_is_out_of_memory() {
    let xs = TensorList::new(&[Tensor::zeros([1], FLOAT).expand([1 << 46], false)]).unwrap();
    let add = Op::find("aten::_foreach_add", "Scalar").unwrap();
    let error = add.call(&[Arg::TensorList(&xs), Arg::Double(1.0)]).expect_err("256 TiB do not fit");
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    // The same through tch, whose errors are only text.
    let tch_error = Tensor::f_zeros([1 << 46], FLOAT).expect_err("256 TiB do not fit");
    assert_eq!(overdrive_ffi::Error::from(tch_error).kind(), ErrorKind::OutOfMemory);
}

#[test]
fn an_unknown_operator_is_named() {
    let error = any_op("aten::no_such_operator", "").expect_err("it does not exist");
    assert!(error.message().contains("no_such_operator"), "{error}");
    assert!(any_op("nul\0byte", "").is_err() && Op::find("nul\0byte", "").is_err());
}

#[test]
fn lists_of_scalars_reach_their_tensors() {
    let xs = TensorList::new(&[Tensor::ones([2], FLOAT), Tensor::ones([1], FLOAT)]).unwrap();
    let mul = Op::find("aten::_foreach_mul_", "ScalarList").unwrap();
    mul.call(&[Arg::TensorList(&xs), Arg::ScalarList(&[3.0, 0.5])]).unwrap();
    assert_eq!((xs.get(0).unwrap().double_value(&[1]), xs.get(1).unwrap().double_value(&[0])), (3.0, 0.5));
    assert!(mul.call(&[Arg::TensorList(&xs), Arg::ScalarList(&[3.0])]).is_err());
}

#[test]
fn wrong_arguments_are_errors() {
    let mul = Op::find("aten::_foreach_mul_", "Scalar").unwrap();
    let xs = TensorList::new(&[Tensor::ones([2], FLOAT)]).unwrap();
    assert!(mul.call(&[]).unwrap_err().message().contains("needs argument 0, self"));
    assert!(mul.call(&[Arg::TensorList(&xs), Arg::None]).is_err());
    assert!(mul.call(&[Arg::Double(1.0), Arg::TensorList(&xs)]).is_err());
    let too_many = [Arg::TensorList(&xs), Arg::Double(1.0), Arg::Double(1.0)];
    assert!(mul.call(&too_many).unwrap_err().message().contains("at most 2"));
}

#[test]
fn every_sort_of_argument_and_result_crosses() {
    let xs = TensorList::new(&[Tensor::from_slice(&[3f32, 4.0]), Tensor::from_slice(&[0f32, 0.0])]).unwrap();
    let norms = Op::find("aten::_foreach_norm", "Scalar").unwrap().call(&[Arg::TensorList(&xs)]).unwrap();
    let [Value::TensorList(norms)] = &norms[..] else { panic!("{norms:?}") };
    assert_eq!(norms.get(0).unwrap().double_value(&[]), 5.0);

    let x = Tensor::arange(6, FLOAT);
    let view = any_op("aten::view", "").unwrap().call(&[Arg::Tensor(&x), Arg::IntList(&[2, 3])]).unwrap();
    let [Value::Tensor(view)] = &view[..] else { panic!("{view:?}") };
    assert_eq!(view.size(), [2, 3]);

    let max = any_op("aten::max", "dim").unwrap().call(&[Arg::Tensor(view), Arg::Int(1)]).unwrap();
    assert!(matches!(&max[..], [Value::Tensor(_), Value::Tensor(_)]), "{max:?}");
    let size = any_op("aten::size", "int").unwrap().call(&[Arg::Tensor(view), Arg::Int(1)]).unwrap();
    assert!(matches!(size[..], [Value::Int(3)]), "{size:?}");
    let item = any_op("aten::allclose", "").unwrap().call(&[Arg::Tensor(&x), Arg::Tensor(&x)]).unwrap();
    assert!(matches!(item[..], [Value::Bool(true)]), "{item:?}");
}

#[test]
fn grads_are_found_selected_and_cleared() {
    let params: Vec<_> = (0..3).map(|_| Tensor::ones([2], FLOAT).set_requires_grad(true)).collect();
    (&params[0] * 2.0 + &params[2] * 3.0).sum(Kind::Float).backward();
    let list = TensorList::new(&params).unwrap();
    let grads = list.grads().unwrap();
    assert_eq!(grads.defined, [true, false, true]);
    assert!(!grads.complete());
    assert_eq!(grads.list.get(1).unwrap().double_value(&[0]), 3.0);
    assert_eq!(list.select(&grads.defined).unwrap().len(), 2);
    assert!(list.select(&[true]).unwrap_err().message().contains("1 flags for a list of 3"));
    assert!(list.get(3).is_err());
    list.clear_grads().unwrap();
    assert!(!params[0].grad().defined());
}

#[test]
fn autocast_regions_nest_and_restore_after_a_panic() {
    let off = autocast::state(Device::Cpu).unwrap();
    assert!(!off.enabled);
    let on = State { enabled: true, kind: Kind::BFloat16, cache_enabled: true };
    let result = std::panic::catch_unwind(|| {
        let _outer = Region::enter(Device::Cpu, on).unwrap();
        let _inner =
            Region::enter(Device::Cpu, State { enabled: false, kind: Kind::Half, cache_enabled: false }).unwrap();
        assert_eq!(autocast::state(Device::Cpu).unwrap().kind, Kind::Half);
        panic!("planted");
    });
    assert!(result.is_err());
    assert_eq!(autocast::state(Device::Cpu).unwrap(), off);
}

#[test]
fn regions_that_end_out_of_order_leave_nothing_behind() {
    let off = autocast::state(Device::Cpu).unwrap();
    let on = |kind, cache_enabled| State { enabled: true, kind, cache_enabled };
    // They end in the order in which they began, not from the innermost outwards.
    let regions = vec![
        Region::enter(Device::Cpu, on(Kind::BFloat16, false)).unwrap(),
        Region::enter(Device::Cuda(0), on(Kind::BFloat16, true)).unwrap(),
        Region::enter(Device::Cpu, on(Kind::Half, true)).unwrap(),
    ];
    let mut regions = regions.into_iter();
    drop(regions.next());
    assert_eq!(autocast::state(Device::Cpu).unwrap(), on(Kind::Half, true), "the innermost still holds");
    drop(regions.next());
    assert!(!autocast::state(Device::Cuda(0)).unwrap().enabled);
    assert_eq!(autocast::state(Device::Cpu).unwrap(), on(Kind::Half, true));
    drop(regions.next());
    assert_eq!(autocast::state(Device::Cpu).unwrap(), off);
}

#[test]
fn a_device_without_autocast_is_refused() {
    assert!(autocast::state(Device::Vulkan).is_err());
}

#[test]
fn tf32_can_be_read_and_set() {
    // PyTorch's defaults.
    let both = || (context::matmul_allow_tf32().unwrap(), context::cudnn_allow_tf32().unwrap());
    assert_eq!(both(), (false, true));
    context::set_matmul_allow_tf32(true).unwrap();
    assert_eq!(both(), (true, true));
    context::set_cudnn_allow_tf32(false).unwrap();
    assert_eq!(both(), (true, false));
    context::set_matmul_allow_tf32(false).unwrap();
    context::set_cudnn_allow_tf32(true).unwrap();
    assert_eq!(both(), (false, true));
}

#[test]
fn without_a_gpu_cuda_calls_are_errors() {
    if tch::Cuda::is_available() {
        return; // the `gpu` tests of the facade cover this machine
    }
    assert!(empty_pinned(&[2], Kind::Float).is_err());
    assert!(cuda::device_name(0).is_err());
    assert!(cuda::memory_stats(usize::MAX).is_err());
    assert!(cuda::reset_peak_memory_stats(0).is_err());
    assert_eq!(cuda::ForbidSync::new().is_ok(), cuda::is_compiled());
}

#[cfg(feature = "libjpeg-turbo")]
#[test]
fn a_damaged_jpeg_or_a_part_beyond_it_is_an_error() {
    use overdrive_ffi::jpeg::{Part, decode};

    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testing/images/h2v2.jpg");
    let file = std::fs::read(path).unwrap();
    let whole = Part { top: 0, left: 0, height: 43, width: 61, eighths: 8, channels: 3 };
    let mut pixels = vec![0; 3 * 43 * 61];
    decode(&file, &whole, &mut pixels).unwrap();
    let mut part = vec![0; 4 * 20 * 9];
    decode(&file, &Part { top: 11, left: 50, height: 20, width: 9, eighths: 8, channels: 4 }, &mut part).unwrap();
    for (i, pixel) in part.chunks_exact(4).enumerate() {
        let (y, x) = (11 + i / 9, 50 + i % 9);
        assert_eq!(pixel[..3], pixels[3 * (61 * y + x)..][..3]);
    }
    for cut in [0, 2, 100, file.len() / 2, file.len() - 40] {
        let error = decode(&file[..cut], &whole, &mut pixels).expect_err("a truncated file");
        assert!(!error.message().is_empty());
    }
    let beyond = [
        Part { top: 1, ..whole },
        Part { left: 1, ..whole },
        Part { eighths: 4, ..whole },
        Part { eighths: 3, ..whole },
        Part { channels: 1, ..whole },
        Part { height: 0, ..whole },
        Part { height: usize::MAX, ..whole },
        Part { width: 60, ..whole },
    ];
    for part in beyond {
        assert!(decode(&file, &part, &mut pixels).is_err(), "{part:?}");
    }
}

#[test]
fn a_hook_is_called_for_each_complete_gradient_until_it_is_dropped() {
    let x = Tensor::ones([2], FLOAT).set_requires_grad(true);
    let calls = Arc::new(AtomicUsize::new(0));
    let (count, param) = (calls.clone(), x.shallow_clone());
    let hook = GradHook::new(&x, move || {
        assert!(param.grad().defined(), "the gradient is there");
        count.fetch_add(1, Ordering::Relaxed);
    });
    let hook = hook.unwrap();
    // Used twice, accumulated once.
    (&x * &x).sum(Kind::Float).backward();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert!(GradHook::new(&x, || ()).unwrap_err().message().contains("already has a gradient hook"));
    assert!(
        GradHook::new(&x.detach(), || ()).unwrap_err().message().contains("a leaf tensor that requires a gradient")
    );
    assert!(GradHook::new(&(&x * 2.0), || ()).is_err());
    assert!(GradHook::new(&Tensor::new(), || ()).is_err());
    drop(hook);
    x.sum(Kind::Float).backward();
    assert_eq!((calls.load(Ordering::Relaxed), Arc::strong_count(&calls)), (1, 1), "what it held is dropped");
    let _second = GradHook::new(&x, || ()).unwrap();
}

#[test]
fn a_hooks_panic_is_kept_until_it_is_resumed() {
    let x = Tensor::ones([2], FLOAT).set_requires_grad(true);
    let hook = GradHook::new(&x, || panic!("in a hook")).unwrap();
    x.sum(Kind::Float).backward();
    let resumed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| hook.resume_panic()));
    assert_eq!(resumed.unwrap_err().downcast_ref::<&str>(), Some(&"in a hook"));
    hook.resume_panic(); // does nothing: there is no panic left
}

#[test]
fn the_8_bit_kernel_refuses_what_does_not_fit() {
    let byte = (Kind::Uint8, Device::Cpu);
    let (param, codes, scales) = (Tensor::ones([300], FLOAT), Tensor::zeros([300], byte), Tensor::zeros([2], FLOAT));
    let options =
        adamw8bit::Options { lr: 0.1, betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.0, step: 1.0, maximize: false };
    let step = |param: &Tensor, grad: &Tensor, codes: &Tensor, scales: &Tensor| {
        let (codes2, scales2) = (codes.copy(), scales.copy());
        let state = adamw8bit::State { codes1: codes, scales1: scales, codes2: &codes2, scales2: &scales2 };
        adamw8bit::step(param, grad, state, &options).map_err(|error| error.message().to_owned())
    };
    let grad = param.ones_like();
    assert!(
        step(&param, &grad.to_kind(Kind::Double), &codes, &scales).unwrap_err().contains("strides of its parameter")
    );
    assert!(step(&param, &grad.narrow(0, 0, 299), &codes, &scales).is_err());
    assert!(step(&param, &grad, &codes.narrow(0, 0, 299), &scales).unwrap_err().contains("each of 300 numbers"));
    assert!(step(&param, &grad, &codes, &Tensor::zeros([3], FLOAT)).unwrap_err().contains("each of 2 blocks"));
    assert!(step(&param.to_kind(Kind::Int64), &grad.to_kind(Kind::Int64), &codes, &scales).is_err());
    assert!(param.equal(&grad), "nothing has changed");
    step(&param, &grad, &codes, &scales).unwrap();
    assert!((param.double_value(&[0]) - 0.9).abs() < 1e-6, "Adam's first step equals the learning rate");
    for signed in [true, false] {
        let map = adamw8bit::dynamic_map(signed);
        assert!(map.windows(2).all(|pair| pair[0] < pair[1]) && map[255] == 1.0 && map.contains(&0.0));
        assert_eq!(map.iter().filter(|code| **code < 0.0).count(), if signed { 127 } else { 0 });
    }
}

#[cfg(feature = "distributed")]
mod compress {
    use overdrive_ffi::compress::{sign_compress, sign_expand, take_largest, takes};

    use super::*;

    fn numbers(tensor: &Tensor) -> Vec<f64> {
        Vec::try_from(tensor.to_kind(Kind::Double)).unwrap()
    }

    #[test]
    fn the_largest_are_taken_out_and_the_rest_is_the_error() {
        // So that the loops are shared, whatever the environment says.
        tch::set_num_threads(2);
        let count = 200_003;
        let (grad, error) = (Tensor::randn([count], FLOAT), Tensor::randn([count], FLOAT));
        // Ties, of which the first are taken, and infinity and NaN, which count as the largest.
        for (place, value) in [(17, f64::INFINITY), (90_000, f64::NAN), (5, -100.0), (6, 100.0), (7, 100.0)] {
            let _ = grad.get(place).f_copy_(&Tensor::from(value as f32)).map(|()| error.get(place).zero_());
        }
        let whole = numbers(&(&grad + &error));
        for kept in [0, 1, 4, 1000, count] {
            let left = error.copy();
            let (places, values) = take_largest(&grad, &left, kept).unwrap();
            let rank = |value: f64| if value.is_nan() { f64::INFINITY } else { value.abs().min(1e300) };
            let mut order: Vec<usize> = (0..count as usize).collect();
            order.sort_by(|&a, &b| rank(whole[b]).total_cmp(&rank(whole[a])));
            let mut expected = order[..kept as usize].to_vec();
            expected.sort_unstable();
            let mut found: Vec<usize> = numbers(&places).iter().map(|&place| place as usize).collect();
            let taken = numbers(&values);
            for (&place, value) in found.iter().zip(taken) {
                assert!(value == whole[place] || value.is_nan() && whole[place].is_nan());
            }
            found.sort_unstable();
            assert_eq!(found, expected, "{kept} of them");
            for (place, left) in numbers(&left).into_iter().enumerate() {
                let stays = found.binary_search(&place).is_err();
                // An infinity that is not taken is not kept in the error either.
                assert_eq!(left, if stays && whole[place].is_finite() { whole[place] } else { 0.0 }, "at {place}");
            }
        }
        assert!(take_largest(&grad, &error, count + 1).is_err() && take_largest(&grad, &error, -1).is_err());
        assert!(take_largest(&grad, &error.narrow(0, 0, 5), 1).is_err());
        assert!(!takes(&Tensor::zeros([2], (Kind::Double, Device::Cpu))));
    }

    #[test]
    fn signs_and_their_rounding_error_add_up_to_the_sum() {
        tch::set_num_threads(2);
        let (count, padded) = (150_001, 150_008);
        let grad = Tensor::randn([count], FLOAT);
        let before = Tensor::randn([padded], FLOAT);
        let _ = before.narrow(0, count, padded - count).zero_();
        let error = before.copy();
        let (packed, scale) = sign_compress(&grad, &error).unwrap();
        let whole = (&grad + before.narrow(0, 0, count)).to_kind(Kind::Double);
        let root = whole.square().mean(Kind::Double).sqrt().double_value(&[]);
        let scale = scale.double_value(&[0]);
        assert!((scale / root - 1.0).abs() < 1e-6, "{scale} instead of {root}");
        let signs = Tensor::full([count], f64::NAN, FLOAT);
        sign_expand(&packed, 2.0, &signs, false).unwrap();
        assert!(signs.equal(&((whole.ge(0.0).to_kind(Kind::Float) * 2.0 - 1.0) * 2.0)));
        sign_expand(&packed, scale as f32, &signs, true).unwrap();
        let lost = error.narrow(0, 0, count) + signs - (whole.ge(0.0).to_kind(Kind::Float) * 2.0 - 1.0) * 2.0;
        assert!((lost.to_kind(Kind::Double) - whole).abs().max().double_value(&[]) < 1e-5);
        assert_eq!(numbers(&error)[count as usize..], [0.0; 7], "the padding has no error");
        assert!(sign_compress(&grad, &error.narrow(0, 0, 150_004)).is_err(), "not a multiple of 8");
        assert!(sign_expand(&packed, 1.0, &Tensor::zeros([padded + 1], FLOAT), false).is_err());
    }
}
