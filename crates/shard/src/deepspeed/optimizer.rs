//! Section `optimizer`.

use overdrive_core::{Optimizer, OptimizerError, Parameter};
use overdrive_optim::{Adagrad, Adam, AdamW, Lion, Sgd};
use serde_json::Value;

use super::error::DeepSpeedError;
use super::keys;
use super::schema::check_within;
use super::tree::{Tree, wrong};

const TYPE: &str = "optimizer.type";

/// An optimizer that can be built as often as needed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chosen {
    kind: Kind,
    lr: f64,
    pub betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    momentum: f64,
    dampening: f64,
    lr_decay: f64,
    initial_accumulator_value: f64,
    amsgrad: bool,
    nesterov: bool,
    maximize: bool,
    capturable: bool,
    fused: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Adam,
    AdamW,
    Adagrad,
    Lion,
    Sgd,
}

/// Types that DeepSpeed has, and why they are refused.
pub(super) const REFUSED: [(&str, &str); 9] = [
    (
        "Lamb",
        "DeepSpeed's keeps trust ratios within `min_coeff` and `max_coeff`, which `Lamb` of `overdrive-optim` does not: \
         choose that one by `optimizer_from`",
    ),
    ("OneBitAdam", "it averages gradients itself: use `OneBitAdam` of `overdrive-ddp` without ZeRO"),
    ("ZeroOneAdam", "it averages gradients itself: `OneBitAdam` of `overdrive-ddp`, without ZeRO, is similar"),
    ("OneBitLamb", "it averages gradients itself: `OneBitAdam` of `overdrive-ddp`, without ZeRO, is similar"),
    ("MuAdam", "the package mup scales rates by the widths of layers: use groups of `AdamW`"),
    ("MuAdamW", "the package mup scales rates by the widths of layers: use groups of `AdamW`"),
    ("MuSGD", "the package mup scales rates by the widths of layers: use groups of `Sgd`"),
    (
        "Muon",
        "which parameters are hidden matrices is in the program: join a sharded `Muon` and a sharded `AdamW` by `Joint`",
    ),
    ("FusedAdam", "DeepSpeed has it as `Adam`"),
];

impl Chosen {
    /// `None` without the section.
    pub(super) fn read(tree: &Tree) -> Result<Option<Self>, DeepSpeedError> {
        let Some(name) = tree.text(TYPE)? else { return absent(tree) };
        let lower = name.to_lowercase();
        let kind = match lower.as_str() {
            // DeepSpeed's `Adam` is AdamW.
            "adam" if tree.flag("optimizer.params.adam_w_mode")? == Some(false) => Kind::Adam,
            "adam" | "adamw" => Kind::AdamW,
            "adagrad" => Kind::Adagrad,
            "lion" => Kind::Lion,
            "sgd" => Kind::Sgd,
            _ => return Err(refused(name)),
        };
        match tree.at("optimizer.params") {
            Some(Value::Object(params)) => {
                let rows = keys::of_optimizer(&lower).unwrap_or_default();
                check_within(params, "optimizer.params", &[rows])?;
            }
            Some(other) => return Err(wrong("optimizer.params", other, "an object")),
            None => {}
        }
        // An AdamW's mode cannot be changed, but is read.
        tree.flag("optimizer.params.adam_w_mode")?;
        Self::of_kind(kind, tree).map(Some)
    }

    fn of_kind(kind: Kind, tree: &Tree) -> Result<Self, DeepSpeedError> {
        type Read<T> = Result<T, DeepSpeedError>;
        let size = |name: &str, default: f64| -> Read<f64> { Ok(tree.size(&param(name))?.unwrap_or(default)) };
        let flag = |name: &str| -> Read<bool> { Ok(tree.flag(&param(name))?.unwrap_or(false)) };
        let is_torch = flag("torch_adam")?;
        let decay = if kind == Kind::AdamW && is_torch { 1e-2 } else { 0.0 };
        Ok(Self {
            kind,
            lr: size("lr", if kind == Kind::Adagrad { 1e-2 } else { 1e-3 })?,
            betas: betas(tree, (0.9, 0.999))?,
            eps: size("eps", if kind == Kind::Adagrad { 1e-10 } else { 1e-8 })?,
            weight_decay: size("weight_decay", decay)?,
            momentum: size("momentum", 0.0)?,
            dampening: tree.number(&param("dampening"))?.unwrap_or(0.0),
            lr_decay: size("lr_decay", 0.0)?,
            initial_accumulator_value: size("initial_accumulator_value", 0.0)?,
            amsgrad: flag("amsgrad")?,
            nesterov: flag("nesterov")?,
            maximize: flag("maximize")?,
            capturable: flag("capturable")?,
            fused: fused(tree)?,
        })
    }

