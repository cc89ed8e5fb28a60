//! [`ReduceLrOnPlateau`] over an optimizer's rates.

use overdrive_core::{Entry, Optimizer, StateDict, StateError, Stateful};

use crate::ScheduleError;
use crate::attached::{check_groups, count, insert_rates, rates, rates_of};
use crate::claim::Claim;
use crate::plateau::{PlateauState, ReduceLrOnPlateau, ReduceLrOnPlateauBuilder};

impl ReduceLrOnPlateauBuilder {
    /// Builds it over the optimizer's present rates.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`], and [`ScheduleError::UnknownLr`] for an optimizer that does not report its
    /// rates: pass them to [`build`](Self::build). [`ScheduleError::AlreadyScheduled`] if the optimizer has a schedule.
    pub fn attach(self, opt: &(impl Optimizer + ?Sized)) -> Result<ReduceLrOnPlateau, ScheduleError> {
        let mut plateau = self.build(&rates_of(opt)?)?;
        plateau.claim = Some(Claim::of(opt)?);
        Ok(plateau)
    }
}

impl ReduceLrOnPlateau {
    /// Takes the next metric, and lowers the optimizer's rates when `patience` is exhausted. It lowers the rates that
    /// the optimizer reports, or its own if the optimizer reports none.
    ///
    /// # Errors
    /// When the optimizer refuses a rate, has another number of groups, is not the one of earlier calls, or has another
    /// schedule. The metric is not counted then.
    ///
    /// # Syncs
    /// No.
    pub fn step(&mut self, metric: f64, opt: &mut (impl Optimizer + ?Sized)) -> Result<(), ScheduleError> {
        check_groups(opt, self.lrs.len())?;
        self.claim(opt)?;
        let mut next = self.clone();
        for (group, lr) in next.lrs.iter_mut().enumerate() {
            *lr = opt.lr(group).unwrap_or(*lr);
        }
        let before = next.lrs.clone();
        next.update(metric);
        for (group, (before, lr)) in before.iter().zip(&next.lrs).enumerate() {
            if before != lr {
                opt.set_lr(group, *lr)?;
            }
        }
        *self = next;
        Ok(())
    }

    /// Sets the rates again, after loading a state.
    ///
    /// # Errors
    /// When the optimizer refuses a rate, has another number of groups, is not the one of earlier calls, or has another
    /// schedule.
    ///
    /// # Syncs
    /// No.
    pub fn apply(&mut self, opt: &mut (impl Optimizer + ?Sized)) -> Result<(), ScheduleError> {
        check_groups(opt, self.lrs.len())?;
        self.claim(opt)?;
        for (group, lr) in self.lrs.iter().enumerate() {
            opt.set_lr(group, *lr)?;
        }
        Ok(())
    }

    /// Claims the first optimizer, and refuses all others from then on.
    fn claim(&mut self, opt: &(impl Optimizer + ?Sized)) -> Result<(), ScheduleError> {
        match &self.claim {
            Some(claim) => claim.check(opt),
            None => {
                self.claim = Some(Claim::of(opt)?);
                Ok(())
            }
        }
    }
}

const KEYS: [&str; 4] = ["last_epoch", "best", "num_bad_epochs", "cooldown_counter"];

/// The entries are PyTorch's (`last_epoch`, `best`, `num_bad_epochs`, `cooldown_counter`) and the rates, `lrs.0` and so
/// on. Loading does not change the optimizer: call [`apply`](ReduceLrOnPlateau::apply) afterwards.
impl Stateful for ReduceLrOnPlateau {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        let whole = |count: u64| Entry::Int(i64::try_from(count).unwrap_or(i64::MAX));
        state.insert("last_epoch", whole(self.state.last_epoch));
        state.insert("best", Entry::Float(self.state.best));
        state.insert("num_bad_epochs", whole(self.state.num_bad_epochs));
        state.insert("cooldown_counter", whole(self.state.cooldown_counter));
        insert_rates(&mut state, "lrs", self.last_lr());
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let lrs = rates(state, "lrs", self.lrs.len(), &KEYS)?;
        let limit = i64::MAX as u64;
        let seen = PlateauState {
            last_epoch: count(state, "last_epoch", limit)?,
            best: state.float("best")?,
            num_bad_epochs: count(state, "num_bad_epochs", limit)?,
            cooldown_counter: count(state, "cooldown_counter", limit)?,
        };
        self.resume(seen, &lrs).map_err(|error| StateError::Mismatch {
            key: "best".to_owned(),
            expected: "the best metric so far".to_owned(),
            found: error.to_string(),
        })
    }
}
