//! What goes to the device without need, and what the host waits for without need: counted on a fake device.

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{MixUp, OnDevice, TensorDataset, ToFloat};
use overdrive::ffi::{self, Rows};
use overdrive::nn::metrics::AverageMeter;
use overdrive::prelude::*;
use overdrive_ddp::hooks::{
    CastCompress, HierarchicalAllReduce, OneBit, PostLocalSgd, PowerSgd, PowerSgdOptions, TopK,
};
use overdrive_ddp::{
    Backend, CommHook, DistributedDataParallel, InitMethod, OneBitAdam, OneBitAdamOptions, ProcessGroup, SyncBatchNorm,
};
use overdrive_fakecuda::{Counts, Pace, allocations, created, runtime, waits};
use tch::nn;

use crate::loading::{paces, watched};
use crate::{FLOAT, GPU, fake};

/// What `run` makes the stand-ins count, when it has run once before.
fn counted<T, E: Into<anyhow::Error>>(mut run: impl FnMut() -> Result<T, E>) -> Result<Counts> {
    drop(run().map_err(Into::into)?);
    let fake = fake()?;
    fake.reset();
    fake.trace_waits(true);
    drop(run().map_err(Into::into)?);
    fake.trace_waits(false);
    Ok(fake.counts())
}

const PAGEABLE: &str = "bytes host to device, pageable";

fn uploaded(counts: &Counts) -> u64 {
    let bytes = counts.iter().filter(|(name, _)| name.starts_with("bytes host to device"));
    bytes.map(|(_, bytes)| bytes).sum()
}

/// Nothing is waited for, and so many bytes go to the device: from pinned memory, because a copy from other memory may
/// wait for its stream.
fn costs<T, E: Into<anyhow::Error>>(bytes: u64, run: impl FnMut() -> Result<T, E>) -> Result<()> {
    let counts = counted(run)?;
    ensure!(waits(&counts) == 0, "waits: {}", fake()?.waits());
    ensure!(uploaded(&counts) == bytes, "{} bytes instead of {bytes}: {counts:?}", uploaded(&counts));
    ensure!(!counts.contains_key(PAGEABLE), "from pageable memory: {counts:?}");
    Ok(())
}

/// How often a wait that is told has come.
fn times(told: &str) -> u64 {
    told.split_once(" times: ").map_or(1, |(times, _)| times.parse().unwrap_or(0))
}

/// Each way in which the host waits is found alone, and so is an upload that is not from pinned memory.
pub fn every_wait_is_counted() -> Result<()> {
    let fake = fake()?;
    let failed = |code| anyhow::anyhow!("CUDA's error {code}");
    let (host, device) = (vec![0u8; 64], runtime::malloc(64).map_err(failed)?);
    let pinned = || runtime::malloc_host(64).map_err(failed);
    let (freed, block, event) = (pinned()?, pinned()?, runtime::event(false).map_err(failed)?);
    let (read, other) = (Tensor::ones([4], FLOAT), runtime::malloc(64).map_err(failed)?);
    let ask = || {
        let _ = (runtime::fill(device, 1, 64, 0), runtime::record(event, 0));
        while runtime::query_event(event) != 0 {}
        0
    };
    let copy = |to| runtime::copy(to, device, 64, runtime::COPY_DEFAULT, 0);
    let stream = runtime::stream(true).map_err(failed)?;
    let to_host = || copy(host.as_ptr() as usize);
    let ways: [(&str, u64, &dyn Fn() -> i32); 16] = [
        ("a copy from pinned memory", 0, &|| runtime::copy(device, block, 64, runtime::COPY_DEFAULT, 0)),
        ("a copy to pinned memory", 0, &|| copy(block)),
        ("a copy to pageable memory", 1, &to_host),
        ("that and a wait for what it has waited for", 1, &|| to_host().max(runtime::synchronize(0))),
        ("that and a wait for another stream", 2, &|| to_host().max(runtime::synchronize(stream))),
        ("that and a wait for work behind it", 2, &|| {
            to_host().max(runtime::fill(device, 1, 64, 0)).max(runtime::synchronize(0))
        }),
        ("that twice", 2, &|| to_host().max(to_host())),
        ("libtorch's copy to the host", 1, &|| {
            drop(read.to_device(Device::Cpu));
            0
        }),
        ("a stream", 1, &|| runtime::synchronize(0)),
        ("a stream twice", 2, &|| runtime::synchronize(0).max(runtime::synchronize(0))),
        ("an event", 1, &|| runtime::synchronize_event(event)),
        ("a device", 1, &runtime::device_synchronize),
        ("freeing device memory", 1, &|| runtime::free(other)),
        ("freeing pinned memory", 1, &|| runtime::free_host(freed)),
        ("asking until it is done", 1, &ask),
        ("nothing", 0, &|| 0),
    ];
    for (what, expected, way) in ways {
        fake.set_pace(Pace::Lazy);
        fake.trace_waits(true);
        fake.reset();
        let code = way();
        let counts = fake.counts();
        ensure!(code == 0 && waits(&counts) == expected, "{what}: {code}, {} waits: {counts:?}", waits(&counts));
        let told = fake.waits().lines().filter(|line| !line.starts_with(' ')).map(times).sum::<u64>();
        ensure!(told == expected, "{what}: {told} waits are told instead of {expected}: {}", fake.waits());
    }
    ensure!(runtime::destroy_stream(stream) == 0);
    fake.set_pace(Pace::Eager);
    fake.trace_waits(false);
    let pageable = Tensor::ones([4], (Kind::Float, Device::Cpu));
    ensure!(costs(16, || pageable.f_to_device_(GPU, Kind::Float, true, false)).is_err(), "it is not pinned");
    Ok(())
}

