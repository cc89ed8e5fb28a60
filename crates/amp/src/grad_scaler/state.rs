//! Saves and loads the scaler's state.

use overdrive_core::{Entry, StateDict, StateError, Stateful};

use super::GradScaler;
use crate::error::AmpError;
use crate::scaler_options::GradScalerBuilder;

/// PyTorch's entries: `scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `_growth_tracker`; none when
/// disabled. Taking the state waits for the device.
impl Stateful for GradScaler {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        if !self.options.enabled {
            return Ok(state);
        }
        state.insert("scale", Entry::Float(self.scale_value().map_err(to_state_error)?));
        state.insert("growth_factor", Entry::Float(self.options.growth_factor));
        state.insert("backoff_factor", Entry::Float(self.options.backoff_factor));
        state.insert("growth_interval", Entry::Int(self.options.growth_interval));
        state.insert("_growth_tracker", Entry::Int(self.growth_tracker().map_err(to_state_error)?));
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        if !self.options.enabled {
            return Ok(());
        }
        if state.is_empty() {
            return Err(to_state_error(AmpError::EmptyState));
        }
        state.refuse_unknown(&["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])?;
        let options = GradScalerBuilder {
            init_scale: state.float("scale")?,
            growth_factor: state.float("growth_factor")?,
            backoff_factor: state.float("backoff_factor")?,
            growth_interval: state.int("growth_interval")?,
            ..self.options
        };
        // Many bad steps in a row can back a scale off to 0, so 0 is a valid saved scale.
        if !(options.init_scale >= 0.0 && (options.init_scale as f32).is_finite()) {
            return Err(StateError::Mismatch {
                key: "scale".to_owned(),
                expected: "at least 0 and finite as a float32".to_owned(),
                found: options.init_scale.to_string(),
            });
        }
        options.check_factors().map_err(to_state_error)?;
        let growth_tracker = state.int("_growth_tracker")?;
        if !(0..=i64::from(i32::MAX)).contains(&growth_tracker) {
            return Err(StateError::Mismatch {
                key: "_growth_tracker".to_owned(),
                expected: "a count of steps that fits an int32".to_owned(),
                found: growth_tracker.to_string(),
            });
        }
        *self = Self { init_growth_tracker: growth_tracker, ..Self::from_options(options) };
        Ok(())
    }
}

fn to_state_error(error: AmpError) -> StateError {
    match error {
        AmpError::State(error) => error,
        AmpError::Torch(error) => StateError::Torch(error),
        other => StateError::Mismatch {
            key: "GradScaler".to_owned(),
            expected: "the state of an enabled GradScaler".to_owned(),
            found: other.to_string(),
        },
    }
}
