//! What operators save, in another form.

use overdrive_ffi::autocast::{Region, State};
use overdrive_ffi::autograd::{GradOptions, grad};
use overdrive_ffi::host_memory;
use overdrive_memory::{Compression, SavedTensors, checkpoint};
use tch::{Device, Kind, Tensor, nn};

use crate::{FLOAT, alone, grads, leaf};

/// The relative difference of gradients that go through these hooks.
fn difference(compression: Compression, kind: Kind) -> f64 {
    let x = Tensor::randn([64, 33], (kind, Device::Cpu)).set_requires_grad(true);
    let weight = Tensor::randn([33, 48], (kind, Device::Cpu)).set_requires_grad(true);
    let run = || x.matmul(&weight).tanh().matmul(&weight.tr()).square().sum(Kind::Float);
    let expected = grads(&run(), &[&x, &weight]);
    let loss = {
        let _guard = SavedTensors::compressed(compression).min_bytes(0).begin().unwrap();
        run()
    };
    let found = grads(&loss, &[&x, &weight]);
    let relative = |(one, other): (&Tensor, &Tensor)| ((one - other).norm() / other.norm()).double_value(&[]);
    found.iter().zip(&expected).map(relative).fold(0.0, f64::max)
}

#[test]
fn compressed_tensors_are_close_to_what_they_were() {
    let _alone = alone();
    // Half of the last bit: 2^-9, 2^-5 and 1 / 254 of the block's largest; gradients add several roundings up.
    for (compression, most) in [(Compression::BFloat16, 0.01), (Compression::Float8, 0.1), (Compression::Int8, 0.03)] {
        let found = difference(compression, Kind::Float);
        assert!(found > 1e-5 && found < most, "{compression:?}: {found}");
    }
    assert!(difference(Compression::Int8, Kind::BFloat16) > 1e-5);
    assert_eq!(difference(Compression::BFloat16, Kind::BFloat16), 0.0, "it has no fewer bits");
}

/// The scale of all others would be infinite.
#[test]
fn tensors_with_infinities_stay_as_they_are() {
    let _alone = alone();
    let x = leaf(&[4, 4]);
    let factor = Tensor::from_slice(&[f32::INFINITY, 2.0, 3.0, 4.0]);
    for compression in [Compression::Int8, Compression::Float8, Compression::BFloat16] {
        let _guard = SavedTensors::compressed(compression).min_bytes(0).begin().unwrap();
        assert_eq!(grads(&(&x * &factor).sum(Kind::Float), &[&x])[0], factor.expand([4, 4], false));
    }
}

/// A view that is conjugated when it is read is not the tensor itself, though all of its memory is the same.
#[test]
fn a_tensor_and_its_conjugate_are_two() {
    let _alone = alone();
    let x = Tensor::randn([100], (Kind::ComplexFloat, Device::Cpu)).set_requires_grad(true);
    let run = || {
        let z = &x * 2.0;
        (&z * z.conj()).real().sum(Kind::Float)
    };
    let expected = grads(&run(), &[&x]);
    let folder = tempfile::tempdir().unwrap();
    let loss = {
        let _guard = SavedTensors::on_disk(folder.path()).unwrap().min_bytes(0).begin().unwrap();
        run()
    };
    assert_eq!(grads(&loss, &[&x]), expected);
}

