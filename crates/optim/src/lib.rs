//! Optimizers for tch that update all parameters in few libtorch calls: by fused kernels, or by `_foreach` operators
//! over lists.
//!
//! ```
//! use overdrive_core::Optimizer;
//! use overdrive_optim::AdamW;
//! use tch::nn::Module;
//! use tch::{Device, Kind, Tensor, nn};
//!
//! # fn main() -> Result<(), overdrive_core::OptimizerError> {
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = AdamW::builder(&vs).lr(1e-3).weight_decay(0.01).build()?;
//!
//! model.forward(&Tensor::randn([8, 4], (Kind::Float, Device::Cpu))).square().mean(Kind::Float).backward();
//! opt.step()?;
//! opt.zero_grad()?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adamax;
mod adamw8bit;
mod algorithm;
mod asgd;
mod averaged;
mod bucket;
mod builder;
mod check_params;
mod clip;
mod constants;
mod foreach;
mod group_mut;
mod in_backward;
mod joint;
mod lamb;
mod lars;
mod lbfgs;
mod lion;
mod lookahead;
mod low_precision;
mod muon;
mod nadam;
mod optimizer;
mod options;
mod pieces;
mod prodigy;
mod radam;
mod rmsprop;
mod rprop;
mod sam;
mod schedule_free;
mod sgd;
mod sparse_adam;
mod split;
mod stateful;
mod step_count;
mod t5_adafactor;
mod together;
mod trust;
mod wrapper;

pub use adadelta::{Adadelta, AdadeltaBuilder, AdadeltaOptions};
pub use adafactor::{Adafactor, AdafactorBuilder, AdafactorForm, AdafactorOptions};
pub use adagrad::{Adagrad, AdagradBuilder, AdagradOptions};
pub use adam::{Adam, AdamBuilder, AdamOptions, AdamW, AdamWBuilder};
pub use adamax::{Adamax, AdamaxBuilder, AdamaxOptions};
pub use adamw8bit::{AdamW8Bit, AdamW8BitBuilder, AdamW8BitOptions};
pub use asgd::{Asgd, AsgdBuilder, AsgdOptions};
pub use averaged::{AveragedModel, AveragedModelBuilder, Averaging};
pub use builder::{GroupBuilder, OneGroup, Options, ParamGroup, Whole};
pub use clip::{ClipGradNorm, GradNorm, clip_grad_norm_, clip_grad_value_};
pub use group_mut::{GroupMut, Live};
pub use in_backward::InBackward;
pub use joint::{Joint, hidden_matrices};
pub use lamb::{Lamb, LambBuilder, LambOptions};
pub use lars::{Lars, LarsBuilder, LarsForm, LarsOptions};
pub use lbfgs::{Lbfgs, LbfgsBuilder, LineSearch};
pub use lion::{Lion, LionBuilder, LionOptions};
pub use lookahead::Lookahead;
pub use low_precision::LowPrecision;
pub use muon::{AdjustLr, Muon, MuonBuilder, MuonOptions};
pub use nadam::{NAdam, NAdamBuilder, NAdamOptions};
pub use optimizer::GroupOptimizer;
pub use prodigy::{Prodigy, ProdigyBuilder, ProdigyOptions};
pub use radam::{RAdam, RAdamBuilder, RAdamOptions};
pub use rmsprop::{RmsProp, RmsPropBuilder, RmsPropOptions};
pub use rprop::{Rprop, RpropBuilder, RpropOptions};
pub use sam::Sam;
pub use schedule_free::{
    AdamWScheduleFree, AdamWScheduleFreeBuilder, ScheduleFreeOptions, SgdScheduleFree, SgdScheduleFreeBuilder,
};
pub use sgd::{Sgd, SgdBuilder, SgdOptions};
pub use sparse_adam::{SparseAdam, SparseAdamBuilder, SparseAdamOptions};
