//! Manifests of shards whose numbers cannot be: an error, never a panic or a large allocation.

use std::fs;

use overdrive_checkpoint::{Checkpoint, CheckpointError, Writers, consolidate};
use overdrive_core::RankGroup;
use serde_json::{Value, json};

use crate::edit_manifest;
use crate::group::{Rank, run};
use crate::model;
use crate::shards::{Sharded, resume, save, step};

/// A size that is trusted would need far more.
const MOST_GROWTH: u64 = 1 << 30;

fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
}

/// Where ranks that are others than 2 resume after a change of the second rank's manifest, they are all told, and so is
/// `consolidate`; the 2 that have saved are told too unless they need nothing of it.
fn is_told(edit: &dyn Fn(&mut Value), as_many_too: bool) {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1]);
    edit_manifest(&step(folder.path(), 1, 1), edit).unwrap();
    for ranks in [1, 3, 2] {
        let found = resume(folder.path(), ranks);
        if ranks != 2 || as_many_too {
            assert!(found.iter().all(Result::is_err), "{ranks} ranks: {found:?}");
        }
    }
    let told = consolidate(folder.path(), None, "sharded", folder.path().join("whole.safetensors"));
    assert!(told.is_err(), "{told:?}");
}

#[test]
fn rows_that_cannot_be_are_errors() {
    let (before, most) = (peak(), i64::MAX);
    let rows = |key: &'static str, whole: Value, first: i64| {
        move |manifest: &mut Value| manifest["parts"]["sharded"]["rows"][key] = json!({"first": first, "whole": whole})
    };
    // Rank 1 has rows 651 to 1301 of 700 numbers, and row 1 of 3 numbers.
    for (whole, first) in [
        (json!([1301, 700]), most),
        (json!([1301, 700]), i64::MIN),
        (json!([1301, 700]), -1),
        (json!([1301, 700]), 652),
        (json!([most, 700]), 651),
        (json!([most, 700]), most - 650),
        (json!([i64::MIN, 700]), 651),
        (json!([1301, most]), 651),
        (json!([1301]), 651),
        (json!([1301, 700, 1]), 651),
        (json!([]), 0),
        (json!([-1, -1]), 651),
        (json!([1300, 700]), 651),
    ] {
        is_told(&rows("large", whole, first), false);
    }
    // Both ranks say so: then there is no rank that has the rows in between.
    for whole in [most, 1 << 40, 1302] {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 2, &[1]);
        for rank in 0..2 {
            let edit =
                |manifest: &mut Value| manifest["parts"]["sharded"]["rows"]["large"]["whole"] = json!([whole, 700]);
            edit_manifest(&step(folder.path(), rank, 1), edit).unwrap();
        }
        for ranks in [1, 3, 2] {
            assert!(resume(folder.path(), ranks).iter().all(Result::is_err), "{whole} rows, {ranks} ranks");
        }
        let told = consolidate(folder.path(), None, "sharded", folder.path().join("whole.safetensors")).unwrap_err();
        assert!(told.is_damage(), "{told}");
    }
    // Of a tensor without dimensions, of one that is said to be whole, and of names that are not there.
    is_told(&rows("step", json!([]), 0), false);
    is_told(&rows("step", json!([1]), 0), false);
    is_told(&|manifest| drop(manifest["parts"]["sharded"]["rows"].as_object_mut().unwrap().remove("few")), true);
    assert!(peak() - before < MOST_GROWTH, "{} bytes more", peak() - before);
}

#[test]
fn ranks_that_cannot_be_are_errors() {
    let before = peak();
    for world_size in [0u64, 1, 3, u64::MAX] {
        is_told(&|manifest| manifest["ranks"]["world_size"] = json!(world_size), true);
        // On both, so that they agree.
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 2, &[1]);
        for rank in 0..2 {
            let edit = |manifest: &mut Value| manifest["ranks"]["world_size"] = json!(world_size);
            edit_manifest(&step(folder.path(), rank, 1), edit).unwrap();
        }
        assert!(resume(folder.path(), 3).iter().all(Result::is_err), "{world_size} ranks");
    }
    is_told(&|manifest| manifest["ranks"]["rank"] = json!(u64::MAX), true);
    is_told(&|manifest| drop(manifest.as_object_mut().unwrap().remove("ranks")), true);
    // The part is no shard, or is not there, on one rank.
    is_told(&|manifest| drop(manifest["parts"]["sharded"].as_object_mut().unwrap().remove("ranks")), false);
    is_told(&|manifest| manifest["parts"]["sharded"]["ranks"] = json!("own"), false);
    is_told(&|manifest| drop(manifest["parts"].as_object_mut().unwrap().remove("sharded")), true);
    // Without the checksums of single tensors.
    is_told(&|manifest| drop(manifest["parts"]["sharded"]["file"].as_object_mut().unwrap().remove("pieces")), false);
    is_told(&|manifest| manifest["parts"]["sharded"]["file"]["pieces"]["tensors"] = json!({}), true);
    is_told(&|manifest| manifest["parts"]["sharded"]["file"]["pieces"]["blocks"] = json!({}), false);
    is_told(&|manifest| manifest["parts"]["sharded"]["file"] = json!(null), true);
    assert!(peak() - before < MOST_GROWTH, "{} bytes more", peak() - before);
}

/// Folders whose numbers no step has.
#[test]
fn names_of_other_folders_are_no_steps_and_no_ranks() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1]);
    for name in
        ["step-18446744073709551615", "step-9223372036854775808", "rank-007", "rank-+3", "rank-18446744073709551615"]
    {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    fs::create_dir(folder.path().join("rank-1/step-18446744073709551615")).unwrap();
    fs::create_dir(folder.path().join("rank-007/step-000000000009")).unwrap();
    fs::write(folder.path().join("rank-5"), "no folder").unwrap();
    run(Rank::group(2, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        let (mut sharded, mut vs) = (Sharded::new(number, 2, 0.0), model(0.0));
        let resumed = checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
        assert!((resumed.step, resumed.skipped.len()) == (1, 0), "{resumed:?}");
    });
    let told = consolidate(folder.path(), Some(u64::MAX), "sharded", folder.path().join("x.safetensors")).unwrap_err();
    assert!(matches!(told, CheckpointError::NoSuchStep { .. }), "{told}");
}
