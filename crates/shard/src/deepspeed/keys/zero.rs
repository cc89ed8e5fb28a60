//! `zero_optimization`.

use super::super::schema::{OFF, ON, Plain, REFUSED, Row, Rule};

const UNITS: &str =
    "the units that the program makes say what is gathered, kept and freed together; results are the same";
const GROUPS: &str =
    "parameters are parted over all ranks: for parts within a host use `FullyShardedDataParallel::hybrid`";
const QUANTIZED: &str = "nothing is quantized to be sent";
const NVME: &str =
    "the state is in files that are mapped into memory, which the system reads and writes while training goes on";

pub(super) const KEYS: &[Row] = &[
    Row {
        section: "zero_optimization",
        keys: &["stage"],
        rule: Rule::Honoured,
        why: "`stage()`: 0; 1, a `ZeroRedundancyOptimizer`; 2, a `ShardedDataParallel` too; 3, a \
              `FullyShardedDataParallel`, whose units the program makes. `true` in place of the section is stage 1, as in old files",
    },
    Row {
        section: "zero_optimization",
        keys: &["reduce_bucket_size"],
        rule: Rule::Honoured,
        why: "the buckets of `sharded_data_parallel()`, in elements; if left out 25 MiB, not DeepSpeed's 5e8 elements. A \
              gradient of 1 MiB and more is sent alone. With stage 3 the others of a unit are one bucket",
    },
    Row {
        section: "zero_optimization",
        keys: &["contiguous_gradients"],
        rule: Rule::NoEffect,
        why: "the gradients of a bucket are copied into one buffer to send them; those of 1 MiB and more are sent as they are",
    },
    Row {
        section: "zero_optimization",
        keys: &["reduce_scatter", "use_multi_rank_bucket_allreduce", "overlap_comm", "grad_hooks"],
        rule: Rule::NoEffect,
        why: "each bucket is averaged on the rank that steps with it, while the backward pass goes on; results are the same",
    },
    Row {
        section: "zero_optimization",
        keys: &["allgather_partitions", "allgather_bucket_size"],
        rule: Rule::NoEffect,
        why: "new parameters are broadcast in buckets of 25 MiB, those of 1 MiB and more alone; results are the same",
    },
    Row {
        section: "",
        keys: &["allgather_size", "disable_allgather"],
        rule: Rule::NoEffect,
        why: "new parameters are broadcast in buckets of 25 MiB, those of 1 MiB and more alone; results are the same",
    },
    Row {
        section: "zero_optimization",
        keys: &["round_robin_gradients"],
        rule: Rule::NoEffect,
        why: "parameters go to ranks by size, the largest first",
    },
    Row {
        section: "zero_optimization",
        keys: &["load_from_fp32_weights"],
        rule: ON,
        why: "parameters are of float32: there are no 16-bit copies to begin from",
    },
    Row {
        section: "zero_optimization",
        keys: &["ignore_unused_parameters"],
        rule: ON,
        why: "a parameter that a pass does not use counts as zero",
    },
    Row {
        section: "zero_optimization",
        keys: &["elastic_checkpoint"],
        rule: OFF,
        why: "`consolidate_state_dict` makes a state that any number of ranks can load",
    },
    Row { section: "zero_optimization", keys: &["legacy_stage1"], rule: OFF, why: "there is one stage 1" },
    Row {
        section: "zero_optimization",
        keys: &["enable_sanity_checks"],
        rule: Rule::NoEffect,
        why: "ranks always check that they agree",
    },
    Row {
        section: "zero_optimization.offload_optimizer",
        keys: &["device"],
        rule: Rule::Honoured,
        why: "`cpu`: a `CpuOffloadOptimizer` on each rank; `nvme`: its state in files, also with stages 1 and 2; `none`",
    },
    Row {
        section: "zero_optimization.offload_optimizer",
        keys: &["nvme_path"],
        rule: Rule::Honoured,
        why: "the folder of `CpuOffloadOptimizer::state_on_disk`",
    },
    Row {
        section: "zero_optimization.offload_optimizer",
        keys: &["pin_memory"],
        rule: Rule::NoEffect,
        why: "copies on the host for a GPU are always pinned",
    },
    Row {
        section: "zero_optimization.offload_optimizer",
        keys: &["buffer_count", "pipeline_read", "pipeline_write", "fast_init"],
        rule: Rule::NoEffect,
        why: NVME,
    },
    Row {
        section: "zero_optimization.offload_optimizer",
        keys: &["ratio"],
        rule: Rule::Only(&[Plain::Number(1.0)]),
        why: "the whole step is made on the host (DeepSpeed has parts with stage 3 alone)",
    },
    Row {
        section: "zero_optimization.offload_optimizer",
        keys: &["super_offload"],
        rule: OFF,
        why: "it is not there (DeepSpeed has it with stage 3 alone)",
    },
    Row {
        section: "zero_optimization.offload_optimizer",
        keys: &["cpuadam_cores_perc"],
        rule: Rule::NoEffect,
        why: "it belongs to `super_offload`",
    },
    Row {
        section: "zero_optimization",
        keys: &["cpu_offload"],
        rule: Rule::Honoured,
        why: "the old form of `offload_optimizer` with the device `cpu`",
    },
    Row {
        section: "zero_optimization",
        keys: &["cpu_offload_use_pin_memory"],
        rule: Rule::NoEffect,
        why: "DeepSpeed does not read it any more",
    },
    Row {
        section: "zero_optimization.offload_param",
        keys: &["device"],
        rule: Rule::Honoured,
        why: "with stage 3, the `OffloadPolicy`: `cpu`, rows of parameters, their gradients and the optimizer's state in the \
              host's memory; `nvme`, in files; `none`. DeepSpeed leaves the state on the device if `offload_optimizer` is \
              missing",
    },
    Row {
        section: "zero_optimization.offload_param",
        keys: &["nvme_path"],
        rule: Rule::Honoured,
        why: "the folder of `OffloadPolicy::Disk`",
    },
    Row {
        section: "zero_optimization.offload_param",
        keys: &["pin_memory"],
        rule: Rule::NoEffect,
        why: "what is copied to a GPU is always pinned",
    },
    Row {
        section: "zero_optimization.offload_param",
        keys: &["buffer_count", "buffer_size", "max_in_cpu"],
        rule: Rule::NoEffect,
        why: NVME,
    },
    Row {
        section: "zero_optimization",
        keys: &["cpu_offload_param"],
        rule: Rule::Honoured,
        why: "the old form of `offload_param` with the device `cpu`",
    },
    Row {
        section: "zero_optimization",
        keys: &["stage3_prefetch_bucket_size", "prefetch_bucket_size"],
        rule: Rule::Honoured,
        why: "0: no unit is gathered ahead; else the next one is, whatever its size",
    },
    Row {
        section: "zero_optimization",
        keys: &[
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "max_live_parameters",
            "max_reuse_distance",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "sub_group_size",
            "memory_efficient_linear",
            "override_module_apply",
            "pipeline_loading_checkpoint",
            "log_trace_cache_warnings",
            "save_muon_momentum_buffer_in_memory",
        ],
        rule: Rule::NoEffect,
        why: UNITS,
    },
    Row {
        section: "zero_optimization.leaf_module",
        keys: &["classes", "names", "name_suffixes"],
        rule: Rule::NoEffect,
        why: UNITS,
    },
    Row {
        section: "zero_optimization",
        keys: &["zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"],
        rule: OFF,
        why: QUANTIZED,
    },
    Row { section: "zero_optimization", keys: &["zeropp_loco_param"], rule: REFUSED, why: QUANTIZED },
    Row {
        section: "zero_optimization",
        keys: &["zero_hpz_partition_size"],
        rule: Rule::Only(&[Plain::Number(1.0)]),
        why: GROUPS,
    },
    Row {
        section: "zero_optimization",
        keys: &["mics_shard_size"],
        rule: Rule::Only(&[Plain::Number(-1.0)]),
        why: GROUPS,
    },
    Row { section: "zero_optimization", keys: &["mics_hierarchical_params_gather"], rule: OFF, why: GROUPS },
    Row {
        section: "zero_optimization",
        keys: &["zenflow"],
        rule: REFUSED,
        why: "steps that are part on the device and part on the host are not there: use `offload_optimizer`",
    },
    Row {
        section: "",
        keys: &["zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"],
        rule: Rule::NoEffect,
        why: "any optimizer is taken, or refused with the reason",
    },
    Row {
        section: "aio",
        keys: &[
            "block_size",
            "queue_depth",
            "thread_count",
            "intra_op_parallelism",
            "single_submit",
            "overlap_events",
            "use_gds",
        ],
        rule: Rule::NoEffect,
        why: NVME,
    },
];
