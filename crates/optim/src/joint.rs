//! Joins two optimizers into one, for example Muon for the hidden matrices and AdamW for the rest.

use std::collections::HashSet;

use overdrive_core::{
    Activity, Behavior, Entry, GradScale, IntoParameters, Optimizer, OptimizerError, OptimizerId, Parameter,
    RowsToLoad, Shapes, StateDict, StateError, Stateful, activity, check_averaged,
};
use overdrive_ffi::data_address;
use tch::Tensor;

/// Two optimizers over different parameters, used as one: by a schedule, a `GradScaler`, an accumulator, a checkpoint.
/// Parameter groups are numbered: those of the first optimizer, then those of the second, then groups added later.
///
/// ```
/// # use overdrive_core::Optimizer;
/// # use overdrive_optim::{AdamW, Joint, Muon, hidden_matrices};
/// # use tch::{Device, nn};
/// # fn main() -> Result<(), overdrive_core::OptimizerError> {
/// # let vs = nn::VarStore::new(Device::Cpu);
/// # nn::linear(vs.root() / "hidden", 4, 4, Default::default());
/// # nn::linear(vs.root() / "head", 4, 2, Default::default());
/// let (hidden, others) = hidden_matrices(&vs, |name| name.starts_with("embed") || name.starts_with("head"));
/// let muon = Muon::builder(hidden).lr(0.02).build()?;
/// let adamw = AdamW::builder(others).lr(3e-4).build()?;
/// let mut opt = Joint::new(muon, adamw)?;
/// # opt.step()
/// # }
/// ```
///
/// # Source
/// `MuonWithAuxAdam` of Jordan's Muon, `ChainedOptimizer` of Megatron-LM.
#[derive(Debug)]
#[doc(alias = "MuonWithAuxAdam")]
#[doc(alias = "ChainedOptimizer")]
pub struct Joint<A, B> {
    id: OptimizerId,
    first: A,
    second: B,
    /// By group number: which optimizer has the group, and the group's number in that optimizer.
    order: Vec<(Owner, usize)>,
    /// The number of groups at the last `check_apart`, which is repeated when groups were added.
    checked: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    First,
    Second,
}

/// An error if the two share a parameter or a name.
fn check_apart(first: &impl Optimizer, second: &impl Optimizer) -> Result<(), OptimizerError> {
    let place = |tensor: &Tensor| (tensor.numel() > 0).then(|| data_address(tensor));
    let known: HashSet<_> = first.params().iter().filter_map(place).collect();
    for (index, param) in second.parameters().iter().enumerate() {
        if place(param.tensor()).is_some_and(|place| known.contains(&place)) {
            let reason = "both optimizers have it: give it to only one";
            return Err(OptimizerError::parameter(param, index, reason));
        }
    }
    let names: Vec<_> = first.parameters().into_iter().filter_map(|param| Some(param.name()?.to_owned())).collect();
    let names: HashSet<&str> = names.iter().map(String::as_str).collect();
    for (index, param) in second.parameters().iter().enumerate() {
        if param.name().is_some_and(|name| names.contains(name)) {
            let reason = "both optimizers have a parameter of this name: give each model's parameters their own prefix \
                          with `overdrive_core::prefixed`";
            return Err(OptimizerError::parameter(param, index, reason));
        }
    }
    Ok(())
}

/// Splits parameters into the matrices of hidden layers and the others: those that are not matrices, and those whose
/// names `is_outer` accepts (embeddings and heads).
pub fn hidden_matrices(
    params: impl IntoParameters,
    is_outer: impl Fn(&str) -> bool,
) -> (Vec<Parameter>, Vec<Parameter>) {
    let is_hidden = |param: &Parameter| param.tensor().dim() == 2 && !param.name().is_some_and(&is_outer);
    params.into_parameters().into_iter().partition(is_hidden)
}

impl<A: Optimizer, B: Optimizer> Joint<A, B> {
    /// Joins two optimizers.
    ///
    /// # Errors
    /// When they share a parameter or a name, or only one of them steps during the backward pass.
    pub fn new(first: A, second: B) -> Result<Self, OptimizerError> {
        if first.behavior().steps_in_backward != second.behavior().steps_in_backward {
            let reason = "only one of the two steps during the backward pass: build both with `build`, or both with \
                          `build_in_backward`";
            return Err(OptimizerError::DoesNotFit { part: "Joint", reason });
        }
        check_apart(&first, &second)?;
        let mut joint = Self { id: OptimizerId::new(), first, second, order: Vec::new(), checked: 0 };
        joint.order = joint.order_now();
        joint.checked = joint.order.len();
        Ok(joint)
    }

