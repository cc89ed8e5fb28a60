//! Models as tables.

pub(crate) mod record;
mod table;
mod unchanged;

use std::collections::HashSet;

use overdrive_core::{Module, ModuleId, ModuleState, Visitor};
use overdrive_ffi::TensorId;
use tch::Tensor;

use self::record::{Output, Outputs, Recording};
use self::unchanged::Unchanged;
use crate::error::NnError;

/// A model's modules with the shapes of their outputs, their parameters and their multiply-adds; printed as a table.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The model itself and all modules in it, each before its own modules.
    pub rows: Vec<SummaryRow>,
    /// Elements of all parameters, tied ones once.
    pub total_params: usize,
    /// Of them those that require a gradient.
    pub trainable_params: usize,
    /// Multiply-adds of all layers.
    pub total_mult_adds: u64,
    /// Of the input.
    pub input_bytes: usize,
    /// Outputs of the layers with parameters, and their gradients.
    pub forward_backward_bytes: usize,
    /// Of all parameters.
    pub params_bytes: usize,
    depth: usize,
}

/// A module of a [`Summary`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SummaryRow {
    /// Its dotted name; empty for the model.
    pub name: String,
    /// Its type.
    pub class: String,
    /// How many modules it is in.
    pub depth: usize,
    /// Whether there are no modules in it.
    pub is_layer: bool,
    /// The shape of its last output. None if it did not run, and for modules whose `forward` is called by other code than
    /// this crate's.
    pub output: Option<Vec<i64>>,
    /// Elements of its own parameters, without those of its modules and those that an earlier row has.
    pub params: usize,
    /// Of them those that require a gradient.
    pub trainable_params: usize,
    /// Whether an earlier row has the module, or all its parameters.
    pub is_repeated: bool,
    /// Multiply-adds of a layer, of all its runs.
    pub mult_adds: u64,
}

/// Runs a model in evaluation mode without gradients, and tells what its layers compute. The model stays as it is.
///
/// Multiply-adds: of a convolution its weights for each position of the output, of a linear layer its weights for each
/// row, of others their weights for each item of the batch, as torchinfo counts them; but of a linear layer it counts one
/// row for each item of the batch, and so too few for sequences. Operations that are not layers count nothing.
///
/// ```
/// use overdrive_nn::{Linear, NnError, Relu, Sequential, sequential, summary};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), NnError> {
/// let model = sequential![Linear::new(4, 8)?, Relu, Linear::new(8, 2)?];
/// let x = Tensor::zeros([16, 4], (Kind::Float, Device::Cpu));
/// let summary = summary(&model, &x, Sequential::forward)?;
/// assert_eq!(summary.total_params, 58);
/// println!("{summary}");
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Those of `forward`.
///
/// # Source
/// `torchinfo.summary(model, input_data=x, mode="eval")`
#[doc(alias = "torchinfo")]
pub fn summary<M: Module, E: From<NnError>>(
    model: &M,
    input: &Tensor,
    forward: impl FnOnce(&M, &Tensor) -> Result<Tensor, E>,
) -> Result<Summary, E> {
    let (output, outputs) = {
        let _unchanged = Unchanged::new(model).map_err(NnError::from)?;
        model.eval();
        let (_no_grad, recording) = (tch::no_grad_guard(), Recording::start());
        let output = forward(model, input)?;
        (Output::of(&output), recording.outputs())
    };
    let mut summary = Summary { input_bytes: Output::of(input).bytes, depth: 3, ..Summary::default() };
    let mut rows = Rows { outputs, modules: HashSet::new(), parameters: HashSet::new(), summary: &mut summary };
    rows.add(model, String::new(), 0, vec![output]);
    Ok(summary)
}

impl Summary {
    /// How deep modules are shown; default 3, as torchinfo's.
    #[must_use]
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }
}

/// Makes the rows.
struct Rows<'s> {
    outputs: Outputs,
    modules: HashSet<ModuleId>,
    parameters: HashSet<TensorId>,
    summary: &'s mut Summary,
}

