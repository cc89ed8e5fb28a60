//! Section `scheduler`.

use overdrive_sched::PerGroup;
use serde_json::Value;

use super::one_cycle::{Momentum, OneCycle};
use super::warmup::{Decay, Warmup, WarmupCosine, WarmupLr};
use super::{LrRangeTest, LrSchedule, Shape};
use crate::deepspeed::error::DeepSpeedError;
use crate::deepspeed::keys;
use crate::deepspeed::optimizer::Chosen;
use crate::deepspeed::schema::check_within;
use crate::deepspeed::tree::{Tree, shown, wrong};

const TYPE: &str = "scheduler.type";
const PARAMS: &str = "scheduler.params";
const RATES: &str = "a number of at least 0, or a list of such numbers, one for each parameter group";
const MOMENTA: &str = "at least 0 and below 1, or a list of such numbers, one for each parameter group";

impl LrSchedule {
    /// `None` without the section. The optimizer is the file's, if it has one.
    pub(in crate::deepspeed) fn read(tree: &Tree, optimizer: Option<&Chosen>) -> Result<Option<Self>, DeepSpeedError> {
        let Some(name) = tree.text(TYPE)? else {
            return match tree.at("scheduler") {
                None => Ok(None),
                Some(_) => missing(TYPE, "it says which schedule the section is about, such as \"WarmupLR\""),
            };
        };
        let Some(rows) = keys::of_scheduler(name) else {
            let expected = "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest";
            return Err(wrong(TYPE, &name.into(), expected));
        };
        match tree.at(PARAMS) {
            Some(Value::Object(params)) => check_within(params, PARAMS, &[rows])?,
            Some(other) => return Err(wrong(PARAMS, other, "an object")),
            None => {}
        }
        let shape = match name {
            "WarmupLR" => Shape::Warmup(warmup_lr(tree, Decay::None)?),
            "WarmupDecayLR" => Shape::Warmup(warmup_lr(tree, Decay::Linear { total: total(tree)? })?),
            "WarmupCosineLR" => Shape::Cosine(WarmupCosine {
                warmup: warmup(tree)?,
                total: total(tree)?,
                warmup_min_ratio: size(tree, "warmup_min_ratio", 0.0)?,
                cos_min_ratio: size(tree, "cos_min_ratio", 1e-4)?,
            }),
            "OneCycle" => Shape::OneCycle(one_cycle(tree, optimizer)?),
            _ => Shape::RangeTest(LrRangeTest {
                min_lr: per_group(tree, "lr_range_test_min_lr", RATES)?.unwrap_or(PerGroup::All(1e-3)),
                step_size: tree.count(&param("lr_range_test_step_size"), 1)?.unwrap_or(2000) as f64,
                step_rate: size(tree, "lr_range_test_step_rate", 1.0)?,
                staircase: tree.flag(&param("lr_range_test_staircase"))?.unwrap_or(false),
            }),
        };
        Ok(Some(Self(shape)))
    }
}

fn param(name: &str) -> String {
    format!("{PARAMS}.{name}")
}

fn missing<T>(key: &str, reason: &str) -> Result<T, DeepSpeedError> {
    Err(DeepSpeedError::Missing { key: key.to_owned(), reason: reason.to_owned() })
}

fn size(tree: &Tree, name: &str, default: f64) -> Result<f64, DeepSpeedError> {
    Ok(tree.size(&param(name))?.unwrap_or(default))
}

fn total(tree: &Tree) -> Result<u64, DeepSpeedError> {
    let key = param("total_num_steps");
    let total = tree.count(&key, 1)?;
    total.map_or_else(|| missing(&key, "the rate ends with it: give the optimizer's steps of the whole run"), Ok)
}

fn warmup(tree: &Tree) -> Result<Warmup, DeepSpeedError> {
    let steps = tree.count(&param("warmup_num_steps"), 1)?.unwrap_or(1000).max(2);
    let key = param("warmup_type");
    let is_log = match tree.text(&key)? {
        None | Some("log") => true,
        Some("linear") => false,
        Some(other) => return Err(wrong(&key, &other.into(), "\"log\" or \"linear\"")),
    };
    Ok(Warmup { steps, is_log })
}