#[test]
fn what_is_left_alone_and_sparse_tensors_stay_as_they_are() {
    let _alone = alone();
    let (x, frozen) = (leaf(&[4, 4]), Tensor::randn([4, 4], FLOAT));
    let expected = &frozen.sum_dim_intlist([0].as_slice(), false, Kind::Float).expand([4, 4], false);
    let rounded = |saved: SavedTensors| {
        let _guard = saved.begin().unwrap();
        let found = &grads(&x.mm(&frozen.tr()).sum(Kind::Float), &[&x])[0];
        !found.allclose(expected, 1e-6, 1e-6, false)
    };
    let int8 = || SavedTensors::compressed(Compression::Int8).min_bytes(0);
    assert!(rounded(int8()), "autograd does not tell a frozen parameter from an activation");
    assert!(!rounded(int8().leave_alone([&frozen])));
    assert!(
        !rounded(int8().leave_alone([&frozen.narrow(0, 1, 1)]).leave_alone([&x])),
        "it is a view of the same memory"
    );
    // Of a module: a buffer, or a parameter that requires no gradient; not one that does, which stays anyway.
    let vs = nn::VarStore::new(Device::Cpu);
    let mut buffer = vs.root().zeros_no_train("buffer", &[4, 4]);
    buffer.copy_(&frozen);
    let of_module = |saved: SavedTensors| {
        let _guard = saved.begin().unwrap();
        let found = &grads(&x.mm(&buffer.tr()).sum(Kind::Float), &[&x])[0];
        !found.allclose(expected, 1e-6, 1e-6, false)
    };
    assert!(of_module(int8()) && !of_module(int8().leave_alone_frozen(&vs)));

    let sparse = Tensor::eye(4, FLOAT).to_sparse_sparse_dim(2);
    for saved in [int8(), SavedTensors::compressed(Compression::BFloat16).min_bytes(0)] {
        let _guard = saved.begin().unwrap();
        assert_eq!(grads(&sparse.mm(&x).sum(Kind::Float), &[&x])[0], x.ones_like());
    }
}

/// It would keep the whole in memory.
#[test]
fn a_small_part_of_a_large_tensor_is_stored() {
    let _alone = alone();
    let x = leaf(&[1 << 20]);
    host_memory::count(usize::MAX).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let saved = SavedTensors::on_disk(folder.path()).unwrap();
    let before = host_memory::stats().unwrap().allocated;
    let y = {
        let _guard = saved.begin().unwrap();
        (&x * 2.0).narrow(0, 5, 7).square().sum(Kind::Float)
    };
    let after = host_memory::stats().unwrap().allocated;
    assert!(after - before < 4096, "{} bytes", after - before);
    let expected = Tensor::cat(&[x.zeros_like().narrow(0, 0, 5), x.detach().narrow(0, 5, 7) * 8.0], 0);
    assert_eq!(grads(&y, &[&x])[0].narrow(0, 0, 12), expected);
}

#[test]
fn small_tensors_parameters_and_their_views_stay_as_they_are() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let run = || x.mm(&weight.tr()).sum(Kind::Float);
    let loss = {
        let _guard = SavedTensors::compressed(Compression::Int8).min_bytes(0).begin().unwrap();
        run()
    };
    assert_eq!(grads(&loss, &[&x, &weight]), grads(&run(), &[&x, &weight]));
    let small = {
        let _guard = SavedTensors::compressed(Compression::Int8).min_bytes(65).begin().unwrap();
        x.exp()
    };
    assert_eq!(grads(&small.sum(Kind::Float), &[&x])[0], x.exp().detach());
}

/// The copy that hooks make of its input counts no changes.
#[test]
fn a_checkpointed_function_whose_input_was_changed_before_runs_again_under_hooks() {
    let _alone = alone();
    let (x, one) = (leaf(&[100]), Tensor::from(1f32));
    let folder = tempfile::tempdir().unwrap();
    let saved = SavedTensors::on_disk(folder.path()).unwrap().min_bytes(0);
    for changes in 0..4 {
        let run = || {
            let mut y = x.sin();
            (0..changes).for_each(|_| _ = y.f_add_(&one).unwrap());
            let checkpointed = checkpoint(|[y]| y.f_exp()?.f_sin(), [&y]).unwrap();
            // Another operator saves it too.
            (checkpointed * &y).sum(Kind::Float)
        };
        let expected = grads(&run(), &[&x]);
        for is_written in [false, true] {
            let loss = {
                let _guard = saved.begin().unwrap();
                run()
            };
            let began = std::time::Instant::now();
            while is_written && files_in(folder.path()) < 2 {
                assert!(began.elapsed().as_secs() < 300, "nothing was written");
                std::thread::yield_now();
            }
            assert_eq!(grads(&loss, &[&x]), expected, "{changes} changes, {is_written}");
        }
    }
}

/// Autocast keeps the copy anyway.
#[test]
fn what_autocast_makes_of_a_parameter_stays_as_it_is() {
    let _alone = alone();
    let (x, weight) = (leaf(&[8, 8]), leaf(&[8, 8]));
    let on = State { enabled: true, kind: Kind::BFloat16, cache_enabled: true };
    let run = || {
        let _region = Region::enter(Device::Cpu, on).unwrap();
        x.matmul(&weight.tr()).sum(Kind::Float)
    };
    let expected = grads(&run(), &[&x]);
    let loss = {
        let _guard = SavedTensors::compressed(Compression::Int8).min_bytes(0).begin().unwrap();
        run()
    };
    assert_eq!(grads(&loss, &[&x]), expected);
}

