//! What a program knows besides the file, and the `"auto"` values that it stands for.

use serde_json::{Value, json};

use super::error::DeepSpeedError;
use super::tree::{Tree, is_auto, joined, shown};

/// The dtype of matrix products and convolutions.
///
/// # Source
/// Accelerate's `mixed_precision`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixedPrecision {
    /// float32.
    No,
    /// float16, with a loss scale.
    Fp16,
    /// bfloat16.
    Bf16,
}

/// What a program knows besides the file: the number of ranks, and what `"auto"` in the file stands for.
///
/// An `"auto"` takes the argument of the same meaning. A value in the file that differs from an argument is an error, as
/// in the HF Trainer; so is an `"auto"` whose argument is missing, as in Accelerate. Nothing has a default, unless
/// [`with_trainer_defaults`](Self::with_trainer_defaults) is called. An argument whose key the file does not have is
/// not used, as in the Trainer.
///
/// # Source
/// `transformers.TrainingArguments` and `HfTrainerDeepSpeedConfig`
#[derive(Clone, Debug)]
#[must_use = "arguments do nothing until a configuration is read with them"]
pub struct TrainingArguments {
    pub(super) world_size: usize,
    per_device_train_batch_size: Option<u64>,
    gradient_accumulation_steps: Option<u64>,
    max_grad_norm: Option<f64>,
    learning_rate: Option<f64>,
    adam_betas: Option<(f64, f64)>,
    adam_epsilon: Option<f64>,
    weight_decay: Option<f64>,
    warmup_steps: Option<u64>,
    max_steps: Option<u64>,
    hidden_size: Option<u64>,
    mixed_precision: Option<MixedPrecision>,
}

impl TrainingArguments {
    /// For this many ranks, the size of the process group.
    pub fn new(world_size: usize) -> Self {
        Self {
            world_size,
            per_device_train_batch_size: None,
            gradient_accumulation_steps: None,
            max_grad_norm: None,
            learning_rate: None,
            adam_betas: None,
            adam_epsilon: None,
            weight_decay: None,
            warmup_steps: None,
            max_steps: None,
            hidden_size: None,
            mixed_precision: None,
        }
    }

    /// `train_micro_batch_size_per_gpu`: the samples of a rank's micro-batch.
    pub fn per_device_train_batch_size(mut self, samples: u64) -> Self {
        self.per_device_train_batch_size = Some(samples);
        self
    }

    /// `gradient_accumulation_steps`: the micro-batches of a step.
    pub fn gradient_accumulation_steps(mut self, micro_batches: u64) -> Self {
        self.gradient_accumulation_steps = Some(micro_batches);
        self
    }

    /// `gradient_clipping`.
    pub fn max_grad_norm(mut self, max_norm: f64) -> Self {
        self.max_grad_norm = Some(max_norm);
        self
    }

    /// `optimizer.params.lr` and `scheduler.params.warmup_max_lr`.
    pub fn learning_rate(mut self, lr: f64) -> Self {
        self.learning_rate = Some(lr);
        self
    }

    /// `optimizer.params.betas`: the Trainer's `adam_beta1` and `adam_beta2`.
    pub fn adam_betas(mut self, beta1: f64, beta2: f64) -> Self {
        self.adam_betas = Some((beta1, beta2));
        self
    }

    /// `optimizer.params.eps`.
    pub fn adam_epsilon(mut self, eps: f64) -> Self {
        self.adam_epsilon = Some(eps);
        self
    }

    /// `optimizer.params.weight_decay`.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }

    /// `scheduler.params.warmup_num_steps`.
    pub fn warmup_steps(mut self, steps: u64) -> Self {
        self.warmup_steps = Some(steps);
        self
    }

    /// `scheduler.params.total_num_steps`: the optimizer's steps of the whole run.
    pub fn max_steps(mut self, steps: u64) -> Self {
        self.max_steps = Some(steps);
        self
    }

    /// The model's width: `zero_optimization.reduce_bucket_size` is its square.
    pub fn hidden_size(mut self, hidden_size: u64) -> Self {
        self.hidden_size = Some(hidden_size);
        self
    }

    /// `fp16.enabled` and `bf16.enabled`.
    pub fn mixed_precision(mut self, precision: MixedPrecision) -> Self {
        self.mixed_precision = Some(precision);
        self
    }

    /// The Trainer's defaults for what has not been given: batches of 8, one micro-batch a step, a norm of 1, a rate of
    /// 5e-5, betas of 0.9 and 0.999, eps of 1e-8, no weight decay, no warm-up, float32. The number of steps and the width
    /// have none.
    pub fn with_trainer_defaults(mut self) -> Self {
        self.per_device_train_batch_size.get_or_insert(8);
        self.gradient_accumulation_steps.get_or_insert(1);
        self.max_grad_norm.get_or_insert(1.0);
        self.learning_rate.get_or_insert(5e-5);
        self.adam_betas.get_or_insert((0.9, 0.999));
        self.adam_epsilon.get_or_insert(1e-8);
        self.weight_decay.get_or_insert(0.0);
        self.warmup_steps.get_or_insert(0);
        self.mixed_precision.get_or_insert(MixedPrecision::No);
        self
    }

