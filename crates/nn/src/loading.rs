//! Loading a state dict into a module.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use overdrive_core::{Entry, MOVED, Module, StateDict, TorchError, module_entries};
use overdrive_ffi::TensorId;
use tch::{Kind, TchError, Tensor};

/// Copies the tensors of a state dict into a module's own ones, by name.
///
/// Floating-point dtypes are converted. Everything is checked before anything is copied. Of tied weights, one of the names
/// is enough, as in files of `save_safetensors`.
///
/// ```
/// use overdrive_nn::{LoadStateDict, Linear, Stateful};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (saved, model) = (Linear::new(4, 2)?, Linear::new(4, 2)?);
/// LoadStateDict::new(&saved.state_dict()?).into(&model)?;
/// assert_eq!(*model.weight, *saved.weight);
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.nn.Module.load_state_dict`
#[doc(alias = "load_state_dict")]
#[must_use = "nothing is loaded before `into`"]
pub struct LoadStateDict<'a> {
    state: &'a StateDict,
    strict: bool,
    rename: Option<Rename<'a>>,
}

type Rename<'a> = Box<dyn Fn(&str) -> String + 'a>;

/// The names that [`LoadStateDict::into`] did not match; both are empty unless it is not strict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Incompatible {
    /// Of the module, not of the state.
    pub missing_keys: Vec<String>,
    /// Of the state, not of the module.
    pub unexpected_keys: Vec<String>,
}

/// Why a state dict does not fit a module. Nothing was loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Names or sizes differ; the message is PyTorch's.
    #[error("{0}")]
    Mismatch(Mismatch),
    /// `rename` gives two entries of the state the same name.
    #[error("`{first}` and `{second}` of the state are both renamed to `{name}`")]
    Renamed {
        /// An entry.
        first: String,
        /// The other.
        second: String,
        /// The name of both.
        name: String,
    },
    /// Two names of one tensor have different values in the state. (PyTorch takes the last.)
    #[error("`{first}` and `{second}` are tied in the module, but differ in the state: leave one of them out")]
    Tied {
        /// A name of the tensor.
        first: String,
        /// Another.
        second: String,
    },
    /// SAM has moved the weights.
    #[error("SAM's `ascend` has moved the weights: call `step` or `step_skipped` first, which move them back")]
    Moved,
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// What differs between a state dict and a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The type of the module.
    pub module: String,
    /// Names that the state lacks, and that the module lacks.
    pub keys: Incompatible,
    /// Sentences about tensors that do not fit.
    pub tensors: Vec<String>,
}

impl<'a> LoadStateDict<'a> {
    /// Loads this state, strictly.
    pub fn new(state: &'a StateDict) -> Self {
        Self { state, strict: true, rename: None }
    }

    /// Whether names that the state or the module lacks are an error; default true. Sizes always have to fit. A batch
    /// norm's `num_batches_tracked` may always be missing beside its `running_mean`, as in old files.
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Gives each entry of the state the name in the module that this returns: for a checkpoint with other names.
    pub fn rename(mut self, rename: impl Fn(&str) -> String + 'a) -> Self {
        self.rename = Some(Box::new(rename));
        self
    }

    /// Copies the state into the module's tensors.
    ///
    /// # Errors
    /// [`LoadError::Mismatch`] names every missing and unexpected name and every tensor that does not fit;
    /// [`LoadError::Renamed`]; [`LoadError::Tied`]; [`LoadError::Moved`]. Nothing has changed then.
    ///
    /// # Syncs
    /// As copies between devices do.
    pub fn into<M: Module>(self, module: &M) -> Result<Incompatible, LoadError> {
        let mut own = module_entries(module);
        if MOVED.position(own.iter().map(|(_, tensor)| tensor)).is_some() {
            return Err(LoadError::Moved);
        }
        let mut saved = self.renamed()?;
        // Tied weights need only one of their names.
        let given: HashSet<TensorId> =
            own.iter().filter(|(name, _)| saved.contains_key(name)).map(|(_, tensor)| TensorId::of(tensor)).collect();
        // States from before PyTorch 0.4.1 do not count batches.
        let means: HashSet<String> = saved.keys().filter(|name| name.ends_with("running_mean")).cloned().collect();
        let has_mean = |norm: &str| means.contains(&format!("{norm}running_mean"));
        let mut keys = Incompatible::default();
        let (mut tensors, mut pairs) = (Vec::new(), Vec::new());
        let mut names = HashMap::new();
        for (name, tensor) in &own {
            if *names.entry(name).or_insert(TensorId::of(tensor)) != TensorId::of(tensor) {
                tensors.push(format!("two tensors of the module have the name {name}."));
            }
        }
        for (name, tensor) in &mut own {
            match saved.remove(name).map(|(_, entry)| fitting(name, tensor, entry)) {
                None if given.contains(&TensorId::of(tensor)) => {}
                None if name.strip_suffix("num_batches_tracked").is_some_and(has_mean) => {}
                None => keys.missing_keys.push(name.clone()),
                Some(Ok(saved)) => pairs.push((name.as_str(), tensor, saved)),
                Some(Err(sentence)) => tensors.push(sentence),
            }
        }
        keys.unexpected_keys = in_pytorchs_order(module, saved.into_keys().collect());
        let keys_differ = !keys.missing_keys.is_empty() || !keys.unexpected_keys.is_empty();
        if (self.strict && keys_differ) || !tensors.is_empty() {
            let module = module.describe();
            let module = module.split('(').next().unwrap_or(&module).to_owned();
            let keys = if self.strict { keys } else { Incompatible::default() };
            return Err(LoadError::Mismatch(Mismatch { module, keys, tensors }));
        }
        check_tied(&pairs)?;
        let _no_grad = tch::no_grad_guard();
        for (_, own, saved) in pairs {
            let saved = saved.f_reshape(own.size()).map_err(TorchError::from)?;
            own.f_copy_(&saved).map_err(TorchError::from)?;
        }
        Ok(keys)
    }

    /// The state's entries by their new names, each with its old name.
    fn renamed(&self) -> Result<BTreeMap<String, (&'a str, &'a Entry)>, LoadError> {
        let mut renamed: BTreeMap<String, (&str, &Entry)> = BTreeMap::new();
        for (old, entry) in self.state.iter() {
            let name = self.rename.as_ref().map_or_else(|| old.to_owned(), |rename| rename(old));
            if let Some((first, _)) = renamed.get(&name) {
                return Err(LoadError::Renamed { first: (*first).to_owned(), second: old.to_owned(), name });
            }
            renamed.insert(name, (old, entry));
        }
        Ok(renamed)
    }
}

/// Unexpected keys in the order in which PyTorch's modules, outer ones first, find them.
fn in_pytorchs_order<M: Module>(module: &M, mut keys: Vec<String>) -> Vec<String> {
    if keys.len() > 1 {
        let paths: Vec<String> = module.named_modules().into_iter().map(|(path, _)| path).collect();
        let is_in =
            |key: &str, path: &str| path.is_empty() || key.strip_prefix(path).is_some_and(|it| it.starts_with('.'));
        keys.sort_by_cached_key(|key| paths.iter().rposition(|path| is_in(key, path)));
    }
    keys
}

/// An error if a tensor would get two different values.
fn check_tied(pairs: &[(&str, &mut Tensor, &Tensor)]) -> Result<(), LoadError> {
    let mut seen: HashMap<TensorId, (&str, &Tensor)> = HashMap::new();
    for (name, own, saved) in pairs {
        let (first, other) = *seen.entry(TensorId::of(own)).or_insert((name, saved));
        if first != *name && !is_same(saved, other).map_err(TorchError::from)? {
            return Err(LoadError::Tied { first: first.to_owned(), second: (*name).to_owned() });
        }
    }
    Ok(())
}

/// Whether tensors of one shape have equal values; NaN is equal to NaN.
fn is_same(a: &Tensor, b: &Tensor) -> Result<bool, TchError> {
    if a.f_is_set_to(b)? {
        return Ok(true);
    }
    let b = b.f_to_device(a.device())?;
    let both_nan = a.f_ne_tensor(a)?.f_logical_and(&b.f_ne_tensor(&b)?)?;
    Ok(a.f_eq_tensor(&b)?.f_logical_or(&both_nan)?.f_all()?.f_int64_value(&[])? != 0)
}

/// The saved tensor, or a sentence about why it does not fit.
fn fitting<'s>(name: &str, own: &Tensor, entry: &'s Entry) -> Result<&'s Tensor, String> {
    let class = match entry {
        Entry::Tensor(saved) => return fitting_tensor(name, own, saved),
        Entry::Bool(_) => "bool",
        Entry::Int(_) => "int",
        Entry::Float(_) => "float",
        Entry::Text(_) => "str",
    };
    Err(format!(
        "While copying the parameter named \"{name}\", expected torch.Tensor or Tensor-like object from checkpoint but \
         received <class '{class}'>"
    ))
}

fn fitting_tensor<'s>(name: &str, own: &Tensor, saved: &'s Tensor) -> Result<&'s Tensor, String> {
    let sizes = |tensor: &Tensor| tensor.size().iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
    // As PyTorch before 0.4 saved scalars.
    let is_scalar = saved.defined() && own.size().is_empty() && saved.size() == [1];
    if !is_scalar && (!saved.defined() || saved.size() != own.size()) {
        let saved = if saved.defined() { sizes(saved) } else { "undefined".to_owned() };
        return Err(format!(
            "size mismatch for {name}: copying a param with shape torch.Size([{saved}]) from checkpoint, the shape in \
             current model is torch.Size([{}]).",
            sizes(own)
        ));
    }
    let is_real = |kind: Kind| matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
    if saved.kind() != own.kind() && !(is_real(saved.kind()) && is_real(own.kind())) {
        return Err(format!("dtype mismatch for {name}: {:?} in the checkpoint, {:?} here.", saved.kind(), own.kind()));
    }
    let (sizes, strides) = (own.size(), own.stride());
    if sizes.iter().zip(&strides).any(|(size, stride)| *size > 1 && *stride == 0) {
        return Err(format!("{name} cannot be written: its elements share memory (it was made by `expand`)."));
    }
    if saved.is_sparse() {
        return Err(format!("layout mismatch for {name}: a sparse tensor in the checkpoint."));
    }
    Ok(saved)
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error(s) in loading state_dict for {}:", self.module)?;
        let quoted = |keys: &[String]| keys.iter().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(", ");
        if !self.keys.missing_keys.is_empty() {
            write!(f, "\n\tMissing key(s) in state_dict: {}. ", quoted(&self.keys.missing_keys))?;
        }
        if !self.keys.unexpected_keys.is_empty() {
            write!(f, "\n\tUnexpected key(s) in state_dict: {}. ", quoted(&self.keys.unexpected_keys))?;
        }
        self.tensors.iter().try_for_each(|sentence| write!(f, "\n\t{sentence}"))
    }
}

impl fmt::Debug for LoadStateDict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadStateDict").field("strict", &self.strict).finish_non_exhaustive()
    }
}
