//! Saving and loading: this rank's part, or the whole.

use std::collections::{HashMap, HashSet};

use overdrive_core::{Entry, Optimizer, Rows, RowsToLoad, Shapes, Shard, ShardedBy, StateDict, StateError, Stateful};

use super::ZeroRedundancyOptimizer;
use super::gather::own_entries;
use crate::ownership::{Group, Own, Ownership};

/// This rank's [part](StateDict::shard) of the whole state: the entries of its parameters, under the names of
/// [`consolidate_state_dict`](ZeroRedundancyOptimizer::consolidate_state_dict), and those of all groups as far as it knows
/// them. An optimizer inside with entries besides those of parameters and groups (`Lookahead`) has its own state under
/// `own` instead, which the same rank of as many ranks loads.
///
/// Loads its part, or a whole state, as `consolidate_state_dict` and the optimizer inside over all parameters make it, of
/// which it keeps its part; ranks do not communicate. A checkpoint of each rank (`Writers::Each`) is also loaded by another
/// number of ranks, and by another way to shard.
///
/// Of a whole state, [`StateError::Mismatch`] tells of groups and names that are not those of all parameters, and
/// shapes of this rank's part; [`StateError::Unexpected`] of entries that belong to none of the parameters.
impl<O: Optimizer> Stateful for ZeroRedundancyOptimizer<O> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let Some(entries) = own_entries(&self.ownership, self.own.as_ref())? else { return self.own_state() };
        let mut state = StateDict::of_shard(self.shard());
        // Of its own groups, the entries say the same.
        for (key, value) in (0..self.ownership.groups.len()).flat_map(|number| self.ownership.rates(number)) {
            state.insert(key, Entry::Float(value));
        }
        for (key, entry) in entries {
            state.insert(key, entry);
        }
        self.ownership.tell_parameters(&mut state);
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let (groups, part) = match state.get("zero.ranks") {
            Ok(_) => self.part_of(state)?,
            Err(_) => {
                state.check_shard(Some(self.shard()))?;
                from_whole(&self.ownership, self.own.as_ref(), state)?
            }
        };
        if let Some(own) = &mut self.own {
            (&mut own.inner as &mut dyn Optimizer).load_state_dict(&part)?;
        }
        self.ownership.groups = groups;
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        self.group.size() > 1
    }

    fn rows_to_load(&self, values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
        let names = self.ownership.names();
        let saved = saved_names(&self.ownership, names.as_deref(), values)?;
        let index_of: HashMap<&str, usize> = saved.iter().map(String::as_str).zip(0..).collect();
        let own: HashSet<usize> = self.own.iter().flat_map(|own| own.params.iter().copied()).collect();
        let mut rows = RowsToLoad::new();
        for (key, shape) in shapes {
            let unexpected = || StateError::Unexpected { key: key.clone() };
            let is_own = match key.strip_prefix("state.") {
                Some(rest) => own.contains(&split(rest, &index_of).ok_or_else(unexpected)?.0),
                None => true,
            };
            if is_own {
                rows.insert(key.clone(), Rows::all(shape));
            }
        }
        Ok(rows)
    }
}

impl<O: Optimizer> ZeroRedundancyOptimizer<O> {
    fn shard(&self) -> Shard {
        Shard { rank: self.group.rank(), ranks: self.group.size(), by: ShardedBy::Tensors }
    }

    /// The state of the optimizer inside under `own`, the number of ranks and this rank's, and the rates of all groups.
    fn own_state(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("zero.ranks", Entry::Int(self.group.size() as i64));
        state.insert("zero.rank", Entry::Int(self.group.rank() as i64));
        for (number, group) in self.ownership.groups.iter().enumerate() {
            for (name, value) in [("lr", group.lr), ("momentum", group.momentum)] {
                if let Some(value) = value {
                    state.insert(format!("zero.groups.{number}.{name}"), Entry::Float(value));
                }
            }
        }
        if let Some(own) = &self.own {
            state.insert_nested("own", (&own.inner as &dyn Optimizer).state_dict()?);
        }
        Ok(state)
    }

