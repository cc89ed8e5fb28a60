//! Selective checkpointing by budget: what is kept is chosen by what operators cost.

use std::any::TypeId;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_ffi::keep::{Call, Keeps, Ran};
use overdrive_ffi::saved_tensors::version;
use overdrive_ffi::{Error as TorchError, address_of};
use tch::Tensor;

use super::knapsack;
use crate::error::MemoryError;

/// How often a function is measured before it has a plan. The least time of each operator counts.
const RUNS: usize = 2;

/// A share of the memory that functions' saved tensors take without checkpointing.
///
/// The first two calls of a function keep nothing, and measure the time and the results of each operator. From then on
/// those results are kept that save the most time in the second run, as far as the budget allows; inputs count, because
/// they are always kept. Functions are told apart by type (the closure's place in the program) and by the inputs' shapes,
/// dtypes and devices: give clones of one budget to all layers.
///
/// On a CUDA device, the two measured calls wait for it after each operator.
///
/// # Source
/// `torch._functorch.config.activation_memory_budget`, which plans for a compiled graph
#[doc(alias = "activation_memory_budget")]
#[derive(Clone, Debug)]
pub struct Budget(Arc<Plans>);

#[derive(Debug)]
struct Plans {
    share: f64,
    functions: Mutex<HashMap<Key, Function>>,
}

/// What tells functions apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    function: TypeId,
    inputs: String,
}

impl Key {
    pub(super) fn of<F: 'static>(_function: &F, inputs: &[Tensor]) -> Self {
        let about = |tensor: &Tensor| match tensor.defined() {
            true => format!("{:?} {:?} {:?};", tensor.size(), tensor.kind(), tensor.device()),
            false => "none;".to_owned(),
        };
        Self { function: TypeId::of::<F>(), inputs: inputs.iter().map(about).collect() }
    }
}

#[derive(Debug)]
enum Function {
    Measured(Vec<Notes>),
    Planned(Arc<Plan>),
}

impl Budget {
    /// 0 keeps nothing, 1 as much as without checkpointing.
    ///
    /// # Errors
    /// For a share that is not from 0 to 1.
    pub fn new(share: f64) -> Result<Self, MemoryError> {
        if !(0.0..=1.0).contains(&share) {
            return Err(MemoryError::Budget { share });
        }
        Ok(Self(Arc::new(Plans { share, functions: Mutex::default() })))
    }

    fn functions(&self) -> MutexGuard<'_, HashMap<Key, Function>> {
        self.0.functions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The plan for a function, if it is known.
    pub(super) fn plan(&self, key: &Key) -> Option<Arc<Plan>> {
        match self.functions().get(key)? {
            Function::Planned(plan) if !plan.is_outdated.load(Ordering::Relaxed) => Some(Arc::clone(plan)),
            _ => None,
        }
    }

    /// A measurement of a function without a plan.
    pub(super) fn measure(&self, key: Key) -> Arc<Measure> {
        Arc::new(Measure { budget: self.clone(), key, notes: Mutex::default() })
    }

    fn add(&self, key: &Key, notes: Notes) {
        let mut functions = self.functions();
        let function = functions.entry(key.clone()).or_insert_with(|| Function::Measured(Vec::new()));
        if !matches!(function, Function::Measured(_)) {
            *function = Function::Measured(Vec::new());
        }
        let Function::Measured(runs) = function else { return };
        // A run of other operators shows nothing about this one.
        runs.retain(|run| run.names == notes.names);
        runs.push(notes);
        if runs.len() >= RUNS {
            *function = Function::Planned(Arc::new(Plan::of(self.0.share, runs)));
        }
    }
}

/// Which calls' results are kept.
#[derive(Debug)]
pub(super) struct Plan {
    names: Vec<String>,
    keeps: Vec<bool>,
    /// Whether the function has called other operators since.
    is_outdated: AtomicBool,
}

