use overdrive_sched::Scheduler;

use super::*;
use crate::deepspeed::error::DeepSpeedError;
use crate::deepspeed::optimizer::Chosen;
use crate::deepspeed::tree::Tree;

struct Case {
    name: &'static str,
    params: &'static str,
    /// The optimizer's rates.
    base: &'static [f64],
    /// For each group, at each step.
    rates: &'static [&'static [f64]],
    /// Of the first group; empty where it is not cycled.
    momenta: &'static [f64],
}

/// Printed by DeepSpeed's own `lr_schedules.py` (August 2026) over groups of these rates: the values after it is built,
/// and after each `step()`. Where there are no momenta, the optimizer has no `betas`.
#[rustfmt::skip]
const CASES: &[Case] = &[
    Case {
        name: "WarmupLR",
        params: r#"{}"#,
        base: &[0.5],
        rates: &[&[0.0, 0.0, 0.050171665943996864, 0.07952020911994374, 0.10034333188799373, 0.1164950007226698, 0.12969187506394061, 0.14084967333570947]],
        momenta: &[],
    },
    Case {
        name: "WarmupLR",
        params: r#"{"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4}"#,
        base: &[0.5],
        rates: &[&[0.01, 0.01, 0.05500000000000001, 0.08132331253245204, 0.1, 0.1, 0.1, 0.1]],
        momenta: &[],
    },
    Case {
        name: "WarmupLR",
        params: r#"{"warmup_min_lr": [0.01, 0.0], "warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 3, "warmup_type": "linear"}"#,
        base: &[0.5, 0.25],
        rates: &[&[0.01, 0.01, 0.04, 0.07, 0.1, 0.1], &[0.0, 0.0, 0.06666666666666667, 0.13333333333333333, 0.2, 0.2]],
        momenta: &[],
    },
    Case {
        name: "WarmupLR",
        params: r#"{"warmup_num_steps": 1}"#,
        base: &[0.5],
        rates: &[&[0.0, 0.0, 0.5, 0.5, 0.5]],
        momenta: &[],
    },
    Case {
        name: "WarmupDecayLR",
        params: r#"{"total_num_steps": 10, "warmup_num_steps": 4, "warmup_max_lr": 0.1, "warmup_min_lr": 0.02}"#,
        base: &[0.5],
        rates: &[&[0.02, 0.02, 0.06, 0.08339850002884626, 0.1, 0.1, 0.08666666666666667, 0.07333333333333333, 0.06, 0.04666666666666666, 0.03333333333333333, 0.02, 0.02, 0.02]],
        momenta: &[],
    },
    Case {
        name: "WarmupDecayLR",
        params: r#"{"total_num_steps": 8, "warmup_num_steps": 3, "warmup_type": "linear"}"#,
        base: &[0.5],
        rates: &[&[0.0, 0.0, 0.0003333333333333333, 0.0006666666666666666, 0.001, 0.0008, 0.0006, 0.0004, 0.0002, 0.0]],
        momenta: &[],
    },
    Case {
        name: "WarmupDecayLR",
        params: r#"{"total_num_steps": 3, "warmup_num_steps": 5, "warmup_type": "linear"}"#,
        base: &[0.5],
        rates: &[&[0.0, 0.0, 0.0002, 0.0004, 0.0006, 0.0008, 0.0, 0.0]],
        momenta: &[],
    },
    Case {
        name: "WarmupCosineLR",
        params: r#"{"total_num_steps": 10, "warmup_num_steps": 4}"#,
        base: &[0.5, 0.1],
        rates: &[&[0.0, 0.0, 0.25, 0.3962406251802891, 0.5, 0.4665097003110151, 0.37501249999999997, 0.250025, 0.12503750000000005, 0.033540299688984934, 5e-05, 5e-05, 5e-05, 5e-05], &[0.0, 0.0, 0.05, 0.07924812503605783, 0.1, 0.09330194006220302, 0.0750025, 0.050005, 0.025007500000000012, 0.006708059937796987, 1e-05, 1e-05, 1e-05, 1e-05]],
        momenta: &[],
    },
    Case {
        name: "WarmupCosineLR",
        params: r#"{"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "linear", "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}"#,
        base: &[0.5],
        rates: &[&[0.0, 0.05, 0.2, 0.35, 0.47320508075688783, 0.4, 0.30000000000000004, 0.20000000000000007, 0.12679491924311226, 0.1, 0.1, 0.1]],
        momenta: &[],
    },
    Case {
        name: "WarmupCosineLR",
        params: r#"{"total_num_steps": 2, "warmup_num_steps": 3, "warmup_type": "linear"}"#,
        base: &[0.5],
        rates: &[&[0.0, 0.0, 0.16666666666666666, 0.3333333333333333, 5e-05, 5e-05]],
        momenta: &[],
    },
    Case {
        name: "OneCycle",
        params: r#"{"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}"#,
        base: &[0.5],
        rates: &[&[0.01, 0.0325, 0.05500000000000001, 0.0775, 0.1, 0.0775, 0.05500000000000001, 0.0325, 0.01, 0.01, 0.01, 0.01]],
        momenta: &[0.8, 0.875, 0.8500000000000001, 0.8250000000000001, 0.8, 0.8250000000000001, 0.8500000000000001, 0.875, 0.9, 0.9, 0.9, 0.9],
    },
    Case {
        name: "OneCycle",
        params: r#"{"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_second_step_size": 5, "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95}"#,
        base: &[0.5],
        rates: &[&[0.01, 0.04, 0.07, 0.1, 0.082, 0.064, 0.046000000000000006, 0.028000000000000004, 0.01, 0.008, 0.006666666666666667, 0.005714285714285714, 0.005, 0.0044444444444444444]],
        momenta: &[0.7, 0.8666666666666666, 0.7833333333333333, 0.7, 0.75, 0.7999999999999999, 0.85, 0.8999999999999999, 0.95, 0.9547499999999999, 0.9594999999999999, 0.9642499999999998, 0.969, 0.9737499999999999],
    },
    Case {
        name: "OneCycle",
        params: r#"{"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_second_step_size": 6, "cycle_first_stair_count": 2, "cycle_second_stair_count": 3}"#,
        base: &[0.5],
        rates: &[&[0.01, 0.01, 0.05500000000000001, 0.05500000000000001, 0.1, 0.07, 0.07, 0.04, 0.04, 0.01, 0.01, 0.01, 0.01]],
        momenta: &[],
    },
    Case {
        name: "OneCycle",
        params: r#"{"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_second_step_size": 0, "cycle_momentum": false}"#,
        base: &[0.5],
        rates: &[&[0.01, 0.039999999999999994, 0.06999999999999999, 0.01, 0.01, 0.01]],
        momenta: &[],
    },
    Case {
        name: "LRRangeTest",
        params: r#"{"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}"#,
        base: &[0.5],
        rates: &[&[0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04]],
        momenta: &[],
    },
    Case {
        name: "LRRangeTest",
        params: r#"{"lr_range_test_min_lr": [0.01, 0.02], "lr_range_test_step_size": 3, "lr_range_test_staircase": true}"#,
        base: &[0.5, 0.5],
        rates: &[&[0.01, 0.01, 0.01, 0.02, 0.02, 0.02, 0.03, 0.03], &[0.02, 0.02, 0.02, 0.04, 0.04, 0.04, 0.06, 0.06]],
        momenta: &[],
    },
];

