//! `optimizer.params` and `scheduler.params`, which depend on the type.

use super::super::schema::{OFF, ON, Plain, REFUSED, Row, Rule};

const O: &str = "optimizer.params";
const S: &str = "scheduler.params";

const FREED_GRADIENTS: Row = Row { section: O, keys: &["set_grad_none"], rule: ON, why: "`zero_grad` frees gradients" };
const MAX_GRAD_NORM: Row = Row {
    section: O,
    keys: &["max_grad_norm"],
    rule: REFUSED,
    why: "DeepSpeed has it no more: use `gradient_clipping`",
};
const FLOAT32_STATES: Row =
    Row { section: O, keys: &["fp32_optimizer_states"], rule: ON, why: "the optimizer's state is of float32" };
const NOT_DIFFERENTIABLE: Row =
    Row { section: O, keys: &["differentiable"], rule: OFF, why: "steps are not recorded by autograd" };
const KERNELS: Row = Row {
    section: O,
    keys: &["fused", "foreach"],
    rule: Rule::Honoured,
    why: "the setters of the same names; if left out, fused kernels where libtorch has them",
};

const ADAM: &[Row] = &[
    Row {
        section: O,
        keys: &["lr", "betas", "eps", "amsgrad", "maximize", "capturable"],
        rule: Rule::Honoured,
        why: "the setters of the same names",
    },
    Row {
        section: O,
        keys: &["weight_decay"],
        rule: Rule::Honoured,
        why: "decoupled in `AdamW`; by default 0 as in DeepSpeed, with `torch_adam` 0.01 in `AdamW`",
    },
    Row {
        section: O,
        keys: &["adam_w_mode"],
        rule: Rule::Honoured,
        why: "the type `Adam` is `AdamW` unless this is false; the type `AdamW` always is",
    },
    Row {
        section: O,
        keys: &["torch_adam"],
        rule: Rule::Honoured,
        why: "decides on the default of `weight_decay`; the steps are the same",
    },
    Row { section: O, keys: &["bias_correction"], rule: ON, why: "averages are always corrected" },
    KERNELS,
    FREED_GRADIENTS,
    FLOAT32_STATES,
    NOT_DIFFERENTIABLE,
    MAX_GRAD_NORM,
];

const ADAGRAD: &[Row] = &[
    Row {
        section: O,
        keys: &["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"],
        rule: Rule::Honoured,
        why: "the setters of the same names",
    },
    Row { section: O, keys: &["amsgrad"], rule: OFF, why: "Adagrad has none" },
    KERNELS,
    FLOAT32_STATES,
    NOT_DIFFERENTIABLE,
    MAX_GRAD_NORM,
];

const LION: &[Row] = &[
    Row {
        section: O,
        keys: &["lr", "betas", "weight_decay"],
        rule: Rule::Honoured,
        why: "the setters of the same names; the defaults of `lr` and `betas` are DeepSpeed's 1e-3 and (0.9, 0.999)",
    },
    FREED_GRADIENTS,
    FLOAT32_STATES,
    MAX_GRAD_NORM,
];

const SGD: &[Row] = &[
    Row {
        section: O,
        keys: &["lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"],
        rule: Rule::Honoured,
        why: "the setters of the same names",
    },
    KERNELS,
    NOT_DIFFERENTIABLE,
    MAX_GRAD_NORM,
];

const SAME_FORMULA: &str = "DeepSpeed's formula, with one value for all groups or a list with one for each";

const WARMUP: &[Row] = &[
    Row { section: S, keys: &["warmup_min_lr", "warmup_max_lr"], rule: Rule::Honoured, why: SAME_FORMULA },
    Row { section: S, keys: &["warmup_num_steps", "warmup_type"], rule: Rule::Honoured, why: "DeepSpeed's formula" },
    START,
];

const WARMUP_DECAY: &[Row] = &[
    Row { section: S, keys: &["warmup_min_lr", "warmup_max_lr"], rule: Rule::Honoured, why: SAME_FORMULA },
    Row {
        section: S,
        keys: &["warmup_num_steps", "warmup_type", "total_num_steps"],
        rule: Rule::Honoured,
        why: "DeepSpeed's formula",
    },
    START,
];

const WARMUP_COSINE: &[Row] = &[
    Row {
        section: S,
        keys: &["warmup_min_ratio", "cos_min_ratio", "warmup_num_steps", "warmup_type", "total_num_steps"],
        rule: Rule::Honoured,
        why: "DeepSpeed's formula",
    },
    START,
];

const ONE_CYCLE: &[Row] = &[
    Row { section: S, keys: &["cycle_min_lr", "cycle_max_lr"], rule: Rule::Honoured, why: SAME_FORMULA },
    Row {
        section: S,
        keys: &[
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "cycle_first_stair_count",
            "cycle_second_stair_count",
            "decay_step_size",
        ],
        rule: Rule::Honoured,
        why: "DeepSpeed's formula",
    },
    Row {
        section: S,
        keys: &["cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"],
        rule: Rule::Honoured,
        why: "DeepSpeed's formula for the first of `betas`; the second is 0.99 then, whatever the file's optimizer says, \
              as in DeepSpeed; the program's own has to set it",
    },
    START,
];

const LR_RANGE_TEST: &[Row] = &[
    Row { section: S, keys: &["lr_range_test_min_lr"], rule: Rule::Honoured, why: SAME_FORMULA },
    Row {
        section: S,
        keys: &["lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"],
        rule: Rule::Honoured,
        why: "DeepSpeed's formula",
    },
    START,
];

const START: Row = Row {
    section: S,
    keys: &["last_batch_iteration"],
    rule: Rule::Only(&[Plain::Number(-1.0)]),
    why: "a schedule goes on by `load_state_dict` or `Scheduler::seek`",
};

/// The keys of an optimizer's type in lower case, as DeepSpeed compares it.
pub(in super::super) fn of_optimizer(kind: &str) -> Option<&'static [Row]> {
    match kind {
        "adam" | "adamw" => Some(ADAM),
        "adagrad" => Some(ADAGRAD),
        "lion" => Some(LION),
        "sgd" => Some(SGD),
        _ => None,
    }
}

/// The keys of a schedule's type.
pub(in super::super) fn of_scheduler(kind: &str) -> Option<&'static [Row]> {
    match kind {
        "WarmupLR" => Some(WARMUP),
        "WarmupDecayLR" => Some(WARMUP_DECAY),
        "WarmupCosineLR" => Some(WARMUP_COSINE),
        "OneCycle" => Some(ONE_CYCLE),
        "LRRangeTest" => Some(LR_RANGE_TEST),
        _ => None,
    }
}

#[cfg(test)]
pub(super) const BY_TYPE: &[(&str, &[Row])] = &[
    ("`Adam`, `AdamW`", ADAM),
    ("`Adagrad`", ADAGRAD),
    ("`Lion`", LION),
    ("`SGD`", SGD),
    ("`WarmupLR`", WARMUP),
    ("`WarmupDecayLR`", WARMUP_DECAY),
    ("`WarmupCosineLR`", WARMUP_COSINE),
    ("`OneCycle`", ONE_CYCLE),
    ("`LRRangeTest`", LR_RANGE_TEST),
];
