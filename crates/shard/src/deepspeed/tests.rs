//! Whole files, and every key that DeepSpeed documents.

use serde_json::{Value, json};

use super::keys;
use super::optimizer;
use super::schema::{Plain, Row, Rule, find};
use super::*;

const DOCUMENTED: &str = include_str!("documented.txt");

/// What no key's default is, and no key takes.
fn nonsense() -> Value {
    json!([[]])
}

/// Sections that are there, so that a key within them adds nothing by making its section.
fn base() -> Tree {
    let text = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"},
        "activation_checkpointing": {}}"#;
    Tree::parse(text).unwrap()
}

fn read(tree: &Tree) -> Result<DeepSpeedConfig, String> {
    let text = Value::Object(tree.root().clone()).to_string();
    DeepSpeedConfig::from_json(&text, &TrainingArguments::new(1)).map_err(|error| error.to_string())
}

fn with(tree: &Tree, path: &str, value: Value) -> Result<DeepSpeedConfig, String> {
    let mut tree = tree.clone();
    tree.set(path, value);
    read(&tree)
}

/// Documented keys, with the type after the @ where there is one.
fn documented() -> impl Iterator<Item = (&'static str, Option<&'static str>)> {
    let lines = DOCUMENTED.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split_once(" @").map_or((line, None), |(path, kind)| (path, Some(kind))))
}

/// The row of a key, or of an object above it whose content has no effect.
fn row(path: &str) -> Option<&'static Row> {
    let tables = keys::tables();
    let above = |end: usize| find(&tables, &path[..end]).filter(|row| matches!(row.rule, Rule::Open));
    find(&tables, path).or_else(|| path.match_indices('.').find_map(|(end, _)| above(end)))
}

/// A file that an editor of Windows has written; one in UTF-16 is named.
#[test]
fn a_byte_order_mark_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds_config.json");
    let text = "{\"train_batch_size\": 8}";
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        DeepSpeedConfig::from_file(&path, &TrainingArguments::new(1))
    };
    assert_eq!(read(format!("\u{feff}{text}").as_bytes()).unwrap(), read(text.as_bytes()).unwrap());
    let wide: Vec<u8> = format!("\u{feff}{text}").encode_utf16().flat_map(u16::to_le_bytes).collect();
    let told = read(&wide).unwrap_err().to_string();
    assert!(told.contains("ds_config.json") && told.contains("UTF-8"), "{told}");
}

/// A key that is honoured is read, one that is refused names itself, and one without effect changes nothing.
fn does_what_its_row_says(base: &Tree, path: &str, row: &Row) {
    let unchanged = read(base).unwrap();
    let told = with(base, path, nonsense());
    match row.rule {
        Rule::Honoured => {
            let told = told.expect_err(path);
            assert!(told.starts_with(&format!("`{path}` is [[]], but should be ")), "{path}: {told}");
        }
        Rule::NoEffect | Rule::Open => assert_eq!(told.expect(path), unchanged, "{path}"),
        Rule::Only(accepted) => {
            let told = told.expect_err(path);
            assert_eq!(told, format!("`{path}`: [[]] is refused: {}", row.why));
            for &plain in accepted {
                let value = match plain {
                    Plain::Flag(flag) => json!(flag),
                    Plain::Number(number) => json!(number),
                    Plain::Text(text) => json!(text),
                };
                assert_eq!(with(base, path, value).expect(path), unchanged, "{path}");
            }
        }
    }
    assert_eq!(
        with(base, path, Value::Null).map_err(|told| format!("{path}: {told}")),
        Ok(unchanged),
        "null is not given"
    );
}

#[test]
fn every_documented_key_is_honoured_or_refused_or_changes_nothing() {
    let mut count = 0;
    for (path, _) in documented().filter(|(_, kind)| kind.is_none()) {
        count += 1;
        // Without these there is no run, or no section.
        if ["train_batch_size", "optimizer.type", "scheduler.type"].contains(&path) {
            let told = with(&base(), path, nonsense()).expect_err(path);
            assert!(told.starts_with(&format!("`{path}` is [[]], but should be ")), "{told}");
            continue;
        }
        // The old name of bf16.
        if let Some(key) = path.strip_prefix("bfloat16.") {
            let told = with(&base(), path, nonsense()).expect_err(path);
            assert!(told.starts_with(&format!("`bf16.{key}` is [[]]")), "{told}");
            continue;
        }
        does_what_its_row_says(&base(), path, row(path).expect(path));
    }
    assert!(count > 350, "{count}");
}

