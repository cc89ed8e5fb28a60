//! What is kept on the host for the device: saved tensors, gradients, the state of optimizers.

pub mod overlap;
pub mod steps;
pub mod stored;

use anyhow::{Result, ensure};
use overdrive::ffi::autograd::{GradOptions, grad};
use overdrive::ffi::cuda;
use overdrive::memory::{SavedTensors, checkpoint};
use overdrive::prelude::*;
use overdrive_fakecuda::{Calls, Counts, Fake, Pace, allocations, created, waits};

use crate::loading::{paces, watched};
use crate::{FLOAT, fake};

const LAYERS: i64 = 12;
const SIDE: i64 = 32;
const BYTES: u64 = (SIDE * SIDE * 4) as u64;

/// Each wait of one stream for the other is needed, and so is the host's: without one, a race is found.
fn each_forgotten_wait_is_found(run: impl Fn() -> Result<()>) -> Result<()> {
    let fake = fake()?;
    let forgotten = [
        ("cudaStreamWaitEvent", Calls::Zero),
        ("cudaStreamWaitEvent", Calls::Others),
        ("cudaStreamSynchronize", Calls::All),
    ];
    for (call, streams) in forgotten {
        fake.leave_out(call, streams);
        let (_, notes) = watched(Pace::Lazy, &run)?;
        let is_found = |note: &String| note.contains("not ordered") || note.contains("the host");
        ensure!(notes.iter().any(is_found), "{call}, {streams:?}: {notes:?}");
    }
    Ok(())
}

fn leaf() -> Tensor {
    Tensor::randn([SIDE, SIDE], FLOAT).set_requires_grad(true)
}

/// Saves tensors that are transposed, that are a part of another one, and that several operators save.
fn forward(x: &Tensor, weight: &Tensor) -> Tensor {
    let layer = |y: Tensor| {
        let product = y.matmul(weight).tanh();
        let halves = [0, SIDE / 2].map(|from| product.narrow(1, from, SIDE / 2));
        Tensor::cat(&[&halves[0].sin() * &halves[1], halves[1].exp()], 1).tr().sin()
    };
    (0..LAYERS).fold(x.shallow_clone(), |y, _| layer(y)).square().mean(Kind::Float)
}

fn loss(saved: Option<&SavedTensors>, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let _guard = saved.map(SavedTensors::begin).transpose()?;
    Ok(forward(x, weight))
}

fn grads(loss: &Tensor, of: &[&Tensor], options: GradOptions) -> Result<Vec<Tensor>> {
    Ok(grad::<Tensor>(&[loss], of, &[], options)?)
}

fn on_host() -> SavedTensors {
    SavedTensors::on_host().min_bytes(0)
}

fn are_equal(found: &[Tensor], expected: &[Tensor]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(one, other)| one.equal(other))
}

/// On the host and on disk; also twice over one graph, and by second derivatives.
pub fn tensors_saved_elsewhere_give_the_same_gradients() -> Result<()> {
    let (x, weight, folder) = (leaf(), leaf(), tempfile::tempdir()?);
    let leaves = [&x, &weight];
    let keep = GradOptions { retain_graph: true, create_graph: true, ..GradOptions::default() };
    let all = |saved: Option<&SavedTensors>| -> Result<Vec<Tensor>> {
        let once = loss(saved, &x, &weight)?;
        let first = grads(&once, &leaves, keep)?;
        let again = grads(&once, &leaves, keep)?;
        let second = grads(&first[0].square().sum(Kind::Float), &leaves, GradOptions::default())?;
        drop(loss(saved, &x, &weight)?);
        let alone = grads(&loss(saved, &x, &weight)?, &leaves, GradOptions::default())?;
        Ok([first, again, second, alone].iter().flatten().map(Tensor::detach).collect())
    };
    let expected = all(None)?;
    for saved in [on_host(), SavedTensors::on_disk(folder.path())?.min_bytes(0)] {
        for _ in 0..2 {
            ensure!(are_equal(&all(Some(&saved))?, &expected), "{saved:?}");
        }
    }
    Ok(())
}

/// The copies that come back count their changes otherwise.
pub fn checkpointed_functions_run_again_with_inputs_from_the_host() -> Result<()> {
    let (x, weight, saved) = (leaf(), leaf(), on_host());
    let run = || -> Result<Tensor> {
        let mut y = x.shallow_clone();
        for _ in 0..LAYERS {
            let own = weight.shallow_clone();
            y = checkpoint(move |[y]: &[Tensor; 1]| y.f_matmul(&own)?.f_tanh(), [&y])? * &y;
        }
        Ok(y.square().mean(Kind::Float))
    };
    let expected = grads(&run()?, &[&x, &weight], GradOptions::default())?;
    let loss = {
        let _guard = saved.begin()?;
        run()?
    };
    ensure!(are_equal(&grads(&loss, &[&x, &weight], GradOptions::default())?, &expected));
    Ok(())
}

/// Two steps, in the second of which the host memory is used again.
fn two_steps(x: &Tensor, weight: &Tensor) -> Result<Vec<Tensor>> {
    let saved = on_host();
    let mut found = Vec::new();
    for _ in 0..2 {
        found.extend(grads(&loss(Some(&saved), x, weight)?, &[x, weight], GradOptions::default())?);
    }
    Ok(found)
}

