use super::*;
use crate::sample;

#[test]
fn rates_waits_and_ratios_are_those_of_the_turns() {
    let report = sample::report();
    let row = report.workloads[0].row(Contender::Tch).unwrap();
    let rate = row.rate.unwrap();
    assert!((rate.high - 4_050.0).abs() < 1e-6 && (rate.low - 4_050.0 / 1.04).abs() < 1e-6, "{rate:?}");
    assert!((row.wait_share.unwrap() - 0.006).abs() < 1e-9);
    let [against] = row.against.as_slice() else { panic!("{:?}", row.against) };
    // All rounds were slowed alike, so that each pair says the same.
    assert_eq!((against.with, against.pairs), (Contender::Pytorch, 3));
    assert!((against.ratio.low - 4_050.0 / 1_310.0).abs() < 1e-9 && (against.ratio.high - against.ratio.low) < 1e-9);
}

#[test]
fn whole_trainings_give_seconds_accuracy_and_the_time_to_the_target() {
    let report = sample::report();
    let row = report.workloads[0].row(Contender::Combined).unwrap();
    let seconds = row.seconds.unwrap();
    assert_eq!((seconds.low, seconds.median), (23.9, 23.9 * 1.01));
    assert_eq!((row.accuracy, row.curve.len(), row.kept), (Some(0.9860), 5, Some(true)));
    // 97% lies between the last two marks.
    let [short, past] = [0.014 * 3f64.powf(0.8) - 0.03, 0.03 - 0.014];
    let expected = 23.9 * (0.8 + 0.2 * short / (short + past));
    assert!((row.seconds_to_target.unwrap() - expected).abs() < 1e-9, "{:?}", row.seconds_to_target);
}

#[test]
fn a_contender_that_learns_less_has_not_kept_it() {
    let [tch, mut ours] = [Contender::Tch, Contender::Combined].map(|contender| {
        let sketch = (contender, 1_000.0, 0.0, 1, Some((10.0, 0.98)));
        sample::measurements(Workload::Digits, &[sketch], 3).measured.remove(0)
    });
    let end_at = |ours: &mut Measured, accuracy: Option<f64>, loss: f64| {
        for whole in &mut ours.wholes {
            let last = whole.marks.last_mut().unwrap();
            (last.accuracy, last.loss) = (accuracy, Some(loss));
        }
    };
    assert_eq!(kept(&ours, &tch, Workload::Digits), Some(true));
    // Half a point is kept, more is not.
    end_at(&mut ours, Some(0.975), 0.1);
    assert_eq!(kept(&ours, &tch, Workload::Digits), Some(true));
    end_at(&mut ours, Some(0.9749), 0.1);
    assert_eq!(kept(&ours, &tch, Workload::Digits), Some(false));
    // Where there is no accuracy, the loss tells; one that is not finite is not kept.
    let mut plain = tch.clone();
    end_at(&mut plain, None, 2.0);
    for (loss, is_kept) in [(2.03, true), (2.05, false), (f64::NAN, false)] {
        end_at(&mut ours, None, loss);
        assert_eq!(kept(&ours, &plain, Workload::Digits), Some(is_kept), "{loss}");
    }
    // Photographs have few test images: their loss tells.
    end_at(&mut plain, Some(0.5), 1.0);
    for (loss, is_kept) in [(1.01, true), (1.05, false)] {
        end_at(&mut ours, Some(1.1 - loss), loss);
        assert_eq!(kept(&ours, &plain, Workload::Photos), Some(is_kept), "{loss}");
    }
    ours.wholes.clear();
    assert_eq!(kept(&ours, &tch, Workload::Digits), None);
}

#[test]
fn the_json_form_comes_back() {
    for report in [sample::report(), sample::quick()] {
        let back: Report = serde_json::from_str(&report.to_json().unwrap()).unwrap();
        assert_eq!(back.setting, report.setting);
        assert_eq!(back.workloads.len(), report.workloads.len());
        assert_eq!(back.to_json().unwrap(), report.to_json().unwrap());
    }
}

#[test]
fn the_first_steps_of_a_timeline_are_whole() {
    let report = sample::report();
    let timeline = &report.workloads[0].measurements.of(Contender::Tch).unwrap().timeline;
    assert_eq!([1, 3, 4, 9].map(|steps| first_steps(timeline, steps).len()), [4, 12, 16, 16]);
}
