//! A device's saved tensors on disk and in fewer bits.

use anyhow::{Result, ensure};
use overdrive::ffi::cuda;
use overdrive::memory::{Compression, SavedTensors};
use overdrive::prelude::*;
use overdrive_fakecuda::{Fake, Pace, waits};

use super::{are_equal, each_forgotten_wait_is_found, forward, grads, leaf, loss, peak_of_twenty};
use crate::loading::{paces, watched};
use crate::{FLOAT, fake};

const COMPRESSIONS: [Compression; 4] =
    [Compression::Masks, Compression::BFloat16, Compression::Float8, Compression::Int8];

/// Computes a loss.
type Function = fn(&Tensor, &Tensor) -> Tensor;

fn compressed(compression: Compression) -> SavedTensors {
    SavedTensors::compressed(compression).min_bytes(0)
}

/// Two steps with the same leaves.
fn two_steps(saved: &SavedTensors, x: &Tensor, weight: &Tensor) -> Result<Vec<Tensor>> {
    let step = || grads(&loss(Some(saved), x, weight)?, &[x, weight], Default::default());
    Ok([step()?, step()?].into_iter().flatten().collect())
}

pub fn tensors_saved_on_disk_are_never_early() -> Result<()> {
    let (x, weight, folder) = (leaf(), leaf(), tempfile::tempdir()?);
    let once = grads(&forward(&x, &weight), &[&x, &weight], Default::default())?;
    let expected: Vec<_> = once.iter().chain(&once).map(Tensor::shallow_clone).collect();
    let saved = SavedTensors::on_disk(folder.path())?.min_bytes(0);
    for pace in paces(50) {
        let (found, notes) = watched(pace, || two_steps(&saved, &x, &weight).map(|it| are_equal(&it, &expected)))?;
        ensure!(notes.is_empty() && found?, "{pace:?}: {}", notes.join("; "));
    }
    Ok(())
}

/// Also that of the thread that writes.
pub fn a_forgotten_wait_for_a_tensor_on_disk_is_found() -> Result<()> {
    let (x, weight, folder) = (leaf(), leaf(), tempfile::tempdir()?);
    let saved = SavedTensors::on_disk(folder.path())?.min_bytes(0);
    each_forgotten_wait_is_found(|| two_steps(&saved, &x, &weight).map(drop))
}

pub fn nobody_but_the_writer_waits_for_a_tensor_on_disk() -> Result<()> {
    let (fake, x, weight, folder) = (fake()?.lend(), leaf(), leaf(), tempfile::tempdir()?);
    let saved = SavedTensors::on_disk(folder.path())?.min_bytes(0);
    for pace in [Pace::Eager, Pace::Lazy] {
        fake.set_pace(pace);
        drop(two_steps(&saved, &x, &weight)?);
        fake.reset();
        fake.trace_waits(true);
        drop(two_steps(&saved, &x, &weight)?);
        let (waits, text) = (waits(&fake.counts()), fake.waits());
        fake.trace_waits(false);
        // How many tensors the thread comes to write before they are dropped is a matter of time.
        let of_the_writer = text.matches("disk::OnDisk::write").count();
        ensure!(waits == 0 || of_the_writer > 0, "{pace:?}: {waits} waits, {text}");
        for caller in ["Store>::store", "Packed>::unpack", "two_steps"] {
            ensure!(!text.lines().any(|line| line.ends_with(caller)), "{pace:?}: {caller} in {text}");
        }
    }
    Ok(())
}

/// What the device is given after it was saved comes behind the copy.
pub fn a_tensor_that_changes_after_it_was_saved_on_disk_is_the_one_that_was_saved() -> Result<()> {
    let (x, folder) = (leaf(), tempfile::tempdir()?);
    let saved = SavedTensors::on_disk(folder.path())?.min_bytes(0);
    let expected = grads(&(&x * 1.0).square().sum(Kind::Float), &[&x], Default::default())?;
    for pace in paces(10) {
        let run = || -> Result<Vec<Tensor>> {
            let mut y = &x * 1.0;
            let loss = {
                let _guard = saved.begin()?;
                y.square().sum(Kind::Float)
            };
            drop(tch::no_grad(|| y.fill_(7.0)));
            grads(&loss, &[&x], Default::default())
        };
        let (found, notes) = watched(pace, || run().map(|it| are_equal(&it, &expected)))?;
        ensure!(notes.is_empty() && found?, "{pace:?}: {}", notes.join("; "));
    }
    Ok(())
}

