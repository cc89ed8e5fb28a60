//! What is known about the steps of each kind of batch: recorded, compiled, or not to be compiled.

use std::collections::HashMap;
use std::hash::Hash;

use overdrive_ffi::host_memory;

use crate::error::CompileError;
use crate::graph::{Code, Graph, Scalar};
use crate::options::Options;
use crate::trace::Trace;
use crate::trial::{Trial, Way};
use crate::varying::Varying;

/// What a plan is for: the batch's forms, and all else that a step depends on.
pub(crate) trait Key: Eq + Hash {
    /// The same for batches of any size.
    fn of_any_size(&self) -> Self;

    /// Whether steps of this kind cannot come again once there are such as `now`.
    fn is_over(&self, _now: &Self) -> bool {
        false
    }
}

/// The plans of a step by what they are for. `C` is what a compiled step needs to run.
#[derive(Debug)]
pub(crate) struct Plans<K, C> {
    pub(crate) options: Options,
    plans: HashMap<K, Plan<C>>,
    /// What is known of batches that differ in their size.
    families: HashMap<K, Family>,
    /// How often in a row all steps were over before one was compiled.
    never_compiled: usize,
    why_eager: Option<String>,
}

/// So often they may be over in a row before that is said.
const NEVER_COMPILED: usize = 6;

#[derive(Debug)]
enum Plan<C> {
    /// Has run once, unrecorded.
    Started,
    /// Recorded once.
    Recorded(Box<Trace>),
    Compiled {
        compiled: Box<C>,
        /// Whether its code is for batches of any size.
        is_shared: bool,
        /// Until the faster way is known.
        trial: Option<Trial>,
    },
    /// Cannot be compiled: the error of the next step in strict mode.
    Refused(CompileError),
    /// Is faster uncompiled.
    Slower,
    /// There is no room for its code.
    Uncompiled,
}

/// Steps over batches that differ in their size.
#[derive(Debug)]
struct Family {
    /// The last one that was compiled for its own size, or the one that was compiled for any.
    trace: Trace,
    any_size: AnySize,
}

/// Code for batches of any size.
#[derive(Debug)]
enum AnySize {
    /// There was one size so far.
    Unknown,
    Compiled(Varying, Code),
    /// Each size is compiled for itself.
    Refused,
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

impl<K: Key, C> Plans<K, C> {
    pub(crate) fn new() -> Self {
        let (plans, families) = (HashMap::new(), HashMap::new());
        Self { options: Options::default(), plans, families, never_compiled: 0, why_eager: None }
    }

    pub(crate) fn why_eager(&self) -> Option<&str> {
        self.why_eager.as_deref()
    }

    /// What a step of this kind has to do now.
    ///
    /// # Errors
    /// In strict mode, why it is not compiled.
    pub(crate) fn next(&mut self, key: &K) -> Result<Next<'_, C>, CompileError> {
        self.end_trial(key);
        let is_known = self.plans.contains_key(key);
        if !is_known && self.drop_what_is_over(key) && self.never_compiled >= NEVER_COMPILED {
            self.refuse(CompileError::AlwaysAnew)?;
        }
        let has_room = is_known || self.has_room(key);
        if !has_room {
            self.refuse(self.no_room())?;
        }
        if self.options.strict {
            self.check(key)?;
        }
        Ok(match self.plans.get_mut(key) {
            Some(Plan::Compiled { compiled, trial, .. }) => match trial.as_mut().map_or(Way::Compiled, Trial::begin) {
                Way::Compiled => Next::Run(compiled),
                Way::Uncompiled => Next::Plain,
            },
            Some(Plan::Refused(_)) => Next::Refused,
            Some(Plan::Slower | Plan::Uncompiled) => Next::Plain,
            Some(Plan::Started | Plan::Recorded(_)) => Next::Record,
            None if has_room => Next::First,
            None => Next::Plain,
        })
    }

    /// Forgets the steps that cannot come again. Whether there were some.
    fn drop_what_is_over(&mut self, now: &K) -> bool {
        self.families.retain(|known, _| !known.is_over(now));
        let (mut is_over, mut was_compiled) = (false, false);
        self.plans.retain(|known, plan| {
            let ends = known.is_over(now);
            is_over |= ends;
            was_compiled |= ends && !matches!(plan, Plan::Started | Plan::Recorded(_));
            !ends
        });
        // Those over batches of several sizes are over together.
        self.never_compiled += usize::from(is_over && !was_compiled);
        is_over
    }

    /// An error if steps of this kind cannot be compiled.
    fn check(&mut self, key: &K) -> Result<(), CompileError> {
        match self.plans.get_mut(key) {
            Some(Plan::Refused(error)) => {
                let again = CompileError::RefusedBefore { why: error.to_string() };
                Err(std::mem::replace(error, again))
            }
            Some(Plan::Uncompiled) => Err(self.no_room()),
            _ => Ok(()),
        }
    }

    fn no_room(&self) -> CompileError {
        CompileError::NoRoom { shapes: self.options.shapes }
    }

    /// Whether a step may be compiled. One over a batch of another size takes no room if there is code for any size.
    fn has_room(&self, key: &K) -> bool {
        let any_size = self.families.get(&key.of_any_size()).map(|known| &known.any_size);
        matches!(any_size, Some(AnySize::Compiled(..))) || self.takes_room() < self.options.shapes
    }