fn warmup_lr(tree: &Tree, decay: Decay) -> Result<WarmupLr, DeepSpeedError> {
    let max_lr = per_group(tree, "warmup_max_lr", RATES)?;
    // DeepSpeed has this default for the one, and the optimizer's rate for the other.
    let default = (decay != Decay::None).then_some(PerGroup::All(1e-3));
    Ok(WarmupLr {
        min_lr: per_group(tree, "warmup_min_lr", RATES)?.unwrap_or(PerGroup::All(0.0)),
        max_lr: max_lr.or(default),
        warmup: warmup(tree)?,
        decay,
    })
}

fn one_cycle(tree: &Tree, optimizer: Option<&Chosen>) -> Result<OneCycle, DeepSpeedError> {
    let rate = |name| match per_group(tree, name, RATES)? {
        Some(rate) => Ok(rate),
        None => missing(&param(name), "a cycle is between two rates: give `cycle_min_lr` and `cycle_max_lr`"),
    };
    let first = tree.count(&param("cycle_first_step_size"), 1)?.unwrap_or(2000) as f64;
    let first_stairs = tree.count(&param("cycle_first_stair_count"), 0)?.unwrap_or(0) as f64;
    let second_stairs = tree.count(&param("cycle_second_stair_count"), 0)?.map(|it| it as f64);
    Ok(OneCycle {
        min_lr: rate("cycle_min_lr")?,
        max_lr: rate("cycle_max_lr")?,
        decay_lr_rate: size(tree, "decay_lr_rate", 0.0)?,
        first,
        second: tree.count(&param("cycle_second_step_size"), 0)?.map_or(first, |it| it as f64),
        first_stairs,
        second_stairs: second_stairs.unwrap_or(first_stairs),
        decay_step_size: size(tree, "decay_step_size", 0.0)?,
        momentum: momentum(tree, optimizer)?,
    })
}

fn momentum(tree: &Tree, optimizer: Option<&Chosen>) -> Result<Option<Momentum>, DeepSpeedError> {
    let key = param("cycle_momentum");
    let told = tree.flag(&key)?;
    let momentum = Momentum {
        min: per_group(tree, "cycle_min_mom", MOMENTA)?.unwrap_or(PerGroup::All(0.8)),
        max: per_group(tree, "cycle_max_mom", MOMENTA)?.unwrap_or(PerGroup::All(0.9)),
        decay_rate: size(tree, "decay_mom_rate", 0.0)?,
    };
    let has_betas = optimizer.is_none_or(Chosen::has_betas);
    if told == Some(true) && !has_betas {
        let keys = format!("`{key}` and `optimizer.type`");
        let reason = "DeepSpeed cycles the first of `betas`, which this optimizer lacks: set it to false".to_owned();
        return Err(DeepSpeedError::Contradiction { keys, reason });
    }
    Ok((told.unwrap_or(true) && has_betas).then_some(momentum))
}

fn per_group(tree: &Tree, name: &str, expected: &str) -> Result<Option<PerGroup>, DeepSpeedError> {
    let key = param(name);
    let Some(values) = tree.numbers(&key, expected)? else { return Ok(None) };
    let below = if expected == MOMENTA { 1.0 } else { f64::INFINITY };
    if values.is_empty() || !values.iter().all(|it| (0.0..below).contains(it)) {
        let found = tree.at(&key).map(shown).unwrap_or_default();
        return Err(DeepSpeedError::Value { key, found, expected: expected.to_owned() });
    }
    Ok(Some(match (tree.at(&key), values.as_slice()) {
        (Some(Value::Array(_)), _) => PerGroup::Each(values),
        (_, [one, ..]) => PerGroup::All(*one),
        (_, []) => return Ok(None),
    }))
}