    /// The rates of all groups and the inner state, of a saved part.
    fn part_of(&self, state: &StateDict) -> Result<(Vec<Group>, StateDict), StateError> {
        let (rank, ranks) = (state.int("zero.rank")?, state.int("zero.ranks")?);
        let (own_rank, own_ranks) = (self.group.rank() as i64, self.group.size() as i64);
        if (rank, ranks) != (own_rank, own_ranks) {
            let expected = format!(
                "the part of rank {own_rank} of {own_ranks}; for another number of ranks, load what \
                 `consolidate_state_dict` has made"
            );
            let found = format!("that of rank {rank} of {ranks}");
            return Err(StateError::Mismatch { key: "zero.rank".to_owned(), expected, found });
        }
        let mut known = vec!["zero.rank".to_owned(), "zero.ranks".to_owned()];
        let mut groups = Vec::with_capacity(self.ownership.groups.len());
        for (number, group) in self.ownership.groups.iter().enumerate() {
            let mut read = |name: &str, own: Option<f64>| {
                let key = format!("zero.groups.{number}.{name}");
                let value = own.map(|_| state.float(&key)).transpose();
                known.push(key);
                value
            };
            groups.push(Group { lr: read("lr", group.lr)?, momentum: read("momentum", group.momentum)? });
        }
        check_rates(&groups, "zero.groups")?;
        let is_own = |key: &str| self.own.is_some() && key.starts_with("own.");
        if let Some((key, _)) = state.iter().find(|(key, _)| !is_own(key) && !known.iter().any(|it| it == key)) {
            return Err(StateError::Unexpected { key: key.to_owned() });
        }
        Ok((groups, state.nested("own")))
    }
}

/// The rates of all groups, and what the optimizer inside would have saved, of a whole state.
fn from_whole<O>(
    ownership: &Ownership,
    own: Option<&Own<O>>,
    state: &StateDict,
) -> Result<(Vec<Group>, StateDict), StateError> {
    let names = ownership.names();
    let saved = saved_names(ownership, names.as_deref(), state)?;
    // Under which name each saved parameter is known: its index among all.
    let index_of: HashMap<&str, usize> = saved.iter().map(String::as_str).zip(0..).collect();
    let own_place: HashMap<usize, usize> = own.map_or_else(HashMap::new, |own| {
        own.params.iter().copied().enumerate().map(|(place, index)| (index, place)).collect()
    });
    let mut part = StateDict::new();
    for (key, entry) in state.iter() {
        if let Some(rest) = key.strip_prefix("param_groups.") {
            let unexpected = || StateError::Unexpected { key: key.to_owned() };
            let (group, field) = rest.split_once('.').ok_or_else(unexpected)?;
            let group: usize = group.parse().map_err(|_| unexpected())?;
            if group >= ownership.groups.len() {
                return Err(unexpected());
            }
            let number = own.and_then(|own| own.groups.iter().position(|&of_all| of_all == group));
            let (Some(number), false) = (number, field == "params" || field.starts_with("param_names.")) else {
                continue;
            };
            part.insert(format!("param_groups.{number}.{field}"), entry.share());
        } else if let Some(rest) = key.strip_prefix("state.") {
            let (index, slot) = split(rest, &index_of).ok_or_else(|| StateError::Unexpected { key: key.to_owned() })?;
            let Some(place) = own_place.get(&index) else { continue };
            let name = names.as_ref().map_or_else(|| place.to_string(), |names| names[index].to_owned());
            part.insert(format!("state.{name}.{slot}"), entry.share());
        } else {
            return Err(StateError::Unexpected { key: key.to_owned() });
        }
    }
    if let Some(own) = own {
        let mut counts = vec![0; own.groups.len()];
        for &index in &own.params {
            let Some(number) = own.groups.iter().position(|&group| group == ownership.group_of[index]) else {
                continue;
            };
            if let Some(names) = &names {
                let name = Entry::Text(names[index].to_owned());
                part.insert(format!("param_groups.{number}.param_names.{}", counts[number]), name);
            }
            counts[number] += 1;
        }
        for (number, count) in counts.into_iter().enumerate() {
            part.insert(format!("param_groups.{number}.params"), Entry::Int(count));
        }
    }
    let rates = |(number, group): (usize, &Group)| {
        let read = |names: &[&str], own: Option<f64>| {
            let key = |name: &&str| format!("param_groups.{number}.{name}");
            own.map(|own| names.iter().find_map(|name| state.float(&key(name)).ok()).unwrap_or(own))
        };
        Group { lr: read(&["lr"], group.lr), momentum: read(&["momentum", "betas.0"], group.momentum) }
    };
    let groups: Vec<Group> = ownership.groups.iter().enumerate().map(rates).collect();
    check_rates(&groups, "param_groups")?;
    Ok((groups, part))
}

