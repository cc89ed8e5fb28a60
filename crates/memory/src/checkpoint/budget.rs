//! Selective checkpointing by budget: what is kept is chosen by what operators cost.

use std::any::TypeId;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_ffi::keep::{Call, Keeps, Ran};
use overdrive_ffi::saved_tensors::{is_parameter, version};
use overdrive_ffi::storage;
use tch::Tensor;

use super::knapsack;
use crate::error::MemoryError;

/// How often a function is measured before it has a plan. The least time of each operator counts.
const RUNS: usize = 2;
/// How many different runs of a function are remembered until two are equal.
const MOST_KINDS: usize = 8;
/// How many functions and inputs are remembered.
const MOST_FUNCTIONS: usize = 256;
/// Never kept: whether autocast casts a weight again depends on its cache.
const CAST: &str = "aten::_to_copy.";

/// A share of the memory that functions' saved tensors take without checkpointing.
///
/// A function's first two calls keep nothing, and measure the time and the size of each operator's result. Later calls keep
/// those results that save the backward pass the most time, as far as the budget allows. A function's inputs belong to the
/// budget, because they are kept in any case.
///
/// Give clones of one budget to all layers: a plan is made for each type of function (the closure's place in the program)
/// and each shape, dtype and device of its inputs. Layers that are made by the same closure but differ inside, such as dense
/// ones and mixtures of experts, need a budget each. Inputs whose shape is new in each call, as texts of any length, are
/// measured again and again: pad them to a few lengths.
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
    pub(super) fn of(function: TypeId, inputs: &[Tensor]) -> Self {
        let about = |tensor: &Tensor| match tensor.defined() {
            true => format!("{:?} {:?} {:?};", tensor.size(), tensor.kind(), tensor.device()),
            false => "none;".to_owned(),
        };
        Self { function, inputs: inputs.iter().map(about).collect() }
    }
}

/// A call by its operator, and how many of the operator there were before.
type CallId = (String, usize);

#[derive(Debug)]
enum Function {
    Measured(Vec<Notes>),
    Planned(Arc<Plan>),
}

impl Budget {
    /// 0 keeps nothing, 1 nearly as much as without checkpointing.
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
            Function::Planned(plan) => Some(Arc::clone(plan)),
            Function::Measured(_) => None,
        }
    }

    /// A measurement of a function without a plan.
    pub(super) fn measure(&self, key: Key, inputs: &[Tensor]) -> Arc<Measure> {
        let of_inputs = inputs.iter().filter(|tensor| tensor.defined() && !is_parameter(tensor));
        let of_inputs = of_inputs.filter_map(|tensor| Some((storage(tensor).ok()?.address, bytes(tensor)))).collect();
        let notes = Notes { inputs: of_inputs, ..Notes::default() };
        Arc::new(Measure { budget: self.clone(), key, notes: Mutex::new(notes), is_over: AtomicBool::new(false) })
    }

    fn add(&self, key: &Key, notes: Notes) {
        let mut functions = self.functions();
        if functions.len() >= MOST_FUNCTIONS && !functions.contains_key(key) {
            functions.clear();
        }
        let function = functions.entry(key.clone()).or_insert_with(|| Function::Measured(Vec::new()));
        let Function::Measured(runs) = function else { return };
        runs.push(notes);
        let last = &runs[runs.len() - 1];
        let same: Vec<&Notes> = runs.iter().filter(|run| run.calls == last.calls).collect();
        if same.len() >= RUNS {
            *function = Function::Planned(Arc::new(Plan::of(self.0.share, last, &same)));
        } else if runs.len() > MOST_KINDS {
            runs.remove(0);
        }
    }
}

/// Which calls' results are kept.
#[derive(Debug)]
pub(super) struct Plan(HashSet<CallId>);

