//! When a window's counts are summed over ranks.

use std::cell::RefCell;
use std::rc::Rc;

use overdrive_accum::{Accumulator, Samples};
use overdrive_core::{AveragedBy, GradientSync, PendingSum, SyncError};
use tch::{Kind, Tensor};

use super::{CPU, Params, loss, model};

/// The only rank, which notes what is asked of it.
#[derive(Clone, Default)]
struct Noting(Rc<RefCell<Vec<&'static str>>>);

impl GradientSync for Noting {
    fn world_size(&self) -> usize {
        1
    }

    fn averaged_by(&self) -> AveragedBy {
        AveragedBy::Backward
    }

    fn hold_back(&self, _hold: bool) -> Result<(), SyncError> {
        Ok(())
    }

    fn close_with_nothing(&self) -> Result<(), SyncError> {
        Ok(())
    }

    fn backward(&self, loss: &Tensor) -> Result<(), SyncError> {
        self.0.borrow_mut().push("backward");
        loss.backward();
        Ok(())
    }

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        self.0.borrow_mut().push("sum");
        Ok(value)
    }

    fn start_sum(&self, value: f64) -> Result<PendingSum, SyncError> {
        let noted = Rc::clone(&self.0);
        noted.borrow_mut().push("begins");
        Ok(Box::new(move || {
            noted.borrow_mut().push("waits");
            Ok(value)
        }))
    }
}

#[test]
fn the_sum_of_counts_begins_before_backward_and_is_waited_for_after_it() {
    let (vs, model) = model();
    let (opt, noting) = (Params::new(&vs.trainable_variables()), Noting::default());
    let mut accum = Accumulator::new(2).unwrap().with_sync(noting.clone());
    let batch = Tensor::randn([2, 5], (Kind::Float, CPU));
    for window in 0..2 {
        for closes in [false, true] {
            accum.backward(&opt, &loss(&model, &batch), Samples(2), closes).unwrap();
        }
        // The first window's reference is a sum of its own.
        let first: &[&str] = if window == 0 { &["sum"] } else { &[] };
        assert_eq!(noting.0.take(), [first, &["backward", "begins", "backward", "waits"]].concat(), "window {window}");
    }
}