/// Each way to ask the driver for memory, an event or a stream is counted once.
pub fn what_the_driver_is_asked_for_is_counted_in_every_way() -> Result<()> {
    let fake = fake()?;
    let host = vec![0u8; 2 << 12];
    let code = |result: Result<_, i32>| result.err().unwrap_or(0);
    type Way<'a> = (&'a str, [u64; 2], &'a dyn Fn() -> i32);
    let ways: [Way<'_>; 7] = [
        ("device memory", [1, 0], &|| code(runtime::malloc(64))),
        ("device memory in the order of a stream", [1, 0], &|| code(runtime::malloc_async(64, 0))),
        ("pinned memory", [1, 0], &|| code(runtime::malloc_host(64))),
        ("memory that is pinned later", [1, 0], &|| {
            let address = host.as_ptr() as usize;
            runtime::pin(address, host.len(), 0).max(runtime::unpin(address))
        }),
        ("an event", [0, 1], &|| code(runtime::event(false))),
        ("a stream", [0, 1], &|| code(runtime::stream(true))),
        ("nothing", [0, 0], &|| 0),
    ];
    for (what, expected, way) in ways {
        fake.reset();
        let code = way();
        let counts = fake.counts();
        let found = [allocations(&counts), created(&counts)];
        ensure!(code == 0 && found == expected, "{what}: {code}, {found:?} instead of {expected:?}: {counts:?}");
    }
    Ok(())
}

pub fn transforms_upload_nothing() -> Result<()> {
    let images = Tensor::zeros([4, 3, 8, 8], (Kind::Uint8, GPU));
    let to_float = ToFloat::new(&[0.5, 0.4, 0.3], &[0.2, 0.2, 0.2])?;
    costs(0, || to_float.apply(&images))?;
    let (floats, labels) = (Tensor::zeros([4, 3, 8, 8], FLOAT), Tensor::zeros([4], (Kind::Int64, GPU)));
    let mix_up = MixUp::new(10)?.alpha(0.2)?;
    costs(0, || mix_up.with_share(&floats, &labels, 0.3))
}

pub fn rows_on_the_device_are_gathered_without_waiting() -> Result<()> {
    let rows = Rows::new(&Tensor::arange(40, FLOAT).view([10, 4]))?;
    costs(3 * 8, || rows.gather(&[9, 0, 3], false))?;
    let gathered = rows.gather(&[9, 0], false)?.sum_dim_intlist(&[1i64][..], false, Kind::Float);
    ensure!(Vec::<f32>::try_from(gathered.to_device(Device::Cpu))? == [150.0, 6.0]);
    Ok(())
}

