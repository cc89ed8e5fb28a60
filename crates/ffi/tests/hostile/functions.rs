//! Functions whose backward passes panic, run passes, are dropped during one, or return the wrong gradients.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use overdrive_ffi::Error;
use overdrive_ffi::autograd::{Backward, BoxError, Call, GradOptions, Pass, grad};
use tch::{Kind, Tensor};

use super::{FLOAT, ends};

/// A backward pass that is a closure.
struct Closure<F>(F);

impl<F> Backward for Closure<F>
where
    F: Fn(&Pass<'_>, Vec<Tensor>) -> Result<Vec<Tensor>, BoxError> + Send + Sync,
{
    fn backward(&self, pass: &Pass<'_>, grads: Vec<Tensor>) -> Result<Vec<Tensor>, BoxError> {
        (self.0)(pass, grads)
    }
}

fn call<'a>(inputs: &'a [&'a Tensor]) -> Call<'a> {
    Call {
        name: "Test",
        materialize_grads: true,
        once_differentiable: false,
        inputs,
        saved: &[],
        dirty: &[],
        non_differentiable: &[],
    }
}

/// The outputs as if they were computed from the inputs.
fn record<F>(inputs: &[&Tensor], outputs: &[Tensor], backward: F) -> Result<Vec<Tensor>, Error>
where
    F: Fn(&Pass<'_>, Vec<Tensor>) -> Result<Vec<Tensor>, BoxError> + Send + Sync + 'static,
{
    call(inputs).record(outputs, Box::new(Closure(backward)))
}

fn param() -> Tensor {
    Tensor::ones([2], FLOAT).set_requires_grad(true)
}

fn data() -> Tensor {
    Tensor::ones([2], FLOAT)
}

const KEEP: GradOptions = GradOptions { retain_graph: true, create_graph: false, allow_unused: false };

fn ones(tensors: &[&Tensor]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.ones_like()).collect()
}

fn panic_text(run: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    panic.downcast_ref::<&str>().map(ToString::to_string).or_else(|| panic.downcast_ref::<String>().cloned()).unwrap()
}

#[test]
fn a_panic_is_resumed_by_grad_and_an_error_of_other_passes() {
    ends(|| {
        let x = param();
        let y = record(&[&x], &[data()], |_, _| panic!("planted")).unwrap().remove(0);
        let text = panic_text(|| drop(grad(&[&y], &[&x], &ones(&[&y]), KEEP)));
        assert_eq!(text, "planted");
        let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
        assert!(error.contains("planted"), "{error}");
        // Passes work as before.
        x.sum(Kind::Float).backward();
        assert_eq!(x.grad().double_value(&[0]), 1.0);
    });
}

struct Loud(Arc<AtomicUsize>);

impl Drop for Loud {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("planted in drop");
    }
}

#[derive(Debug)]
struct Unprintable;

impl fmt::Display for Unprintable {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("planted in fmt")
    }
}

impl std::error::Error for Unprintable {}

#[test]
fn what_panics_when_it_is_dropped_or_printed_is_dropped_once() {
    ends(|| {
        let (x, drops) = (param(), Arc::new(AtomicUsize::new(0)));
        let held = Loud(drops.clone());
        let y = record(&[&x], &[data()], move |_, _| Err(held.0.load(Ordering::SeqCst).to_string().into()));
        drop(y.unwrap());
        assert_eq!(drops.load(Ordering::SeqCst), 1, "with the graph");
        // Nothing is recorded without gradients.
        let held = Loud(drops.clone());
        record(&[&data()], &[data()], move |_, _| panic!("{}", held.0.load(Ordering::SeqCst))).unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 2, "at once");

        let y = record(&[&x], &[data()], |_, _| Err(Box::new(Unprintable))).unwrap().remove(0);
        assert_eq!(panic_text(|| drop(grad(&[&y], &[&x], &ones(&[&y]), KEEP))), "planted in fmt");
        let count = drops.clone();
        let y = record(&[&x], &[data()], move |_, _| std::panic::panic_any(Loud(count.clone()))).unwrap().remove(0);
        assert!(y.sum(Kind::Float).f_backward().is_err());
        assert_eq!(drops.load(Ordering::SeqCst), 3, "what it panicked with");
    });
}