    /// The first and the second optimizer.
    pub fn optimizers(&self) -> (&A, &B) {
        (&self.first, &self.second)
    }

    /// The first and the second optimizer, to add parameter groups or change their options. Call `step` and load states
    /// on the joint optimizer, not on these. A parameter may belong to only one of the two.
    pub fn optimizers_mut(&mut self) -> (&mut A, &mut B) {
        self.order = self.order_now();
        (&mut self.first, &mut self.second)
    }

    /// Both optimizers' checks, before either updates a parameter: a step that is refused changes nothing.
    fn check_both(&mut self) -> Result<(), OptimizerError> {
        let groups = self.num_groups();
        if groups != self.checked {
            check_apart(&self.first, &self.second)?;
            self.checked = groups;
        }
        check_averaged(self)?;
        self.check_step()
    }

    fn order_now(&self) -> Vec<(Owner, usize)> {
        let mut order = self.order.clone();
        for (owner, groups) in [(Owner::First, self.first.num_groups()), (Owner::Second, self.second.num_groups())] {
            let known = order.iter().filter(|(whose, _)| *whose == owner).count();
            order.extend((known..groups).map(|group| (owner, group)));
        }
        order
    }

    fn group(&self, group: usize) -> Option<(&dyn Optimizer, usize)> {
        match *self.order_now().get(group)? {
            (Owner::First, own) => Some((&self.first, own)),
            (Owner::Second, own) => Some((&self.second, own)),
        }
    }

    fn group_mut(&mut self, group: usize) -> Result<(&mut dyn Optimizer, usize), OptimizerError> {
        self.order = self.order_now();
        match self.order.get(group) {
            Some((Owner::First, own)) => Ok((&mut self.first, *own)),
            Some((Owner::Second, own)) => Ok((&mut self.second, *own)),
            None => Err(OptimizerError::NoSuchGroup { group, groups: self.order.len() }),
        }
    }
}

impl<A: Optimizer, B: Optimizer> Optimizer for Joint<A, B> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        self.first.params().into_iter().chain(self.second.params()).collect()
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.first.parameters().into_iter().chain(self.second.parameters()).collect()
    }

    fn trained(&self) -> Result<Vec<Tensor>, OptimizerError> {
        Ok(self.first.trained()?.into_iter().chain(self.second.trained()?).collect())
    }

    fn behavior(&self) -> Behavior {
        self.first.behavior().and(self.second.behavior())
    }

    fn num_groups(&self) -> usize {
        self.first.num_groups() + self.second.num_groups()
    }

    /// `None` where a group was added to the first optimizer later: its number is then behind those of the second, and its
    /// parameters are not.
    fn group_lens(&self) -> Option<Vec<usize>> {
        let is_in_order = self.order_now().is_sorted_by_key(|(owner, _)| *owner == Owner::Second);
        let lens = self.first.group_lens()?.into_iter().chain(self.second.group_lens()?);
        is_in_order.then(|| lens.collect())
    }

    /// Both only grow, and so does their sum.
    fn revision(&self) -> Option<u64> {
        Some(self.first.revision()? + self.second.revision()?)
    }

    fn lr(&self, group: usize) -> Option<f64> {
        let (optimizer, group) = self.group(group)?;
        optimizer.lr(group)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        let (optimizer, group) = self.group_mut(group)?;
        optimizer.set_lr(group, lr)
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        let (optimizer, group) = self.group(group)?;
        optimizer.momentum(group)
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        let (optimizer, group) = self.group_mut(group)?;
        optimizer.set_momentum(group, momentum)
    }

    /// Steps the first, then, unless that failed, the second.
    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.check_both()?;
        self.make_state()?;
        self.first.step()?;
        self.second.step()
    }

    fn make_state(&mut self) -> Result<(), OptimizerError> {
        self.first.make_state()?;
        self.second.make_state()
    }

    fn check_step(&self) -> Result<(), OptimizerError> {
        self.first.check_step()?;
        self.second.check_step()
    }

    fn takes_grad_scale(&self) -> bool {
        self.first.takes_grad_scale() && self.second.takes_grad_scale()
    }

    fn step_scaled(&mut self, scale: GradScale<'_>) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        if !self.takes_grad_scale() {
            return Err(OptimizerError::TakesNoGradScale);
        }
        self.check_both()?;
        self.first.step_scaled(scale)?;
        self.second.step_scaled(scale)
    }

    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        self.first.step_skipped()?;
        self.second.step_skipped()
    }

    fn gradients_used(&self) -> u64 {
        self.first.gradients_used() + self.second.gradients_used()
    }

    fn used_found_inf(&self) -> Vec<Tensor> {
        self.first.used_found_inf().into_iter().chain(self.second.used_found_inf()).collect()
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        self.first.zero_grad()?;
        self.second.zero_grad()
    }

    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        self.first.params_changed()?;
        self.second.params_changed()
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        self.first.as_stateful().and(self.second.as_stateful()).map(|_| self as &dyn Stateful)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        let both = self.first.as_stateful().and(self.second.as_stateful()).is_some();
        both.then_some(self as &mut dyn Stateful)
    }
}

