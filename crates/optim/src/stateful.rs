//! Saving and loading an optimizer, under PyTorch's names.

use std::collections::HashSet;

use overdrive_core::{Entry, OptimizerError, StateDict, StateError, Stateful, TorchError};
use overdrive_ffi::{Form, TensorList, memory_address};
use tch::{Kind, Tensor};

use crate::algorithm::{Algorithm, Field};
use crate::bucket::{Bucket, State, buckets};
use crate::foreach;
use crate::optimizer::{Group, GroupOptimizer, Values, check, with_momentum};
use crate::step_count::StepCounts;

/// `param_groups.G.NAME` holds each option, `param_groups.G.params` the number of parameters, and
/// `param_groups.G.param_names.N` their names, if they have any. `state.P.NAME` is the state of the parameter named P;
/// without names, P is its index over all groups. A parameter that was never stepped has no state. The names of options
/// and tensors are PyTorch's, except that `betas` is split into `betas.0` and `betas.1`.
///
/// A state with names is loaded by name, into a group with the same names in any order; if the names differ, the whole
/// state is refused. If the state or the optimizer has no names, the order of the parameters decides; numbers of
/// parameters and shapes are checked.
///
/// Loading takes over the options, copies the tensors into the optimizer's, and reads the step counts, for which it
/// waits for the device. `assign_state_dict` keeps the given tensors instead, if each has an allocation of its own, and all
/// are on the device and in the memory format of the optimizer's.
impl<A: Algorithm> Stateful for GroupOptimizer<A> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        let mut first = 0;
        for (number, group) in self.groups.iter().enumerate() {
            let prefix = format!("param_groups.{number}");
            save_options(group, &prefix, &mut state);
            if let Some(names) = &self.names {
                for (place, name) in names[first..first + group.len].iter().enumerate() {
                    state.insert(format!("{prefix}.param_names.{place}"), Entry::Text(name.clone()));
                }
            }
            first += group.len;
            for bucket in &group.buckets {
                save_bucket(bucket, self.names.as_deref(), &mut state)?;
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        self.load(state, copy_into_own)
    }

    fn assign_state_dict(&mut self, state: StateDict) -> Result<(), StateError> {
        self.load(&state, |loading| if fits_own(loading)? { assign(loading) } else { copy_into_own(loading) })
    }
}

/// The parameters' names (or indices) in the state, in the group's order.
fn saved_names(
    (own, first, len): (Option<&[String]>, usize, usize),
    prefix: &str,
    state: &StateDict,
    known: &mut Vec<String>,
) -> Result<Vec<String>, StateError> {
    let key = |place: usize| format!("{prefix}.param_names.{place}");
    if state.get(&key(0)).is_err() {
        return Ok((first..first + len).map(|index| index.to_string()).collect());
    }
    let mut saved = Vec::new();
    for place in 0..len {
        saved.push(state.text(&key(place))?.to_owned());
        known.push(key(place));
    }
    let Some(own) = own else { return Ok(saved) };
    let there: HashSet<&String> = saved.iter().collect();
    match own.iter().find(|name| !there.contains(name)) {
        None => Ok(own.to_vec()),
        Some(missing) => {
            let strange = saved.iter().find(|name| !own.contains(name));
            let expected = format!("the names of this group's parameters, including `{missing}`");
            let found = strange.map_or("others".to_owned(), |name| format!("others, including `{name}`"));
            Err(StateError::Mismatch { key: format!("{prefix}.param_names"), expected, found })
        }
    }
}

/// A bucket with tensors for the saved state, and the (target, source) lists to copy.
struct Loading {
    bucket: Bucket,
    copies: Vec<(TensorList, TensorList)>,
}

/// Copies the saved tensors into the optimizer's.
fn copy_into_own(loading: &mut [&mut Loading]) -> Result<(), StateError> {
    let pairs = loading.iter().flat_map(|loading| &loading.copies);
    pairs.into_iter().try_for_each(|(own, saved)| Ok(foreach::copy_(own, saved)?))
}