fn read(name: &str, params: &str, optimizer: &str) -> Result<LrSchedule, DeepSpeedError> {
    let scheduler = format!(r#""scheduler": {{"type": "{name}", "params": {params}}}"#);
    let optimizer = format!(r#""optimizer": {{"type": "{optimizer}"}}"#);
    let tree = Tree::parse(&format!("{{{scheduler}, {optimizer}}}"))?;
    let optimizer = Chosen::read(&tree)?;
    LrSchedule::read(&tree, optimizer.as_ref()).map(|schedule| schedule.expect(name))
}

#[test]
fn rates_and_momenta_are_deepspeed_s() {
    let close = |found: f64, expected: f64, what: &str| {
        assert!((found - expected).abs() <= 1e-15 + 1e-14 * expected, "{what}: {found}, not {expected}");
    };
    for case in CASES {
        let cycles = !case.momenta.is_empty();
        let schedule = read(case.name, case.params, if cycles { "AdamW" } else { "SGD" }).unwrap();
        assert_eq!((schedule.name(), schedule.cycles_momentum()), (case.name, cycles));
        let mut scheduler = Scheduler::new(case.base, schedule).unwrap();
        for step in 0..case.rates[0].len() {
            let what = format!("{} {} at step {step}", case.name, case.params);
            for (group, rates) in case.rates.iter().enumerate() {
                close(scheduler.last_lr()[group], rates[step], &what);
            }
            match case.momenta.get(step) {
                Some(&momentum) => close(scheduler.momentum(0).expect(&what), momentum, &what),
                None => assert_eq!(scheduler.momentum(0), None, "{what}"),
            }
            scheduler.step().unwrap();
        }
    }
}

#[test]
fn a_jump_gives_the_rates_of_the_steps() {
    let params = r#"{"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 0.1}"#;
    let new = || Scheduler::new(&[0.1], read("WarmupDecayLR", params, "AdamW").unwrap()).unwrap();
    let (mut stepped, mut jumped) = (new(), new());
    (0..6).for_each(|_| drop(stepped.step().unwrap().to_vec()));
    assert_eq!(jumped.seek(6).unwrap(), stepped.last_lr());
}

#[test]
fn lists_that_do_not_fit_the_groups_are_refused() {
    let schedule = read("OneCycle", r#"{"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 1}"#, "AdamW").unwrap();
    let told = Scheduler::new(&[0.1], schedule).unwrap_err().to_string();
    assert_eq!(told, "OneCycle: `cycle_min_lr` should be one value, or one for each of 1 groups, but is 2 values");
}

#[test]
fn without_an_optimizer_in_the_file_the_momentum_is_cycled_unless_told_otherwise() {
    let read = |params: &str| {
        let text = format!(r#"{{"scheduler": {{"type": "OneCycle", "params": {params}}}}}"#);
        LrSchedule::read(&Tree::parse(&text).unwrap(), None).unwrap().unwrap().cycles_momentum()
    };
    assert!(read(r#"{"cycle_min_lr": 0, "cycle_max_lr": 1}"#));
    assert!(!read(r#"{"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": false}"#));
}

#[test]
fn bad_parameters_are_named() {
    for (name, params, expected) in [
        ("CosineAnnealingLR", "{}", "`scheduler.type` is \"CosineAnnealingLR\", but should be WarmupLR, WarmupDecayLR"),
        ("WarmupLR", "[1]", "`scheduler.params` is [1], but should be an object"),
        ("WarmupLR", r#"{"total_num_steps": 5}"#, "`scheduler.params.total_num_steps` is unknown"),
        ("WarmupLR", r#"{"warmup_num_steps": 0}"#, "`scheduler.params.warmup_num_steps` is 0"),
        ("WarmupLR", r#"{"warmup_type": "cubic"}"#, "`scheduler.params.warmup_type` is \"cubic\""),
        ("WarmupLR", r#"{"warmup_max_lr": -1}"#, "`scheduler.params.warmup_max_lr` is -1"),
        ("WarmupLR", r#"{"warmup_max_lr": []}"#, "`scheduler.params.warmup_max_lr` is []"),
        ("WarmupDecayLR", "{}", "`scheduler.params.total_num_steps` is missing"),
        ("WarmupCosineLR", "{}", "`scheduler.params.total_num_steps` is missing"),
        ("WarmupCosineLR", r#"{"total_num_steps": "auto"}"#, "`scheduler.params.total_num_steps` is \"auto\""),
        ("OneCycle", r#"{"cycle_min_lr": 0.1}"#, "`scheduler.params.cycle_max_lr` is missing"),
        (
            "OneCycle",
            r#"{"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_min_mom": 1}"#,
            "`scheduler.params.cycle_min_mom` is 1, but should be at least 0 and below 1",
        ),
        (
            "OneCycle",
            r#"{"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_momentum": true}"#,
            "`scheduler.params.cycle_momentum` and `optimizer.type` contradict each other",
        ),
        ("LRRangeTest", r#"{"lr_range_test_step_size": 0}"#, "`scheduler.params.lr_range_test_step_size` is 0"),
        ("LRRangeTest", r#"{"last_batch_iteration": 5}"#, "`scheduler.params.last_batch_iteration`: 5 is refused"),
    ] {
        let told = read(name, params, "SGD").expect_err(params).to_string();
        assert!(told.starts_with(expected), "{told}");
    }
    let told = LrSchedule::read(&Tree::parse(r#"{"scheduler": {"params": {}}}"#).unwrap(), None).unwrap_err();
    assert!(told.to_string().starts_with("`scheduler.type` is missing"), "{told}");
}