/// The first epoch of a cache on the device uploads each sample once, and the places that it is kept at.
pub fn a_cache_on_the_device_uploads_each_sample_once() -> Result<()> {
    let fake = fake()?;
    fake.trace_waits(true);
    let samples =
        (Tensor::zeros([48, 16], (Kind::Float, Device::Cpu)), Tensor::zeros([48], (Kind::Int64, Device::Cpu)));
    let loader = DataLoader::builder(TensorDataset::new(samples)?).batch_size(8).cache(OnDevice(GPU))?.build()?;
    fake.reset();
    for batch in &loader {
        drop(batch?);
    }
    let (samples, places) = (48 * (16 * 4 + 8), 48 * 8);
    let first = fake.counts();
    ensure!(waits(&first) == 0, "waits: {}", fake.waits());
    let expected = samples + places;
    ensure!(uploaded(&first) == expected, "{} bytes instead of {expected}: {first:?}", uploaded(&first));
    ensure!(!first.contains_key(PAGEABLE), "{first:?}");
    fake.reset();
    for batch in &loader {
        drop(batch?);
    }
    let second = fake.counts();
    ensure!(waits(&second) == 0, "the second epoch waits: {}", fake.waits());
    ensure!(uploaded(&second) == places && !second.contains_key(PAGEABLE), "{second:?}");
    Ok(())
}

/// A loader, half precision with a scaler, an optimizer and a meter: a whole epoch of steps.
pub fn steps_fed_by_a_loader_neither_wait_nor_upload_more_than_the_batch() -> Result<()> {
    for workers in [0, 2] {
        let labels = Tensor::randint(4, [64], (Kind::Int64, Device::Cpu));
        let samples = (Tensor::randn([64, 16], (Kind::Float, Device::Cpu)), labels);
        let builder = DataLoader::builder(TensorDataset::new(samples)?).batch_size(8).num_workers(workers);
        let loader = builder.to_device(GPU).build()?;
        let model =
            sequential![overdrive::nn::Linear::new(16, 32)?, overdrive::nn::Relu, overdrive::nn::Linear::new(32, 4)?];
        model.to(GPU)?;
        let mut opt = AdamW::builder(&model).build()?;
        let mut scaler = GradScaler::new(GPU);
        let mut meter = AverageMeter::new("loss");
        let epoch = || -> Result<()> {
            for batch in &loader {
                let (inputs, targets) = batch?;
                let loss = {
                    let _autocast = AutocastGuard::new(GPU, Kind::Half)?;
                    model.forward(&inputs)?.cross_entropy_for_logits(&targets)
                };
                scaler.scale(&loss)?.f_backward()?;
                scaler.step(&mut opt)?;
                scaler.update()?;
                opt.zero_grad()?;
                meter.update(&loss, 8)?;
            }
            Ok(())
        };
        costs(64 * (16 * 4 + 8), epoch).with_context(|| format!("{workers} workers"))?;
    }
    Ok(())
}

pub fn a_new_scale_is_set_without_waiting() -> Result<()> {
    let mut scaler = GradScaler::new(GPU);
    drop(scaler.scale(&Tensor::ones([1], FLOAT))?);
    costs(0, || scaler.update_to(1024.0))?;
    ensure!(scaler.scale_value()? == 1024.0);
    Ok(())
}

/// The caller writes to all of it: clearing it first would cost as much as the copy.
pub fn pinned_memory_is_not_cleared() -> Result<()> {
    drop(ffi::empty_pinned(&[1 << 16], Kind::Float)?.fill_(7.0));
    // libtorch's allocator gives the same block again.
    let again = ffi::empty_pinned(&[1 << 16], Kind::Float)?;
    ensure!(again.eq(7.0).all().int64_value(&[]) == 1, "the block was cleared, or is another one");
    Ok(())
}

/// Its copy to the device is still to come when the caller writes to it.
pub fn a_pinned_tensor_may_change_after_its_upload() -> Result<()> {
    let program = || -> Result<Vec<f32>> {
        let mut host = ffi::empty_pinned(&[4], Kind::Float)?.fill_(1.0);
        let uploaded = ffi::upload(&host, GPU)?;
        let _changed = host.fill_(2.0);
        Ok(Vec::try_from(uploaded.to_device(Device::Cpu))?)
    };
    for pace in paces(3) {
        let (numbers, notes) = watched(pace, program)?;
        ensure!(notes.is_empty(), "{pace:?}: {}", notes.join("; "));
        let numbers = numbers?;
        ensure!(numbers == [1.0; 4], "{pace:?}: {numbers:?}");
    }
    Ok(())
}

/// A group of this process alone, over NCCL: all of a step runs but the exchange with others.
fn alone(folder: &tempfile::TempDir) -> Result<ProcessGroup> {
    let group = ProcessGroup::builder(Backend::Nccl).cuda_device(0);
    Ok(group.init(&InitMethod::File { path: folder.path().join("meet"), rank: 0, world_size: 1 })?)
}

/// libtorch makes its buckets anew after the first pass.
const FIRST_PASSES: usize = 2;

