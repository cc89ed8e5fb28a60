//! An optimizer whose state is on the host or on its disk, for parameters that are on the host too.

use std::path::Path;

use overdrive::core::{OptimizerError, Parameter};
use overdrive::memory::{AutoMicroBatch, CpuOffloadOptimizer};
use overdrive::prelude::*;

use crate::{CPU, turn};

fn adamw(params: Vec<Parameter>) -> Result<AdamW, OptimizerError> {
    AdamW::builder(params).lr(0.1).build()
}

fn train(params: &[(&str, Tensor)], opt: &mut dyn Optimizer, steps: u32) -> anyhow::Result<()> {
    for _ in 0..steps {
        for (_, param) in params {
            (param * param).sum(Kind::Float).f_backward()?;
        }
        clip_grad_norm_(opt.params(), 0.5)?;
        opt.step()?;
        opt.zero_grad()?;
    }
    Ok(())
}

#[test]
fn on_a_cpu_it_is_the_optimizer_itself_and_their_states_are_each_others() -> anyhow::Result<()> {
    let _turn = turn();
    let start = [3, 5].map(|size| Tensor::randn([size], (Kind::Float, CPU)));
    let params = || ["a", "b"].into_iter().zip(&start).map(|(name, it)| (name, it.copy().set_requires_grad(true)));
    let [plain, offloaded]: [Vec<_>; 2] = [params().collect(), params().collect()];
    let (mut opt, mut on_host) =
        (AdamW::builder(&plain).lr(0.1).build()?, CpuOffloadOptimizer::new(&offloaded, adamw)?);
    assert_eq!(on_host.parameters()[1].name(), Some("b"));
    on_host.set_lr(0, 0.05)?;
    opt.set_lr(0, 0.05)?;
    let both = |opt: &mut AdamW, on_host: &mut CpuOffloadOptimizer<AdamW>, steps| -> anyhow::Result<()> {
        train(&plain, opt, steps)?;
        train(&offloaded, on_host, steps)?;
        assert!(plain.iter().zip(&offloaded).all(|(one, other)| one.1 == other.1));
        Ok(())
    };
    both(&mut opt, &mut on_host, 3)?;
    let [one, other] = [opt.state_dict()?.copied()?, on_host.state_dict()?.copied()?];
    opt.load_state_dict(&other)?;
    on_host.load_state_dict(&one)?;
    both(&mut opt, &mut on_host, 3)
}

/// The bytes of files in a folder that are mapped into memory.
fn mapped(folder: &Path) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of_folder = maps.lines().filter(|line| line.contains(&*folder.to_string_lossy()));
    let bytes = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(start, 16).ok()?)
    };
    of_folder.filter_map(bytes).sum()
}