#[test]
fn every_documented_parameter_of_each_type_is_honoured_or_refused() {
    for (path, kind) in documented() {
        let Some(kind) = kind else { continue };
        let mut base = base();
        let section = path.split('.').next().unwrap();
        base.set(&format!("{section}.type"), kind.into());
        let rows = match section {
            "optimizer" => keys::of_optimizer(&kind.to_lowercase()),
            _ => keys::of_scheduler(kind),
        };
        let Some(rows) = rows else {
            assert!(optimizer::REFUSED.iter().any(|(refused, _)| *refused == kind), "{kind}");
            let told = with(&base, path, 1.into()).expect_err(path);
            assert!(told.starts_with(&format!("`optimizer.type`: \"{kind}\" is refused")), "{told}");
            continue;
        };
        let needed: &[&str] = match kind {
            "WarmupDecayLR" | "WarmupCosineLR" => &["total_num_steps"],
            "OneCycle" => &["cycle_min_lr", "cycle_max_lr"],
            _ => &[],
        };
        for name in needed {
            base.set(&format!("scheduler.params.{name}"), 2.into());
        }
        let row = find(&[rows], path).unwrap_or_else(|| panic!("{kind}: {path}"));
        if needed.iter().any(|name| path.ends_with(name)) {
            let told = with(&base, path, nonsense()).expect_err(path);
            assert!(told.starts_with(&format!("`{path}` is [[]]")), "{told}");
        } else {
            does_what_its_row_says(&base, path, row);
        }
    }
}

#[test]
fn keys_of_the_tables_that_are_not_documented_do_what_their_rows_say_too() {
    for row in keys::tables().iter().flat_map(|table| table.iter()) {
        for key in row.keys {
            let path = super::tree::joined(row.section, key);
            let is_special =
                ["train_batch_size", "optimizer.type", "scheduler.type", "optimizer.params", "scheduler.params"];
            if !is_special.contains(&path.as_str()) {
                does_what_its_row_says(&base(), &path, row);
            }
        }
    }
}

/// The file of the Trainer's documentation for ZeRO-2.
const TRAINER: &str = r#"{
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
        "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_scatter": true,
        "reduce_bucket_size": 2e8, "contiguous_gradients": true},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}"#;

#[test]
fn the_trainer_s_file_is_read_as_it_is() {
    let arguments = TrainingArguments::new(4).gradient_accumulation_steps(2).warmup_steps(10);
    let arguments = arguments.mixed_precision(MixedPrecision::Fp16).with_trainer_defaults();
    let config = DeepSpeedConfig::from_json(TRAINER, &arguments).unwrap();
    let sizes =
        (config.train_batch_size(), config.train_micro_batch_size_per_gpu(), config.gradient_accumulation_steps());
    assert_eq!(sizes, (64, 8, 2));
    assert_eq!(config.gradient_clipping(), Some(1.0));
    assert_eq!((config.stage(), config.zero.bucket), (ZeroStage::Gradients, Some(200_000_000)));
    assert_eq!(config.zero.offload, zero::Offload::Cpu);
    assert_eq!(config.precision.kind, Some(tch::Kind::Half));
    assert_eq!((config.steps_per_print(), config.dataloader_drop_last()), (Some(2000), false));
    assert!(config.activation_checkpoint().is_none());
    let opt = config.optimizer([tch::Tensor::ones([2], tch::kind::FLOAT_CPU).set_requires_grad(true)]).unwrap();
    assert_eq!(opt.lr(0), Some(5e-5));
    let sched = overdrive_sched::Scheduler::new(&[5e-5], config.schedule().unwrap()).unwrap();
    assert_eq!(sched.last_lr(), [0.0]);
}