/// Puts the saved tensors in place of the optimizer's.
fn assign(loading: &mut [&mut Loading]) -> Result<(), StateError> {
    for Loading { bucket, copies } in loading.iter_mut().map(|loading| &mut **loading) {
        if let Some(state) = bucket.state.as_mut().filter(|_| !copies.is_empty()) {
            state.slots = copies.drain(..).map(|(_, saved)| saved).collect();
        }
    }
    Ok(())
}

/// Whether every saved tensor can take the place of the optimizer's. If only some could, a file's memory might be kept
/// for a few of its tensors.
fn fits_own(loading: &[&mut Loading]) -> Result<bool, StateError> {
    let mut addresses = HashSet::new();
    for (own, saved) in loading.iter().flat_map(|loading| &loading.copies) {
        for (own, saved) in own.to_vec()?.iter().zip(saved.to_vec()?) {
            // Two in one allocation may be one tensor by two names: a step would change both.
            let mut is_alone = || saved.numel() == 0 || addresses.insert(memory_address(&saved));
            if !Form::of(own).is_ok_and(|form| form.fits(&saved)) || !is_alone() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

impl<A: Algorithm> GroupOptimizer<A> {
    /// Loads a state; `take_tensors` decides what becomes of its tensors.
    fn load(
        &mut self,
        state: &StateDict,
        take_tensors: impl FnOnce(&mut [&mut Loading]) -> Result<(), StateError>,
    ) -> Result<(), StateError> {
        let _no_grad = tch::no_grad_guard();
        state.check_shard(None)?;
        let mut known = Vec::new();
        let mut loaded = Vec::new();
        let mut keys = Vec::new();
        self.check_groups(state)?;
        for (number, group) in self.groups.iter().enumerate() {
            let prefix = format!("param_groups.{number}");
            loaded.push(load_options(group, &prefix, state, &mut known)?);
            let first = keys.len();
            let own = self.names.as_ref().map(|names| &names[first..first + group.len]);
            keys.extend(saved_names((own, first, group.len), &prefix, state, &mut known)?);
        }
        let keys: Vec<String> = keys.into_iter().map(|name| format!("state.{name}")).collect();
        let mut buckets = Vec::new();
        for (group, values) in self.groups.iter().zip(&loaded) {
            buckets.push(self.load_buckets((group, &values.options), &keys, state, &mut known)?);
        }
        state.refuse_unknown(&known.iter().map(String::as_str).collect::<Vec<_>>())?;
        self.revision += 1;
        // Everything has been checked and allocated: what follows should not fail.
        let mut loading: Vec<&mut Loading> = buckets.iter_mut().flat_map(|(buckets, _)| buckets).collect();
        take_tensors(&mut loading)?;
        for (group, (values, (buckets, keeps_momentum))) in self.groups.iter_mut().zip(loaded.into_iter().zip(buckets))
        {
            group.take_over(values, buckets.into_iter().map(|loading| loading.bucket).collect(), keeps_momentum);
        }
        Ok(())
    }

    /// Refuses a state with another number of groups: a resumed run has to add the groups that the saved one had added.
    fn check_groups(&self, state: &StateDict) -> Result<(), StateError> {
        let saved = (0..).take_while(|number| state.get(&format!("param_groups.{number}.params")).is_ok()).count();
        if saved == self.groups.len() || saved == 0 {
            return Ok(());
        }
        let own = self.groups.len();
        let expected = format!(
            "{own} groups, as many as this optimizer has (call `add_param_group` for the others before \
                     loading)"
        );
        Err(StateError::Mismatch { key: "param_groups".to_owned(), expected, found: format!("{saved} groups") })
    }

    fn load_buckets(
        &self,
        (group, options): (&Group<A>, &A),
        keys: &[String],
        state: &StateDict,
        known: &mut Vec<String>,
    ) -> Result<(Vec<Loading>, bool), StateError> {
        let Some(first) = group.buckets.iter().flat_map(|bucket| &bucket.indices).min() else {
            return Ok((Vec::new(), group.has_momentum));
        };
        let params = (*first..first + group.len).map(|index| self.params.get(index)).collect::<Result<Vec<_>, _>>()?;
        // The loaded options decide which slots there are; they may differ from the present ones. A group whose
        // momentum a schedule has brought to 0 keeps its momentum state.
        let names = |options: &A| options.slots(&params[0]).into_iter().map(|slot| slot.name).collect::<Vec<_>>();
        let (plain, with) = (names(options), names(&with_momentum(options, true)));
        let is_saved =
            |name: &&str| keys[*first..first + group.len].iter().any(|key| state.get(&format!("{key}.{name}")).is_ok());
        let saves_momentum = with.iter().filter(|name| !plain.contains(name)).any(is_saved);
        let keeps_momentum = saves_momentum || group.has_momentum && !plain.iter().chain(&["step"]).any(is_saved);
        let fresh = buckets(&params, *first, &with_momentum(options, keeps_momentum), self.packing)?;
        let load = |bucket| self.load_bucket((group, options), bucket, keys, state, known);
        Ok((fresh.into_iter().map(load).collect::<Result<_, _>>()?, keeps_momentum))
    }

    fn load_bucket(
        &self,
        (group, options): (&Group<A>, &A),
        mut bucket: Bucket,
        keys: &[String],
        state: &StateDict,
        known: &mut Vec<String>,
    ) -> Result<Loading, StateError> {
        let keys: Vec<&String> = bucket.indices.iter().map(|index| &keys[*index]).collect();
        // Looks for whole entry names, not for the prefix: a parameter's name may be the beginning of another's.
        let entries = || bucket.slots.iter().map(|slot| slot.name).chain(A::COUNTS_STEPS.then_some("step"));
        let has_entries = |key: &&String| entries().any(|entry| state.get(&format!("{key}.{entry}")).is_ok());
        let started: Vec<bool> = keys.iter().map(has_entries).collect();
        if !started.contains(&true) {
            return Ok(Loading { bucket, copies: Vec::new() });
        }
        // Existing tensors are reused.
        let names = |bucket: &Bucket| bucket.slots.iter().map(|slot| slot.name).collect::<Vec<_>>();
        let same = |old: &&Bucket| old.indices == bucket.indices && names(old) == names(&bucket);
        let mut own = match group.buckets.iter().find(same).and_then(|old| old.state.as_ref()) {
            Some(old) => old.share()?,
            None => bucket.blank_state(options, self.packing.fused)?,
        };
        let mut copies = Vec::new();
        for (slot, list) in bucket.slots.iter().zip(&own.slots) {
            let mut saved = Vec::new();
            for (place, own) in list.to_vec()?.iter().enumerate() {
                if started[place] {
                    let key = format!("{}.{}", keys[place], slot.name);
                    let tensor = state.tensor(&key, &own.size(), own.kind())?;
                    saved.push(tensor.f_detach().map_err(TorchError::from)?);
                    known.push(key);
                } else {
                    // The parameter was not stepped: the state before its first step.
                    let param = bucket.precision.stepped(&bucket.params.get(place)?)?;
                    saved.push(slot.fresh(&param)?);
                }
            }
            copies.push((list.share()?, TensorList::new(&saved)?));
        }
        if A::COUNTS_STEPS {
            own.counts = load_counts(&keys, &started, &own, state, known)?;
        }
        own.started = started;
        bucket.state = Some(own);
        Ok(Loading { bucket, copies })
    }
}

fn load_counts(
    keys: &[&String],
    started: &[bool],
    own: &State,
    state: &StateDict,
    known: &mut Vec<String>,
) -> Result<StepCounts, StateError> {
    let place = own.counts.list().get(0)?.device();
    let (mut saved, mut values) = (Vec::new(), Vec::new());
    for (key, started) in keys.iter().zip(started) {
        let key = format!("{key}.step");
        let count = match started {
            true => state.tensor(&key, &[], Kind::Float)?.shallow_clone(),
            false => Tensor::from(0f32),
        };
        let value = count.f_double_value(&[]).map_err(TorchError::from)?;
        if !(0.0..f64::INFINITY).contains(&value) {
            let expected = "a number of steps, finite and at least 0".to_owned();
            return Err(StateError::Mismatch { key, expected, found: value.to_string() });
        }
        saved.push(count);
        values.push(value);
        known.push(key);
    }
    Ok(StepCounts::load(&saved, &values, place)?)
}

fn save_bucket(bucket: &Bucket, names: Option<&[String]>, state: &mut StateDict) -> Result<(), StateError> {
    let Some(own) = &bucket.state else { return Ok(()) };
    for (place, index) in bucket.indices.iter().enumerate().filter(|(place, _)| own.started[*place]) {
        let name = names.map_or_else(|| index.to_string(), |names| names[*index].clone());
        for (slot, list) in bucket.slots.iter().zip(&own.slots) {
            state.insert(format!("state.{name}.{}", slot.name), Entry::Tensor(list.get(place)?));
        }
        if !own.counts.list().is_empty() {
            state.insert(format!("state.{name}.step"), Entry::Tensor(own.counts.list().get(place)?));
        }
    }
    Ok(())
}

fn save_options<A: Algorithm>(group: &Group<A>, prefix: &str, state: &mut StateDict) {
    state.insert(format!("{prefix}.lr"), Entry::Float(group.values.lr));
    state.insert(format!("{prefix}.params"), Entry::Int(group.len as i64));
    for (name, field) in group.values.options.clone().fields() {
        let entry = match field {
            Field::Float(value) => Entry::Float(*value),
            Field::Bool(value) => Entry::Bool(*value),
            Field::Int(value) => Entry::Int(*value),
            Field::Fixed(value) => Entry::Bool(value),
            Field::OwnWord(value, words) if *value == words[0] => continue,
            Field::Word(value, _) | Field::OwnWord(value, _) => Entry::Text((*value).to_owned()),
            Field::Optional(Some(value)) => Entry::Float(*value),
            Field::Optional(None) => continue,
        };
        state.insert(format!("{prefix}.{name}"), entry);
    }
}

fn load_options<A: Algorithm>(
    group: &Group<A>,
    prefix: &str,
    state: &StateDict,
    known: &mut Vec<String>,
) -> Result<Values<A>, StateError> {
    let mismatch =
        |key: &str, expected: String, found: String| StateError::Mismatch { key: key.to_owned(), expected, found };
    let key = format!("{prefix}.params");
    let len = state.int(&key)?;
    if len != group.len as i64 {
        return Err(mismatch(&key, format!("{} parameters", group.len), len.to_string()));
    }
    let lr_key = format!("{prefix}.lr");
    let lr = state.float(&lr_key)?;
    let mut options = group.values.options.clone();
    for (name, field) in options.fields() {
        let key = format!("{prefix}.{name}");
        match field {
            Field::Float(value) => *value = state.float(&key)?,
            Field::Bool(value) => *value = state.bool(&key)?,
            Field::Int(value) => *value = state.int(&key)?,
            Field::Optional(value) => *value = state.get(&key).is_ok().then(|| state.float(&key)).transpose()?,
            Field::Fixed(_) if state.get(&key).is_err() => {}
            Field::Fixed(own) => {
                let found = state.bool(&key)?;
                if found != own {
                    return Err(mismatch(&key, own.to_string(), found.to_string()));
                }
            }
            Field::OwnWord(value, words) if state.get(&key).is_err() => *value = words[0],
            Field::Word(value, words) | Field::OwnWord(value, words) => {
                let found = match state.get(&key)? {
                    Entry::Text(text) => text.as_str(),
                    _ => "no text",
                };
                let word = words.iter().find(|word| **word == found);
                *value = word.ok_or_else(|| mismatch(&key, format!("one of {words:?}"), format!("{found:?}")))?;
            }
        }
        known.push(key);
    }
    let checked = OptimizerError::check_lr(lr).and_then(|()| check(&options, group.has_momentum));
    if let Err(OptimizerError::InvalidOption { option, found, expected }) = &checked {
        return Err(mismatch(&format!("{prefix}.{option}"), (*expected).to_owned(), found.to_string()));
    }
    known.extend([key, lr_key]);
    Ok(Values { lr, options })
}