impl Plan {
    fn of(share: f64, runs: &[Notes]) -> Self {
        let Some(last) = runs.last() else {
            return Self { names: Vec::new(), keeps: Vec::new(), is_outdated: true.into() };
        };
        let nanoseconds = |call: usize| runs.iter().map(|run| run.costs[call].nanoseconds).min().unwrap_or(0);
        let room = share * (last.saved_bytes() + last.input_bytes) as f64 - last.input_bytes as f64;
        // The second run ends with the last saved tensor.
        let can_be_kept = |call: &usize| !last.changed.contains(call) && last.costs[*call].bytes > 0;
        let calls: Vec<usize> = (0..last.end).filter(can_be_kept).collect();
        let items: Vec<_> = calls.iter().map(|&call| (last.costs[call].bytes, nanoseconds(call))).collect();
        let mut keeps = vec![false; last.names.len()];
        for item in knapsack::most_valuable(&items, room.max(0.0) as usize) {
            keeps[calls[item]] = true;
        }
        Self { names: last.names.clone(), keeps, is_outdated: AtomicBool::new(false) }
    }
}

/// A keeper's view of a plan.
pub(super) struct ByPlan(pub(super) Arc<Plan>);

impl Keeps for ByPlan {
    fn keeps(&self, call: Call<'_>) -> bool {
        let Self(plan) = self;
        if plan.names.get(call.number).is_none_or(|name| name != call.name) {
            plan.is_outdated.store(true, Ordering::Relaxed);
            return false;
        }
        plan.keeps[call.number]
    }
}

/// What a function's first run costs.
#[derive(Debug)]
pub(super) struct Measure {
    budget: Budget,
    key: Key,
    notes: Mutex<Notes>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    nanoseconds: u64,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Notes {
    names: Vec<String>,
    costs: Vec<Cost>,
    /// The last call that has made the memory at an address, and its size there.
    made_by: HashMap<usize, (usize, usize)>,
    saved: BTreeSet<usize>,
    /// Calls whose results were changed in place.
    changed: BTreeSet<usize>,
    /// Memory that is saved, and that no call with a result of its own has made.
    others: HashMap<usize, usize>,
    /// Inputs, by address.
    inputs: HashMap<usize, usize>,
    input_bytes: usize,
    /// How many calls there were before the last saved tensor.
    end: usize,
}

impl Notes {
    fn saved_bytes(&self) -> usize {
        self.saved.iter().map(|&call| self.costs[call].bytes).sum::<usize>() + self.others.values().sum::<usize>()
    }
}

impl Measure {
    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn inputs(&self, inputs: &[Tensor]) -> Result<(), TorchError> {
        for tensor in inputs.iter().filter(|tensor| tensor.defined()) {
            self.notes().inputs.insert(address_of(tensor)?, tensor.numel() * tensor.kind().elt_size_in_bytes());
        }
        Ok(())
    }

    /// Takes note of a saved tensor. Parameters take no memory of the graph's.
    pub(super) fn saves(&self, tensor: &Tensor) -> Result<(), TorchError> {
        let address = address_of(tensor)?;
        let is_changed = version(tensor) != 0;
        let mut notes = self.notes();
        notes.end = notes.names.len();
        if let Some(bytes) = notes.inputs.remove(&address) {
            notes.input_bytes += bytes;
        } else if let Some(&(call, _)) = notes.made_by.get(&address) {
            notes.saved.insert(call);
            if is_changed {
                notes.changed.insert(call);
            }
        } else if !tensor.is_leaf() {
            notes.others.insert(address, tensor.numel() * tensor.kind().elt_size_in_bytes());
        }
        Ok(())
    }

    /// Says that the first run is over.
    pub(super) fn finish(&self) {
        let notes = std::mem::take(&mut *self.notes());
        self.budget.add(&self.key, notes);
    }
}

/// A keeper's view of a measurement.
pub(super) struct Measuring(pub(super) Arc<Measure>);

impl Keeps for Measuring {
    fn keeps(&self, call: Call<'_>) -> bool {
        let mut notes = self.0.notes();
        // The second run does not count.
        if call.number == notes.names.len() {
            notes.names.push(call.name.to_owned());
            notes.costs.push(Cost::default());
        }
        false
    }

    fn measures(&self) -> bool {
        true
    }

    fn ran(&self, ran: Ran) {
        let mut notes = self.0.notes();
        let Some(cost) = notes.costs.get_mut(ran.call) else { return };
        cost.nanoseconds = ran.nanoseconds;
        cost.bytes += ran.bytes;
        notes.made_by.insert(ran.address, (ran.call, ran.bytes));
    }
}