#[test]
fn empty_tensors_and_numbers_beyond_float32_stay_as_they_are() {
    let _alone = alone();
    // An expanded mask would take more bits than it has bytes.
    let (mask, y) = (Tensor::rand([1, 4], FLOAT).gt(0.5), leaf(&[4096, 4]));
    host_memory::count(usize::MAX).unwrap();
    let before = host_memory::stats().unwrap().allocated;
    let masked = {
        let _guard = SavedTensors::compressed(Compression::Int8).min_bytes(0).begin().unwrap();
        y.masked_fill(&mask.expand([4096, 4], false), 0.0).sum(Kind::Float)
    };
    assert!(host_memory::stats().unwrap().allocated - before < 1024);
    assert_eq!(grads(&masked, &[&y])[0].select(0, 7), mask.logical_not().to_kind(Kind::Float).select(0, 0));
    let x = leaf(&[4]);
    let large = Tensor::from_slice(&[1e300, 1.0, 2.0, 3.0]).set_requires_grad(true);
    for compression in [Compression::Int8, Compression::Float8, Compression::BFloat16] {
        let _guard = SavedTensors::compressed(compression).min_bytes(0).begin().unwrap();
        assert_eq!(grads(&x.narrow(0, 0, 0).exp().sum(Kind::Float), &[&x])[0], x.zeros_like());
        if compression != Compression::BFloat16 {
            assert_eq!(grads(&(&large * &large).sum(Kind::Double), &[&large])[0], large.detach() * 2.0);
        }
    }
}

fn files_in(folder: &std::path::Path) -> usize {
    std::fs::read_dir(folder)
        .unwrap()
        .flatten()
        .map(|entry| if entry.path().is_dir() { files_in(&entry.path()) } else { 1 })
        .sum()
}

#[test]
fn tensors_on_disk_give_the_same_gradients_and_leave_nothing() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (x, weight) = (leaf(&[4, 6]), leaf(&[6, 6]));
    let run = || {
        let y = (0..6).fold(x.shallow_clone(), |y, _| y.matmul(&weight).sin().dropout(0.2, true));
        y.narrow(1, 1, 3).square().sum(Kind::Float)
    };
    let seeded = |run: &dyn Fn() -> Tensor| {
        tch::manual_seed(1);
        run()
    };
    let expected = grads(&seeded(&run), &[&x, &weight]);
    let saved = SavedTensors::on_disk(folder.path()).unwrap().min_bytes(0);
    for _ in 0..3 {
        let loss = {
            let _guard = saved.begin().unwrap();
            seeded(&run)
        };
        assert_eq!(grads(&loss, &[&x, &weight]), expected);
    }
    // Twice over one graph, and by second derivatives.
    let keep = GradOptions { retain_graph: true, create_graph: true, ..GradOptions::default() };
    let second = |loss: Tensor| {
        let first = grad::<Tensor>(&[&loss], &[&x], &[], keep).unwrap();
        let second = grads(&first[0].square().sum(Kind::Float), &[&x, &weight]);
        (first[0].detach(), second)
    };
    let loss = {
        let _guard = saved.begin().unwrap();
        seeded(&run)
    };
    assert_eq!(second(loss), second(seeded(&run)));
    // Without a backward pass.
    drop({
        let _guard = saved.begin().unwrap();
        run()
    });
    drop(saved);
    // The thread may be about to remove the folder.
    while std::fs::read_dir(folder.path()).unwrap().next().is_some() {
        std::thread::yield_now();
    }
}

/// What is written later must be what was saved.
#[test]
fn a_tensor_that_is_changed_after_it_was_saved_is_as_it_was() {
    let _alone = alone();
    let (folder, x) = (tempfile::tempdir().unwrap(), leaf(&[100]));
    let saved = SavedTensors::on_disk(folder.path()).unwrap().min_bytes(0);
    let y = {
        let _guard = saved.begin().unwrap();
        x.exp()
    };
    let expected = y.detach().copy();
    let _ = tch::no_grad(|| y.shallow_clone().zero_());
    assert_eq!(grads(&y.sum(Kind::Float), &[&x])[0], expected);
}

