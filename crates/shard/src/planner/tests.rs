use super::{Candidate, Cluster, Place, Plan, Workload};
use crate::deepspeed::ZeroStage::{self, Disabled, Gradients, OptimizerStates, Parameters};

fn chosen(workload: &Workload, cluster: &Cluster) -> Option<(ZeroStage, Place, bool)> {
    Plan::new(workload, cluster).unwrap().chosen().map(|it| (it.stage, it.place, it.recomputes))
}

fn of(plan: &Plan, stage: ZeroStage) -> &Candidate {
    plan.candidates().iter().find(|it| it.stage == stage && it.place == Place::Device && !it.recomputes).unwrap()
}

/// 40 units of 100 MB: 4 GB of parameters, 4 of gradients, 8 of state.
fn model() -> Workload {
    Workload::new([25_000_000; 40]).activations(3e9, 0.5e9)
}

#[test]
fn the_simplest_that_fits_is_chosen_where_links_are_fast() {
    let with = |gigabytes: f64| Cluster::new(8, gigabytes * 1e9 / 0.9, 1e12);
    // Parameters 4, state 8, buckets 4, and gradients 4 at the peak.
    assert_eq!(chosen(&model(), &with(21.0)), Some((Disabled, Place::Device, false)));
    // 4 + 1 + 4 + 4.
    assert_eq!(chosen(&model(), &with(14.0)), Some((OptimizerStates, Place::Device, false)));
    // 4 + 1 + 3 of activations.
    assert_eq!(chosen(&model(), &with(9.0)), Some((Gradients, Place::Device, false)));
    // 12 / 8, 3, and a few units of 0.1.
    assert_eq!(chosen(&model(), &with(6.0)), Some((Parameters, Place::Device, false)));
    assert_eq!(chosen(&model(), &with(5.3)), Some((Parameters, Place::Device, false)));
    assert_eq!(chosen(&model(), &with(3.0)), Some((Parameters, Place::Device, true)));
    assert_eq!(chosen(&model(), &with(1.5)), None);
    let offloading = with(1.5).host(10e9, 25e9, 50e9);
    assert_eq!(chosen(&model(), &offloading), Some((Parameters, Place::Host, true)));
    let on_disk = with(1.5).host(1e9, 25e9, 50e9).disk(100e9, 1e9);
    assert_eq!(chosen(&model(), &on_disk), Some((Parameters, Place::Disk, true)));
}

#[test]
fn shares_are_those_of_the_zero_paper() {
    // Of 16 bytes an element: all, 4 + 4 + 8/N and buckets, 4 + 8/N, 16/N; units are small beside them.
    let plan = Plan::new(&Workload::new([1_000_000; 1000]), &Cluster::new(64, 80e9, 1e11)).unwrap();
    let gigabytes = |stage| of(&plan, stage).device_bytes / 1e9;
    let near = |found: f64, expected: f64| assert!((found - expected).abs() < 0.13, "{found}, not {expected}");
    near(gigabytes(Disabled), 4.0 + 8.0 + 4.0 + 4.0);
    near(gigabytes(OptimizerStates), 4.0 + 8.0 / 64.0 + 4.0 + 4.0);
    near(gigabytes(Gradients), 4.0 + 8.0 / 64.0 + 4.0 / 64.0);
    near(gigabytes(Parameters), 16.0 / 64.0);
}

#[test]
fn slow_links_are_avoided_while_something_else_fits() {
    // 8 GB are sent in a step with stage 3, or 4 GB twice with data parallel: 80 s of a slow link.
    let slow = |gigabytes: f64| Cluster::new(2, gigabytes * 1e9 / 0.9, 1e8);
    let plan = Plan::new(&model(), &slow(30.0)).unwrap();
    assert!(of(&plan, Disabled).seconds < of(&plan, OptimizerStates).seconds);
    assert!(of(&plan, Gradients).sent_bytes < of(&plan, Parameters).sent_bytes);
    assert_eq!(chosen(&model(), &slow(30.0)), Some((Disabled, Place::Device, false)));
    // Micro-batches gather parameters again, and keep whole gradients.
    let several = Plan::new(&model().gradient_accumulation_steps(4), &slow(30.0)).unwrap();
    let gathers = |plan: &Plan| of(plan, Parameters).sent_bytes;
    assert!(gathers(&several) > 2.0 * gathers(&plan));
    assert!(of(&several, Parameters).device_bytes > of(&plan, Parameters).device_bytes + 1e9);
}

#[test]
fn one_rank_offloads_alone() {
    let alone = Cluster::new(1, 16e9, 0.0).host(64e9, 25e9, 50e9);
    assert_eq!(chosen(&model().seconds(2.0, 4.0), &alone), Some((OptimizerStates, Place::Host, false)));
    assert_eq!(chosen(&model(), &Cluster::new(1, 30e9, 0.0)), Some((Disabled, Place::Device, false)));
}

#[test]
fn the_text_shows_the_arithmetic_and_wrong_figures_are_named() {
    let text = Plan::new(&model(), &Cluster::new(2, 80e9, 1e10)).unwrap().to_string();
    for part in ["1.000 billion parameters in 40 units", "* data parallel", "2 (N-1)/N gradients", "a model"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let nothing = Plan::new(&model(), &Cluster::new(2, 1e9, 1e10)).unwrap().to_string();
    assert!(nothing.contains("nothing fits"), "{nothing}");
    let told = |workload: Workload, cluster: Cluster| Plan::new(&workload, &cluster).unwrap_err().to_string();
    assert!(told(Workload::new([]), Cluster::new(2, 1e9, 1e9)).starts_with("elements of all units is 0"));
    assert!(told(model().activations(f64::NAN, 0.0), Cluster::new(2, 1e9, 1e9)).contains("NaN"));
    assert!(told(model(), Cluster::new(0, 1e9, 1e9)).starts_with("ranks is 0"));
    assert!(told(model(), Cluster::new(2, 1e9, 0.0)).starts_with("link_bytes_per_second is 0"));
}

#[test]
fn the_chosen_way_is_a_file_that_deepspeed_reads() {
    use crate::deepspeed::{DeepSpeedConfig, TrainingArguments};
    let workload = model().mixed_precision().gradient_accumulation_steps(3);
    let plan = Plan::new(&workload, &Cluster::new(4, 80e9, 1e10).host(1e9, 1e9, 1e9)).unwrap();
    for candidate in plan.candidates() {
        let mut json = candidate.to_json();
        json["train_micro_batch_size_per_gpu"] = 4.into();
        let config = DeepSpeedConfig::from_json(&json.to_string(), &TrainingArguments::new(4)).unwrap();
        assert_eq!(config.stage(), candidate.stage, "{json}");
        assert_eq!((config.gradient_accumulation_steps(), &json["bf16"]["enabled"]), (3, &true.into()), "{json}");
        assert_eq!(config.activation_checkpoint().is_some(), candidate.recomputes, "{json}");
    }
}
