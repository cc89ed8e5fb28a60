//! A tensor that several operators save is stored once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::saved_tensors::{Packed, SameTensor};
use tch::Tensor;

/// Operators that save one tensor follow each other closely, or save it again and again.
const REMEMBERED: usize = 64;

/// The tensors that were stored or asked for last.
#[derive(Default)]
pub(super) struct Seen(Mutex<VecDeque<(SameTensor, Weak<dyn Packed>)>>);

impl Seen {
    /// What was stored for the same tensor, or what `store` stores now.
    pub(super) fn or_store(
        &self,
        tensor: &Tensor,
        store: impl FnOnce() -> Result<Option<Arc<dyn Packed>>, BoxError>,
    ) -> Result<Option<Arc<dyn Packed>>, BoxError> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(known, stored): &(SameTensor, Weak<dyn Packed>)| known.is(tensor) && stored.strong_count() > 0;
        if let Some(at) = seen.iter().rposition(is_it)
            && let Some((known, stored)) = seen.remove(at)
            && let Some(found) = stored.upgrade()
        {
            seen.push_back((known, stored));
            return Ok(Some(found));
        }
        let stored = store()?;
        if let Some(stored) = &stored {
            if seen.len() == REMEMBERED {
                seen.pop_front();
            }
            seen.push_back((SameTensor::of(tensor)?, Arc::downgrade(stored)));
        }
        Ok(stored)
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    struct Nothing;

    impl Packed for Nothing {
        fn unpack(&self) -> Result<Tensor, BoxError> {
            Ok(Tensor::new())
        }
    }

    #[test]
    fn a_tensor_is_stored_once_as_long_as_it_is_the_same_and_somebody_keeps_it() {
        let (seen, mut x) = (Seen::default(), Tensor::rand([4], (Kind::Float, Device::Cpu)));
        let mut stored = 0;
        let mut store = |tensor: &Tensor| {
            let made = seen.or_store(tensor, || {
                stored += 1;
                Ok(Some(Arc::new(Nothing)))
            });
            (made.unwrap().unwrap(), stored)
        };
        let (first, count) = store(&x);
        assert_eq!(count, 1);
        let (again, count) = store(&x.shallow_clone());
        assert!(count == 1 && Arc::ptr_eq(&first, &again));
        assert_eq!(store(&x.narrow(0, 0, 2)).1, 2);
        let _ = x.zero_();
        assert_eq!(store(&x).1, 3, "it was changed");
        drop((first, again));
        assert_eq!(store(&x).1, 4, "nobody kept it");
    }

    #[test]
    fn a_tensor_that_is_saved_again_and_again_is_remembered() {
        let (seen, x) = (Seen::default(), Tensor::rand([4], (Kind::Float, Device::Cpu)));
        let store = |tensor: &Tensor| seen.or_store(tensor, || Ok(Some(Arc::new(Nothing)))).unwrap().unwrap();
        let (first, mut others) = (store(&x), Vec::new());
        for _ in 0..3 * REMEMBERED {
            let other = x.copy();
            others.push((store(&other), other));
            assert!(Arc::ptr_eq(&store(&x), &first));
        }
    }
}
