//! Memory over time.

use std::io::Read as _;

use overdrive_profile::Profiler;
use tch::Tensor;

use crate::{FLOAT, alone, full, profile_of};

#[test]
fn memory_is_what_tensors_take() {
    let _alone = alone();
    let profile = profile_of(full(), || {
        let a = Tensor::zeros([1000], FLOAT);
        let b = Tensor::zeros([500], FLOAT);
        drop(a);
        drop(b);
    });
    let lines = profile.memory_timeline().unwrap();
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0].device, "cpu");
    assert_eq!(lines[0].changes, [4000, 2000, -4000, -2000]);
    assert_eq!(lines[0].in_use, [4000, 6000, 2000, 0]);
    assert_eq!(lines[0].peak(), 6000);
    assert!(lines[0].times_ns.is_sorted() && lines[0].times_ns[0] >= 0);

    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| {
        let path = folder.path().join(name);
        profile.export_memory_timeline(&path).unwrap();
        let bytes = std::fs::read(path).unwrap();
        if !name.ends_with(".gz") {
            return String::from_utf8(bytes).unwrap();
        }
        let mut text = String::new();
        flate2::read::GzDecoder::new(bytes.as_slice()).read_to_string(&mut text).unwrap();
        text
    };
    let json: serde_json::Value = serde_json::from_str(&read("memory.json")).unwrap();
    assert_eq!(json["devices"][0]["in_use_bytes"], serde_json::json!([4000, 6000, 2000, 0]));
    assert_eq!(json["devices"][0]["times_us"].as_array().unwrap().len(), 4);
    let csv = read("memory.csv");
    assert_eq!(csv.lines().next(), Some("device,time_us,change_bytes,in_use_bytes"));
    assert!(csv.lines().nth(1).is_some_and(|line| line.starts_with("cpu,") && line.ends_with(",4000,4000")), "{csv}");
    assert_eq!(read("memory.csv.gz"), csv);
    profile.export_memory_timeline(folder.path().join("missing/memory.json")).expect_err("no such folder");
}

#[test]
fn no_memory_is_recorded_unless_asked_for() {
    let _alone = alone();
    let profile = profile_of(Profiler::builder(), || drop(Tensor::zeros([1000], FLOAT)));
    assert!(profile.memory_timeline().unwrap().is_empty());
}
