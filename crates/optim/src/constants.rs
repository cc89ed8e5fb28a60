//! Numbers of a step that are the same in each step, kept on the parameters' device.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use overdrive_core::TorchError;
use overdrive_ffi::upload;
use tch::{Device, Tensor};

/// How many vectors are kept: parameters whose gradients come and go have several.
const MOST: usize = 8;

/// Vectors of numbers on a device, each uploaded once. Steps on several streams have to be ordered, as for an optimizer's
/// state.
#[derive(Debug, Default)]
pub struct Constants(Mutex<VecDeque<Known>>);

#[derive(Debug)]
struct Known {
    device: Device,
    numbers: Vec<f64>,
    tensor: Tensor,
}

impl Constants {
    /// The numbers as a float64 vector.
    ///
    /// # Syncs
    /// None.
    pub(crate) fn on(&self, device: Device, numbers: &[f64]) -> Result<Tensor, TorchError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.iter().find(|known| known.device == device && known.numbers == numbers) {
            return Ok(known.tensor.shallow_clone());
        }
        let tensor = upload(&Tensor::from_slice(numbers), device)?;
        if known.len() == MOST {
            known.pop_front();
        }
        known.push_back(Known { device, numbers: numbers.to_vec(), tensor: tensor.shallow_clone() });
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_uploaded_once() {
        let constants = Constants::default();
        let on = |numbers: &[f64]| {
            let tensor = constants.on(Device::Cpu, numbers).unwrap();
            (Vec::<f64>::try_from(&tensor).unwrap(), tensor.data_ptr() as usize)
        };
        let first = on(&[1.0, 2.0]);
        assert_eq!((first.0.as_slice(), on(&[1.0, 2.0]).1), ([1.0, 2.0].as_slice(), first.1));
        assert_eq!(on(&[1.0, 3.0]).0, [1.0, 3.0]);
        assert_eq!((on(&[1.0]).0, on(&[1.0, 2.0]).1), (vec![1.0], first.1));
        (0..MOST).for_each(|at| assert_eq!(on(&[at as f64]).0, [at as f64]));
        assert_eq!(on(&[1.0, 2.0]).0, [1.0, 2.0]);
    }
}