    /// How many steps have code of their own, or may get it.
    fn takes_room(&self) -> usize {
        let shares = |plan: &&Plan<C>| matches!(plan, Plan::Compiled { is_shared: true, .. } | Plan::Uncompiled);
        self.plans.len() - self.plans.values().filter(shares).count()
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

    /// Notes why a step runs uncompiled, and says so where it has not just been said.
    fn note(&mut self, why: &CompileError) {
        let why = why.to_string();
        if self.why_eager.as_ref() != Some(&why) {
            self.options.say(&format!("not compiled: {why}"));
            self.why_eager = Some(why);
        }
    }

    /// Takes note of why a step runs uncompiled.
    ///
    /// # Errors
    /// In strict mode, that reason.
    pub(crate) fn refuse(&mut self, why: CompileError) -> Result<(), CompileError> {
        if self.options.strict {
            return Err(why);
        }
        self.note(&why);
        Ok(())
    }

    /// Notes that steps of this kind cannot be compiled. This one is still made, and in strict mode the next one fails.
    pub(crate) fn never(&mut self, key: K, why: CompileError) {
        self.note(&why);
        self.plans.insert(key, Plan::Refused(why));
    }

    /// Drops the code of a step that has become another one, which is then recorded.
    pub(crate) fn forget(&mut self, key: &K, difference: &str) {
        self.options.say(&format!("a step is recorded anew: {difference}"));
        self.plans.remove(key);
        self.families.remove(&key.of_any_size());
    }

    /// Notes that a step of this kind has run once.
    pub(crate) fn start(&mut self, key: K) {
        self.plans.insert(key, Plan::Started);
    }

    /// Takes the record of a step, in which these numbers are given anew at each run. The second record of a step makes
    /// sure that both are the same, and compiles it; if there is code for batches of any size, the first is enough. A step
    /// that cannot be compiled has been made, so it is no error yet.
    pub(crate) fn learn(
        &mut self,
        key: K,
        trace: Trace,
        scalars: Result<Vec<Scalar>, CompileError>,
        compiled: impl FnOnce(Graph) -> C,
    ) {
        let before = match self.plans.remove(&key) {
            Some(Plan::Recorded(before)) => Some(*before),
            _ => None,
        };
        let plan = match self.plan(&key, before, trace, scalars, compiled) {
            Ok(plan) => plan,
            Err(error) => return self.never(key, error),
        };
        let is_compiled = matches!(plan, Plan::Compiled { .. });
        if matches!(plan, Plan::Uncompiled) {
            self.note(&self.no_room());
        }
        self.plans.insert(key, plan);
        if is_compiled {
            // Recording, reading and loading needed much memory for a short time.
            host_memory::trim();
        }
    }

    fn plan(
        &mut self,
        key: &K,
        before: Option<Trace>,
        mut trace: Trace,
        scalars: Result<Vec<Scalar>, CompileError>,
        compiled: impl FnOnce(Graph) -> C,
    ) -> Result<Plan<C>, CompileError> {
        trace.check()?;
        let scalars = scalars?;
        let family = key.of_any_size();
        let known = self.families.get_mut(&family);
        let (code, is_shared) = match (known.as_ref().and_then(|known| known.code_for(&trace, &scalars)), before) {
            (Some(code), _) => (code, true),
            (None, None) => return Ok(Plan::Recorded(Box::new(trace))),
            (None, Some(before)) => {
                before.check_same(&trace, &scalars)?;
                match known.and_then(|known| known.compile(&trace, &scalars, &self.options)) {
                    Some(code) => (code, true),
                    // It was to share code, and is another step.
                    None if self.takes_room() >= self.options.shapes => return Ok(Plan::Uncompiled),
                    None => (Code::of(&trace, None, &scalars, &self.options)?, false),
                }
            }
        };
        self.never_compiled = 0;
        let graph = Graph::new(code, &trace, &scalars);
        let trial = self.options.auto.then(|| Trial::new(trace.gpus()));
        trace.forget_callers();
        match self.families.get_mut(&family) {
            // The one before may be of a batch of one, which is like no other.
            Some(known) if matches!(known.any_size, AnySize::Unknown) => known.trace = trace,
            Some(_) => {}
            None => drop(self.families.insert(family, Family { trace, any_size: AnySize::Unknown })),
        }
        Ok(Plan::Compiled { compiled: Box::new(compiled(graph)), is_shared, trial })
    }
}

impl Family {
    /// The code for batches of any size, if this record is of the same step.
    fn code_for(&self, trace: &Trace, scalars: &[Scalar]) -> Option<Code> {
        let AnySize::Compiled(varying, code) = &self.any_size else { return None };
        let is_fixed = |at: &usize| !varying.places.contains(at);
        let same_others = (0..trace.batch.len()).filter(is_fixed).all(|at| self.trace.form(at) == trace.form(at));
        let fits = same_others && varying.has(trace, scalars) && self.trace.check_same_tensors(trace).is_ok();
        (fits && varying.size_of(trace)? >= code.least_size()).then(|| code.clone())
    }

    /// Compiles for batches of any size, of which this record is the second.
    fn compile(&mut self, trace: &Trace, scalars: &[Scalar], options: &Options) -> Option<Code> {
        if !options.dynamic || !matches!(self.any_size, AnySize::Unknown) {
            return None;
        }
        let varying = Varying::join(&self.trace, trace, scalars)?;
        // Of a step with a dimension that is 1 for this size, it may not be for this size.
        match Code::of(trace, Some(&varying), scalars, options) {
            Ok(code) => {
                let is_for_this = varying.size_of(trace)? >= code.least_size();
                self.any_size = AnySize::Compiled(varying, code.clone());
                is_for_this.then_some(code)
            }
            Err(error) => {
                options.say(&format!("not compiled for batches of any size, but for each by itself: {error}"));
                self.any_size = AnySize::Refused;
                None
            }
        }
    }
}
