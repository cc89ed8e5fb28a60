//! Averages of weights, as a training step keeps them.

use overdrive_ffi::TensorId;

use crate::optimizer::OptimizerError;

/// Averages of a model's weights that follow the weights after each step of the optimizer. The methods besides
/// [`update`](Self::update) tell compiled code how to make the same updates.
pub trait Averages {
    /// Identifies the averages by one of their tensors, which stay the same. None if there are no weights.
    fn id(&self) -> Option<TensorId>;

    /// Moves the averages towards the weights.
    ///
    /// # Errors
    /// When the weights are not the trained ones, or libtorch fails.
    fn update(&mut self) -> Result<(), OptimizerError>;

    /// How far the next update moves them: by this fraction of the difference. At 1 it copies the weights.
    fn next_weight(&self) -> f64;

    /// Counts an update that was made without [`update`](Self::update).
    fn count_update(&mut self);
}
