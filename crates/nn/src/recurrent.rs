//! LSTM and GRU.

use overdrive_core::{Module, ModuleState, StateDict, StateError, Stateful, Visitor, load_module_state, module_state};
use tch::{TchError, Tensor};

use crate::error::NnError;
use crate::init;
use crate::layer::{at_least, empty, python, run};
use crate::tensors::Parameter;

/// Options of an [`Lstm`] or a [`Gru`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `lstm` or `gru`"]
pub struct RecurrentBuilder {
    input_size: i64,
    hidden_size: i64,
    num_layers: i64,
    bias: bool,
    batch_first: bool,
    dropout: f64,
    bidirectional: bool,
}

impl RecurrentBuilder {
    fn new(input_size: i64, hidden_size: i64) -> Self {
        Self {
            input_size,
            hidden_size,
            num_layers: 1,
            bias: true,
            batch_first: false,
            dropout: 0.0,
            bidirectional: false,
        }
    }

    /// Layers on top of each other; default 1.
    pub fn num_layers(mut self, num_layers: i64) -> Self {
        self.num_layers = num_layers;
        self
    }

    /// Whether there are biases; default true.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// Whether inputs are `[batch, length, size]` in place of `[length, batch, size]`; default false.
    pub fn batch_first(mut self, batch_first: bool) -> Self {
        self.batch_first = batch_first;
        self
    }

    /// The probability that an output of a layer, but the last, is dropped in training; default 0.
    pub fn dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }

    /// Whether each layer also reads backwards; default false.
    pub fn bidirectional(mut self, bidirectional: bool) -> Self {
        self.bidirectional = bidirectional;
        self
    }

    fn directions(&self) -> i64 {
        if self.bidirectional { 2 } else { 1 }
    }

    /// Draws the weights of cells with so many gates, each with its name, in PyTorch's order.
    fn draw(self, layer: &'static str, gates: i64) -> Result<Recurrent, NnError> {
        at_least(layer, "input_size", self.input_size, 0)?;
        at_least(layer, "hidden_size", self.hidden_size, 1)?;
        at_least(layer, "num_layers", self.num_layers, 1)?;
        if !(0.0..=1.0).contains(&self.dropout) {
            let (found, expected) = (self.dropout.to_string(), "at least 0 and at most 1".to_owned());
            return Err(NnError::InvalidOption { layer, option: "dropout", found, expected });
        }
        let (bound, size) = (1.0 / (self.hidden_size as f64).sqrt(), gates * self.hidden_size);
        let mut weights = Vec::new();
        for number in 0..self.num_layers {
            let input = if number == 0 { self.input_size } else { self.hidden_size * self.directions() };
            for direction in 0..self.directions() {
                let suffix = if direction == 1 { "_reverse" } else { "" };
                let mut draw = |name: &str, shape: &[i64]| -> Result<(), NnError> {
                    let tensor = empty(shape)?;
                    init::uniform_(&tensor, -bound, bound)?;
                    weights.push((format!("{name}_l{number}{suffix}"), Parameter::new(&tensor)?));
                    Ok(())
                };
                draw("weight_ih", &[size, input])?;
                draw("weight_hh", &[size, self.hidden_size])?;
                if self.bias {
                    draw("bias_ih", &[size])?;
                    draw("bias_hh", &[size])?;
                }
            }
        }
        Ok(Recurrent { weights, state: ModuleState::default(), options: self })
    }
}

/// What [`Lstm`] and [`Gru`] have in common.
#[derive(Debug)]
struct Recurrent {
    /// `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0`, `weight_ih_l0_reverse`, ..
    weights: Vec<(String, Parameter)>,
    state: ModuleState,
    options: RecurrentBuilder,
}

impl Recurrent {
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
        for (name, weight) in &self.weights {
            visitor.parameter(name, weight);
        }
        visitor.state(&self.state);
    }

    fn weight(&self, name: &str) -> Option<&Parameter> {
        self.weights.iter().find(|(own, _)| own == name).map(|(_, weight)| weight)
    }

    fn flat(&self) -> Vec<&Tensor> {
        self.weights.iter().map(|(_, weight)| &**weight).collect()
    }

    /// The input with a batch, and whether it came with one.
    fn batched(&self, input: &Tensor) -> Result<(Tensor, bool), TchError> {
        match input.dim() {
            3 => Ok((input.shallow_clone(), true)),
            2 => Ok((input.f_unsqueeze(self.batch_dim())?, false)),
            dims => Err(TchError::Shape(format!("expected an input of 2 or 3 dimensions, got {dims}"))),
        }
    }

    fn batch_dim(&self) -> i64 {
        if self.options.batch_first { 0 } else { 1 }
    }

    /// The state to begin with: the given one, or zeros.
    fn begin(&self, input: &Tensor, given: Option<&Tensor>, is_batched: bool) -> Result<Tensor, TchError> {
        let options = &self.options;
        let layers = options.num_layers * options.directions();
        let shape = [layers, input.size()[self.batch_dim() as usize], options.hidden_size];
        let state = match given {
            None => return Tensor::f_zeros(shape, (input.kind(), input.device())),
            Some(given) if is_batched => given.shallow_clone(),
            Some(given) => given.f_unsqueeze(1)?,
        };
        match state.size() == shape {
            true => Ok(state),
            false => {
                Err(TchError::Shape(format!("expected a hidden state of shape {shape:?}, got {:?}", state.size())))
            }
        }
    }

    /// Takes the batch away again where the input had none.
    fn without_batch(&self, output: Tensor, states: &mut [&mut Tensor], is_batched: bool) -> Result<Tensor, TchError> {
        if is_batched {
            return Ok(output);
        }
        for state in states {
            **state = state.f_squeeze_dim(1)?;
        }
        output.f_squeeze_dim(self.batch_dim())
    }

    fn describe(&self, name: &str) -> String {
        let RecurrentBuilder { input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional } =
            self.options;
        let mut text = format!("{name}({input_size}, {hidden_size}");
        if num_layers != 1 {
            text += &format!(", num_layers={num_layers}");
        }
        if !bias {
            text += &format!(", bias={}", python(bias));
        }
        if batch_first {
            text += ", batch_first=True";
        }
        if dropout != 0.0 {
            text += &format!(", dropout={dropout:?}");
        }
        if bidirectional {
            text += ", bidirectional=True";
        }
        text + ")"
    }
}

