//! What memory is used for, what is left behind, and how much a step will need. All memory of the process is watched, so
//! these tests run one at a time and in a program of their own.

mod budget;
mod estimate;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_ffi::{TensorList, host_memory};
use overdrive_memory::account::{Category, MemoryRecord, MemoryRecorder, memory_stats, reset_peak_memory_stats};
use overdrive_memory::{LeakCheck, MemoryError, leak_check};
use tch::{Device, Kind, TchError, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn leaf(size: &[i64]) -> Tensor {
    Tensor::randn(size, FLOAT).set_requires_grad(true)
}

/// Two layers, of which the first saves `tanh`'s result.
fn loss(x: &Tensor, weights: &[Tensor; 2]) -> Tensor {
    x.matmul(&weights[0]).tanh().matmul(&weights[1]).square().sum(Kind::Float)
}

fn record_step(batch: i64, weights: &mut [Tensor; 2]) -> MemoryRecord {
    let recorder = MemoryRecorder::begin().unwrap();
    weights.iter_mut().for_each(Tensor::zero_grad);
    let x = Tensor::randn([batch, 100], FLOAT);
    recorder.tag(Category::Input, [&x]).unwrap();
    loss(&x, weights).backward();
    recorder.tag(Category::Parameter, &*weights).unwrap();
    recorder.end()
}

#[test]
fn memory_at_the_peak_is_known_by_what_it_is_used_for() {
    let _alone = alone();
    let mut weights = [leaf(&[100, 300]), leaf(&[300, 50])];
    let record = record_step(40, &mut weights);
    assert_eq!(record.devices(), [Device::Cpu]);
    let uses: Vec<_> = record.timeline(Device::Cpu).into_iter().map(|(_, it)| it).collect();
    let most = |category| uses.iter().map(|it| it.of(category)).max().unwrap();
    assert_eq!(most(Category::Parameter), 4 * (100 * 300 + 300 * 50));
    assert_eq!(most(Category::Input), 4 * 40 * 100);
    assert_eq!(most(Category::Gradient), 4 * (100 * 300 + 300 * 50));
    // What `tanh` and `square` save, the loss, and the loss's gradient.
    assert_eq!(most(Category::Activation), 4 * (40 * 300 + 40 * 50 + 2));
    let peak = record.peak(Device::Cpu);
    assert_eq!(peak.total(), uses.iter().map(|it| it.total()).max().unwrap());
    assert_eq!(Category::ALL.map(|category| peak.of(category)).iter().sum::<u64>(), peak.total());
}

#[test]
fn a_step_that_keeps_its_losses_is_named_by_line() {
    let _alone = alone();
    let (mut kept, w) = (Vec::new(), leaf(&[50, 7]));
    let line = line!() + 2;
    let step = || {
        kept.push(Tensor::randn([30, 50], FLOAT).matmul(&w));
        Ok::<_, TchError>(())
    };
    let error = leak_check(step).unwrap_err();
    let MemoryError::Leaked { leaks } = &error else { panic!("{error}") };
    // The product, and the batch that its graph keeps.
    let [leak] = &leaks[..] else { panic!("{error}") };
    assert_eq!((leak.bytes, leak.blocks, leak.device), (4 * 30 * (50 + 7), 2, Device::Cpu));
    let caller = leak.caller.as_deref().unwrap();
    assert!(caller.ends_with(&format!("main.rs:{line}")), "{caller}");
    assert!(error.to_string().contains(caller), "{error}");
}

#[test]
fn a_step_that_replaces_what_it_made_leaves_nothing_behind() {
    let _alone = alone();
    let (mut w, mut state, mut steps) = (leaf(&[50, 7]), None, 0);
    let mut recent = Vec::new();
    leak_check(|| {
        steps += 1;
        w.zero_grad();
        let loss = Tensor::randn([30, 50], FLOAT).f_matmul(&w)?.f_sum(Kind::Float)?;
        loss.f_backward()?;
        let momentum = state.get_or_insert_with(|| w.grad().zeros_like());
        let _ = momentum.f_add_(&w.grad())?;
        recent.push(loss);
        if recent.len() > 2 {
            drop(recent.remove(0));
        }
        Ok::<_, TchError>(())
    })
    .unwrap();
    assert_eq!(steps, 5);
}

#[test]
fn what_is_kept_longer_than_the_steps_after_it_is_a_leak() {
    let _alone = alone();
    let mut recent = std::collections::VecDeque::new();
    let mut step = || {
        recent.push_back(Tensor::zeros([100], FLOAT));
        if recent.len() > 3 {
            recent.pop_front();
        }
        Ok::<_, TchError>(())
    };
    assert!(matches!(leak_check(&mut step), Err(MemoryError::Leaked { .. })));
    LeakCheck::default().after(3).run(&mut step).unwrap();
}

#[test]
fn a_step_that_fails_ends_the_check_with_its_error() {
    let _alone = alone();
    let error = leak_check(|| Tensor::zeros([2], FLOAT).f_reshape([3]).map(drop)).unwrap_err();
    assert!(matches!(&error, MemoryError::Function { .. }), "{error}");
    assert!(error.to_string().contains("shape"), "{error}");
}

/// The last step's gradients are there until they are cleared.
#[test]
fn gradients_of_the_step_before_count() {
    let _alone = alone();
    let weights = [leaf(&[100, 300]), leaf(&[300, 50])];
    let mut step = |recorder: &MemoryRecorder| {
        let loss = loss(&Tensor::randn([8, 100], FLOAT), &weights);
        TensorList::new(&weights)?.clear_grads()?;
        loss.backward();
        recorder.tag(Category::Parameter, &weights)
    };
    let run = |step: &mut dyn FnMut(&MemoryRecorder) -> Result<(), MemoryError>| {
        let recorder = MemoryRecorder::begin().unwrap();
        step(&recorder).unwrap();
        recorder.end()
    };
    run(&mut step);
    let uses = run(&mut step).timeline(Device::Cpu);
    let of_weights = 4 * 45_000;
    let at_first = uses.iter().take_while(|it| it.0 == 0).last().unwrap().1;
    assert_eq!(at_first.total(), 2 * of_weights, "{at_first:?}");
}

/// A Python with torch, found as by `cargo xtask parity`.
fn python() -> Option<PathBuf> {
    let has_torch = "import importlib.metadata as m, sys; sys.exit(not m.version('torch').startswith('2.11.'))";
    let chosen = std::env::var_os("OVERDRIVE_PYTHON").filter(|value| !value.is_empty()).map(PathBuf::from);
    let around = std::env::var_os("LIBTORCH").and_then(|path| PathBuf::from(path).canonicalize().ok());
    let around = around.and_then(|path| Some(path.ancestors().nth(4)?.join("bin/python3")));
    let fits = |python: &PathBuf| {
        let probe = Command::new(python).args(["-c", has_torch]).stderr(Stdio::null()).status();
        probe.is_ok_and(|status| status.success())
    };
    let candidates = if chosen.is_some() { [chosen, None] } else { [around, Some("python3".into())] };
    candidates.into_iter().flatten().find(fits)
}

#[test]
fn pytorchs_visualiser_reads_a_snapshot() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot.pickle");
    let recorder = MemoryRecorder::with_callers().unwrap();
    let line = line!() + 1;
    let kept = Tensor::zeros([3_000_000], FLOAT);
    drop(Tensor::zeros([1000], FLOAT));
    recorder.tag(Category::Input, [&kept]).unwrap();
    recorder.end().save_snapshot(&path).unwrap();
    drop(kept);
    let Some(python) = python() else {
        println!("skipped: no Python with torch 2.11");
        return;
    };
    let output = Command::new(&python)
        .args(["-c", include_str!("visualiser.py")])
        .arg(&path)
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    let (seen, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{error}");
    assert!(seen.contains("total_reserved: 11.4MiB") && seen.contains("total_allocated: 11.4MiB"), "{seen}");
    // The tensor that is kept, and the one that was freed.
    let function = "pytorchs_visualiser_reads_a_snapshot";
    for (event, line) in [("alloc input 12000000", line), ("free_completed temporary 4000", line + 1)] {
        let found = seen.lines().find_map(|it| it.strip_prefix(&format!("EVENT {event} main.rs:{line} ")));
        assert!(found.is_some_and(|it| it.contains(function)), "{event}, line {line}: {seen}");
    }
    for line in ["b = a[0:11.4MiB]", "d = c[0:3.9KiB]", "del d # 3.9KiB", "cudaFree(c) # 3.9KiB"] {
        assert!(seen.lines().any(|it| it.starts_with(line)), "{line}: {seen}");
    }
}

#[test]
fn a_snapshot_that_cannot_be_written_names_its_file() {
    let _alone = alone();
    let record = MemoryRecorder::begin().unwrap().end();
    let error = record.save_snapshot("/no/such/folder/snapshot.pickle").unwrap_err();
    assert!(error.to_string().contains("/no/such/folder/snapshot.pickle"), "{error}");
}

#[test]
fn statistics_of_the_host_are_those_that_are_counted() {
    let _alone = alone();
    host_memory::count(usize::MAX).unwrap();
    let before = memory_stats(Device::Cpu).unwrap();
    drop(Tensor::zeros([1 << 20], FLOAT));
    let after = memory_stats(Device::Cpu).unwrap();
    assert_eq!(after.allocated, before.allocated);
    assert!(after.allocated_peak >= before.allocated + (4 << 20));
    reset_peak_memory_stats(Device::Cpu).unwrap();
    assert_eq!(memory_stats(Device::Cpu).unwrap().allocated_peak, after.allocated);
    assert!(matches!(memory_stats(Device::Mps), Err(MemoryError::Device { .. })));
}