    /// Whether DeepSpeed's `OneCycle` finds a momentum to cycle.
    pub(super) fn has_betas(&self) -> bool {
        matches!(self.kind, Kind::Adam | Kind::AdamW | Kind::Lion)
    }

    pub(super) fn build(&self, params: Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError> {
        let (beta1, beta2) = self.betas;
        // The same options of builders of different types.
        macro_rules! adam {
            ($builder:expr) => {{
                let builder = $builder.lr(self.lr).betas(beta1, beta2).eps(self.eps).weight_decay(self.weight_decay);
                let builder = builder.amsgrad(self.amsgrad).maximize(self.maximize).capturable(self.capturable);
                Box::new(with_fused!(builder).build()?)
            }};
        }
        macro_rules! with_fused {
            ($builder:expr) => {
                match self.fused {
                    Some(fused) => $builder.fused(fused),
                    None => $builder,
                }
            };
        }
        Ok(match self.kind {
            Kind::Adam => adam!(Adam::builder(params)),
            Kind::AdamW => adam!(AdamW::builder(params)),
            Kind::Adagrad => {
                let builder = Adagrad::builder(params).lr(self.lr).lr_decay(self.lr_decay).eps(self.eps);
                let builder = builder.weight_decay(self.weight_decay).maximize(self.maximize);
                let builder = builder.initial_accumulator_value(self.initial_accumulator_value);
                Box::new(with_fused!(builder).build()?)
            }
            Kind::Lion => {
                let builder = Lion::builder(params).lr(self.lr).betas(beta1, beta2);
                Box::new(builder.weight_decay(self.weight_decay).build()?)
            }
            Kind::Sgd => {
                let builder = Sgd::builder(params).lr(self.lr).momentum(self.momentum).dampening(self.dampening);
                let builder = builder.weight_decay(self.weight_decay).nesterov(self.nesterov).maximize(self.maximize);
                Box::new(with_fused!(builder).build()?)
            }
        })
    }
}

fn param(name: &str) -> String {
    format!("optimizer.params.{name}")
}

/// Without a type there are no parameters either.
fn absent(tree: &Tree) -> Result<Option<Chosen>, DeepSpeedError> {
    match tree.at("optimizer") {
        None => Ok(None),
        Some(_) => {
            let reason = "it says which optimizer the section is about, such as \"AdamW\"".to_owned();
            Err(DeepSpeedError::Missing { key: TYPE.to_owned(), reason })
        }
    }
}

fn refused(name: &str) -> DeepSpeedError {
    let known = REFUSED.iter().find(|(kind, _)| kind.eq_ignore_ascii_case(name)).map(|(_, reason)| *reason);
    let other = "Adam, AdamW, Adagrad, Lion and SGD are built from a file: leave the section out, and choose another one by \
                 `optimizer_from`";
    let (key, found) = (TYPE.to_owned(), format!("{name:?}"));
    DeepSpeedError::Refused { key, found, reason: known.unwrap_or(other).to_owned() }
}

fn betas(tree: &Tree, default: (f64, f64)) -> Result<(f64, f64), DeepSpeedError> {
    const EXPECTED: &str = "two numbers, each at least 0 and below 1";
    let path = param("betas");
    match tree.numbers(&path, EXPECTED)?.as_deref() {
        None => Ok(default),
        Some(&[one, other]) if [one, other].iter().all(|it| (0.0..1.0).contains(it)) => Ok((one, other)),
        Some(_) => Err(wrong(&path, tree.at(&path).unwrap_or(&Value::Null), EXPECTED)),
    }
}

fn fused(tree: &Tree) -> Result<Option<bool>, DeepSpeedError> {
    match (tree.flag(&param("fused"))?, tree.flag(&param("foreach"))?) {
        (Some(true), Some(true)) => {
            let keys = "`optimizer.params.fused` and `optimizer.params.foreach`".to_owned();
            Err(DeepSpeedError::Contradiction {
                keys,
                reason: "there is one kind of kernels: set one of them".to_owned(),
            })
        }
        (Some(true), _) => Ok(Some(true)),
        (_, Some(true)) => Ok(Some(false)),
        (Some(false), _) => Ok(Some(false)),
        (None, Some(false) | None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use overdrive_core::{Entry, StateDict};
    use tch::{Device, Kind as Dtype, Tensor};

    use super::*;

    fn read(params: &str) -> Result<Option<Chosen>, String> {
        Chosen::read(&Tree::parse(&format!(r#"{{"optimizer": {params}}}"#)).unwrap()).map_err(|error| error.to_string())
    }

    fn weights() -> Vec<Parameter> {
        tch::manual_seed(1);
        let weight = Tensor::randn([5, 3], (Dtype::Double, Device::Cpu)).set_requires_grad(true);
        vec![Parameter::named("weight", weight)]
    }

    /// The weights after steps, and what the optimizer saves.
    fn stepped(
        build: impl FnOnce(Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError>,
    ) -> (Tensor, StateDict) {
        let params = weights();
        let mut opt = build(params.iter().map(Parameter::share).collect()).unwrap();
        for step in [1.0, 2.0, 3.0] {
            (params[0].tensor() * step).square().sum(Dtype::Double).backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
        let state = opt.as_stateful().unwrap().state_dict().unwrap().copied().unwrap();
        (params[0].tensor().detach().copy(), state)
    }

    fn is_same(text: &str, build: impl FnOnce(Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError>) {
        let chosen = read(text).unwrap().unwrap();
        let (weight, state) = stepped(|params| chosen.build(params));
        let (expected, expected_state) = stepped(build);
        assert!(weight.equal(&expected), "{text}");
        let plain = |state: &StateDict| {
            let shown = |(key, entry): (&str, &Entry)| match entry {
                Entry::Tensor(tensor) => format!("{key}: {:?}", Vec::<f64>::try_from(tensor.flatten(0, -1)).unwrap()),
                other => format!("{key}: {other:?}"),
            };
            state.iter().map(shown).collect::<Vec<_>>()
        };
        assert_eq!(plain(&state), plain(&expected_state), "{text}");
    }

    macro_rules! boxed {
        ($optimizer:ident $($call:tt)*) => {
            |params| Ok(Box::new($optimizer::builder(params)$($call)*.build()?) as Box<dyn Optimizer>)
        };
    }

    #[test]
    fn each_type_builds_the_optimizer_with_its_options_and_deepspeed_s_defaults() {
        is_same(r#"{"type": "Adam"}"#, boxed!(AdamW.lr(1e-3).weight_decay(0.0)));
        is_same(r#"{"type": "AdamW", "params": {}}"#, boxed!(AdamW.lr(1e-3).weight_decay(0.0)));
        is_same(r#"{"type": "adamw", "params": {"torch_adam": true}}"#, boxed!(AdamW.lr(1e-3).weight_decay(0.01)));
        is_same(r#"{"type": "Adam", "params": {"torch_adam": true, "adam_w_mode": false}}"#, boxed!(Adam.lr(1e-3)));
        is_same(
            r#"{"type": "Adam", "params": {"adam_w_mode": false, "lr": 0.1, "betas": [0.8, 0.99], "eps": 1e-3,
                "weight_decay": 0.5, "amsgrad": true, "maximize": true, "foreach": true, "capturable": true,
                "bias_correction": true, "set_grad_none": true, "differentiable": false}}"#,
            boxed!(
                Adam.lr(0.1)
                    .betas(0.8, 0.99)
                    .eps(1e-3)
                    .weight_decay(0.5)
                    .amsgrad(true)
                    .maximize(true)
                    .fused(false)
                    .capturable(true)
            ),
        );
        is_same(
            r#"{"type": "AdamW", "params": {"adam_w_mode": false, "weight_decay": 0.5, "fused": true}}"#,
            boxed!(AdamW.weight_decay(0.5).fused(true)),
        );
        is_same(r#"{"type": "Lion"}"#, boxed!(Lion.lr(1e-3).betas(0.9, 0.999)));
        is_same(
            r#"{"type": "Lion", "params": {"lr": 0.01, "betas": [0.5, 0.6], "weight_decay": 0.2}}"#,
            boxed!(Lion.lr(0.01).betas(0.5, 0.6).weight_decay(0.2)),
        );
        is_same(r#"{"type": "Adagrad"}"#, boxed!(Adagrad.lr(1e-2)));
        is_same(
            r#"{"type": "Adagrad", "params": {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.3, "eps": 0.4,
                "initial_accumulator_value": 0.5, "maximize": true, "fused": false, "amsgrad": false}}"#,
            boxed!(
                Adagrad
                    .lr(0.1)
                    .lr_decay(0.2)
                    .weight_decay(0.3)
                    .eps(0.4)
                    .initial_accumulator_value(0.5)
                    .maximize(true)
                    .fused(false)
            ),
        );
        is_same(r#"{"type": "SGD"}"#, boxed!(Sgd.lr(1e-3)));
        is_same(
            r#"{"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": true}}"#,
            boxed!(Sgd.lr(0.01).momentum(0.9).weight_decay(0.1).nesterov(true)),
        );
        is_same(
            r#"{"type": "SGD", "params": {"momentum": 0.9, "dampening": 0.5, "maximize": true}}"#,
            boxed!(Sgd.momentum(0.9).dampening(0.5).maximize(true)),
        );
    }

    #[test]
    fn types_that_are_not_built_are_refused_with_the_reason() {
        for (name, _) in REFUSED {
            let told = read(&format!(r#"{{"type": "{name}"}}"#)).unwrap_err();
            assert!(told.starts_with(&format!("`optimizer.type`: \"{name}\" is refused: ")), "{told}");
        }
        assert!(read(r#"{"type": "RMSprop"}"#).unwrap_err().contains("choose another one by `optimizer_from`"));
        assert!(read(r#"{"type": "OneBitAdam"}"#).unwrap_err().contains("averages gradients itself"));
    }

    #[test]
    fn bad_parameters_are_named() {
        for (text, expected) in [
            (r#"{"params": {}}"#, "`optimizer.type` is missing"),
            (r#"{"type": 5}"#, "`optimizer.type` is 5"),
            (r#"{"type": "AdamW", "params": [1]}"#, "`optimizer.params` is [1], but should be an object"),
            (r#"{"type": "AdamW", "params": {"lr": "fast"}}"#, "`optimizer.params.lr` is \"fast\""),
            (r#"{"type": "AdamW", "params": {"lr": -1}}"#, "`optimizer.params.lr` is -1"),
            (r#"{"type": "AdamW", "params": {"betas": [0.9]}}"#, "`optimizer.params.betas` is [0.9]"),
            (r#"{"type": "AdamW", "params": {"betas": [0.9, 1]}}"#, "`optimizer.params.betas` is [0.9,1]"),
            (r#"{"type": "AdamW", "params": {"momentum": 0.9}}"#, "`optimizer.params.momentum` is unknown"),
            (r#"{"type": "AdamW", "params": {"max_grad_norm": 1}}"#, "`optimizer.params.max_grad_norm`: 1 is refused"),
            (
                r#"{"type": "Adam", "params": {"bias_correction": false}}"#,
                "`optimizer.params.bias_correction`: false is",
            ),
            (
                r#"{"type": "SGD", "params": {"fused": true, "foreach": true}}"#,
                "`optimizer.params.fused` and `optimizer",
            ),
        ] {
            let told = read(text).expect_err(text);
            assert!(told.starts_with(expected), "{told}");
        }
    }
}