/// Checks the rates of all groups, as the optimizer inside does those of its own.
fn check_rates(groups: &[Group], prefix: &str) -> Result<(), StateError> {
    for (number, group) in groups.iter().enumerate() {
        let rates = [("lr", group.lr, f64::INFINITY), ("momentum", group.momentum, 1.0)];
        for (name, value, end) in rates {
            if let Some(value) = value.filter(|value| !(0.0..end).contains(value)) {
                let (key, expected) = (format!("{prefix}.{number}.{name}"), format!("at least 0 and below {end}"));
                return Err(StateError::Mismatch { key, expected, found: value.to_string() });
            }
        }
    }
    Ok(())
}

/// The name of each parameter in a whole state, in our order: as in an optimizer's own state, names decide where both
/// have them, and the order otherwise.
fn saved_names(ownership: &Ownership, names: Option<&[&str]>, state: &StateDict) -> Result<Vec<String>, StateError> {
    let mut saved: Vec<String> = Vec::with_capacity(ownership.params.len());
    for group in 0..ownership.groups.len() {
        let first = saved.len();
        let len = ownership.group_of.iter().filter(|of_param| **of_param == group).count();
        let key = format!("param_groups.{group}.params");
        let found = state.int(&key)?;
        if found != len as i64 {
            let (expected, found) = (format!("{len} parameters"), found.to_string());
            return Err(StateError::Mismatch { key, expected, found });
        }
        let name_key = |place: usize| format!("param_groups.{group}.param_names.{place}");
        if len == 0 || state.get(&name_key(0)).is_err() {
            saved.extend((first..first + len).map(|index| index.to_string()));
            continue;
        }
        let theirs = (0..len).map(|place| Ok(state.text(&name_key(place))?.to_owned()));
        let theirs = theirs.collect::<Result<Vec<String>, StateError>>()?;
        let Some(own) = names.map(|names| &names[first..first + len]) else {
            saved.extend(theirs);
            continue;
        };
        let there: HashSet<&str> = theirs.iter().map(String::as_str).collect();
        if let Some(missing) = own.iter().find(|name| !there.contains(**name)) {
            let key = format!("param_groups.{group}.param_names");
            let expected = format!("the names of this group's parameters, including `{missing}`");
            return Err(StateError::Mismatch { key, expected, found: "others".to_owned() });
        }
        saved.extend(own.iter().map(|name| (*name).to_owned()));
    }
    Ok(saved)
}

/// Splits `NAME.SLOT`, where both may have dots, at the longest known name.
fn split<'a>(rest: &'a str, index_of: &HashMap<&str, usize>) -> Option<(usize, &'a str)> {
    rest.rmatch_indices('.').find_map(|(dot, _)| Some((*index_of.get(&rest[..dot])?, &rest[dot + 1..])))
}