#[test]
fn a_folder_that_is_not_there_or_goes_away_is_an_error() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent");
    let error = SavedTensors::on_disk(&absent).unwrap_err().to_string();
    assert!(error.starts_with(&absent.display().to_string()), "{error}");
    let x = leaf(&[4]);
    let saved = SavedTensors::on_disk(folder.path()).unwrap().min_bytes(0);
    let y = {
        let _guard = saved.begin().unwrap();
        x.exp().exp()
    };
    // Written, and then gone.
    while files_in(folder.path()) < 2 {
        std::thread::yield_now();
    }
    std::fs::remove_dir_all(folder.path()).unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("saved-tensors-") && error.contains("No such file"), "{error}");
}

/// Set in the process that may write no large file.
const FULL: &str = "OVERDRIVE_TEST_FULL_DISK";

/// As where a disk is full: a part of a file can be written.
#[test]
fn a_full_disk_is_an_error_of_the_backward_pass_and_leaves_nothing() {
    if std::env::var_os(FULL).is_none() {
        let script = "trap '' XFSZ; ulimit -f 128; exec \"$0\" \"$@\"";
        let name = "saved::a_full_disk_is_an_error_of_the_backward_pass_and_leaves_nothing";
        let program = std::env::current_exe().unwrap();
        let mut command = std::process::Command::new("sh");
        let output = command.args(["-c", script]).arg(program).args(["--exact", name]).env(FULL, "1").output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && told.contains("1 passed"), "{told}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let saved = SavedTensors::on_disk(folder.path()).unwrap().min_bytes(0);
    let (small, large) = (leaf(&[100]), leaf(&[1 << 20]));
    let run = |x: &Tensor| {
        let _guard = saved.begin().unwrap();
        x.exp()
    };
    let loss = run(&small).sum(Kind::Float);
    // The forward pass waits while more than 32 MiB are to be written, so after 80 MiB the first one was tried. One that was
    // not is still in memory, and needs no file.
    let failing: Vec<_> = (0..20).map(|_| run(&large).sum(Kind::Float)).collect();
    let error = failing[0].f_backward().unwrap_err().to_string();
    assert!(error.contains("saved-tensors-") && error.contains("File too large"), "{error}");
    assert!(!large.grad().defined());
    // What fits is as before.
    assert_eq!(grads(&loss, &[&small])[0], small.exp().detach());
    assert_eq!(grads(&run(&small).sum(Kind::Float), &[&small])[0], small.exp().detach());
    drop((loss, failing));
    // The thread may be about to remove them.
    while files_in(folder.path()) > 0 {
        std::thread::yield_now();
    }
}

/// The gradients of `log`, `div` and `sqrt` are infinite at 0.
#[test]
fn small_numbers_do_not_become_zero() {
    let _alone = alone();
    for compression in [Compression::BFloat16, Compression::Float8, Compression::Int8] {
        for kind in [Kind::Float, Kind::Double] {
            let x = Tensor::from_slice(&[1e-4, -3e-9, 0.5, 1.0, -2.0]).to_kind(kind).repeat([10]);
            let x = x.set_requires_grad(true);
            let loss = {
                let _guard = SavedTensors::compressed(compression).min_bytes(0).begin().unwrap();
                (&x * 1.0).abs().log().sum(kind)
            };
            loss.backward();
            let signs = x.detach().sign();
            assert!(x.grad().isfinite().all().int64_value(&[]) == 1, "{compression:?} {kind:?}: {}", x.grad());
            assert_eq!(x.grad().sign(), signs, "{compression:?} {kind:?}");
        }
    }
}

#[test]
fn numbers_that_are_too_large_for_bfloat16_stay_as_they_are() {
    let _alone = alone();
    let x = Tensor::from_slice(&[f32::MAX, 1.0, f32::INFINITY]).repeat([100]).set_requires_grad(true);
    let loss = {
        let _guard = SavedTensors::compressed(Compression::BFloat16).min_bytes(0).begin().unwrap();
        (&x * 1.0).reciprocal().sum(Kind::Float)
    };
    loss.backward();
    let expected = -x.detach().square().reciprocal();
    assert!(x.grad().allclose(&expected, 1e-6, 0.0, true), "{} {expected}", x.grad());
}