pub fn tensors_saved_on_the_host_are_never_early() -> Result<()> {
    let (x, weight) = (leaf(), leaf());
    let once = grads(&loss(None, &x, &weight)?, &[&x, &weight], GradOptions::default())?;
    let expected: Vec<_> = once.iter().chain(&once).map(Tensor::shallow_clone).collect();
    for pace in paces(50) {
        let (found, notes) = watched(pace, || two_steps(&x, &weight).map(|it| are_equal(&it, &expected)))?;
        ensure!(notes.is_empty() && found?, "{pace:?}: {}", notes.join("; "));
    }
    Ok(())
}

/// Each wait of one stream for the other is needed.
pub fn a_forgotten_wait_for_a_saved_tensor_is_found() -> Result<()> {
    let (fake, x, weight) = (fake()?, leaf(), leaf());
    for streams in [Calls::Zero, Calls::Others] {
        fake.leave_out("cudaStreamWaitEvent", streams);
        let (_, notes) = watched(Pace::Lazy, || two_steps(&x, &weight).map(drop))?;
        ensure!(notes.iter().any(|note| note.contains("not ordered")), "{streams:?}: {notes:?}");
    }
    Ok(())
}

fn count(counts: &Counts, name: &str) -> u64 {
    counts.get(name).copied().unwrap_or(0)
}

/// Whether the driver was asked for neither memory nor events nor streams.
fn asks_for_nothing(counts: &Counts) -> bool {
    allocations(counts) + created(counts) == 0
}

pub fn a_step_that_saves_on_the_host_neither_waits_nor_allocates() -> Result<()> {
    let (fake, x, weight, saved) = (fake()?.lend(), leaf(), leaf(), on_host());
    let step =
        || -> Result<()> { grads(&loss(Some(&saved), &x, &weight)?, &[&x, &weight], GradOptions::default()).map(drop) };
    for pace in [Pace::Eager, Pace::Lazy] {
        fake.set_pace(pace);
        (0..2).try_for_each(|_| step())?;
        fake.reset();
        fake.trace_waits(true);
        (0..3).try_for_each(|_| step())?;
        let counts = fake.counts();
        ensure!(waits(&counts) == 0, "{pace:?}: {}", fake.waits());
        ensure!(asks_for_nothing(&counts), "{pace:?}: {counts:?}");
        let [there, back] = ["device to host", "host to device"].map(|way| {
            let bytes = |memory: &str| count(&counts, &format!("bytes {way}, {memory}"));
            (bytes("pinned"), bytes("pageable"))
        });
        // The last ones are on the device when the backward pass needs them.
        ensure!(there.0 > 3 * LAYERS as u64 * BYTES && back.0 > there.0 / 2 && back.0 < there.0, "{there:?}, {back:?}");
        ensure!((there.1, back.1) == (0, 0), "{pace:?}: {counts:?}");
    }
    Ok(())
}

/// The device's peak of a pass through twenty operators that each save a tensor of so many bytes.
fn peak_of_twenty(bytes: i64, saved: Option<&SavedTensors>, pace: Pace) -> Result<i64> {
    let x = Tensor::randn([bytes / 4], FLOAT).set_requires_grad(true);
    let fake = Fake::get().map(Fake::lend);
    if let Some(fake) = &fake {
        fake.set_pace(pace);
    }
    cuda::reset_peak_memory_stats(0)?;
    let before = cuda::memory_stats(0)?.allocated_bytes;
    let loss = {
        let _guard = saved.map(SavedTensors::begin).transpose()?;
        (0..20).fold(x.shallow_clone(), |y, _| y.sin()).sum(Kind::Float)
    };
    drop(grads(&loss, &[&x], GradOptions::default())?);
    Ok(cuda::memory_stats(0)?.allocated_peak_bytes - before)
}

/// However far the host is ahead of the device.
pub fn saved_tensors_leave_the_device() -> Result<()> {
    const BYTES: i64 = 1 << 20;
    for pace in paces(0) {
        let plain = peak_of_twenty(BYTES, None, pace)?;
        let found = peak_of_twenty(BYTES, Some(&SavedTensors::on_host()), pace)?;
        // Four tensors, an operator's result and its input; two gradients in the backward pass.
        ensure!(plain >= 19 * BYTES && found <= 7 * BYTES, "{pace:?}: {found} bytes, {plain} without hooks");
    }
    Ok(())
}

pub fn a_saved_tensor_that_changes_before_its_copy_is_an_error() -> Result<()> {
    let x = leaf();
    for later in [0, 8] {
        let y = {
            let _guard = on_host().begin()?;
            let y = x.exp();
            (0..later).for_each(|_| drop(x.exp().exp()));
            y
        };
        let expected = y.detach().copy();
        let _ = tch::no_grad(|| y.shallow_clone().zero_());
        let found = grads(&y.sum(Kind::Float), &[&x], GradOptions::default());
        match later {
            0 => {
                let error = found.map(drop).unwrap_err().to_string();
                ensure!(error.contains("was changed in place before its copy"), "{error}");
            }
            _ => ensure!(found?[0].equal(&expected)),
        }
    }
    Ok(())
}

/// A tensor of the host stays there, as it is.
pub fn tensors_of_the_host_are_not_copied() -> Result<()> {
    let (fake, x) = (fake()?, Tensor::randn([64], (Kind::Float, Device::Cpu)).set_requires_grad(true));
    fake.reset();
    let y = {
        let _guard = on_host().begin()?;
        x.sin()
    };
    ensure!(grads(&y.sum(Kind::Float), &[&x], GradOptions::default())?[0] == x.cos());
    ensure!(!fake.counts().keys().any(|name| name.starts_with("copies")), "{:?}", fake.counts());
    Ok(())
}
