//! The scopes and remedies of findings, in made-up runs.

use overdrive_profile::{Bottleneck, Diagnosis, Phase};
use serde_json::{Value, json};

use crate::made_up::{finding, op, run, threads, with_ops, with_samples};

const HALF_DATA: [(Phase, f64); 2] = [(Phase::DataWait, 5.0), (Phase::Forward, 5.0)];

fn scope(name: &str, ms: f64, is_main_thread: bool) -> Value {
    json!({ "name": name, "calls": 64.0, "seconds": ms / 1e3, "is_main_thread": is_main_thread })
}

/// The scope of the finding for a run that waits for data, with these workers and scopes.
fn loading(workers: &'static [f64], scopes: &[Value]) -> Option<String> {
    let mut run = with_samples(run(&HALF_DATA), move |number| json!({ "threads": threads(number, 1.0, workers) }));
    run.profiled.as_mut().unwrap().scopes = serde_json::from_value(scopes.to_vec().into()).unwrap();
    finding(&run).scope
}

#[test]
fn workers_scopes_show_where_loading_takes_long() {
    let own = scope("dataload_batch", 18.0, false);
    let decode = scope("decode", 12.0, false);
    let seen = loading(&[0.9], &[own.clone(), decode, scope("resize", 4.0, false), scope("train", 9.0, true)]);
    assert_eq!(seen.as_deref(), Some("decode"));
    // The loader's own span is not the caller's, and the step does not wait for a thread that does little.
    assert_eq!(loading(&[0.9], &[own.clone(), scope("writer", 1.0, false)]), None);
    assert_eq!(loading(&[0.9], &[own]), None);
    // The training thread loads by itself.
    assert_eq!(loading(&[], &[scope("decode", 4.0, true)]).as_deref(), Some("decode"));
}

#[test]
fn a_scope_with_operators_of_other_phases_is_not_where_loading_is() {
    let waits = with_samples(run(&HALF_DATA), |number| json!({ "threads": threads(number, 1.0, &[]) }));
    let mut waits = with_ops(waits, vec![op("aten::mm", Phase::Forward, Some("epoch"), 2.0, (5.0, 0.0))]);
    waits.profiled.as_mut().unwrap().scopes = serde_json::from_value(json!([scope("epoch", 10.0, true)])).unwrap();
    assert_eq!(finding(&waits).scope, None);
}

#[test]
fn skipped_time_between_steps_does_not_count() {
    // Two workers are always busy during the steps, and idle during a validation from 0.5 s to 2 s.
    let step = |number: u64| {
        let validated = if number >= 25 { 1.5 } else { 0.0 };
        json!({ "step": number, "start_seconds": 0.02 * number as f64 + validated, "host_seconds": [0.02, 0, 0, 0, 0, 0, 0],
                "device_seconds": null, "samples": 1, "is_profiled": false })
    };
    let sample = |at: u64| {
        let time = 0.1 * at as f64;
        // Busy up to 0.5 s, and from 2 s on.
        let work = time.min(0.5) + (time - 2.0).max(0.0);
        let thread =
            |id: u64, name: &str| json!({ "id": id, "name": name, "cpu_seconds": work, "queued_seconds": 0.0 });
        json!({ "unix_seconds": 0.0, "elapsed_seconds": time, "system": null, "process": null, "gpus": [],
                "threads": [thread(7, "train"), thread(8, "dataload-0"), thread(9, "dataload-1")] })
    };
    let mut run = run(&HALF_DATA);
    run.step_times = serde_json::from_value((0..50).map(step).collect()).unwrap();
    run.samples = serde_json::from_value((0..=25).map(sample).collect()).unwrap();
    let found = finding(&run);
    assert_eq!(found.bottleneck, Bottleneck::TooFewWorkers, "{found}");
    assert!(found.evidence[1].starts_with("2 workers are busy for 100% of the time"), "{found}");
    // Without the times of the steps, the validation cannot be excluded.
    run.step_times.clear();
    assert!(finding(&run).evidence[1].starts_with("2 workers are busy for 40% of the time"));
}

/// The remedy for an optimizer that calls these operators for each of 300 tensors.
fn remedy(calls: &[(&str, f64)]) -> String {
    let mut run = run(&[(Phase::Forward, 2.0), (Phase::Optimizer, 8.0)]);
    let times = &mut run.profiled.as_mut().unwrap().phases[Phase::Optimizer as usize];
    (times.small_calls, times.small_call_seconds, times.calls) = (3000.0, 0.006, 3000.0);
    let ops = calls.iter().map(|(name, calls)| op(name, Phase::Optimizer, Some("update"), 300.0 * calls, (1.0, 0.0)));
    let found = finding(&with_ops(run, ops.collect()));
    assert_eq!((found.bottleneck, found.scope.as_deref()), (Bottleneck::OptimizerLoop, Some("update")));
    found.remedy
}

#[test]
fn an_optimizers_remedy_depends_on_its_kind() {
    let adam = [("aten::mul_", 2.0), ("aten::add_", 2.0), ("aten::addcmul_", 1.0), ("aten::sqrt", 1.0)];
    let adam = [&adam[..], &[("aten::div", 1.0), ("aten::addcdiv_", 1.0)]].concat();
    assert!(remedy(&adam).contains("`AdamW::builder"), "{}", remedy(&adam));
    // After clipping, with weight decay.
    let clipped = [&[("aten::mul_", 4.0)], &adam[1..]].concat();
    assert!(remedy(&clipped).contains("`AdamW::builder"));
    let rms = [("aten::mul_", 1.0), ("aten::addcmul_", 1.0), ("aten::sqrt", 1.0), ("aten::add_", 1.0)];
    let rms = [&rms[..], &[("aten::addcdiv_", 1.0)]].concat();
    assert!(remedy(&rms).contains("`RmsProp::builder"), "{}", remedy(&rms));
    for sgd in [&[("aten::add_", 1.0)][..], &[("aten::mul_", 1.0), ("aten::add_", 2.0)], &[("aten::sub_", 1.0)]] {
        assert!(remedy(sgd).contains("`Sgd::builder"), "{}", remedy(sgd));
    }
    assert!(remedy(&[("aten::sign", 1.0), ("aten::mul_", 1.0), ("aten::add_", 1.0)]).contains("`Lion::builder"));
    for unknown in [&[("aten::mul_", 2.0)][..], &[("aten::norm", 1.0)], &[("aten::mul_", 1.0), ("aten::addcmul_", 1.0)]]
    {
        assert!(remedy(unknown).contains("counterpart in overdrive-optim"), "{}", remedy(unknown));
    }
}

#[test]
fn a_healthy_runs_bound_depends_on_whole_operator_names() {
    let bound = |name: &str| {
        let ops = vec![
            op(name, Phase::Forward, None, 1.0, (6.0, 0.0)),
            op("aten::copy_", Phase::Forward, None, 1.0, (4.0, 0.0)),
        ];
        Diagnosis::of(&with_ops(run(&[(Phase::Forward, 10.0)]), ops)).bound_by
    };
    assert_eq!(bound("aten::mkldnn_convolution"), Some(Bottleneck::Compute));
    assert_eq!(bound("aten::upsample_bilinear2d"), Some(Bottleneck::MemoryBandwidth));
    assert_eq!(bound("aten::_fused_adamw_"), Some(Bottleneck::MemoryBandwidth));
}
