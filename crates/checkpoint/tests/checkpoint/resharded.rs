//! Checkpoints that ranks have saved together, and that another number of ranks loads.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_checkpoint::{Checkpoint, CheckpointError, RngState, Writers, load};
use overdrive_core::{RankGroup, RowsToLoad, Shapes, SingleProcess, StateDict, StateError, Stateful};
use tch::{Device, Kind, Tensor};

use crate::group::{Rank, run};
use crate::shards::{Sharded, resume, resumed_at, save, step, wholes};
use crate::{model, value};

#[test]
fn any_number_of_ranks_resumes_what_any_other_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    save(folder, 4, &[1, 2]);
    for (number, ranks) in [2, 3, 1, 5, 4, 2].into_iter().enumerate() {
        let last = number as u64 + 2;
        for others in [1, 3, 5] {
            assert_eq!(resumed_at(folder, others), Some(last), "{others} ranks");
        }
        run(Rank::group(ranks, &[]), |rank| {
            let number = rank.rank();
            let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build().unwrap();
            let (mut sharded, mut vs) = (Sharded::new(number, ranks, 0.0), model(0.0));
            checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
            let (sharded, vs) = (Sharded::new(number, ranks, (last + 1) as f64), model((last + 1) as f64));
            checkpoint.save(last + 1, &[("sharded", &sharded), ("model", &vs)]).unwrap();
            checkpoint.finish().unwrap();
        });
    }
}

#[test]
fn a_single_process_resumes_what_ranks_have_saved_and_the_other_way_round() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    save(folder, 3, &[1]);
    let mut checkpoint = Checkpoint::builder(folder).build().unwrap();
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    assert_eq!(checkpoint.read_fields().unwrap(), Some(1));
    checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
    sharded.check(1.0);
    checkpoint.save(2, &[("sharded", &Sharded::new(0, 1, 2.0)), ("model", &model(2.0))]).unwrap();
    checkpoint.finish().unwrap();
    assert_eq!(resumed_at(folder, 3), Some(2));
    assert_eq!(resumed_at(folder, 2), Some(2));
}

/// A rank's own folder is that of a single process, where it has no shards.
#[test]
fn the_folder_of_one_rank_is_read_alone() {
    let folder = tempfile::tempdir().unwrap();
    run(Rank::group(2, &[]), |rank| {
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        checkpoint.save(1, &[("model", &model(1.0))]).unwrap();
        checkpoint.finish().unwrap();
    });
    let mut vs = model(0.0);
    let mut checkpoint = Checkpoint::builder(folder.path().join("rank-1")).build().unwrap();
    checkpoint.resume(&mut [("model", &mut vs)]).unwrap().unwrap();
    assert_eq!(value(&vs), 1.0);
    // A shard is no whole model.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1]);
    let told = load(step(folder.path(), 1, 1), &mut [("sharded", &mut model(0.0))]).unwrap_err().to_string();
    assert!(told.contains("weight"), "{told}");
    let told =
        load(step(folder.path(), 1, 1), &mut [("sharded", &mut Sharded::new(0, 2, 0.0))]).unwrap_err().to_string();
    assert!(told.contains("that of rank 1 of 2, by rows"), "{told}");
}

/// An earlier step, from which the run goes on.
#[test]
fn other_ranks_load_a_given_step() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 3, &[1, 2]);
    run(Rank::group(2, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        let (mut sharded, mut vs) = (Sharded::new(number, 2, 0.0), model(0.0));
        checkpoint.load(1, &mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap();
        sharded.check(1.0);
        let told = checkpoint.load(7, &mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap_err();
        assert!(matches!(told, CheckpointError::NoSuchStep { step: 7, .. }), "{told}");
    });
}

/// Parts of which each rank has its own state.
#[test]
fn random_generators_of_other_ranks_begin_anew_where_the_run_says_so() {
    let folder = tempfile::tempdir().unwrap();
    run(Rank::group(2, &[]), |rank| {
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        checkpoint.save(1, &[("model", &model(1.0)), ("rng", &RngState::new(Device::Cpu))]).unwrap();
        checkpoint.finish().unwrap();
    });
    run(Rank::group(3, &[]), |rank| {
        let (mut vs, mut rng) = (model(0.0), RngState::new(Device::Cpu));
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        let told = checkpoint.resume(&mut [("model", &mut vs), ("rng", &mut rng)]).unwrap_err();
        assert!(matches!(&told, CheckpointError::OtherRanks { part, saved: 2 } if part == "rng"), "{told}");
        assert_eq!(value(&vs), 0.0, "unchanged");
    });
    run(Rank::group(3, &[]), |rank| {
        let (mut vs, mut rng) = (model(0.0), RngState::new(Device::Cpu));
        let builder = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).begin_anew(["rng"]);
        let mut checkpoint = builder.build().unwrap();
        let resumed = checkpoint.resume(&mut [("model", &mut vs), ("rng", &mut rng)]).unwrap().unwrap();
        assert_eq!((resumed.left_out, value(&vs)), (vec!["rng".to_owned()], 1.0));
        // It has to be among the parts all the same.
        let told = checkpoint.load(1, &mut [("model", &mut vs)]).unwrap_err();
        assert!(matches!(told, CheckpointError::Parts { .. }), "{told}");
    });
    // The same ranks load their own.
    let resumed = run(Rank::group(2, &[]), |rank| {
        let (mut vs, mut rng) = (model(0.0), RngState::new(Device::Cpu));
        let builder = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).begin_anew(["rng"]);
        builder.build()?.resume(&mut [("model", &mut vs), ("rng", &mut rng)])
    });
    assert!(resumed.into_iter().all(|resumed| resumed.unwrap().unwrap().left_out.is_empty()));
}