#[test]
fn the_wrong_gradients_are_refused_by_name() {
    ends(|| {
        let (x, absent) = (param(), Tensor::new());
        let refused = |inputs: &[&Tensor], made: fn() -> Vec<Tensor>| {
            let y = record(inputs, &[data()], move |_, _| Ok(made())).unwrap().remove(0);
            grad(&[&y], &[&x], &ones(&[&y]), GradOptions::default()).unwrap_err().to_string()
        };
        let count = "function TestBackward returned an incorrect number of gradients";
        assert_eq!(refused(&[&x], Vec::new), format!("{count} (expected 1, got 0)"));
        assert_eq!(refused(&[&x], || vec![data(), data()]), format!("{count} (expected 1, got 2)"));
        let shape = refused(&[&x], || vec![Tensor::ones([3], FLOAT)]);
        let begin = "Function TestBackward returned an invalid gradient at index 0 - got [3]";
        assert!(shape.starts_with(begin), "{shape}");
        let of_nothing = refused(&[&absent, &x], || vec![data(), data()]);
        assert!(
            of_nothing.contains("TestBackward returned a gradient different than None at position 1"),
            "{of_nothing}"
        );
        // More than there are inputs, all absent, is allowed, as in Python.
        let y = record(&[&x], &[data()], |_, _| Ok(vec![data() * 3, Tensor::new()])).unwrap().remove(0);
        let found = grad(&[&y], &[&x], &ones(&[&y]), GradOptions::default()).unwrap();
        assert_eq!(found[0].double_value(&[1]), 3.0);
    });
}