#[test]
fn state_on_disk_is_in_files_without_names_and_steps_are_the_same_to_the_bit() -> anyhow::Result<()> {
    let _turn = turn();
    let folder = tempfile::tempdir()?;
    // The second is too small for a file, and the third gets its gradient only later.
    let start = [1 << 18, 5, 1 << 17].map(|size| Tensor::randn([size], (Kind::Float, CPU)));
    let params = || ["a", "b", "c"].into_iter().zip(&start).map(|(name, it)| (name, it.copy().set_requires_grad(true)));
    let [plain, offloaded]: [Vec<_>; 2] = [params().collect(), params().collect()];
    let mut opt = AdamW::builder(&plain).lr(0.1).build()?;
    let mut on_disk = CpuOffloadOptimizer::new(&offloaded, adamw)?.state_on_disk(folder.path())?;
    opt.set_lr(0, 0.1)?;
    for count in [2, 3] {
        train(&plain[..count], &mut opt, 2)?;
        train(&offloaded[..count], &mut on_disk, 2)?;
        assert!(plain.iter().zip(&offloaded).all(|(one, other)| one.1 == other.1));
        // Two moments of each.
        assert_eq!(mapped(folder.path()), 3 << 20);
    }
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);

    // What is loaded is on disk too, and what is made outside of a step is not.
    let saved = opt.state_dict()?.copied()?;
    let mut loaded = CpuOffloadOptimizer::new(&offloaded, adamw)?.state_on_disk(folder.path())?;
    loaded.load_state_dict(&saved)?;
    assert_eq!(mapped(folder.path()), 6 << 20);
    drop(on_disk);
    let _in_memory = Tensor::zeros([1 << 18], (Kind::Float, CPU));
    assert_eq!(mapped(folder.path()), 3 << 20);
    train(&plain, &mut opt, 2)?;
    train(&offloaded, &mut loaded, 2)?;
    assert!(plain.iter().zip(&offloaded).all(|(one, other)| one.1 == other.1));
    drop(loaded);
    assert_eq!(mapped(folder.path()), 0);

    let mut stepped = CpuOffloadOptimizer::new(&plain, adamw)?;
    train(&plain, &mut stepped, 1)?;
    let why = stepped.state_on_disk(folder.path()).unwrap_err().to_string();
    assert!(why.contains("before the first step"), "{why}");
    let told =
        |path: &Path| CpuOffloadOptimizer::new(&offloaded, adamw).unwrap().state_on_disk(path).unwrap_err().to_string();
    assert!(told(&folder.path().join("none")).contains("none"));
    let file = folder.path().join("file");
    std::fs::write(&file, "")?;
    assert!(told(&file).contains("not a directory"), "{}", told(&file));
    Ok(())
}

/// Set in the process that may write no large file.
const FULL: &str = "OVERDRIVE_TEST_FULL_DISK";

/// As where a disk is full: the first file has room, the second has not.
#[test]
fn a_step_for_whose_state_the_disk_has_no_room_is_an_error_and_changes_nothing() -> anyhow::Result<()> {
    let _turn = turn();
    if std::env::var_os(FULL).is_none() {
        let script = "trap '' XFSZ; ulimit -f 2048; exec \"$0\" \"$@\"";
        let name = "offload::a_step_for_whose_state_the_disk_has_no_room_is_an_error_and_changes_nothing";
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script]).arg(std::env::current_exe()?).args(["--exact", name]).env(FULL, "1");
        let output = command.output()?;
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && told.contains("1 passed"), "{told}");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let params = [1 << 18, 1 << 20].map(|size| Tensor::ones([size], (Kind::Float, CPU)).set_requires_grad(true));
    let params = ["small", "large"].into_iter().zip(params).collect::<Vec<_>>();
    // Each has a bucket of its own.
    let unfused = |params| AdamW::builder(params).fused(false).build();
    let mut opt = CpuOffloadOptimizer::new(&params, unfused)?.state_on_disk(folder.path())?;
    let told = train(&params, &mut opt, 1).unwrap_err().to_string();
    assert!(told.contains("no file of 4194304 bytes for a tensor in ") && told.contains("File too large"), "{told}");
    assert!(params.iter().all(|(_, param)| param == &param.ones_like()), "no parameter was stepped");
    assert_eq!(mapped(folder.path()), 0);
    // With what fits, it goes on.
    opt.zero_grad()?;
    train(&params[..1], &mut opt, 1)?;
    assert_eq!(mapped(folder.path()), 2 << 20);
    assert!(params[0].1 != params[0].1.ones_like() && params[1].1 == params[1].1.ones_like());
    Ok(())
}

/// A batch that begins again would find other weights.
#[test]
fn a_batch_in_parts_refuses_steps_in_backward() -> anyhow::Result<()> {
    let _turn = turn();
    let weight = Tensor::ones([4], (Kind::Float, CPU)).set_requires_grad(true);
    let mut opt = AdamW::builder([weight.shallow_clone()]).build_in_backward()?;
    let loss = |part: &[Tensor]| Ok::<_, anyhow::Error>((&part[0] * &weight).sum(Kind::Float));
    let told = AutoMicroBatch::new(2).backward(&mut opt, &[Tensor::ones([4, 4], (Kind::Float, CPU))], loss);
    assert!(told.unwrap_err().to_string().contains("would find other weights"));
    Ok(())
}