impl Owner {
    fn word(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Second => "second",
        }
    }
}

impl<A: Optimizer, B: Optimizer> Joint<A, B> {
    /// The order of the groups in a saved state. Schedules address groups by number, so loading keeps the numbers.
    fn saved_order(&self, state: &StateDict) -> Result<Vec<(Owner, usize)>, StateError> {
        let counts = [(Owner::First, self.first.num_groups()), (Owner::Second, self.second.num_groups())];
        if state.get("order").is_err() {
            return Ok(counts.iter().flat_map(|(owner, groups)| (0..*groups).map(|group| (*owner, group))).collect());
        }
        let (found, mut order) = (state.text("order")?, Vec::new());
        for word in found.split(' ') {
            let owner = if word == Owner::First.word() { Owner::First } else { Owner::Second };
            order.push((owner, order.iter().filter(|(whose, _)| *whose == owner).count()));
        }
        let fits =
            counts.iter().all(|(owner, groups)| order.iter().filter(|(whose, _)| whose == owner).count() == *groups);
        match fits && order.iter().map(|(owner, _)| owner.word()).eq(found.split(' ')) {
            true => Ok(order),
            false => Err(StateError::Mismatch {
                key: "order".to_owned(),
                expected: format!("{} times \"first\" and {} times \"second\"", counts[0].1, counts[1].1),
                found: format!("{found:?}"),
            }),
        }
    }
}

/// The states of the two are saved under `first` and `second`. A group that was added to the first later comes after
/// the second's groups: then `order` says for each group number which optimizer has the group. If the second refuses
/// its state on loading, the first gets back the state it had.
impl<A: Optimizer, B: Optimizer> Stateful for Joint<A, B> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert_nested("first", (&self.first as &dyn Optimizer).state_dict()?);
        state.insert_nested("second", (&self.second as &dyn Optimizer).state_dict()?);
        let order = self.order_now();
        if !order.is_sorted_by_key(|(owner, _)| *owner == Owner::Second) {
            let words: Vec<&str> = order.iter().map(|(owner, _)| owner.word()).collect();
            state.insert("order", Entry::Text(words.join(" ")));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let is_known = |key: &str| key == "order" || ["first.", "second."].iter().any(|part| key.starts_with(part));
        if let Some((key, _)) = state.iter().find(|(key, _)| !is_known(key)) {
            return Err(StateError::Unexpected { key: key.to_owned() });
        }
        state.check_shard(self.state_dict()?.shard())?;
        let order = self.saved_order(state)?;
        let before = (&self.first as &dyn Optimizer).state_dict()?.copied()?;
        (&mut self.first as &mut dyn Optimizer).load_state_dict(&state.nested("first"))?;
        let second = (&mut self.second as &mut dyn Optimizer).load_state_dict(&state.nested("second"));
        match second {
            Ok(()) => self.order = order,
            Err(_) => (&mut self.first as &mut dyn Optimizer).load_state_dict(&before)?,
        }
        second
    }

    fn differs_by_rank(&self) -> bool {
        (&self.first as &dyn Optimizer).differs_by_rank() || (&self.second as &dyn Optimizer).differs_by_rank()
    }

    fn rows_to_load(&self, values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
        let mut rows = RowsToLoad::new();
        for (name, part) in [("first", &self.first as &dyn Optimizer), ("second", &self.second)] {
            let own = |(key, shape): (&String, &Vec<i64>)| {
                Some((key.strip_prefix(name)?.strip_prefix('.')?.to_owned(), shape.clone()))
            };
            let own = part.rows_to_load(&values.nested(name), &shapes.iter().filter_map(own).collect())?;
            rows.extend(own.into_iter().map(|(key, rows)| (format!("{name}.{key}"), rows)));
        }
        Ok(rows)
    }
}
