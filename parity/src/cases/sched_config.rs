//! A schedule as Python describes it: a name and its arguments.

use std::sync::Arc;

use anyhow::{Context, Result};
use overdrive_sched::{
    AnnealStrategy, ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts, CyclicLr, CyclicMode,
    DecayShape, ExponentialLr, FactorFn, InverseSqrtLr, LambdaLr, LinearLr, Mode, MultiStepLr, MultiplicativeLr,
    NoamLr, OneCycleLr, PerGroup, Plan, PolynomialLr, ReduceLrOnPlateau, ReduceLrOnPlateauBuilder, SequentialLr,
    StepLr, SwaLr, ThresholdMode, WarmupCosineLr, WarmupStableDecayLr,
};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(untagged)]
pub enum OneOrEach<T> {
    One(T),
    Each(Vec<T>),
}

impl From<&OneOrEach<f64>> for PerGroup {
    fn from(values: &OneOrEach<f64>) -> Self {
        match values {
            OneOrEach::One(value) => Self::All(*value),
            OneOrEach::Each(values) => Self::Each(values.clone()),
        }
    }
}

/// A factor as a function of the step or the cycle: a formula with the parameter `a`.
#[derive(Deserialize)]
pub struct Factor {
    kind: Kind,
    a: f64,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Power,
    Inverse,
    Wave,
}

impl Factor {
    fn at(&self, x: f64) -> f64 {
        match self.kind {
            Kind::Power => self.a.powf(x),
            Kind::Inverse => 1.0 / (1.0 + self.a * x),
            Kind::Wave => 1.0 + 0.5 * (self.a * x).sin(),
        }
    }