    /// The keys that are filled in and compared, each with its argument's name and value.
    fn compared(&self) -> [(&'static str, &'static str, Option<Value>); 12] {
        let is = |wanted| self.mixed_precision.map(|it| json!(it == wanted));
        let betas = self.adam_betas.map(|(beta1, beta2)| json!([beta1, beta2]));
        [
            (MICRO, "per_device_train_batch_size", self.per_device_train_batch_size.map(Value::from)),
            (STEPS, "gradient_accumulation_steps", self.gradient_accumulation_steps.map(Value::from)),
            ("gradient_clipping", "max_grad_norm", self.max_grad_norm.map(Value::from)),
            ("optimizer.params.lr", "learning_rate", self.learning_rate.map(Value::from)),
            ("optimizer.params.betas", "adam_betas", betas),
            ("optimizer.params.eps", "adam_epsilon", self.adam_epsilon.map(Value::from)),
            ("optimizer.params.weight_decay", "weight_decay", self.weight_decay.map(Value::from)),
            ("scheduler.params.warmup_max_lr", "learning_rate", self.learning_rate.map(Value::from)),
            ("scheduler.params.warmup_num_steps", "warmup_steps", self.warmup_steps.map(Value::from)),
            ("scheduler.params.total_num_steps", "max_steps", self.max_steps.map(Value::from)),
            ("fp16.enabled", "mixed_precision", is(MixedPrecision::Fp16)),
            ("bf16.enabled", "mixed_precision", is(MixedPrecision::Bf16)),
        ]
    }

    /// Replaces each `"auto"` in the document.
    pub(super) fn fill(&self, tree: &mut Tree) -> Result<(), DeepSpeedError> {
        self.leave_out_sizes(tree);
        let mut mismatches = Vec::new();
        for (key, argument, value) in self.compared() {
            let Some(found) = tree.at(key) else { continue };
            match value {
                Some(value) if is_auto(found) => tree.set(key, value),
                None if is_auto(found) => return Err(DeepSpeedError::Auto { key: key.to_owned(), argument }),
                Some(value) if !equal(found, &value) => {
                    mismatches.push(format!("`{key}` is {}, but {argument} is {}", shown(found), shown(&value)));
                }
                _ => {}
            }
        }
        if !mismatches.is_empty() {
            return Err(DeepSpeedError::Mismatch { mismatches: mismatches.join("; ") });
        }
        if tree.is_auto(BUCKET) {
            let width = self.hidden_size;
            let width = width.ok_or(DeepSpeedError::Auto { key: BUCKET.to_owned(), argument: "hidden_size" })?;
            tree.set(BUCKET, width.saturating_mul(width).into());
        }
        for (key, value) in [("scheduler.params.warmup_min_lr", json!(0)), ("amp.enabled", json!(false))] {
            if tree.is_auto(key) {
                tree.set(key, value);
            }
        }
        for section in ["fp16", "bf16", "zero_optimization"] {
            leave_out(tree, section);
        }
        Ok(())
    }

    /// A size that follows from the others is left out, which is how DeepSpeed is told to compute it.
    fn leave_out_sizes(&self, tree: &mut Tree) {
        let is_known = |tree: &Tree, key, argument: Option<u64>| {
            tree.at(key).is_some_and(Value::is_number) || (tree.is_auto(key) && argument.is_some())
        };
        let has_total = tree.at(TOTAL).is_some_and(Value::is_number);
        let has_micro = is_known(tree, MICRO, self.per_device_train_batch_size);
        let has_steps = is_known(tree, STEPS, self.gradient_accumulation_steps);
        let follows = [(TOTAL, true), (MICRO, has_total && !has_micro), (STEPS, has_total && has_micro && !has_steps)];
        for (key, follows) in follows {
            if follows && tree.is_auto(key) {
                tree.remove(key);
            }
        }
    }
}

pub(super) const TOTAL: &str = "train_batch_size";
pub(super) const MICRO: &str = "train_micro_batch_size_per_gpu";
pub(super) const STEPS: &str = "gradient_accumulation_steps";
pub(super) const BUCKET: &str = "zero_optimization.reduce_bucket_size";

/// DeepSpeed takes the default of what is `"auto"` in these sections. What decides on a whole technique is not left out.
fn leave_out(tree: &mut Tree, section: &str) {
    const DECIDES: [&str; 4] = ["stage", "device", "nvme_path", "enabled"];
    let Some(Value::Object(object)) = tree.at(section) else { return };
    let is_left_out = |name: &str, value: &Value| is_auto(value) && !DECIDES.contains(&name);
    let autos: Vec<_> =
        object.iter().filter(|(name, value)| is_left_out(name, value)).map(|(name, _)| name.clone()).collect();
    let inner: Vec<_> =
        object.iter().filter(|(_, value)| value.is_object()).map(|(name, _)| joined(section, name)).collect();
    for name in autos {
        tree.remove(&joined(section, &name));
    }
    for section in inner {
        leave_out(tree, &section);
    }
}