#[test]
fn a_missing_part_of_a_rank_is_named_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 3, &[1, 2]);
    // The newest step lacks a part: the one before is loaded.
    fs::remove_dir_all(step(folder.path(), 2, 2)).unwrap();
    assert_eq!(resumed_at(folder.path(), 2), Some(1));
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 3, &[1, 2]);
    fs::remove_dir_all(folder.path().join("rank-2")).unwrap();
    for told in resume(folder.path(), 2) {
        let told = told.unwrap_err();
        assert!(told.is_damage() && told.to_string().contains("rank-2/step-000000000002"), "{told}");
    }
    // Without the first rank's.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 3, &[1]);
    fs::remove_dir_all(folder.path().join("rank-0")).unwrap();
    for (rank, told) in resume(folder.path(), 2).into_iter().enumerate() {
        let told = told.unwrap_err().to_string();
        assert!(told.contains("rank-0/step-000000000001"), "rank {rank}: {told}");
    }
    // Of as many ranks, with one checkpoint alone.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 3, &[1]);
    fs::remove_dir_all(folder.path().join("rank-1")).unwrap();
    assert!(resume(folder.path(), 3).into_iter().all(|told| told.is_err()), "it does not start over");
}

/// Ranks that were ended while they wrote the first checkpoint begin anew, whatever their number is then.
#[test]
fn a_first_checkpoint_that_was_never_completed_is_none() {
    for lacking in [&[0][..], &[2], &[0, 2]] {
        let folder = tempfile::tempdir().unwrap();
        // Files block the folders that these ranks would write to.
        let in_the_way = |rank: &usize| folder.path().join(format!("rank-{rank}/.writing-step-000000000001"));
        for rank in lacking {
            fs::create_dir(folder.path().join(format!("rank-{rank}"))).unwrap();
            fs::write(in_the_way(rank), "").unwrap();
        }
        run(Rank::group(3, &[]), |rank| {
            let number = rank.rank();
            let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
            let parts = (Sharded::new(number, 3, 1.0), model(1.0));
            checkpoint.save(1, &[("sharded", &parts.0), ("model", &parts.1)]).unwrap();
            checkpoint.finish().unwrap_err();
        });
        lacking.iter().for_each(|rank| fs::remove_file(in_the_way(rank)).unwrap());
        assert!(step(folder.path(), 1, 1).exists());
        for ranks in [3, 2, 1, 4, 3] {
            assert_eq!(resumed_at(folder.path(), ranks), None, "{ranks} ranks without that of {lacking:?}");
        }
        save(folder.path(), 3, &[1, 2]);
        assert_eq!(resumed_at(folder.path(), 3), Some(2));
    }
}

fn copy(from: &Path, to: &Path) {
    fs::remove_dir_all(to).unwrap();
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn parts_of_several_runs_are_an_error_on_every_rank() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(folder.path(), 3, &[1, 2]);
    // Another run, of as many ranks, whose step 2 has other values.
    run(Rank::group(3, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = Checkpoint::builder(other.path()).ranks(rank, Writers::Each).build().unwrap();
        let parts = (Sharded::new(number, 3, 77.0), model(77.0));
        checkpoint.save(2, &[("sharded", &parts.0), ("model", &parts.1)]).unwrap();
        checkpoint.finish().unwrap();
    });
    copy(&step(other.path(), 1, 2), &step(folder.path(), 1, 2));
    for ranks in [3, 2, 4] {
        for told in resume(folder.path(), ranks) {
            let told = told.unwrap_err();
            assert!(matches!(told, CheckpointError::OtherRun { step: 2, .. }), "{ranks} ranks: {told}");
        }
    }
    // A rank is given the folder of the other run.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 3, &[1, 2]);
    for ranks in [3, 2] {
        let found = run(Rank::group(ranks, &[]), |rank| {
            let number = rank.rank();
            let own = if number == 1 { other.path() } else { folder.path() };
            let mut checkpoint = Checkpoint::builder(own).ranks(rank, Writers::Each).build().unwrap();
            let (mut sharded, mut vs) = (Sharded::new(number, ranks, 0.0), model(0.0));
            let told = checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap_err();
            assert!(sharded.found.is_empty() && value(&vs) == 0.0, "unchanged");
            told
        });
        found.into_iter().enumerate().for_each(|(rank, told)| {
            // The other run's rank 1 has step 2 alone.
            assert!(matches!(told, CheckpointError::OtherRun { .. }), "rank {rank} of {ranks}: {told}");
        });
    }
    // A rank's folder that was renamed.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 3, &[1]);
    copy(&step(folder.path(), 2, 1), &step(folder.path(), 1, 1));
    for told in resume(folder.path(), 2) {
        let told = told.unwrap_err();
        assert!(matches!(told, CheckpointError::Rank { .. } | CheckpointError::OtherRank { .. }), "{told}");
    }
}