    fn boxed(&self) -> FactorFn {
        let factor = Self { ..*self };
        Arc::new(move |step| factor.at(step as f64))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CyclicModeName {
    Triangular,
    Triangular2,
    #[serde(rename = "exp_range")]
    ExpRange,
}

#[derive(Deserialize)]
pub struct Cyclic {
    base_lr: OneOrEach<f64>,
    max_lr: OneOrEach<f64>,
    step_size_up: u64,
    step_size_down: Option<u64>,
    mode: CyclicModeName,
    gamma: f64,
    scale_fn: Option<Factor>,
    scale_mode: Option<String>,
    cycle_momentum: bool,
    base_momentum: OneOrEach<f64>,
    max_momentum: OneOrEach<f64>,
}

#[derive(Deserialize)]
pub struct OneCycle {
    max_lr: OneOrEach<f64>,
    total_steps: u64,
    pct_start: f64,
    anneal_strategy: String,
    cycle_momentum: bool,
    base_momentum: OneOrEach<f64>,
    max_momentum: OneOrEach<f64>,
    div_factor: f64,
    final_div_factor: f64,
    three_phase: bool,
}

#[derive(Deserialize)]
pub struct Plateau {
    mode: String,
    factor: f64,
    patience: u64,
    threshold: f64,
    threshold_mode: String,
    cooldown: u64,
    min_lr: OneOrEach<f64>,
    eps: f64,
}

#[derive(Deserialize)]
#[serde(tag = "name")]
pub enum Spec {
    #[serde(rename = "LambdaLR")]
    Lambda {
        lr_lambda: OneOrEach<Factor>,
    },
    #[serde(rename = "MultiplicativeLR")]
    Multiplicative {
        lr_lambda: OneOrEach<Factor>,
    },
    #[serde(rename = "StepLR")]
    Step {
        step_size: u64,
        gamma: f64,
    },
    #[serde(rename = "MultiStepLR")]
    MultiStep {
        milestones: Vec<u64>,
        gamma: f64,
    },
    #[serde(rename = "ConstantLR")]
    Constant {
        factor: f64,
        total_iters: u64,
    },
    #[serde(rename = "LinearLR")]
    Linear {
        start_factor: f64,
        end_factor: f64,
        total_iters: u64,
    },
    #[serde(rename = "ExponentialLR")]
    Exponential {
        gamma: f64,
    },
    #[serde(rename = "PolynomialLR")]
    Polynomial {
        total_iters: u64,
        power: f64,
    },
    #[serde(rename = "CosineAnnealingLR")]
    Cosine {
        #[serde(rename = "T_max")]
        t_max: u64,
        eta_min: f64,
    },
    CosineAnnealingWarmRestarts(WarmRestarts),
    #[serde(rename = "CyclicLR")]
    Cyclic(Cyclic),
    #[serde(rename = "OneCycleLR")]
    OneCycle(OneCycle),
    #[serde(rename = "SequentialLR")]
    Sequential {
        schedulers: Vec<Spec>,
        milestones: Vec<u64>,
    },
    #[serde(rename = "ChainedScheduler")]
    Chained {
        schedulers: Vec<Spec>,
    },
    WarmupCosine {
        warmup: u64,
        total: u64,
        start: f64,
        end: f64,
    },
    WarmupStableDecay {
        warmup: u64,
        stable: u64,
        decay: u64,
        start: f64,
        end: f64,
        shape: String,
    },
    InverseSqrt {
        warmup: u64,
    },
    Noam {
        d_model: u64,
        warmup: u64,
    },
    #[serde(rename = "SWALR")]
    Swa {
        swa_lr: OneOrEach<f64>,
        anneal_epochs: u64,
        anneal_strategy: String,
    },
}

#[derive(Deserialize)]
pub struct WarmRestarts {
    #[serde(rename = "T_0")]
    t_0: u64,
    #[serde(rename = "T_mult")]
    t_mult: u64,
    eta_min: f64,
}

impl WarmRestarts {
    pub fn schedule(&self) -> CosineAnnealingWarmRestarts {
        CosineAnnealingWarmRestarts::new(self.t_0).t_mult(self.t_mult).eta_min(self.eta_min)
    }
}

impl Spec {
    /// Whether it contains a schedule that may change a momentum.
    pub fn moves_momentum(&self) -> bool {
        match self {
            Self::Cyclic(_) | Self::OneCycle(_) => true,
            Self::Sequential { schedulers, .. } | Self::Chained { schedulers } => {
                schedulers.iter().any(Self::moves_momentum)
            }
            _ => false,
        }
    }

    pub fn plan(&self) -> Result<Plan> {
        Ok(match self {
            Self::Lambda { lr_lambda: OneOrEach::One(one) } => {
                let one = one.boxed();
                LambdaLr::new(move |step| one(step)).into()
            }
            Self::Lambda { lr_lambda: OneOrEach::Each(each) } => {
                LambdaLr::per_group(each.iter().map(Factor::boxed)).into()
            }
            Self::Multiplicative { lr_lambda: OneOrEach::One(one) } => {
                let one = one.boxed();
                MultiplicativeLr::new(move |step| one(step)).into()
            }
            Self::Multiplicative { lr_lambda: OneOrEach::Each(each) } => {
                MultiplicativeLr::per_group(each.iter().map(Factor::boxed)).into()
            }
            Self::Step { step_size, gamma } => StepLr::new(*step_size).gamma(*gamma).into(),
            Self::MultiStep { milestones, gamma } => MultiStepLr::new(milestones.clone()).gamma(*gamma).into(),
            Self::Constant { factor, total_iters } => {
                ConstantLr::new().factor(*factor).total_iters(*total_iters).into()
            }
            Self::Linear { start_factor, end_factor, total_iters } => {
                LinearLr::new().start_factor(*start_factor).end_factor(*end_factor).total_iters(*total_iters).into()
            }
            Self::Exponential { gamma } => ExponentialLr::new(*gamma).into(),
            Self::Polynomial { total_iters, power } => {
                PolynomialLr::new().total_iters(*total_iters).power(*power).into()
            }
            Self::Cosine { t_max, eta_min } => CosineAnnealingLr::new(*t_max).eta_min(*eta_min).into(),
            Self::CosineAnnealingWarmRestarts(restarts) => restarts.schedule().into(),
            Self::Cyclic(cyclic) => cyclic.plan(),
            Self::OneCycle(one_cycle) => one_cycle.plan()?,
            Self::Sequential { schedulers, milestones } => {
                let (first, others) = schedulers.split_first().context("no schedule")?;
                let join = |sequential: SequentialLr, (part, milestone): (&Self, &u64)| {
                    Ok::<_, anyhow::Error>(sequential.then(*milestone, part.plan()?))
                };
                others.iter().zip(milestones).try_fold(SequentialLr::new(first.plan()?), join)?.into()
            }
            Self::Chained { schedulers } => {
                let (first, others) = schedulers.split_first().context("no schedule")?;
                let join = |chained: ChainedScheduler, part: &Self| Ok::<_, anyhow::Error>(chained.and(part.plan()?));
                others.iter().try_fold(ChainedScheduler::new(first.plan()?), join)?.into()
            }
            Self::WarmupCosine { warmup, total, start, end } => {
                WarmupCosineLr::new(*warmup, *total).start_factor(*start).end_factor(*end).into()
            }
            Self::WarmupStableDecay { warmup, stable, decay, start, end, shape } => {
                let shape = match shape.as_str() {
                    "cosine" => DecayShape::Cosine,
                    "1-sqrt" => DecayShape::OneMinusSqrt,
                    _ => DecayShape::Linear,
                };
                let plan = WarmupStableDecayLr::new(*warmup, *stable, *decay).shape(shape);
                plan.start_factor(*start).end_factor(*end).into()
            }
            Self::InverseSqrt { warmup } => InverseSqrtLr::new(*warmup).into(),
            Self::Noam { d_model, warmup } => NoamLr::new(*d_model, *warmup).into(),
            Self::Swa { swa_lr, anneal_epochs, anneal_strategy } => {
                SwaLr::new(swa_lr).anneal_epochs(*anneal_epochs).anneal_strategy(anneal(anneal_strategy)?).into()
            }
        })
    }
}

fn anneal(strategy: &str) -> Result<AnnealStrategy> {
    match strategy {
        "cos" => Ok(AnnealStrategy::Cos),
        "linear" => Ok(AnnealStrategy::Linear),
        other => anyhow::bail!("anneal_strategy {other}"),
    }
}

impl Cyclic {
    fn plan(&self) -> Plan {
        let mode = match (&self.scale_fn, self.scale_mode.as_deref(), &self.mode) {
            (Some(scale), Some("cycle"), _) => CyclicMode::ByCycle(scale.boxed()),
            (Some(scale), _, _) => CyclicMode::ByStep(scale.boxed()),
            (None, _, CyclicModeName::Triangular) => CyclicMode::Triangular,
            (None, _, CyclicModeName::Triangular2) => CyclicMode::Triangular2,
            (None, _, CyclicModeName::ExpRange) => CyclicMode::ExpRange,
        };
        let cyclic = CyclicLr::new(&self.base_lr, &self.max_lr).step_size_up(self.step_size_up).mode(mode);
        let cyclic = cyclic.gamma(self.gamma).cycle_momentum(self.cycle_momentum);
        let cyclic = cyclic.base_momentum(&self.base_momentum).max_momentum(&self.max_momentum);
        self.step_size_down.map_or(cyclic.clone(), |down| cyclic.step_size_down(down)).into()
    }
}

impl OneCycle {
    fn plan(&self) -> Result<Plan> {
        let anneal = anneal(&self.anneal_strategy)?;
        let one_cycle =
            OneCycleLr::new(&self.max_lr, self.total_steps).pct_start(self.pct_start).anneal_strategy(anneal);
        let one_cycle = one_cycle.cycle_momentum(self.cycle_momentum).three_phase(self.three_phase);
        let one_cycle = one_cycle.base_momentum(&self.base_momentum).max_momentum(&self.max_momentum);
        Ok(one_cycle.div_factor(self.div_factor).final_div_factor(self.final_div_factor).into())
    }
}

impl Plateau {
    pub fn builder(&self) -> ReduceLrOnPlateauBuilder {
        let mode = if self.mode == "max" { Mode::Max } else { Mode::Min };
        let threshold_mode = if self.threshold_mode == "abs" { ThresholdMode::Abs } else { ThresholdMode::Rel };
        let builder = ReduceLrOnPlateau::builder().mode(mode).factor(self.factor).patience(self.patience);
        let builder = builder.threshold(self.threshold).threshold_mode(threshold_mode).cooldown(self.cooldown);
        builder.min_lr(&self.min_lr).eps(self.eps)
    }
}
