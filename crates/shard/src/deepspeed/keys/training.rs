//! Batch sizes, optimizer, schedule, precision, clipping.

use super::super::schema::{OFF, Plain, REFUSED, Row, Rule};

const AMP: &str = "Apex is not there: use `fp16`, `bf16` or `torch_autocast`";
const WHILE_OFF: &str = "it belongs to what is switched off";
const IN_FLOAT32: &str = "parameters are of float32, and so are their gradients and what is averaged of them";

pub(super) const KEYS: &[Row] = &[
    Row {
        section: "",
        keys: &["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"],
        rule: Rule::Honoured,
        why: "methods of the same names; one or two of them may be left out, and the others have to multiply",
    },
    Row {
        section: "",
        keys: &["managed_gradient_accumulation"],
        rule: Rule::NoEffect,
        why: "the program calls `step` where a window closes, whichever it says",
    },
    Row {
        section: "",
        keys: &["gradient_clipping"],
        rule: Rule::Honoured,
        why: "`gradient_clipping()`, by default 1.0 as in DeepSpeed of August 2026 (older releases: 0); 0 is none",
    },
    Row {
        section: "",
        keys: &["steps_per_print", "dataloader_drop_last"],
        rule: Rule::Honoured,
        why: "methods of the same names, for the program's loop and its loader",
    },
    Row { section: "optimizer", keys: &["type"], rule: Rule::Honoured, why: "`optimizer()` builds it; see below" },
    Row { section: "optimizer", keys: &["params"], rule: Rule::Honoured, why: "by type; see below" },
    Row { section: "optimizer", keys: &["legacy_fusion"], rule: OFF, why: "there are no older kernels: leave it out" },
    Row { section: "scheduler", keys: &["type"], rule: Rule::Honoured, why: "`schedule()`; see below" },
    Row { section: "scheduler", keys: &["params"], rule: Rule::Honoured, why: "by type; see below" },
    Row {
        section: "fp16",
        keys: &["enabled"],
        rule: Rule::Honoured,
        why: "`autocast()` in float16 over parameters of float32, of which stage 3 gathers float16, and a `loss_scaler()`",
    },
    Row {
        section: "fp16",
        keys: &[
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        ],
        rule: Rule::Honoured,
        why: "`LossScaler` has DeepSpeed's rule: with stage 0 it has no hysteresis, and goes on at the smallest scale",
    },
    Row {
        section: "fp16",
        keys: &["auto_cast"],
        rule: Rule::NoEffect,
        why: "autocast casts the inputs of each operator that runs in float16",
    },
    Row {
        section: "fp16",
        keys: &["fp16_master_weights_and_grads"],
        rule: OFF,
        why: "parameters, which are the master weights, are of float32",
    },
    Row {
        section: "bf16",
        keys: &["enabled"],
        rule: Rule::Honoured,
        why: "`autocast()` in bfloat16 over parameters of float32, of which stage 3 gathers bfloat16; `bfloat16` is its old name",
    },
    Row {
        section: "bf16",
        keys: &["check_grad_overflow"],
        rule: Rule::Honoured,
        why: "`loss_scaler()` skips a step whose gradients overflow, by default as in DeepSpeed; with stage 3 neither does",
    },
    Row {
        section: "bf16",
        keys: &["immediate_grad_update"],
        rule: Rule::NoEffect,
        why: "gradients are of float32 from the start, with nothing to update later",
    },
    Row {
        section: "bf16",
        keys: &["bf16_master_weights_and_grads", "bf16_optimizer_states"],
        rule: OFF,
        why: "parameters, which are the master weights, and the optimizer's state are of float32",
    },
    Row { section: "amp", keys: &["enabled"], rule: OFF, why: AMP },
    Row { section: "amp", keys: AMP_PARAMS, rule: Rule::NoEffect, why: WHILE_OFF },
    Row {
        section: "torch_autocast",
        keys: &["enabled", "dtype"],
        rule: Rule::Honoured,
        why: "`autocast()`; with float16 a `loss_scaler()` by `GradScaler`'s rule and defaults",
    },
    Row {
        section: "torch_autocast",
        keys: &["lower_precision_safe_modules"],
        rule: REFUSED,
        why: "gradients and parameters of all modules are sent in float32",
    },
    Row {
        section: "",
        keys: &["communication_data_type", "seq_parallel_communication_data_type"],
        rule: Rule::Only(&[Plain::Text("fp32")]),
        why: IN_FLOAT32,
    },
    Row {
        section: "data_types",
        keys: &["grad_accum_dtype", "param_dtype", "buffer_dtype"],
        rule: Rule::Only(&[Plain::Text("fp32")]),
        why: IN_FLOAT32,
    },
    Row {
        section: "",
        keys: &["gradient_allreduce_op"],
        rule: Rule::Only(&[Plain::Text("mean")]),
        why: "gradients are averaged: multiply the loss by the number of ranks for their sum",
    },
    Row {
        section: "",
        keys: &["prescale_gradients"],
        rule: OFF,
        why: "the mean over ranks is taken in float32, which needs no scaling before it",
    },
    Row {
        section: "",
        keys: &["gradient_predivide_factor"],
        rule: Rule::Only(&[Plain::Number(1.0)]),
        why: "the mean over ranks is taken in float32, which needs no scaling before it",
    },
    Row {
        section: "",
        keys: &["sparse_gradients"],
        rule: OFF,
        why: "sharded gradients are dense: make the embedding without `sparse`",
    },
    Row {
        section: "activation_checkpointing",
        keys: &["partition_activations", "contiguous_memory_optimization"],
        rule: OFF,
        why: "it needs model parallelism, which is not there",
    },
    Row {
        section: "activation_checkpointing",
        keys: &["cpu_checkpointing"],
        rule: OFF,
        why: "a checkpoint's inputs stay on their device: `SavedTensors` of `overdrive-memory` keeps other tensors on the host",
    },
    Row {
        section: "activation_checkpointing",
        keys: &["synchronize_checkpoint_boundary", "profile"],
        rule: Rule::NoEffect,
        why: "checkpoints are not timed: use the profiler of `overdrive-profile`",
    },
    Row {
        section: "activation_checkpointing",
        keys: &["number_checkpoints"],
        rule: Rule::NoEffect,
        why: "it is the size of a buffer of `contiguous_memory_optimization`",
    },
];

/// The arguments of `apex.amp.initialize`.
const AMP_PARAMS: &[&str] = &[
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
    "num_losses",
    "verbosity",
    "min_loss_scale",
    "max_loss_scale",
];
