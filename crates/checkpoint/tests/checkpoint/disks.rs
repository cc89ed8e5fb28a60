//! Ranks on disks of their own, which do not see the folders of others.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_checkpoint::{Checkpoint, CheckpointError, Resumed, Writers};
use overdrive_core::RankGroup;
use tempfile::TempDir;

use crate::group::{Rank, run};
use crate::shards::step;
use crate::{model, value};

type Found = Result<Option<Resumed>, CheckpointError>;

fn saved(steps: &[u64]) -> Vec<TempDir> {
    let disks: Vec<TempDir> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    run(Rank::group(2, &[]), |rank| {
        let folder = disks[rank.rank()].path();
        let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build().unwrap();
        steps.iter().for_each(|&step| checkpoint.save(step, &[("model", &model(step as f64))]).unwrap());
        checkpoint.finish().unwrap();
    });
    disks
}

fn resume(disks: &[TempDir]) -> Vec<(Found, f64)> {
    run(Rank::group(2, &[]), |rank| {
        let folder = disks[rank.rank()].path();
        let mut vs = model(0.0);
        let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build().unwrap();
        (checkpoint.resume(&mut [("model", &mut vs)]), value(&vs))
    })
}

fn manifest(disks: &[TempDir], rank: usize, number: u64) -> PathBuf {
    step(disks[rank].path(), rank, number).join("manifest.json")
}

fn flip_last(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

/// What cannot be read for a moment is no damage: nothing is set aside.
#[test]
fn an_error_of_the_file_system_changes_nothing() {
    let disks = saved(&[100, 200]);
    let (manifest, moved) = (manifest(&disks, 1, 200), disks[1].path().join("moved"));
    // A folder cannot be read as a file, whoever runs this.
    fs::rename(&manifest, &moved).unwrap();
    fs::create_dir(&manifest).unwrap();
    let found = resume(&disks);
    assert!(matches!(&found[1].0, Err(CheckpointError::Io { path, .. }) if *path == manifest), "{found:?}");
    assert!(matches!(found[0].0, Err(CheckpointError::OtherRank { .. })), "{found:?}");
    assert!(found.iter().all(|(_, value)| *value == 0.0));
    fs::remove_dir(&manifest).unwrap();
    fs::rename(&moved, &manifest).unwrap();
    for (found, value) in resume(&disks) {
        let found = found.unwrap().unwrap();
        assert_eq!((found.step, found.skipped.len(), value), (200, 0, 200.0));
    }
}

#[test]
fn a_damaged_manifest_of_its_own_is_named_and_set_aside_as_damaged() {
    let disks = saved(&[100, 200]);
    let path = manifest(&disks, 1, 200);
    flip_last(&path);
    let found = resume(&disks);
    assert!(found.iter().all(|(found, value)| {
        found.as_ref().is_ok_and(|found| found.as_ref().is_some_and(|found| found.step == 100)) && *value == 100.0
    }));
    let skipped = &found[1].0.as_ref().unwrap().as_ref().unwrap().skipped;
    assert!(matches!(&skipped[..], [CheckpointError::Damaged { path: named, .. }] if *named == path), "{skipped:?}");
    assert!(disks[1].path().join("rank-1/damaged-step-000000000200").exists());
    assert!(disks[0].path().join("rank-0/abandoned-step-000000000200").exists());
}