/// The file of a part, and where a tensor begins in it.
fn place(folder: &Path, rank: usize, number: u64, tensor: &str) -> (PathBuf, usize) {
    let path = step(folder, rank, number).join("sharded.safetensors");
    let bytes = fs::read(&path).unwrap();
    let (length, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    (path, 8 + length + header.info(tensor).unwrap().data_offsets.0)
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn damage_in_rows_that_a_rank_needs_is_an_error_or_the_step_before_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1, 2]);
    let (path, at) = place(folder.path(), 1, 2, "large");
    // In the second of its blocks.
    flip(&path, at + (3 << 19));
    assert_eq!(resumed_at(folder.path(), 3), Some(1));
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1]);
    let (path, at) = place(folder.path(), 1, 1, "few");
    flip(&path, at);
    for (rank, told) in resume(folder.path(), 3).into_iter().enumerate() {
        let told = told.unwrap_err();
        match rank {
            // It has the second row, which rank 1 of 2 has saved.
            1 => assert!(told.is_damage() && told.to_string().contains("crc32 of `few`, block 0"), "{told}"),
            _ => assert!(matches!(told, CheckpointError::OtherRank { .. }), "{told}"),
        }
    }
    // The headers, and what is not there.
    for damage in [|path: &Path| flip(path, 20), |path: &Path| fs::remove_file(path).unwrap()] {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 2, &[1]);
        damage(&place(folder.path(), 1, 1, "few").0);
        assert!(resume(folder.path(), 3).into_iter().all(|told| told.unwrap_err().is_damage()));
    }
}

/// Shapes and names that are others'.
#[test]
fn the_rows_of_another_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    run(Rank::group(2, &[]), |rank| {
        let number = rank.rank();
        let mut other = Sharded::new(number, 2, 1.0);
        other.wholes[1].1 = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        checkpoint.save(1, &[("sharded", &other), ("model", &model(1.0))]).unwrap();
        checkpoint.finish().unwrap();
    });
    for told in resume(folder.path(), 3) {
        let told = told.unwrap_err();
        assert!(matches!(&told, CheckpointError::Part { part, .. } if part == "sharded"), "{told}");
        assert!(told.to_string().contains("`few`") && told.to_string().contains("[2, 4]"), "{told}");
    }
}

/// A part that wants the first rows alone.
struct First(Option<Tensor>);

impl Stateful for First {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        Ok(StateDict::new())
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        assert!(state.get("few").is_err() && state.len() == 2, "only what it asked for");
        self.0 = Some(state.tensor_rows("large", &[1301, 700], 3..5, Kind::Float)?.copy());
        Ok(())
    }

    fn rows_to_load(&self, _: &StateDict, _: &Shapes) -> Result<RowsToLoad, StateError> {
        Ok([("large".to_owned(), 3..5)].into())
    }
}

#[test]
fn only_the_blocks_of_the_rows_that_are_needed_are_read() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1]);
    // Damage in what is not read is not seen.
    let (path, at) = place(folder.path(), 0, 1, "large");
    flip(&path, at + (3 << 19));
    let (path, at) = place(folder.path(), 1, 1, "large");
    flip(&path, at);
    let mut checkpoint = Checkpoint::builder(folder.path()).ranks(SingleProcess, Writers::Each).build().unwrap();
    let mut first = First(None);
    let before = bytes_read();
    checkpoint.resume(&mut [("sharded", &mut first), ("model", &mut model(0.0))]).unwrap().unwrap();
    let read = bytes_read().zip(before).map(|(after, before)| after - before);
    assert!(first.0.unwrap().equal(&wholes(1.0)[0].1.narrow(0, 3, 2)));
    // Of 3.6 MB: a block of a mebibyte, headers and manifests.
    assert!(read.is_none_or(|read| read < 1_200_000), "{read:?} bytes");
}

/// How many bytes this thread has read from files, where the kernel counts them.
fn bytes_read() -> Option<u64> {
    let io = fs::read_to_string("/proc/thread-self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("rchar: ")?.trim().parse().ok())
}