impl Plan {
    /// For a run, with the least times of some.
    fn of(share: f64, run: &Notes, timed: &[&Notes]) -> Self {
        let nanoseconds = |call: usize| timed.iter().map(|run| run.costs[call].nanoseconds).min().unwrap_or(0);
        let room = share * run.saved_bytes() as f64 - run.inputs.values().sum::<usize>() as f64;
        // The second run ends with the last saved tensor.
        let can_be_kept = |call: &usize| {
            let is_cast = run.calls[*call].0 == CAST;
            !is_cast && !run.changed.contains(call) && run.costs[*call].bytes > 0
        };
        let calls: Vec<usize> = (0..run.end).filter(can_be_kept).collect();
        let items: Vec<_> = calls.iter().map(|&call| (run.costs[call].bytes, nanoseconds(call))).collect();
        let kept = knapsack::most_valuable(&items, room.max(0.0) as usize);
        Self(kept.into_iter().map(|item| run.calls[calls[item]].clone()).collect())
    }
}

/// A keeper's view of a plan.
pub(super) struct ByPlan(pub(super) Arc<Plan>);

impl Keeps for ByPlan {
    fn keeps(&self, call: Call<'_>) -> bool {
        self.0.0.contains(&(full_name(call), call.number))
    }
}

fn full_name(call: Call<'_>) -> String {
    format!("{}.{}", call.name, call.overload)
}

/// What a function's first run costs.
#[derive(Debug)]
pub(super) struct Measure {
    budget: Budget,
    key: Key,
    notes: Mutex<Notes>,
    is_over: AtomicBool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    nanoseconds: u64,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Notes {
    calls: Vec<CallId>,
    costs: Vec<Cost>,
    /// The last call that has made the memory at an address.
    made_by: HashMap<usize, usize>,
    /// Calls whose results are saved.
    saved: BTreeSet<usize>,
    /// Calls whose results were changed in place.
    changed: BTreeSet<usize>,
    /// Memory that is saved, and that no call with a result of its own has made, by address.
    others: HashMap<usize, usize>,
    /// Bytes of inputs, by address.
    inputs: HashMap<usize, usize>,
    saved_inputs: BTreeSet<usize>,
    /// How many calls there were before the last saved tensor.
    end: usize,
}

impl Notes {
    /// What the graph would keep without checkpointing.
    fn saved_bytes(&self) -> usize {
        let of_calls = self.saved.iter().map(|&call| self.costs[call].bytes);
        let of_inputs = self.saved_inputs.iter().filter_map(|address| self.inputs.get(address)).copied();
        of_calls.chain(of_inputs).chain(self.others.values().copied()).sum()
    }
}

impl Measure {
    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of a saved tensor. Parameters take no memory of the graph's, and one without memory of its own, such as a
    /// sparse one, is not counted.
    pub(super) fn saves(&self, tensor: &Tensor) {
        let mut notes = self.notes();
        notes.end = notes.calls.len();
        let Some(address) = storage(tensor).ok().filter(|_| !is_parameter(tensor)).map(|it| it.address) else { return };
        if notes.inputs.contains_key(&address) {
            notes.saved_inputs.insert(address);
        } else if let Some(&call) = notes.made_by.get(&address) {
            notes.saved.insert(call);
            if version(tensor) != 0 {
                notes.changed.insert(call);
            }
        } else {
            notes.others.insert(address, bytes(tensor));
        }
    }

    /// Says that the first run is over.
    pub(super) fn finish(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        let notes = std::mem::take(&mut *self.notes());
        self.budget.add(&self.key, notes);
    }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// A keeper's view of a measurement.
pub(super) struct Measuring(pub(super) Arc<Measure>);

impl Keeps for Measuring {
    fn keeps(&self, call: Call<'_>) -> bool {
        // The second run is not measured.
        if !self.0.is_over.load(Ordering::SeqCst) {
            let mut notes = self.0.notes();
            notes.calls.push((full_name(call), call.number));
            notes.costs.push(Cost::default());
        }
        false
    }

    fn measures(&self) -> bool {
        true
    }

    fn ran(&self, ran: Ran) {
        let mut notes = self.0.notes();
        let Some(call) = notes.calls.len().checked_sub(1) else { return };
        notes.costs[call].nanoseconds = ran.nanoseconds;
        notes.costs[call].bytes += ran.bytes;
        notes.made_by.insert(ran.address, call);
    }
}