macro_rules! recurrent {
    ($(#[$doc:meta])* $name:ident, $text:literal, $gates:literal, $build:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(Recurrent);

        impl $name {
            /// One layer with PyTorch's defaults.
            ///
            /// # Errors
            /// When a size is out of its range, or memory runs out.
            pub fn new(input_size: i64, hidden_size: i64) -> Result<Self, NnError> {
                Self::builder(input_size, hidden_size).$build()
            }

            /// A builder with options. The defaults are PyTorch's.
            pub fn builder(input_size: i64, hidden_size: i64) -> RecurrentBuilder {
                RecurrentBuilder::new(input_size, hidden_size)
            }

            /// A weight by PyTorch's name, such as `weight_ih_l0` or `bias_hh_l1_reverse`.
            pub fn weight(&self, name: &str) -> Option<&Parameter> {
                self.0.weight(name)
            }
        }

        impl RecurrentBuilder {
            /// The layers with new weights.
            ///
            /// # Errors
            /// When an option is out of its range, or memory runs out.
            pub fn $build(self) -> Result<$name, NnError> {
                Ok($name(self.draw($text, $gates)?))
            }
        }

        impl Module for $name {
            fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
                self.0.visit(visitor);
            }

            fn describe(&self) -> String {
                self.0.describe($text)
            }

            fn as_any(&self) -> Option<&dyn std::any::Any> {
                Some(self)
            }
        }

        impl Stateful for $name {
            fn state_dict(&self) -> Result<StateDict, StateError> {
                module_state(self)
            }

            fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
                load_module_state(self, state)
            }
        }
    };
}

recurrent! {
    /// Layers of long short-term memory.
    ///
    /// # Source
    /// `torch.nn.LSTM`; Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997.
    #[doc(alias = "LSTM")]
    Lstm, "LSTM", 4, lstm
}

recurrent! {
    /// Layers of gated recurrent units.
    ///
    /// # Source
    /// `torch.nn.GRU`; Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014.
    #[doc(alias = "GRU")]
    Gru, "GRU", 3, gru
}

impl Lstm {
    /// Reads sequences, from a hidden state and a cell state or from zeros. Returns the outputs, and the last hidden
    /// state and cell state.
    ///
    /// # Shapes
    /// `[length, batch, input_size]`, or `[batch, length, input_size]` with `batch_first`, or without a batch; to the same
    /// with `hidden_size` (twice if bidirectional). States are `[layers * directions, batch, hidden_size]`.
    ///
    /// # Errors
    /// When the input or a state has another shape, dtype or device.
    pub fn forward(
        &self,
        input: &Tensor,
        states: Option<(&Tensor, &Tensor)>,
    ) -> Result<(Tensor, (Tensor, Tensor)), NnError> {
        let (own, options) = (&self.0, &self.0.options);
        run(self, &own.state, || {
            let (input, is_batched) = own.batched(input)?;
            let begin = [states.map(|it| it.0), states.map(|it| it.1)];
            let begin = begin.map(|state| own.begin(&input, state, is_batched));
            let [hidden, cell] = begin;
            let (output, mut hidden, mut cell) = input.f_lstm(
                &[&hidden?, &cell?],
                &own.flat(),
                options.bias,
                options.num_layers,
                options.dropout,
                own.state.is_training(),
                options.bidirectional,
                options.batch_first,
            )?;
            let output = own.without_batch(output, &mut [&mut hidden, &mut cell], is_batched)?;
            Ok((output, (hidden, cell)))
        })
    }
}

impl Gru {
    /// Reads sequences, from a hidden state or from zeros. Returns the outputs and the last hidden state.
    ///
    /// # Shapes
    /// As [`Lstm::forward`].
    ///
    /// # Errors
    /// When the input or the state has another shape, dtype or device.
    pub fn forward(&self, input: &Tensor, state: Option<&Tensor>) -> Result<(Tensor, Tensor), NnError> {
        let (own, options) = (&self.0, &self.0.options);
        run(self, &own.state, || {
            let (input, is_batched) = own.batched(input)?;
            let hidden = own.begin(&input, state, is_batched)?;
            let (output, mut hidden) = input.f_gru(
                &hidden,
                &own.flat(),
                options.bias,
                options.num_layers,
                options.dropout,
                own.state.is_training(),
                options.bidirectional,
                options.batch_first,
            )?;
            let output = own.without_batch(output, &mut [&mut hidden], is_batched)?;
            Ok((output, hidden))
        })
    }
}
