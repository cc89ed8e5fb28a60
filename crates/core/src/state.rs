//! State that a run needs to continue where it stopped.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Kind, Tensor};

use overdrive_ffi::Error as TorchError;

use crate::rows::{Rows, Shard};

/// Something whose state can be saved and loaded.
///
/// # Source
/// `state_dict` and `load_state_dict`
pub trait Stateful {
    /// The state now. Tensors share their data with the owner, as in PyTorch: copy them to keep them.
    ///
    /// # Errors
    /// When libtorch fails.
    fn state_dict(&self) -> Result<StateDict, StateError>;

    /// Loads a state. Everything is checked before anything changes.
    ///
    /// # Errors
    /// When an entry is missing, unknown, or has another type, shape or dtype; nothing has changed then.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError>;

    /// As [`load_state_dict`](Self::load_state_dict), but the owner may keep the state's tensors in place of copying
    /// them into its own: large states load faster. Nothing else may use them later.
    ///
    /// Tensors that were taken from `state_dict` before may then have the values before loading. By default it copies.
    ///
    /// # Errors
    /// Those of [`load_state_dict`](Self::load_state_dict).
    ///
    /// # Source
    /// `load_state_dict(assign=True)`
    fn assign_state_dict(&mut self, state: StateDict) -> Result<(), StateError> {
        self.load_state_dict(&state)
    }

    /// Whether the state is specific to its rank (random number generators, for instance), so that no other rank may
    /// load it.
    fn differs_by_rank(&self) -> bool {
        false
    }

    /// Of a state that several ranks have saved together, the rows of each tensor that this rank loads: no others are read
    /// from disk. By default all of all; a tensor that is left out is not loaded. `values`: the entries that are not tensors;
    /// `shapes`: those of the whole tensors, of which one without dimensions has one row.
    ///
    /// [`load_state_dict`](Self::load_state_dict) is then given these entries under the whole state's names, tensors as
    /// [rows](StateDict::rows).
    ///
    /// # Errors
    /// When a tensor does not belong here, or is of another shape.
    fn rows_to_load(&self, _values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
        Ok(shapes.iter().map(|(key, shape)| (key.clone(), Rows::all(shape))).collect())
    }
}

/// Shapes of tensors by name.
pub type Shapes = BTreeMap<String, Vec<i64>>;

/// Rows of tensors by name.
pub type RowsToLoad = BTreeMap<String, Range<i64>>;

/// Why a state could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// An entry that should be there is not.
    #[error("the state has no entry `{key}`")]
    Missing {
        /// The entry's name.
        key: String,
    },
    /// An entry that the owner does not know: most likely the state of something else.
    #[error("the state has an entry `{key}`, which does not belong here")]
    Unexpected {
        /// The entry's name.
        key: String,
    },
    /// An entry is not what it should be.
    #[error("`{key}` should be {expected}, but is {found}")]
    Mismatch {
        /// The entry's name.
        key: String,
        /// What would be right.
        expected: String,
        /// What was found.
        found: String,
    },
    /// Something that cannot be saved or loaded, or not at this moment; why, and what to do.
    #[error("its state cannot be saved or loaded: {reason}")]
    NotSaved {
        /// Why, and what would be right.
        reason: &'static str,
    },
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// One entry of a [`StateDict`].
#[derive(Debug)]
pub enum Entry {
    /// A tensor.
    Tensor(Tensor),
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A text.
    Text(String),
}

impl Entry {
    /// The same entry. A tensor is shared, not copied.
    pub fn share(&self) -> Self {
        match self {
            Self::Tensor(tensor) => Self::Tensor(tensor.shallow_clone()),
            Self::Bool(value) => Self::Bool(*value),
            Self::Int(value) => Self::Int(*value),
            Self::Float(value) => Self::Float(*value),
            Self::Text(value) => Self::Text(value.clone()),
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Tensor(tensor) if !tensor.defined() => "an undefined tensor".to_owned(),
            Self::Tensor(tensor) => format!("a {:?} tensor of shape {:?}", tensor.kind(), tensor.size()),
            Self::Bool(value) => format!("the bool {value}"),
            Self::Int(value) => format!("the whole number {value}"),
            Self::Float(value) => format!("the real number {value}"),
            Self::Text(value) => format!("the text {value:?}"),
        }
    }
}

/// Named tensors and plain values, in the order of their names. Of a state that is partitioned over ranks, it can be one
/// rank's [part](Self::shard), whose tensors are [rows](Self::rows) of the whole's.
#[derive(Debug, Default)]
pub struct StateDict {
    pub(crate) entries: BTreeMap<String, Entry>,
    /// Of tensors that are not whole.
    pub(crate) rows: BTreeMap<String, Rows>,
    pub(crate) shard: Option<Shard>,
}

impl StateDict {
    /// An empty state.
    pub fn new() -> Self {
        Self::default()
    }

    /// Inserts an entry, replacing one of the same name.
    pub fn insert(&mut self, key: impl Into<String>, entry: Entry) {
        let key = key.into();
        self.rows.remove(&key);
        self.entries.insert(key, entry);
    }

