//! The optimizers as a user's program builds them.

use anyhow::{Context, Result};
use overdrive::core::{IntoParameters, OptimizerError, Parameter, StateError};
use overdrive::ddp::{OneBitAdam, OneBitAdamOptions};
use overdrive::memory::CpuOffloadOptimizer;
use overdrive::optim::{
    AdamOptions, AdamWScheduleFree, InBackward, Joint, Lamb, Lookahead, LowPrecision, Muon, Prodigy, Sam,
    hidden_matrices,
};
use overdrive::prelude::*;
use tch::nn::{self, OptimizerConfig};

use crate::choices::{Cell, Opt};
use crate::formulas::{ADAMW_LR, LAMB_LR, LAMB_NORM, LOOKAHEAD, MOMENTUM, MUON_LR, PRODIGY_D0, SGD_LR};
use crate::reference::RHO;

type Boxed = Box<dyn Optimizer>;

/// With its own type if a method is called that `Optimizer` does not have.
pub enum Subject {
    Boxed(Boxed),
    Sam(Sam<Boxed>),
    SamLookahead(Sam<Lookahead<Boxed>>),
    Sgd(Sgd),
    AdamW(AdamW),
    Lamb(Lamb),
    InBackward(InBackward<AdamOptions<true>>),
}

macro_rules! each {
    ($subject:expr, $opt:ident => $value:expr) => {
        match $subject {
            Subject::Boxed($opt) => $value,
            Subject::Sam($opt) => $value,
            Subject::SamLookahead($opt) => $value,
            Subject::Sgd($opt) => $value,
            Subject::AdamW($opt) => $value,
            Subject::Lamb($opt) => $value,
            Subject::InBackward($opt) => $value,
        }
    };
}

/// The trained parameters, with their names.
fn trained(vs: &nn::VarStore) -> Vec<Parameter> {
    vs.into_parameters().into_iter().filter(|param| param.tensor().requires_grad()).collect()
}

impl Subject {
    /// `group`: the ranks over which 1-bit Adam averages.
    pub fn new(cell: &Cell, vs: &nn::VarStore, group: Option<&ProcessGroup>) -> Result<Self> {
        let sgd = || Sgd::builder(trained(vs)).lr(SGD_LR).momentum(MOMENTUM);
        let adamw = || AdamW::builder(trained(vs)).lr(ADAMW_LR);
        Ok(match cell.optimizer {
            Opt::Sgd => Self::Sgd(sgd().build()?),
            Opt::AdamW => Self::AdamW(adamw().build()?),
            Opt::Lamb => Self::Lamb(Lamb::builder(trained(vs)).lr(LAMB_LR).max_grad_norm(Some(LAMB_NORM)).build()?),
            Opt::Tch => {
                let sgd = nn::Sgd { momentum: MOMENTUM, ..Default::default() };
                Self::Boxed(Box::new(TchOptimizer::new(sgd.build(vs, SGD_LR)?)))
            }
            Opt::Masters => Self::Boxed(Box::new(sgd().low_precision(LowPrecision::MasterCopy).build()?)),
            Opt::InBackward => Self::InBackward(adamw().build_in_backward()?),
            Opt::Lookahead => {
                let inner: Boxed = Box::new(adamw().foreach(true).build()?);
                Self::Boxed(Box::new(Lookahead::new(inner, LOOKAHEAD.0, LOOKAHEAD.1)?))
            }
            Opt::Sam => {
                let inner: Boxed = Box::new(sgd().build()?);
                Self::Sam(Sam::new(inner, RHO)?)
            }
            Opt::SamLookahead => {
                let inner: Boxed = Box::new(sgd().build()?);
                Self::SamLookahead(Sam::new(Lookahead::new(inner, LOOKAHEAD.0, LOOKAHEAD.1)?, RHO)?)
            }
            Opt::Joint => {
                let (hidden, others) = hidden_matrices(vs, |name| name.starts_with("out"));
                let muon = Muon::builder(hidden).lr(MUON_LR).build()?;
                Self::Boxed(Box::new(Joint::new(muon, AdamW::builder(others).lr(ADAMW_LR).build()?)?))
            }
            Opt::ScheduleFree => Self::Boxed(Box::new(AdamWScheduleFree::builder(trained(vs)).lr(ADAMW_LR).build()?)),
            Opt::Prodigy => Self::Boxed(Box::new(Prodigy::builder(trained(vs)).d0(PRODIGY_D0).build()?)),
            Opt::Offloaded => {
                let inner = |params: Vec<Parameter>| AdamW::builder(params).lr(ADAMW_LR).build();
                let offloaded = CpuOffloadOptimizer::new(trained(vs), inner)?;
                Self::Boxed(Box::new(offloaded.state_on_disk(std::env::temp_dir())?))
            }
            Opt::OneBit => {
                let group = group.context("1-bit Adam has a group")?;
                // Its compressed steps are tested elsewhere; before `freeze_step` it is Adam.
                let options = OneBitAdamOptions { lr: ADAMW_LR, freeze_step: 1000, ..Default::default() };
                Self::Boxed(Box::new(OneBitAdam::new(group, trained(vs), options)?))
            }
        })
    }

    /// Adds a parameter in its own group.
    pub fn add(&mut self, name: &str, param: Tensor) -> Result<(), OptimizerError> {
        let param = vec![(name, param)];
        match self {
            Self::Sgd(opt) => opt.add_param_group(Sgd::group(param)),
            Self::AdamW(opt) => opt.add_param_group(AdamW::group(param)),
            Self::Lamb(opt) => opt.add_param_group(Lamb::group(param)),
            Self::InBackward(opt) => opt.add_param_group(AdamW::group(param)),
            // `is_program` excludes these.
            _ => Err(OptimizerError::NoParameters),
        }
    }

    pub fn ascend(&mut self) -> Result<(), OptimizerError> {
        match self {
            Self::Sam(opt) => opt.ascend(),
            Self::SamLookahead(opt) => opt.ascend(),
            _ => Ok(()),
        }
    }

    pub fn get(&self) -> &dyn Optimizer {
        each!(self, opt => opt)
    }

    pub fn get_mut(&mut self) -> &mut dyn Optimizer {
        each!(self, opt => opt)
    }
}

impl Stateful for Subject {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        each!(self, opt => opt.state_dict())
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        each!(self, opt => opt.load_state_dict(state))
    }
}