pub fn accumulation_over_nccl_neither_waits_nor_uploads() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let group = alone(&folder)?;
    let vs = nn::VarStore::new(GPU);
    let linear = nn::linear(vs.root(), 8, 8, Default::default());
    let ddp = DistributedDataParallel::builder(&group).build(&vs)?;
    let opt = Sgd::builder(&vs).build()?;
    let inputs = Tensor::ones([8, 8], FLOAT);
    let mut accum = Accumulator::with_sync(Accumulator::new(2)?, &ddp);
    // Of uneven micro-batches, so that gradients are multiplied when the counts are known.
    let mut window = |first: i64| -> Result<()> {
        for micro in accum.windows([first, 8 - first]) {
            let batch = inputs.narrow(0, 0, micro.batch);
            let loss = ddp.forward(|| nn::Module::forward(&linear, &batch))?.square().mean(Kind::Float);
            accum.backward(&opt, &loss, Samples(micro.batch), micro.closes)?;
        }
        Ok(())
    };
    (0..FIRST_PASSES).try_for_each(|_| window(4))?;
    costs(0, || window(3))
}

pub fn a_step_within_join_neither_waits_nor_uploads() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let group = alone(&folder)?;
    let vs = nn::VarStore::new(GPU);
    let linear = nn::linear(vs.root(), 8, 8, Default::default());
    let ddp = DistributedDataParallel::builder(&group).build(&vs)?;
    let inputs = Tensor::ones([4, 8], FLOAT);
    let step = || -> Result<()> {
        let outputs = ddp.forward(|| nn::Module::forward(&linear, &inputs))?;
        Ok(ddp.backward(&outputs.square().mean(Kind::Float))?)
    };
    (0..FIRST_PASSES).try_for_each(|_| step())?;
    ddp.join(false, || costs(0, step))?
}

pub fn hooks_and_statistics_over_nccl_neither_wait_nor_upload() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let group = alone(&folder)?;
    let power = PowerSgdOptions { start_power_sgd_iter: 2, ..Default::default() };
    costs_of_hook(0, &group, OneBit::new(&group, 0))?;
    costs_of_hook(0, &group, TopK::new(&group, 0.1, 0)?)?;
    costs_of_hook(0, &group, PowerSgd::new(&group, power)?)?;
    // A new right factor in each step, of the only matrix: 64 numbers.
    let power = PowerSgdOptions { warm_start: false, ..power };
    costs_of_hook(4 * 64, &group, PowerSgd::new(&group, power)?)?;
    costs_of_hook(0, &group, CastCompress::half(&group))?;
    costs_of_hook(0, &group, PostLocalSgd::new(&group, None, 0))?;
    costs_of_hook(0, &group, HierarchicalAllReduce::new(&group, 1)?)?;
    let weights = Tensor::randn([64, 64], FLOAT).set_requires_grad(true);
    let options = OneBitAdamOptions { freeze_step: 1, ..OneBitAdamOptions::default() };
    let mut opt = OneBitAdam::new(&group, [&weights], options)?;
    let mut step = || -> Result<()> {
        weights.square().sum(Kind::Float).backward();
        opt.step()?;
        Ok(opt.zero_grad()?)
    };
    (0..FIRST_PASSES).try_for_each(|_| step())?;
    costs(0, step)?;

    let norm_vs = nn::VarStore::new(GPU);
    let norm = SyncBatchNorm::new(norm_vs.root(), 3, Default::default(), &group);
    let images = Tensor::randn([4, 3, 8, 8], FLOAT);
    costs(0, || norm.forward_t(&images, true).map(|it| it.sum(Kind::Float).backward()))
}

fn costs_of_hook(bytes: u64, group: &ProcessGroup, hook: impl CommHook + 'static) -> Result<()> {
    let vs = nn::VarStore::new(GPU);
    let linear = nn::linear(vs.root(), 64, 64, Default::default());
    let ddp = DistributedDataParallel::builder(group).build(&vs)?;
    ddp.register_comm_hook(hook)?;
    let inputs = Tensor::randn([8, 64], FLOAT);
    let step = || -> Result<()> {
        let outputs = ddp.forward(|| nn::Module::forward(&linear, &inputs))?;
        Ok(ddp.backward(&outputs.square().mean(Kind::Float))?)
    };
    // PowerSGD's first matrices are uploaded in the step after its warm-up.
    (0..FIRST_PASSES + 1).try_for_each(|_| step())?;
    costs(bytes, step)
}