    /// Inserts all entries of `inner`, with `prefix` and a dot before their names.
    pub fn insert_nested(&mut self, prefix: &str, inner: StateDict) {
        self.entries.extend(inner.entries.into_iter().map(|(key, entry)| (format!("{prefix}.{key}"), entry)));
        self.rows.extend(inner.rows.into_iter().map(|(key, rows)| (format!("{prefix}.{key}"), rows)));
        self.shard = inner.shard.or(self.shard);
    }

    /// The entries whose names begin with `prefix` and a dot, named by the rest. Their tensors are shared. It is not told
    /// that they are a [part](Self::shard).
    pub fn nested(&self, prefix: &str) -> StateDict {
        let rest = |key: &str| Some(key.strip_prefix(prefix)?.strip_prefix('.')?.to_owned());
        let entries = self.entries.iter().filter_map(|(key, entry)| Some((rest(key)?, entry.share())));
        let rows = self.rows.iter().filter_map(|(key, rows)| Some((rest(key)?, rows.clone())));
        // Not all that are joined need be parts.
        StateDict { entries: entries.collect(), rows: rows.collect(), shard: None }
    }

    /// The same with copies of the tensors, which keep their values when the owner's change.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// # Syncs
    /// No.
    pub fn copied(&self) -> Result<StateDict, StateError> {
        // `detach_copy` is differentiable.
        let _no_grad = tch::no_grad_guard();
        self.with_tensors(|tensor| match tensor.defined() {
            true => Ok(tensor.f_detach_copy().map_err(TorchError::from)?),
            false => Ok(tensor.shallow_clone()),
        })
    }

    /// The same with others in place of its tensors, such as copies on another device.
    ///
    /// # Errors
    /// Those of `of`.
    pub fn with_tensors(
        &self,
        mut of: impl FnMut(&Tensor) -> Result<Tensor, StateError>,
    ) -> Result<StateDict, StateError> {
        let mut entry = |(key, entry): (&String, &Entry)| {
            let entry = match entry {
                Entry::Tensor(tensor) => Entry::Tensor(of(tensor)?),
                other => other.share(),
            };
            Ok((key.clone(), entry))
        };
        let entries = self.entries.iter().map(&mut entry).collect::<Result<_, StateError>>()?;
        Ok(StateDict { entries, rows: self.rows.clone(), shard: self.shard })
    }

    /// All entries by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(key, entry)| (key.as_str(), entry))
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entry of this name.
    ///
    /// # Errors
    /// [`StateError::Missing`]
    pub fn get(&self, key: &str) -> Result<&Entry, StateError> {
        self.entries.get(key).ok_or_else(|| StateError::Missing { key: key.to_owned() })
    }

    /// The tensor of this name, checked against the shape and dtype that its owner needs.
    ///
    /// # Errors
    /// [`StateError::Missing`], [`StateError::Mismatch`]
    pub fn tensor(&self, key: &str, shape: &[i64], kind: Kind) -> Result<&Tensor, StateError> {
        match self.get(key)? {
            Entry::Tensor(tensor) if tensor.defined() && tensor.size() == shape && tensor.kind() == kind => Ok(tensor),
            other => Err(mismatch(key, &format!("a {kind:?} tensor of shape {shape:?}"), other)),
        }
    }

    /// The real number of this name; a whole number is converted.
    ///
    /// # Errors
    /// [`StateError::Missing`], [`StateError::Mismatch`]
    pub fn float(&self, key: &str) -> Result<f64, StateError> {
        match self.get(key)? {
            Entry::Float(value) => Ok(*value),
            Entry::Int(value) => Ok(*value as f64),
            other => Err(mismatch(key, "a real number", other)),
        }
    }

    /// The whole number of this name.
    ///
    /// # Errors
    /// [`StateError::Missing`], [`StateError::Mismatch`]
    pub fn int(&self, key: &str) -> Result<i64, StateError> {
        match self.get(key)? {
            Entry::Int(value) => Ok(*value),
            other => Err(mismatch(key, "a whole number", other)),
        }
    }

    /// The bool of this name.
    ///
    /// # Errors
    /// [`StateError::Missing`], [`StateError::Mismatch`]
    pub fn bool(&self, key: &str) -> Result<bool, StateError> {
        match self.get(key)? {
            Entry::Bool(value) => Ok(*value),
            other => Err(mismatch(key, "a bool", other)),
        }
    }

    /// The text of this name.
    ///
    /// # Errors
    /// [`StateError::Missing`], [`StateError::Mismatch`]
    pub fn text(&self, key: &str) -> Result<&str, StateError> {
        match self.get(key)? {
            Entry::Text(value) => Ok(value),
            other => Err(mismatch(key, "a text", other)),
        }
    }

    /// An error when there is an entry whose name is not among `known`.
    ///
    /// # Errors
    /// [`StateError::Unexpected`]
    pub fn refuse_unknown(&self, known: &[&str]) -> Result<(), StateError> {
        match self.entries.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(StateError::Unexpected { key: key.clone() }),
            None => Ok(()),
        }
    }
}

impl IntoIterator for StateDict {
    type Item = (String, Entry);
    type IntoIter = std::collections::btree_map::IntoIter<String, Entry>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

pub(crate) fn mismatch(key: &str, expected: &str, found: &Entry) -> StateError {
    StateError::Mismatch { key: key.to_owned(), expected: expected.to_owned(), found: found.describe() }
}
