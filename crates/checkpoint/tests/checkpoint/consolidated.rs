//! One safetensors file of what ranks have saved together.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use overdrive_checkpoint::{Checkpoint, CheckpointError, RngState, Writers, consolidate};
use overdrive_core::{Entry, RankGroup};
use safetensors::SafeTensors;
use tch::{Device, Kind, Tensor};

use crate::group::{Rank, run};
use crate::shards::{Sharded, save};
use crate::{Plain, model};

#[test]
fn one_file_has_the_whole_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("whole.safetensors");
    save(folder.path(), 3, &[1, 2]);
    assert_eq!(consolidate(folder.path(), None, "sharded", &file).unwrap(), 2);
    let bytes = fs::read(&file).unwrap();
    let found = SafeTensors::deserialize(&bytes).unwrap();
    let whole = Sharded::new(0, 1, 2.0);
    assert_eq!(found.len(), whole.wholes.len());
    for (name, whole) in &whole.wholes {
        let found = found.tensor(name).unwrap();
        let kind = if whole.kind() == Kind::Bool { Kind::Uint8 } else { whole.kind() };
        assert_eq!(found.shape().iter().map(|&side| side as i64).collect::<Vec<_>>(), whole.size());
        let found = Tensor::f_from_data_size(found.data(), &whole.size(), kind).unwrap();
        assert!(found.equal(&whole.to_kind(kind)), "{name}");
    }
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = metadata.metadata().clone().unwrap();
    assert_eq!((metadata["format"].as_str(), metadata["groups"].as_str()), ("pt", "2"));
    // A part that is the same on all ranks, of a given step, and by the program.
    let file = folder.path().join("model.safetensors");
    let program = Command::new(env!("CARGO_BIN_EXE_overdrive-checkpoint"))
        .args(["consolidate", "--step", "1"])
        .args([folder.path(), &file])
        .output()
        .unwrap();
    assert!(program.status.success(), "{program:?}");
    assert!(String::from_utf8_lossy(&program.stdout).contains("the part \"model\" of step 1"), "{program:?}");
    let bytes = fs::read(&file).unwrap();
    let weight = SafeTensors::deserialize(&bytes).unwrap().tensor("weight").unwrap().data().to_vec();
    assert_eq!(weight, [1.0f32; 12].iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>());
}

#[test]
fn tied_tensors_are_written_once_and_checkpoints_of_one_process_are_read_too() {
    let folder = tempfile::tempdir().unwrap();
    let tied = Tensor::arange(6, (Kind::Float, Device::Cpu));
    let names = ["decoder", "encoder", "other"];
    let part =
        names.map(|name| (name, Entry::Tensor(if name == "other" { tied.copy() } else { tied.shallow_clone() })));
    let mut part = Plain::new(part);
    // `Plain` copies.
    let shared = part.0.tensor("decoder", &[6], Kind::Float).unwrap().shallow_clone();
    part.0.insert("encoder", Entry::Tensor(shared));
    struct Shared(Plain);
    impl overdrive_core::Stateful for Shared {
        fn state_dict(&self) -> Result<overdrive_core::StateDict, overdrive_core::StateError> {
            self.0.0.with_tensors(|tensor| Ok(tensor.shallow_clone()))
        }
        fn load_state_dict(&mut self, state: &overdrive_core::StateDict) -> Result<(), overdrive_core::StateError> {
            self.0.load_state_dict(state)
        }
    }
    let mut checkpoint = Checkpoint::builder(folder.path()).build().unwrap();
    checkpoint.save(5, &[("model", &Shared(part))]).unwrap();
    checkpoint.finish().unwrap();
    let file = folder.path().join("out.safetensors");
    assert_eq!(consolidate(folder.path(), None, "model", &file).unwrap(), 5);
    let bytes = fs::read(&file).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut names = header.offset_keys();
    names.sort();
    assert_eq!(names, ["decoder", "other"]);
    assert_eq!(header.metadata().as_ref().unwrap()["encoder"], "decoder");
}