impl Rows<'_> {
    /// Adds a module and those in it. `outputs` are those that its owner knows.
    fn add(&mut self, module: &dyn Module, name: String, depth: usize, mut outputs: Vec<Output>) {
        let mut parts = Parts::default();
        module.visit(&mut parts);
        let class = module.describe();
        let class = class.split('(').next().unwrap_or_default().to_owned();
        let is_layer = parts.modules.is_empty();
        let mut row = SummaryRow { name: name.clone(), class, depth, is_layer, ..SummaryRow::default() };
        let id = module.id();
        row.is_repeated = id.is_some_and(|id| !self.modules.insert(id));
        if let Some(own) = id.and_then(|id| self.outputs.get(&(id, None))) {
            outputs.clone_from(own);
        }
        row.output = outputs.last().map(|output| output.size.clone());
        if !row.is_repeated {
            self.count(&mut row, &parts, &outputs);
        }
        self.summary.rows.push(row);
        for (place, (part, module)) in parts.modules.into_iter().enumerate() {
            let known = id.and_then(|id| self.outputs.get(&(id, Some(place)))).cloned().unwrap_or_default();
            let name = if name.is_empty() { part } else { format!("{name}.{part}") };
            self.add(module, name, depth + 1, known);
        }
    }

    /// Counts a module's own parameters, and what a layer computes.
    fn count(&mut self, row: &mut SummaryRow, parts: &Parts<'_>, outputs: &[Output]) {
        let mut all = 0;
        for (_, tensor) in &parts.parameters {
            all += tensor.numel();
            if self.parameters.insert(TensorId::of(tensor)) {
                row.params += tensor.numel();
                row.trainable_params += if tensor.requires_grad() { tensor.numel() } else { 0 };
                self.summary.params_bytes += Output::of(tensor).bytes;
            }
        }
        row.is_repeated = all > 0 && row.params == 0;
        self.summary.total_params += row.params;
        self.summary.trainable_params += row.trainable_params;
        if row.is_layer {
            row.mult_adds = outputs.iter().map(|output| mult_adds(&row.class, &parts.parameters, &output.size)).sum();
            self.summary.total_mult_adds += row.mult_adds;
            if all > 0 {
                // The gradients are as large.
                self.summary.forward_backward_bytes += outputs.iter().map(|output| 2 * output.bytes).sum::<usize>();
            }
        }
    }
}

/// The multiply-adds of a layer that has computed an output of this size.
fn mult_adds(class: &str, parameters: &[(String, Tensor)], output: &[i64]) -> u64 {
    let product = |sizes: &[i64]| sizes.iter().map(|size| size.unsigned_abs()).product::<u64>();
    let dims = parameters.iter().find(|(name, _)| name == "weight").map_or(0, |(_, weight)| weight.dim());
    let times = |name: &str| match name {
        "weight" | "bias" if class.contains("Conv") => {
            // Without the channels, which come before the positions.
            let channels = (output.len() + 1).checked_sub(dims).and_then(|dim| output.get(dim)).copied().unwrap_or(1);
            product(output) / channels.unsigned_abs().max(1)
        }
        "weight" | "bias" if class.contains("Linear") => product(&output[..output.len().saturating_sub(1)]),
        "weight" | "bias" => product(&output[..output.len().min(1)]),
        // Those of recurrent layers, whose outputs begin with length and batch.
        name if name.contains("weight") || name.contains("bias") => product(&output[..output.len().min(2)]),
        _ => 0,
    };
    parameters.iter().map(|(name, tensor)| tensor.numel() as u64 * times(name)).sum()
}

/// What belongs to a module itself.
#[derive(Default)]
struct Parts<'a> {
    parameters: Vec<(String, Tensor)>,
    modules: Vec<(String, &'a dyn Module)>,
}

impl<'a> Visitor<'a> for Parts<'a> {
    fn parameter(&mut self, name: &str, parameter: &Tensor) {
        self.parameters.push((name.to_owned(), parameter.shallow_clone()));
    }

    fn buffer(&mut self, _: &str, _: &Tensor, _: bool) {}

    fn module(&mut self, name: &str, module: &'a dyn Module) {
        self.modules.push((name.to_owned(), module));
    }

    fn state(&mut self, _: &'a ModuleState) {}
}