#[test]
fn undefined_repeated_and_missing_tensors_are_accepted_or_refused() {
    ends(|| {
        let (x, absent) = (param(), Tensor::new());
        let backward = |_: &Pass<'_>, grads: Vec<Tensor>| Ok(vec![grads[1].shallow_clone(), Tensor::new()]);
        let outputs = record(&[&x, &absent], &[Tensor::new(), data()], backward).unwrap();
        assert!(!outputs[0].defined() && outputs[1].requires_grad());
        grad(&[&outputs[1]], &[&x], &ones(&[&x]), KEEP).unwrap();

        // One tensor for both outputs, and one for both inputs.
        let twice = data();
        let sum = |_: &Pass<'_>, grads: Vec<Tensor>| Ok(vec![&grads[0] + &grads[1], Tensor::new()]);
        let outputs = record(&[&x, &x], &[twice.shallow_clone(), twice], sum).unwrap();
        let total = &outputs[0] + &outputs[1];
        assert_eq!(grad(&[&total], &[&x], &ones(&[&x]), KEEP).unwrap()[0].double_value(&[0]), 2.0);

        assert!(record(&[], &[data()], |_, _| Ok(Vec::new())).is_ok());
        assert!(record(&[&x], &[], |_, _| Ok(Vec::new())).unwrap().is_empty());
        let named = Call { name: "a\0b", ..call(&[]) };
        assert!(named.record(&[], Box::new(Closure(|_: &Pass<'_>, grads| Ok(grads)))).is_err());

        let y = &x * 2;
        let none: [&Tensor; 0] = [];
        let refused = |outputs: &[&Tensor], inputs: &[&Tensor], grads: &[Tensor]| {
            grad(outputs, inputs, grads, KEEP).unwrap_err().to_string()
        };
        assert!(refused(&none, &[&x], &[]).contains("non-empty outputs"));
        assert!(refused(&[&y], &none, &[]).contains("non-empty inputs"));
        assert!(refused(&[&absent], &[&x], &[]).contains("undefined"));
        assert!(refused(&[&y], &[&absent], &[]).contains("undefined"));
        assert_eq!(refused(&[&y], &[&x], &ones(&[&y, &y])), "got 1 tensors and 2 gradients");
        assert!(!x.grad().defined(), "no gradient is accumulated");
    });
}

#[test]
fn saved_tensors_are_freed_by_a_pass_and_refused_after_it() {
    ends(|| {
        let x = param();
        let backward = |pass: &Pass<'_>, grads: Vec<Tensor>| Ok(vec![&grads[0] * &pass.saved_tensors()?[0]]);
        let (inputs, saved) = ([&x], [x.shallow_clone(), Tensor::new()]);
        let call = Call { saved: &saved, ..call(&inputs) };
        let y = call.record(&[data()], Box::new(Closure(backward))).unwrap().remove(0);
        grad(&[&y], &[&x], &ones(&[&x]), KEEP).unwrap();
        grad(&[&y], &[&x], &ones(&[&x]), GradOptions::default()).unwrap();
        let again = grad(&[&y], &[&x], &ones(&[&x]), KEEP).unwrap_err().to_string();
        assert!(again.starts_with("Trying to backward through the graph a second time"), "{again}");
    });
}

#[test]
fn a_backward_pass_may_run_a_pass_over_its_own_graph() {
    ends(|| {
        let (x, depth) = (param(), Arc::new(AtomicUsize::new(0)));
        let (own, inner_x) = (Arc::new(Mutex::new(None::<Tensor>)), Mutex::new(x.shallow_clone()));
        let (slot, calls) = (own.clone(), depth.clone());
        let backward = move |pass: &Pass<'_>, grads: Vec<Tensor>| {
            assert!(pass.needs_input_grad(0)? && !pass.needs_input_grad(7)?);
            if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                let (y, x) = (slot.lock().unwrap().take().unwrap(), inner_x.lock().unwrap().shallow_clone());
                // The last handle of the output is dropped here, within the pass.
                return Ok(grad(&[&y], &[&x], &ones(&[&y]), KEEP)?);
            }
            Ok(vec![&grads[0] * 5])
        };
        let y = record(&[&x], &[data()], backward).unwrap().remove(0);
        let total = y.sum(Kind::Float);
        *own.lock().unwrap() = Some(y);
        total.backward();
        assert_eq!((x.grad().double_value(&[0]), depth.load(Ordering::SeqCst)), (5.0, 2));
    });
}

#[test]
fn threads_run_passes_over_one_graph() {
    ends(|| {
        let x = param();
        let backward = |pass: &Pass<'_>, grads: Vec<Tensor>| Ok(vec![&grads[0] * &pass.saved_tensors()?[0]]);
        let (inputs, saved) = ([&x], [x.shallow_clone()]);
        let call = Call { saved: &saved, ..call(&inputs) };
        let y = call.record(&[data()], Box::new(Closure(backward))).unwrap().remove(0);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (y, x) = (y.shallow_clone(), x.shallow_clone());
                std::thread::spawn(move || {
                    for round in 0..200 {
                        // The last one frees what is saved, while others may read it.
                        let options = GradOptions { retain_graph: round < 199, ..KEEP };
                        if let Err(error) = grad(&[&y], &[&x], &ones(&[&x]), options) {
                            assert!(error.message().starts_with("Trying to backward"), "{error}");
                            return false;
                        }
                    }
                    true
                })
            })
            .collect();
        drop(y);
        let whole: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(whole.contains(&true));
    });
}

#[test]
fn a_long_chain_of_functions_is_run_and_freed_without_recursion() {
    ends(|| {
        let x = param();
        let mut y = x.shallow_clone();
        for _ in 0..20_000 {
            let (inputs, saved) = ([&y], [y.shallow_clone()]);
            let pass_on = Closure(|_: &Pass<'_>, grads| Ok(grads));
            let next = Call { saved: &saved, ..call(&inputs) }.record(&[data()], Box::new(pass_on)).unwrap().remove(0);
            y = next;
        }
        assert_eq!(grad(&[&y], &[&x], &ones(&[&x]), KEEP).unwrap()[0].double_value(&[0]), 1.0);
        drop(y);
    });
}