/// Whether two values are the same, 1 and 1.0 too.
fn equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one.as_f64() == other.as_f64(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| equal(one, other))
        }
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(text: &str, arguments: &TrainingArguments) -> Result<Value, String> {
        let mut tree = Tree::parse(text).unwrap();
        arguments.fill(&mut tree).map_err(|error| error.to_string())?;
        Ok(Value::Object(tree.root().clone()))
    }

    /// The file of transformers' documentation, shortened.
    const ALL_AUTO: &str = r#"{
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto",
            "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu", "pin_memory": "auto"}},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto"
    }"#;

    fn given() -> TrainingArguments {
        TrainingArguments::new(4)
            .per_device_train_batch_size(2)
            .gradient_accumulation_steps(3)
            .max_grad_norm(0.5)
            .learning_rate(1e-4)
            .adam_betas(0.8, 0.9)
            .adam_epsilon(1e-6)
            .weight_decay(0.1)
            .warmup_steps(10)
            .max_steps(100)
            .hidden_size(64)
            .mixed_precision(MixedPrecision::Bf16)
    }

    #[test]
    fn each_auto_takes_the_argument_of_its_meaning() {
        let expected = json!({
            "fp16": {"enabled": false, "loss_scale": 0},
            "bf16": {"enabled": true},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_min_lr": 0,
                "warmup_max_lr": 1e-4, "warmup_num_steps": 10}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 4096, "offload_optimizer": {"device": "cpu"}},
            "gradient_accumulation_steps": 3, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 2
        });
        assert_eq!(filled(ALL_AUTO, &given()).unwrap(), expected);
    }

    #[test]
    fn the_trainer_s_defaults_are_taken_where_they_are_asked_for() {
        let arguments =
            TrainingArguments::new(1).learning_rate(1.0).max_steps(7).hidden_size(2).with_trainer_defaults();
        let found = filled(ALL_AUTO, &arguments).unwrap();
        let params = &found["optimizer"]["params"];
        assert_eq!(*params, json!({"lr": 1.0, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}));
        assert_eq!(found["train_micro_batch_size_per_gpu"], json!(8));
        assert_eq!(found["bf16"]["enabled"], json!(false));
    }

    #[test]
    fn an_auto_without_its_argument_is_named() {
        let told = filled(r#"{"optimizer": {"params": {"lr": "auto"}}}"#, &TrainingArguments::new(1)).unwrap_err();
        let expected = "`optimizer.params.lr` is \"auto\", but the arguments have no `learning_rate`: give it, or write a \
                        value into the file";
        assert_eq!(told, expected);
        for (key, argument, _) in TrainingArguments::new(1).compared() {
            let mut tree = Tree::parse("{}").unwrap();
            tree.set(key, "auto".into());
            let told = TrainingArguments::new(1).fill(&mut tree).unwrap_err().to_string();
            assert!(told.contains(key) && told.contains(argument), "{told}");
        }
        let told = filled(r#"{"zero_optimization": {"reduce_bucket_size": "auto"}}"#, &TrainingArguments::new(1));
        assert!(told.unwrap_err().contains("hidden_size"));
    }

    #[test]
    fn values_that_differ_from_the_arguments_are_all_named() {
        let text = r#"{"gradient_clipping": 1.0, "bf16": {"enabled": false}, "optimizer": {"params": {"betas": [0.8, 0.9]}},
            "train_micro_batch_size_per_gpu": 2.0}"#;
        let expected = "`gradient_clipping` is 1.0, but max_grad_norm is 0.5; `bf16.enabled` is false, but mixed_precision \
                        is true: write \"auto\" into the file, or give the same";
        assert_eq!(filled(text, &given()).unwrap_err(), expected);
    }

    #[test]
    fn a_batch_size_that_follows_from_the_others_is_left_out() {
        let none = TrainingArguments::new(2);
        let text =
            r#"{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}"#;
        assert_eq!(filled(text, &none).unwrap(), json!({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}));
        let text =
            r#"{"train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}"#;
        assert_eq!(filled(text, &none).unwrap(), json!({"train_batch_size": 16, "gradient_accumulation_steps": 2}));
        let text = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}"#;
        assert!(filled(text, &none).unwrap_err().contains("`gradient_accumulation_steps` is \"auto\""));
        let text = r#"{"train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto"}"#;
        assert!(filled(text, &none).unwrap_err().contains("`gradient_accumulation_steps` is \"auto\""));
    }

    #[test]
    fn what_decides_on_a_technique_is_not_left_out() {
        let text = r#"{"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}"#;
        assert_eq!(filled(text, &TrainingArguments::new(1)).unwrap(), serde_json::from_str::<Value>(text).unwrap());
    }
}