#[test]
fn what_a_file_does_not_say_is_deepspeed_s_default() {
    let config = DeepSpeedConfig::from_json(r#"{"train_batch_size": 4}"#, &TrainingArguments::new(2)).unwrap();
    assert_eq!((config.stage(), config.gradient_clipping()), (ZeroStage::Disabled, Some(1.0)));
    assert_eq!((config.train_micro_batch_size_per_gpu(), config.gradient_accumulation_steps()), (2, 1));
    assert!(config.schedule().is_none() && config.steps_per_print().is_none());
    let params = || [tch::Tensor::ones([2], tch::kind::FLOAT_CPU).set_requires_grad(true)];
    let told = config.optimizer(params()).err().expect("no optimizer").to_string();
    assert!(told.contains("the file has no `optimizer`: choose one by `optimizer_from`"), "{told}");
    let own = config.optimizer_from(params(), |params| overdrive_optim::Lamb::builder(params).build());
    assert_eq!(own.unwrap().lr(0), Some(1e-3));
    let product = |region: overdrive_amp::Autocast| {
        let x = tch::Tensor::ones([2, 2], tch::kind::FLOAT_CPU);
        region.run(|| x.matmul(&x).kind()).unwrap()
    };
    assert_eq!(product(config.autocast(tch::Device::Cpu)), tch::Kind::Float);
    let text = r#"{"train_batch_size": 4, "bf16": {"enabled": true}, "gradient_clipping": 0}"#;
    let config = DeepSpeedConfig::from_json(text, &TrainingArguments::new(1)).unwrap();
    assert_eq!((product(config.autocast(tch::Device::Cpu)), config.gradient_clipping()), (tch::Kind::BFloat16, None));
}

#[test]
fn a_cycled_momentum_sets_the_second_beta_as_in_deepspeed() {
    let text = r#"{"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"betas": [0.5, 0.6]}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}}"#;
    let config = DeepSpeedConfig::from_json(text, &TrainingArguments::new(1)).unwrap();
    assert_eq!(config.optimizer.unwrap().betas, (0.5, 0.99));
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let told = DeepSpeedConfig::from_file("/no/such/file.json", &TrainingArguments::new(1)).unwrap_err().to_string();
    assert!(told.starts_with("/no/such/file.json: "), "{told}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds_config.json");
    std::fs::write(&path, r#"{"train_batch_size": 4}"#).unwrap();
    assert_eq!(DeepSpeedConfig::from_file(&path, &TrainingArguments::new(1)).unwrap().train_batch_size(), 4);
}

#[test]
fn an_optimizer_is_on_the_host_if_the_file_says_so() {
    // `CpuOffloadOptimizer` refuses one that averages parameters.
    let built = |device: &str| {
        let text = format!(
            r#"{{"train_batch_size": 4, "zero_optimization": {{"stage": 1, "offload_optimizer": {{"device": "{device}",
            "nvme_path": "/"}}}}}}"#
        );
        let config = DeepSpeedConfig::from_json(&text, &TrainingArguments::new(1)).unwrap();
        let param = tch::Tensor::ones([2], tch::kind::FLOAT_CPU).set_requires_grad(true);
        let built =
            config.optimizer_from([param], |params| overdrive_optim::AdamWScheduleFree::builder(params).build());
        built.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(built("none"), Ok(()));
    for device in ["cpu", "nvme"] {
        let told = built(device).expect_err(device);
        assert!(told.starts_with("CpuOffloadOptimizer cannot be used with this optimizer"), "{told}");
    }
}

#[test]
fn a_section_of_activation_checkpointing_gives_what_runs_a_part() {
    let text = r#"{"train_batch_size": 4, "activation_checkpointing": {"cpu_checkpointing": false}}"#;
    let config = DeepSpeedConfig::from_json(text, &TrainingArguments::new(1)).unwrap();
    let x = tch::Tensor::ones([2], tch::kind::FLOAT_CPU).set_requires_grad(true);
    let run = config.activation_checkpoint().expect("a section").run(|[x]| x.f_exp(), [&x]);
    run.unwrap().sum(tch::Kind::Float).backward();
    assert_eq!(x.grad().double_value(&[0]), f64::from(1f32.exp()));
}

#[test]
fn a_folder_for_the_state_that_is_not_there_is_named() {
    let text = r#"{"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/no/such/folder"}}}"#;
    let config = DeepSpeedConfig::from_json(text, &TrainingArguments::new(1)).unwrap();
    let param = tch::Tensor::ones([2], tch::kind::FLOAT_CPU).set_requires_grad(true);
    let told = config.optimizer([param]).err().expect("no folder").to_string();
    assert!(told.contains("`zero_optimization.offload_optimizer.nvme_path`: /no/such/folder"), "{told}");
}