#[test]
fn what_is_no_whole_is_refused_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("out.safetensors");
    // Not the folder of a run: empty, missing, a file.
    let a_file = folder.path().join("note");
    fs::write(&a_file, "").unwrap();
    for (at, reason) in [
        (folder.path().to_path_buf(), "there are no checkpoints in it"),
        (folder.path().join("missing"), "No such file or directory"),
        (a_file.clone(), "it is no folder"),
    ] {
        let told = consolidate(&at, None, "model", &file).unwrap_err();
        assert!(matches!(&told, CheckpointError::NoRun { folder, .. } if *folder == at), "{told:?}");
        let program = Command::new(env!("CARGO_BIN_EXE_overdrive-checkpoint"));
        let program = { program }.arg("consolidate").args([&at, &file]).output().unwrap();
        let said = String::from_utf8_lossy(&program.stderr).into_owned();
        let right = "it should be the folder of a run";
        assert!(!program.status.success() && said.contains(at.to_str().unwrap()), "{said}");
        assert!(said.contains(reason) && said.contains(right), "{said}");
    }
    fs::remove_file(a_file).unwrap();
    run(Rank::group(2, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        let parts = (Sharded::new(number, 2, 1.0), RngState::new(Device::Cpu), model(1.0));
        checkpoint.save(1, &[("sharded", &parts.0), ("rng", &parts.1), ("model", &parts.2)]).unwrap();
        checkpoint.finish().unwrap();
    });
    let told = consolidate(folder.path(), None, "rng", &file).unwrap_err();
    assert!(matches!(&told, CheckpointError::OtherRanks { part, saved: 2 } if part == "rng"), "{told}");
    let told = consolidate(folder.path(), None, "optimizer", &file).unwrap_err();
    assert!(matches!(told, CheckpointError::Parts { .. }), "{told}");
    let told = consolidate(folder.path(), Some(3), "model", &file).unwrap_err();
    assert!(matches!(told, CheckpointError::NoSuchStep { step: 3, .. }), "{told}");
    let path = folder.path().join("rank-1/step-000000000001/sharded.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let told = consolidate(folder.path(), None, "sharded", &file).unwrap_err();
    assert!(told.is_damage(), "{told}");
    fs::remove_dir_all(folder.path().join("rank-1")).unwrap();
    let told = consolidate(folder.path(), None, "sharded", &file).unwrap_err();
    assert!(told.is_damage() && told.to_string().contains("rank-1"), "{told}");
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["rank-0"]);
}

/// A Python with torch and safetensors: the one that is named, or that of libtorch.
fn python() -> Option<PathBuf> {
    let chosen = std::env::var_os("OVERDRIVE_PYTHON").filter(|value| !value.is_empty()).map(PathBuf::from);
    let libtorch = std::env::var_os("LIBTORCH").and_then(|path| PathBuf::from(path).canonicalize().ok());
    let around = libtorch.and_then(|path| Some(path.ancestors().nth(4)?.join("bin/python3")));
    let fits = |python: &PathBuf| {
        let probe = Command::new(python).args(["-c", "import safetensors.torch"]).stderr(Stdio::null()).status();
        probe.is_ok_and(|status| status.success())
    };
    [chosen, around].into_iter().flatten().find(fits)
}

const SCRIPT: &str = "
import sys, torch
from safetensors import safe_open
from safetensors.torch import load_file
found = load_file(sys.argv[1])
assert sorted(found) == ['few', 'flags', 'half', 'large', 'step'], sorted(found)
numbers = lambda *shape: (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + 1).view(shape)
assert found['large'].equal(numbers(1301, 700)) and found['few'].equal(numbers(2, 3))
assert found['flags'].equal(numbers(5).remainder(2).bool()) and found['half'].equal(numbers(7, 2).bfloat16())
assert found['step'].equal(torch.tensor(1.0, dtype=torch.float64))
with safe_open(sys.argv[1], 'pt') as file:
    assert file.metadata() == {'format': 'pt', 'groups': '2'}, file.metadata()
print('equal')
";

#[test]
fn pythons_safetensors_reads_the_file() {
    let Some(python) = python() else {
        println!("skipped: no Python with torch and safetensors");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("whole.safetensors");
    save(folder.path(), 3, &[1]);
    consolidate(folder.path(), Some(1), "sharded", &file).unwrap();
    let output = Command::new(python).args(["-c", SCRIPT]).arg(&file).output().unwrap();
    assert!(output.status.success() && output.stdout.starts_with(b"equal"), "{output:?}");
}
