//! Faults that the gates have to find, planted in a small program and in the loader, which are right without them.

use anyhow::{Result, ensure};
use overdrive::ffi::{CopyStream, empty_pinned};
use overdrive::prelude::*;
use overdrive_fakecuda::{Calls, Pace, runtime};

use super::gates::{Source, Way, hold_one};
use super::{paces, watched};
use crate::{GPU, fake};

const SHAPE: [i64; 2] = [64, 1024];
const SEEDS: u64 = 5;

/// What is wrong with a program that copies two batches to the device, as a loader does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// The computing stream does not wait for the copy.
    NoWait,
    /// The allocator does not learn that the computing stream uses the copy: the next copy gets its memory.
    NoRecordStream,
    /// The host fills the pinned buffer again before it has waited for the copy.
    EarlyReuse,
}

fn program(fault: Fault) -> Result<Vec<f64>> {
    let stream = CopyStream::new(0)?;
    let mut buffers = [empty_pinned(&SHAPE, Kind::Uint8)?, empty_pinned(&SHAPE, Kind::Uint8)?];
    let mut sums = Vec::new();
    for batch in 0..2 {
        let buffer = &mut buffers[if fault == Fault::EarlyReuse { 0 } else { batch }];
        let _ = buffer.fill_(batch as i64 + 1);
        let copy = stream.upload(buffer)?;
        let mut copied = stream.record()?;
        match fault {
            Fault::NoWait => {}
            Fault::NoRecordStream => copied.wait([])?,
            Fault::Nothing | Fault::EarlyReuse => copied.wait([&copy])?,
        }
        sums.push(copy.sum(Kind::Int64));
    }
    Ok(sums.iter().map(|sum| sum.double_value(&[])).collect())
}

/// The program without a fault is right and quiet at each pace; with it, the search says so at each pace.
fn is_found(fault: Fault, says: &str) -> Result<()> {
    for pace in paces(SEEDS) {
        let (sums, notes) = watched(pace, || program(Fault::Nothing))?;
        let (sums, ones) = (sums?, (SHAPE[0] * SHAPE[1]) as f64);
        ensure!(notes.is_empty() && sums == [ones, 2.0 * ones], "{pace:?}: {sums:?}, {}", notes.join("; "));
        let (_, notes) = watched(pace, || program(fault))?;
        ensure!(notes.iter().any(|note| note.contains(says)), "{pace:?}, {fault:?}: {notes:?}");
    }
    Ok(())
}

pub fn a_missing_wait_is_found() -> Result<()> {
    is_found(Fault::NoWait, "not ordered")
}

pub fn a_missing_record_stream_is_found() -> Result<()> {
    is_found(Fault::NoRecordStream, "not ordered")
}

pub fn a_pinned_buffer_used_again_is_found() -> Result<()> {
    is_found(Fault::EarlyReuse, "the host writes pinned memory")
}

/// A batch is dropped while its copy is under way, as by an epoch that ends early. Its memory is the computing stream's,
/// which gives it to the next tensor: that has to wait for the copy.
fn dropped(is_early: bool) -> Result<f64> {
    let failed = |code| anyhow::anyhow!("CUDA's error {code}");
    let (stream, event) = (runtime::stream(true).map_err(failed)?, runtime::event(false).map_err(failed)?);
    let mut buffer = empty_pinned(&SHAPE, Kind::Uint8)?;
    let _ = buffer.fill_(7);
    let batch = Tensor::empty(SHAPE, (Kind::Uint8, GPU));
    let mut codes = vec![runtime::device_synchronize()];
    let [to, from] = [&batch, &buffer].map(|tensor| tensor.data_ptr() as usize);
    codes.push(runtime::copy(to, from, batch.numel(), runtime::COPY_DEFAULT, stream));
    if !is_early {
        codes.extend([runtime::record(event, stream), runtime::wait_event(0, event, 0)]);
    }
    drop(batch);
    let next = Tensor::ones(SHAPE, (Kind::Uint8, GPU));
    ensure!(next.data_ptr() as usize == to, "the next tensor has other memory");
    let sum = next.sum(Kind::Int64).double_value(&[]);
    codes.extend([runtime::synchronize(stream), runtime::destroy_event(event), runtime::destroy_stream(stream)]);
    ensure!(codes.iter().all(|code| *code == 0), "{codes:?}");
    Ok(sum)
}

pub fn a_batch_dropped_early_is_found() -> Result<()> {
    for pace in paces(SEEDS) {
        let (sum, notes) = watched(pace, || dropped(false))?;
        ensure!(notes.is_empty() && sum? == (SHAPE[0] * SHAPE[1]) as f64, "{pace:?}: {}", notes.join("; "));
        let (sum, notes) = watched(pace, || dropped(true))?;
        sum?;
        ensure!(notes.iter().any(|note| note.contains("not ordered")), "{pace:?}: {notes:?}");
    }
    Ok(())
}

/// Epochs and loaders that are dropped in the middle, in a loader that forgets a wait: that of the training loop's stream
/// for a copy, or that of a copy for the use of its memory by a batch that was dropped.
pub fn a_loader_that_forgets_a_wait_is_found() -> Result<()> {
    let fake = fake()?;
    for source in [Source::Stacked, Source::HostRows, Source::Images, Source::Stream] {
        for way in [Way::DroppedEpochs, Way::DroppedLoader] {
            for streams in [Calls::Zero, Calls::Others] {
                fake.leave_out("cudaStreamWaitEvent", streams);
                let held = hold_one(GPU, source, way, &[Pace::Lazy]);
                let told = held.err().map(|error| format!("{error:#}")).unwrap_or_default();
                ensure!(told.contains("not ordered"), "{source:?}, {way:?}, {streams:?} is held: {told}");
            }
            // What is left out ends with the gate.
            hold_one(GPU, source, way, &[Pace::Lazy])?;
        }
    }
    Ok(())
}
