//! Tests of [`super`].

use super::*;
use crate::sample;

fn run(technique: Technique, repetition: u32, seconds: f64, wait: f64, accuracy: f64) -> Run {
    Run {
        technique,
        device: DeviceKind::Cpu,
        repetition,
        seconds,
        data_wait_seconds: wait,
        epochs: vec![EpochMark { seconds, accuracy, loss: Some(0.1) }],
        final_loss: 0.1,
        peak_rss_bytes: Some(u64::from(repetition) + 100),
        peak_device_bytes: None,
    }
}

/// Two techniques, twice as fast in every repetition, on a machine that slows down.
fn runs() -> Vec<Run> {
    let mut runs = Vec::new();
    for (repetition, slow) in [(0, 1.0), (1, 1.5), (2, 9.0)] {
        runs.push(run(Technique::CachePrefetch, repetition, 5.0 * slow, 0.05 * slow, 0.975));
        runs.push(run(Technique::Baseline, repetition, 10.0 * slow, 5.5 * slow, 0.98));
    }
    runs
}

#[test]
fn a_row_is_the_median_of_its_pairs() {
    let report = Report::from_runs(Setting::default(), &runs()).unwrap();
    let [base, row] = report.rows.as_slice() else { panic!("two rows expected: {:?}", report.rows) };
    assert!(base.is_baseline() && base.speedup == 1.0 && base.won_back_fraction.is_none());
    assert_eq!((row.seconds.as_slice(), row.seconds_median), ([5.0, 7.5, 45.0].as_slice(), 7.5));
    assert_eq!((row.speedup, row.speedup_low, row.speedup_high), (2.0, 2.0, 2.0));
    assert!((row.won_back_fraction.unwrap() - 5.0 / 5.5).abs() < 1e-12);
    assert!((row.data_wait_fraction - 0.01).abs() < 1e-12);
    assert_eq!(row.peak_rss_bytes, Some(102));
    assert_eq!(row.curve.len(), 1);
}

#[test]
fn the_guard_allows_half_a_point_and_no_more() {
    let mut runs = runs();
    let kept = |runs: &[Run]| Report::from_runs(Setting::default(), runs).unwrap().rows[1].clone();
    assert_eq!((kept(&runs).accuracy_delta_points, kept(&runs).kept_accuracy), (-0.5, true));
    for run in runs.iter_mut().filter(|run| run.technique != Technique::Baseline) {
        run.epochs[0].accuracy = 0.9748;
    }
    assert_eq!((kept(&runs).accuracy_delta_points, kept(&runs).kept_accuracy), (-0.52, false));
}

#[test]
fn runs_without_a_fair_baseline_are_refused() {
    let refused = |runs: &[Run]| Report::from_runs(Setting::default(), runs).unwrap_err();
    let lonely = (Technique::CachePrefetch, DeviceKind::Cpu);
    assert_eq!(refused(&[]), ReportError::NoRuns);
    let without = &runs()[..5]; // the third repetition has no baseline
    assert_eq!(refused(without), ReportError::NoBaseline { technique: lonely.0, device: lonely.1 });
    for seconds in [0.0, f64::NAN] {
        let mut runs = runs();
        runs[0].seconds = seconds;
        assert_eq!(refused(&runs), ReportError::BadRun { technique: lonely.0, device: lonely.1 });
    }
}

#[test]
fn a_loss_that_diverged_is_absent_rather_than_invalid_json() {
    let mut runs = runs();
    runs[0].final_loss = f64::INFINITY;
    runs[0].epochs[0].loss = None;
    let report = Report::from_runs(Setting::default(), &runs).unwrap();
    assert_eq!((report.rows[1].final_loss, report.rows[1].curve[0].loss), (None, None));
    assert_eq!(serde_json::from_str::<Report>(&report.to_json().unwrap()).unwrap(), report);
}

#[test]
fn the_json_has_every_field_of_the_form() {
    let json = serde_json::to_value(sample::report(false)).unwrap();
    for field in ["schema", "machine", "versions", "dataset", "config", "rows", "advice"] {
        assert!(!json[field].is_null(), "{field} is missing");
    }
    for field in ["name", "train", "test", "sha256"] {
        assert!(!json["dataset"][field].is_null(), "dataset.{field} is missing");
    }
    let fields = "technique device seconds seconds_median speedup accuracy accuracy_delta_points peak_rss_bytes \
                  data_wait_fraction";
    for field in fields.split(' ') {
        assert!(!json["rows"][0][field].is_null(), "rows.{field} is missing");
    }
    assert!(json["rows"][0].as_object().unwrap().contains_key("peak_device_bytes"));
    assert_eq!((&json["schema"], &json["rows"][0]["technique"]), (&1.into(), &"baseline".into()));
}
