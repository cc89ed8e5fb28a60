//! What is known about the steps of each kind of batch: recorded, compiled, or not to be compiled.

use std::collections::HashMap;
use std::hash::Hash;

use crate::error::CompileError;
use crate::options::Options;
use crate::trace::Trace;
use crate::trial::{Trial, Way};

/// The plans of a step by what they are for. `C` is what a compiled step needs to run.
#[derive(Debug)]
pub(crate) struct Plans<K, C> {
    pub(crate) options: Options,
    plans: HashMap<K, Plan<C>>,
    why_eager: Option<String>,
}

#[derive(Debug)]
enum Plan<C> {
    /// Has run once, unrecorded.
    Started,
    /// Recorded once.
    Recorded(Box<Trace>),
    Compiled {
        compiled: Box<C>,
        /// Until the faster way is known.
        trial: Option<Trial>,
    },
    /// Cannot be compiled.
    Refused,
    /// Is faster uncompiled.
    Slower,
}

/// What a step has to do.
pub(crate) enum Next<'p, C> {
    /// Run compiled.
    Run(&'p mut C),
    /// Run as it is.
    Plain,
    /// Run as it is, or in parts: it cannot be compiled.
    Refused,
    /// Run as it is, for the first time.
    First,
    /// Run as it is, and record that.
    Record,
}

impl<K: Eq + Hash, C> Plans<K, C> {
    pub(crate) fn new() -> Self {
        Self { options: Options::default(), plans: HashMap::new(), why_eager: None }
    }

    pub(crate) fn why_eager(&self) -> Option<&str> {
        self.why_eager.as_deref()
    }

    /// What a step of this kind has to do now.
    pub(crate) fn next(&mut self, key: &K) -> Next<'_, C> {
        self.end_trial(key);
        let has_room = self.plans.len() < self.options.shapes;
        match self.plans.get_mut(key) {
            Some(Plan::Compiled { compiled, trial }) => match trial.as_mut().map_or(Way::Compiled, Trial::begin) {
                Way::Compiled => Next::Run(compiled),
                Way::Uncompiled => Next::Plain,
            },
            Some(Plan::Refused) => Next::Refused,
            Some(Plan::Slower) => Next::Plain,
            Some(Plan::Started | Plan::Recorded(_)) => Next::Record,
            None if has_room => Next::First,
            None => Next::Plain,
        }
    }

    /// Ends the time of a step that was begun, if the ways of this kind of step are being compared.
    pub(crate) fn end_trial(&mut self, key: &K) {
        let Some(plan @ Plan::Compiled { trial: Some(_), .. }) = self.plans.get_mut(key) else { return };
        let Plan::Compiled { trial: Some(trial), .. } = plan else { return };
        let Some(verdict) = trial.end() else { return };
        self.options.say(&verdict.to_string());
        match (verdict.faster, plan) {
            (Way::Compiled, Plan::Compiled { trial, .. }) => *trial = None,
            (_, plan) => {
                self.why_eager = Some(verdict.to_string());
                *plan = Plan::Slower;
            }
        }
    }

    /// Notes that a step of this kind has run once.
    pub(crate) fn start(&mut self, key: K) {
        self.plans.insert(key, Plan::Started);
    }

    /// Takes the record of a step. `compile` is called with this one if there was one before: it makes sure that both are
    /// the same.
    ///
    /// # Errors
    /// In strict mode why the step cannot be compiled. Otherwise it runs uncompiled from now on, and says so.
    pub(crate) fn learn(
        &mut self,
        key: K,
        trace: Trace,
        compile: impl FnOnce(&Trace, &Trace, &Options) -> Result<C, CompileError>,
    ) -> Result<(), CompileError> {
        let plan = match self.plans.remove(&key) {
            Some(Plan::Recorded(before)) => compile(&before, &trace, &self.options).map(|compiled| Plan::Compiled {
                compiled: Box::new(compiled),
                trial: self.options.auto.then(|| Trial::new(trace.gpus())),
            }),
            _ => trace.check().map(|()| Plan::Recorded(Box::new(trace))),
        };
        match plan {
            Ok(plan) => drop(self.plans.insert(key, plan)),
            Err(error) if self.options.strict => return Err(error),
            Err(error) => {
                self.options.say(&format!("not compiled: {error}"));
                self.why_eager = Some(error.to_string());
                self.plans.insert(key, Plan::Refused);
            }
        }
        Ok(())
    }
}
