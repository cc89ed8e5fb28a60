//! Damaged checkpoints, other formats, other models, and a full disk.

use std::fs;
use std::path::Path;
use std::process::Command;

use overdrive_checkpoint::{Checkpoint, CheckpointError};
use overdrive_core::Entry;
use tch::{Device, Kind, Tensor, nn};

use crate::{Plain, child, model, value};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Saves two good checkpoints, of steps 1 and 2.
fn two(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    let mut checkpoint = Checkpoint::builder(folder).build()?;
    checkpoint.save(1, &[("model", &model(1.0))])?;
    checkpoint.save(2, &[("model", &model(2.0))])?;
    checkpoint.wait()?;
    Ok(checkpoint)
}

#[test]
fn a_truncated_checkpoint_is_skipped() -> Outcome {
    for name in ["model.safetensors", "manifest.json"] {
        let folder = tempfile::tempdir()?;
        let mut checkpoint = two(folder.path())?;
        let path = checkpoint.path(2).join(name);
        let whole = fs::read(&path)?;
        for len in [0, 1, 7, 8, 20, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..len])?;
            let error = checkpoint.load(2, &mut [("model", &mut model(0.0))]).unwrap_err();
            assert!(error.is_damage() && error.to_string().contains(name), "{len}: {error}");
        }
        fs::remove_file(&path)?;
        let mut vs = model(0.0);
        let resumed = checkpoint.resume(&mut [("model", &mut vs)])?.ok_or("nothing")?;
        assert_eq!((resumed.step, resumed.skipped.len(), value(&vs)), (1, 1, 1.0));
        assert_eq!(checkpoint.steps()?, [1], "the damaged step is no longer listed");
    }
    Ok(())
}

#[test]
fn every_flipped_bit_is_detected() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut checkpoint = two(folder.path())?;
    for name in ["model.safetensors", "manifest.json"] {
        let path = checkpoint.path(2).join(name);
        let whole = fs::read(&path)?;
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << (at % 8);
            fs::write(&path, flipped)?;
            let mut vs = model(0.0);
            let error = checkpoint.load(2, &mut [("model", &mut vs)]).unwrap_err();
            // A flipped bit can turn the format number into a newer one.
            let found = error.is_damage() || matches!(error, CheckpointError::NewerFormat { .. });
            assert!(found, "{name}, byte {at}: {error}");
            assert_eq!(value(&vs), 0.0);
        }
        fs::write(&path, whole)?;
    }
    let mut vs = model(0.0);
    checkpoint.load(2, &mut [("model", &mut vs)])?;
    assert_eq!(value(&vs), 2.0);
    Ok(())
}

#[test]
fn a_newer_format_is_an_error_and_the_previous_checkpoint_loads() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut checkpoint = two(folder.path())?;
    let path = checkpoint.path(2).join("manifest.json");
    fs::write(&path, fs::read_to_string(&path)?.replace("\"format\": 1,", "\"format\": 9,"))?;
    let mut vs = model(0.0);
    let error = checkpoint.resume(&mut [("model", &mut vs)]).unwrap_err();
    assert!(error.to_string().ends_with("format: expected 1 or less, found 9: a later version wrote it"), "{error}");
    checkpoint.load(1, &mut [("model", &mut vs)])?;
    assert_eq!(value(&vs), 1.0);
    Ok(())
}

#[test]
fn the_error_for_another_model_names_the_weight() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut checkpoint = two(folder.path())?;
    let mut wide = nn::VarStore::new(Device::Cpu);
    let _ = wide.root().var("bias", &[3], nn::Init::Const(0.0));
    let _ = wide.root().var("weight", &[3, 5], nn::Init::Const(0.0));
    let error = checkpoint.resume(&mut [("model", &mut wide)]).unwrap_err().to_string();
    let expected = "model: `weight` should be a Float tensor of shape [3, 5], but is a Float tensor of shape [3, 4]";
    assert_eq!(error, expected);
    assert_eq!(value(&wide), 0.0);

    let mut double = model(0.0);
    double.double();
    let error = checkpoint.resume(&mut [("model", &mut double)]).unwrap_err().to_string();
    assert!(error.contains("should be a Double tensor"), "{error}");
    let _ = wide.root().var("more", &[1], nn::Init::Const(0.0));
    assert!(checkpoint.resume(&mut [("model", &mut wide)]).unwrap_err().to_string().contains("`more`"));
    Ok(())
}

#[test]
fn when_all_are_damaged_a_run_does_not_start_over_silently() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut checkpoint = two(folder.path())?;
    for step in [1, 2] {
        fs::remove_file(checkpoint.path(step).join("manifest.json"))?;
    }
    let error = checkpoint.resume(&mut [("model", &mut model(0.0))]).unwrap_err();
    assert!(error.is_damage(), "{error}");
    Ok(())
}

#[test]
fn leftovers_of_a_crash_are_cleaned_up() -> Outcome {
    let folder = tempfile::tempdir()?;
    let checkpoint = two(folder.path())?;
    let (one, two) = (checkpoint.path(1), checkpoint.path(2));
    assert!(matches!(Checkpoint::builder(folder.path()).build(), Err(CheckpointError::InUse { .. })));
    drop(checkpoint);
    let beside = |prefix: &str, path: &Path| {
        folder.path().join(format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy()))
    };
    // As after a kill between the two renames that replace a checkpoint, during a removal, and during a write.
    fs::rename(&two, beside(".replaced-", &two))?;
    fs::rename(&one, beside(".removed-", &one))?;
    fs::create_dir(folder.path().join(".writing-step-000000000003"))?;
    let mut checkpoint = Checkpoint::builder(folder.path()).build()?;
    assert_eq!(checkpoint.steps()?, [2]);
    checkpoint.load(2, &mut [("model", &mut model(0.0))])?;
    assert_eq!(fs::read_dir(folder.path())?.count(), 2, "the checkpoint and the lock");
    Ok(())
}

