//! Loading a state dict into a module.

use std::collections::BTreeMap;
use std::fmt;

use overdrive_core::{Entry, MOVED, Module, StateDict, TorchError, module_entries};
use tch::{Kind, Tensor};

/// Copies the tensors of a state dict into a module's own ones, by name.
///
/// Floating-point dtypes are converted. Everything is checked before anything is copied.
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
    rename: Option<Box<dyn Fn(&str) -> String + 'a>>,
}

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

    /// Whether names that the state or the module lacks are an error; default true. Sizes always have to fit.
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
    /// [`LoadError::Mismatch`] names every missing and unexpected name and every tensor that does not fit.
    ///
    /// # Syncs
    /// As copies between devices do.
    pub fn into<M: Module>(self, module: &M) -> Result<Incompatible, LoadError> {
        let mut own = module_entries(module);
        if MOVED.position(own.iter().map(|(_, tensor)| tensor)).is_some() {
            return Err(LoadError::Moved);
        }
        let name_of = |name: &str| self.rename.as_ref().map_or_else(|| name.to_owned(), |rename| rename(name));
        let mut saved: BTreeMap<String, &Entry> =
            self.state.iter().map(|(name, entry)| (name_of(name), entry)).collect();
        let mut keys = Incompatible::default();
        let (mut tensors, mut pairs) = (Vec::new(), Vec::new());
        for (name, tensor) in &mut own {
            match saved.remove(name) {
                None => keys.missing_keys.push(name.clone()),
                Some(entry) => match fitting(name, tensor, entry) {
                    Ok(saved) => pairs.push((tensor, saved)),
                    Err(sentence) => tensors.push(sentence),
                },
            }
        }
        keys.unexpected_keys = saved.into_keys().collect();
        let keys_differ = !keys.missing_keys.is_empty() || !keys.unexpected_keys.is_empty();
        if (self.strict && keys_differ) || !tensors.is_empty() {
            let module = module.describe();
            let module = module.split('(').next().unwrap_or(&module).to_owned();
            let keys = if self.strict { keys } else { Incompatible::default() };
            return Err(LoadError::Mismatch(Mismatch { module, keys, tensors }));
        }
        let _no_grad = tch::no_grad_guard();
        for (own, saved) in pairs {
            own.f_copy_(saved).map_err(TorchError::from)?;
        }
        Ok(keys)
    }
}

/// The saved tensor, or a sentence about why it does not fit.
fn fitting<'s>(name: &str, own: &Tensor, entry: &'s Entry) -> Result<&'s Tensor, String> {
    let Entry::Tensor(saved) = entry else {
        return Err(format!("{name} is no tensor in the checkpoint."));
    };
    let sizes = |tensor: &Tensor| tensor.size().iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
    if !saved.defined() || saved.size() != own.size() {
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