pub fn tensors_saved_on_disk_leave_the_device() -> Result<()> {
    const BYTES: i64 = 1 << 20;
    let folder = tempfile::tempdir()?;
    for pace in paces(0) {
        let saved = SavedTensors::on_disk(folder.path())?;
        let (plain, found) = (peak_of_twenty(BYTES, None, pace)?, peak_of_twenty(BYTES, Some(&saved), pace)?);
        // In the backward pass two gradients, a saved tensor and its cosine; and scalars.
        ensure!(plain >= 19 * BYTES && found <= 4 * BYTES + 4096, "{pace:?}: {found} bytes, {plain} without hooks");
    }
    Ok(())
}

/// What is rounded on the device is rounded as on the host.
pub fn compressed_tensors_of_the_device_are_those_of_the_host() -> Result<()> {
    let (x, weight) = (leaf(), leaf());
    let [host_x, host_weight] = [&x, &weight].map(|it| it.detach().to_device(Device::Cpu).set_requires_grad(true));
    // A device's kernels may round otherwise than the host's. Through many layers that would grow to more than a step of
    // eight bits, so on a device it is a product alone, which saves its factors. (Leaves would be left as they are.)
    let product: Function = |x, weight| ((x * 1.0) * (weight * 1.0)).sum(Kind::Float);
    let functions: &[Function] = if Fake::get().is_some() { &[forward, product] } else { &[product] };
    for function in functions {
        let saving = |compression: Option<Compression>, x: &Tensor, weight: &Tensor| -> Result<Vec<Tensor>> {
            let saved = compression.map(compressed);
            let loss = {
                let _guard = saved.as_ref().map(SavedTensors::begin).transpose()?;
                function(x, weight)
            };
            grads(&loss, &[x, weight], Default::default())
        };
        let plain = saving(None, &x, &weight)?;
        for compression in COMPRESSIONS {
            let found = saving(Some(compression), &x, &weight)?;
            let on_host = saving(Some(compression), &host_x, &host_weight)?;
            for (found, expected) in found.iter().zip(&on_host) {
                let found = found.to_device(Device::Cpu);
                let apart = (&found - expected).norm().double_value(&[]) / expected.norm().double_value(&[]);
                let is_close = if Fake::get().is_some() { found.equal(expected) } else { apart <= 1e-6 };
                ensure!(is_close, "{compression:?}: {apart:e} apart");
            }
            ensure!(are_equal(&found, &plain) == (compression == Compression::Masks), "{compression:?}");
        }
    }
    Ok(())
}

/// Dropout saves boolean masks there.
pub fn masks_of_the_device_take_a_bit_and_gradients_are_the_same() -> Result<()> {
    const ELEMENTS: i64 = 1 << 20;
    let x = Tensor::randn([ELEMENTS], FLOAT).set_requires_grad(true);
    let run = |compression: Option<Compression>| -> Result<(i64, Vec<Tensor>)> {
        manual_seed(4);
        let before = cuda::memory_stats(0)?.allocated_bytes;
        let loss = {
            let saved = compression.map(compressed);
            let _guard = saved.as_ref().map(SavedTensors::begin).transpose()?;
            x.dropout(0.3, true).relu().sum(Kind::Float)
        };
        let bytes = cuda::memory_stats(0)?.allocated_bytes - before;
        Ok((bytes, grads(&loss, &[&x], Default::default())?))
    };
    let (plain, expected) = run(None)?;
    // A byte for dropout, and ReLU's result.
    ensure!(plain >= 5 * ELEMENTS, "{plain}");
    for compression in COMPRESSIONS {
        let (bytes, found) = run(Some(compression))?;
        ensure!(bytes <= 2 * ELEMENTS / 8 + 4096, "{compression:?}: {bytes} bytes, {plain} without hooks");
        ensure!(are_equal(&found, &expected), "{compression:?}");
    }
    Ok(())
}

pub fn compressed_tensors_are_never_early_and_nothing_waits() -> Result<()> {
    let (fake, x, weight) = (fake()?, leaf(), leaf());
    for compression in COMPRESSIONS {
        let saved = compressed(compression);
        let expected = two_steps(&saved, &x, &weight)?;
        for pace in paces(10) {
            let (found, notes) = watched(pace, || two_steps(&saved, &x, &weight).map(|it| are_equal(&it, &expected)))?;
            ensure!(notes.is_empty() && found?, "{compression:?}, {pace:?}: {}", notes.join("; "));
        }
        let lent = fake.lend();
        lent.set_pace(Pace::Lazy);
        lent.reset();
        lent.trace_waits(true);
        drop(two_steps(&saved, &x, &weight)?);
        manual_seed(4);
        let dropped = {
            let _guard = saved.begin()?;
            x.dropout(0.3, true).relu().sum(Kind::Float)
        };
        drop(grads(&dropped, &[&x], Default::default())?);
        ensure!(waits(&lent.counts()) == 0, "{compression:?}: {}", lent.waits());
    }
    Ok(())
}