#[test]
fn invalid_options_names_and_tensors_are_refused() -> Outcome {
    let folder = tempfile::tempdir()?;
    assert!(Checkpoint::builder(folder.path()).keep(0).build().is_err());
    assert!(Checkpoint::builder(folder.path()).every(0).build().is_err());
    let mut checkpoint = Checkpoint::builder(folder.path()).build()?;
    let vs = model(0.0);
    for name in ["", "a/b", "..", ".a", "ü"] {
        assert!(matches!(checkpoint.save(1, &[(name, &vs)]), Err(CheckpointError::PartName { .. })), "{name}");
    }
    assert!(checkpoint.save(1, &[("a", &vs), ("A", &vs)]).is_err());
    let ones = Tensor::ones([2], (Kind::Float, Device::Cpu));
    let odd = [
        Tensor::new(),
        Tensor::zeros([2], (Kind::ComplexDouble, Device::Cpu)),
        ones.to_sparse_sparse_dim(1),
        Tensor::quantize_per_tensor(&ones, 0.1, 0, Kind::QInt8),
    ];
    for tensor in odd {
        let part = Plain::new([]);
        let mut part = part;
        part.0.insert("odd", Entry::Tensor(tensor));
        let error = checkpoint.save(1, &[("part", &Shared(&part))]).unwrap_err().to_string();
        assert!(error.starts_with("part: `odd`: expected"), "{error}");
    }
    let error = checkpoint.load(5, &mut []).unwrap_err().to_string();
    assert!(error.ends_with("no checkpoint of step 5; there are []"), "{error}");
    Ok(())
}

#[test]
fn a_part_whose_name_leads_out_of_the_folder_is_damage() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut checkpoint = two(folder.path())?;
    let tensors = fs::read(checkpoint.path(2).join("model.safetensors"))?;
    fs::write(folder.path().join("outside.safetensors"), &tensors)?;
    let absolute = folder.path().join("outside").to_string_lossy().into_owned();
    for name in ["../outside", "", absolute.as_str(), "a\0b", "a/b", "a\\b", "..", ".hidden", "C:outside"] {
        crate::edit_manifest(&checkpoint.path(2), |manifest| {
            let parts = manifest["parts"].as_object_mut().unwrap();
            let part = parts.values().next().unwrap().clone();
            *parts = [(name.to_owned(), part)].into_iter().collect();
        })?;
        let mut vs = model(0.0);
        let errors = [
            checkpoint.load(2, &mut [("model", &mut vs)]).unwrap_err(),
            overdrive_checkpoint::load(checkpoint.path(2), &mut []).unwrap_err(),
            overdrive_checkpoint::read_part(checkpoint.path(2), name, |_| true).unwrap_err(),
        ];
        for error in errors {
            assert!(error.is_damage() && error.to_string().contains("a part's name"), "{name:?}: {error}");
        }
    }
    let resumed = checkpoint.resume(&mut [("model", &mut model(0.0))])?.ok_or("nothing")?;
    assert_eq!(resumed.step, 1, "the previous checkpoint");
    Ok(())
}

/// Returns its tensors without copies, including undefined ones.
struct Shared<'a>(&'a Plain);

impl overdrive_core::Stateful for Shared<'_> {
    fn state_dict(&self) -> Result<overdrive_core::StateDict, overdrive_core::StateError> {
        let mut state = overdrive_core::StateDict::new();
        for (key, entry) in self.0.0.iter() {
            if let Entry::Tensor(tensor) = entry {
                state.insert(key, Entry::Tensor(tensor.shallow_clone()));
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, _: &overdrive_core::StateDict) -> Result<(), overdrive_core::StateError> {
        Ok(())
    }
}

/// A limit on file sizes simulates a full disk: the write fails halfway.
#[cfg(unix)]
#[test]
fn on_a_full_disk_the_next_call_returns_the_error_and_the_previous_checkpoint_loads() -> Outcome {
    let folder = tempfile::tempdir()?;
    drop(two(folder.path())?);
    let mut limited = Command::new("bash");
    // In units of 1024 bytes. The signal is ignored, so that the write fails instead.
    limited.args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\" \"$@\""]).arg(std::env::current_exe()?);
    let output = child::arguments(&mut limited, "full_disk", folder.path()).output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("the checkpoint of step 3 was not written"), "{said}");
    assert!(said.contains("model.safetensors: cannot write its 4000"), "{said}");

    let mut vs = model(0.0);
    let mut checkpoint = Checkpoint::builder(folder.path()).build()?;
    assert_eq!(checkpoint.resume(&mut [("model", &mut vs)])?.ok_or("nothing")?.step, 2);
    assert_eq!(value(&vs), 2.0);
    Ok(())
}

#[test]
fn a_folder_of_pythons_distributed_checkpoint_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(".metadata"), "").unwrap();
    let told = overdrive_checkpoint::load(folder.path(), &mut [("model", &mut model(0.0))]).unwrap_err().to_string();
    assert!(told.contains("torch.distributed.checkpoint") && told.contains("`load_dcp`"), "{told}");
}
