//! Functions with a backward pass of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use overdrive_nn::NnError;
use overdrive_nn::autograd::{BackwardContext, BoxError, Context, Function, backward, grad};
use tch::{Device, Kind, Tensor};

pub const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

pub fn param(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

pub fn list(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).view(-1)).unwrap()
}

/// `exp(x)`, from its own output.
struct Exp;

impl Function for Exp {
    type Inputs = Tensor;
    type Outputs = Tensor;

    fn forward(&mut self, ctx: &mut Context, x: &Tensor) -> Result<Tensor, BoxError> {
        let y = x.f_exp()?;
        ctx.save_for_backward([&y]);
        Ok(y)
    }

    fn backward(&self, ctx: &BackwardContext<'_>, grad: Tensor) -> Result<Option<Tensor>, BoxError> {
        let [y] = ctx.saved_tensors()?;
        Ok(Some(grad * y))
    }
}

/// `a * b` and `by * (a + b)`.
struct Both {
    by: f64,
}

impl Function for Both {
    type Inputs = [Tensor; 2];
    type Outputs = [Tensor; 2];

    fn forward(&mut self, ctx: &mut Context, [a, b]: [&Tensor; 2]) -> Result<[Tensor; 2], BoxError> {
        ctx.save_for_backward([a, b]);
        Ok([a.f_mul(b)?, a.f_add(b)? * self.by])
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        [product, sum]: [Tensor; 2],
    ) -> Result<[Option<Tensor>; 2], BoxError> {
        let [a, b] = ctx.saved_tensors()?;
        Ok([(&product * b, 0), (&product * a, 1)]
            .map(|(part, at)| ctx.needs_input_grad(at).then(|| part + &sum * self.by)))
    }
}

/// Functions that tests make of closures.
struct Made<F, B, const ONCE: bool = false> {
    forward: F,
    backward: B,
}

impl<F, B, const ONCE: bool> Function for Made<F, B, ONCE>
where
    F: FnMut(&mut Context, &[&Tensor]) -> Result<Vec<Tensor>, BoxError> + Send + Sync + 'static,
    B: Fn(&BackwardContext<'_>, Vec<Tensor>) -> Result<Vec<Option<Tensor>>, BoxError> + Send + Sync + 'static,
{
    type Inputs = Vec<Tensor>;
    type Outputs = Vec<Tensor>;

    const ONCE_DIFFERENTIABLE: bool = ONCE;

    fn forward(&mut self, ctx: &mut Context, inputs: Vec<&Tensor>) -> Result<Vec<Tensor>, BoxError> {
        (self.forward)(ctx, &inputs)
    }

    fn backward(&self, ctx: &BackwardContext<'_>, grads: Vec<Tensor>) -> Result<Vec<Option<Tensor>>, BoxError> {
        (self.backward)(ctx, grads)
    }
}

fn made<F, B>(forward: F, backward: B) -> Made<F, B>
where
    F: FnMut(&mut Context, &[&Tensor]) -> Result<Vec<Tensor>, BoxError>,
    B: Fn(&BackwardContext<'_>, Vec<Tensor>) -> Result<Vec<Option<Tensor>>, BoxError>,
{
    Made { forward, backward }
}

/// A backward pass that nobody runs.
fn never(_: &BackwardContext<'_>, _: Vec<Tensor>) -> Result<Vec<Option<Tensor>>, BoxError> {
    Err("no pass is expected".into())
}

/// Passes every gradient on.
fn pass_on(_: &BackwardContext<'_>, grads: Vec<Tensor>) -> Result<Vec<Option<Tensor>>, BoxError> {
    Ok(grads.into_iter().map(Some).collect())
}

#[test]
fn values_and_gradients_are_those_of_operators() {
    let (a, b) = (param(&[1.5, -2.0, 0.25]), param(&[0.5, 3.0, -1.0]));
    let values = |[product, sum]: [Tensor; 2]| {
        let loss = (&product * &product * &sum).sum(Kind::Double);
        let [da, db] = grad(&loss, [&a, &b]).create_graph(true).run().unwrap();
        let second = (&da * &da * &db).sum(Kind::Double);
        let [daa, dab] = grad(&second, [&a, &b]).run().unwrap();
        [product, sum, da, db, daa, dab].map(|it| list(&it))
    };
    assert_eq!(values(Both { by: 2.0 }.apply([&a, &b]).unwrap()), values([&a * &b, (&a + &b) * 2.0]));

    let x = param(&[0.1, -0.7]);
    let third = |y: Tensor| {
        let first = grad(&y.sum(Kind::Double), &x).create_graph(true).run().unwrap();
        let second = grad(&first.sum(Kind::Double), &x).create_graph(true).run().unwrap();
        list(&grad(&(&second * &second).sum(Kind::Double), &x).run().unwrap())
    };
    assert_eq!(third(Exp.apply(&x).unwrap()), third(x.exp()));
}

#[test]
fn nothing_is_recorded_without_need() {
    let x = param(&[1.0]);
    let held = Arc::new(());
    let keep = held.clone();
    let function = made(|_, inputs| Ok(vec![inputs[0] * 2.0]), move |_, _| Err(format!("{keep:?}").into()));
    let y = tch::no_grad(|| function.apply(vec![&x]).unwrap().remove(0));
    assert!(!y.requires_grad() && Arc::strong_count(&held) == 1);
    assert!(!Exp.apply(&Tensor::ones([1], DOUBLE)).unwrap().requires_grad());
    // Operators of `forward` are not recorded, and gradients are on again after it failed.
    let failing = made(
        |ctx, inputs| {
            assert!(ctx.needs_input_grad(0) && !ctx.needs_input_grad(1));
            assert!(!(inputs[0] * 2.0).requires_grad());
            Err("planted".into())
        },
        never,
    );
    let error = failing.apply(vec![&x]).unwrap_err();
    assert!(matches!(error, NnError::Function { .. }));
    assert_eq!(error.to_string(), "Made: planted");
    let panics = made(|_, _| panic!("planted"), never);
    let panic = catch_unwind(AssertUnwindSafe(|| panics.apply(vec![&x]).map(drop))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"planted"));
    assert!((&x * 2.0).requires_grad());
}

#[test]
fn failures_of_backward_come_out_of_the_pass() {
    let x = param(&[1.0, 2.0]);
    let double = |_: &mut Context, inputs: &[&Tensor]| Ok(vec![inputs[0] * 2.0]);
    let y = made(double, |_, _| Err("the planted reason".into())).apply(vec![&x]).unwrap().remove(0);
    let loss = y.sum(Kind::Double);
    assert!(loss.f_backward().unwrap_err().to_string().contains("the planted reason"));
    assert_eq!(grad(&loss, &x).run().unwrap_err().to_string(), "the planted reason");

    let y = made(double, |_, _| panic!("planted")).apply(vec![&x]).unwrap().remove(0);
    let loss = y.sum(Kind::Double);
    let panic = catch_unwind(AssertUnwindSafe(|| grad(&loss, &x).run().map(drop))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"planted"));
    let panic = catch_unwind(AssertUnwindSafe(|| backward(&loss).run())).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"planted"));
    assert!(loss.f_backward().unwrap_err().to_string().contains("planted"));

    let wrong = |made_grads: fn() -> Vec<Option<Tensor>>| {
        let y = made(double, move |_, _| Ok(made_grads())).apply(vec![&x]).unwrap().remove(0);
        grad(&y.sum(Kind::Double), &x).run().unwrap_err().to_string()
    };
    let expected = "function MadeBackward returned an incorrect number of gradients (expected 1, got 0)";
    assert_eq!(wrong(Vec::new), expected);
    let shape = wrong(|| vec![Some(Tensor::ones([3], DOUBLE))]);
    let expected =
        "Function MadeBackward returned an invalid gradient at index 0 - got [3] but expected shape compatible";
    assert!(shape.starts_with(expected), "{shape}");
    // Another dtype is converted, as for operators.
    let single = made(double, |_, _| Ok(vec![Some(Tensor::ones([2], (Kind::Float, Device::Cpu)))]));
    let y = single.apply(vec![&x]).unwrap().remove(0);
    assert_eq!(grad(&y.sum(Kind::Double), &x).run().unwrap().kind(), Kind::Double);
}

#[test]
fn saved_tensors_that_are_changed_or_freed_are_errors() {
    let x = param(&[1.0, 2.0]);
    let mut y = Exp.apply(&x).unwrap();
    let loss = y.sum(Kind::Double);
    let _ = y.g_add_scalar_(1.0);
    let error = grad(&loss, &x).retain_graph(true).run().unwrap_err().to_string();
    let expected = "one of the variables needed for gradient computation has been modified by an inplace operation: \
                    [CPUDoubleType [2]], which is output 0 of ExpBackward, is at version 1; expected version 0 \
                    instead.";
    assert!(error.starts_with(expected), "{error}");

    let loss = Exp.apply(&x).unwrap().sum(Kind::Double);
    drop(grad(&loss, &x).run().unwrap());
    let error = grad(&loss, &x).run().unwrap_err().to_string();
    assert!(error.starts_with("Trying to backward through the graph a second time"), "{error}");

    let takes_two = made(
        |ctx, inputs| {
            ctx.save_for_backward(inputs.iter().copied());
            Ok(vec![inputs[0] * 2.0])
        },
        |ctx, _| {
            assert_eq!(ctx.saved_list()?.len(), 1);
            let [_a, _b] = ctx.saved_tensors()?;
            Ok(Vec::new())
        },
    );
    let y = takes_two.apply(vec![&x]).unwrap().remove(0);
    let error = grad(&y.sum(Kind::Double), &x).run().unwrap_err().to_string();
    assert_eq!(error, "saved tensors: 2 are asked for, but there are 1");
}

#[test]
fn the_graph_frees_functions_and_saved_tensors() {
    let (x, held) = (param(&[1.0, 2.0]), Arc::new(()));
    let function = || {
        let keep = held.clone();
        made(
            |ctx, inputs| {
                let (y, between) = (inputs[0] * 2.0, inputs[0] * 3.0);
                ctx.save_for_backward([inputs[0], &y, &between]);
                Ok(vec![y])
            },
            move |ctx, grads| {
                assert!(Arc::strong_count(&keep) > 1);
                let [_x, y, _between] = ctx.saved_tensors()?;
                // An output comes back with its place in the graph.
                assert!(y.requires_grad() && !y.is_leaf());
                Ok(vec![Some(&grads[0] * 2.0)])
            },
        )
    };
    for create_graph in [false, true] {
        let y = function().apply(vec![&x]).unwrap().remove(0);
        let z = function().apply(vec![&y]).unwrap().remove(0);
        assert_eq!(Arc::strong_count(&held), 3);
        drop(grad(&z.sum(Kind::Double), &x).create_graph(create_graph).run().unwrap());
        drop((y, z));
        assert_eq!(Arc::strong_count(&held), 1);
    }
    drop(function().apply(vec![&x]).unwrap());
    assert_eq!(Arc::strong_count(&held), 1, "without a pass");
}

#[test]
fn gradients_of_unused_outputs_are_zeros_or_undefined() {
    let x = param(&[1.0, 2.0]);
    for materialize in [true, false] {
        let function = made(
            move |ctx, inputs| {
                ctx.set_materialize_grads(materialize);
                let top = inputs[0].argmax(0, false);
                ctx.mark_non_differentiable([&top]);
                Ok(vec![inputs[0] * 2.0, inputs[0] * 3.0, top])
            },
            move |_, grads| {
                assert!(grads[0].defined() && grads[0].double_value(&[0]) == 1.0);
                assert_eq!(grads[1..].iter().map(Tensor::defined).collect::<Vec<_>>(), [materialize; 2]);
                if materialize {
                    assert_eq!((list(&grads[1]), list(&grads[2])), (vec![0.0; 2], vec![0.0]));
                }
                Ok(vec![Some(&grads[0] * 2.0)])
            },
        );
        let outputs = function.apply(vec![&x]).unwrap();
        assert_eq!(outputs.iter().map(Tensor::requires_grad).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(list(&grad(&outputs[0].sum(Kind::Double), &x).run().unwrap()), [2.0, 2.0]);
    }
    // A floating-point output that is marked has no gradient either.
    let marked = made(
        |ctx, inputs| {
            let outputs = vec![inputs[0] * 2.0, inputs[0] * 3.0];
            ctx.mark_non_differentiable([&outputs[1]]);
            Ok(outputs)
        },
        pass_on,
    );
    assert!(!marked.apply(vec![&x]).unwrap()[1].requires_grad());
}

#[test]
fn needs_input_grad_is_about_this_pass() {
    let [a, b] = [param(&[1.0]), param(&[2.0])];
    let function = || {
        let product = |ctx: &mut Context, inputs: &[&Tensor]| {
            assert!(ctx.needs_input_grad(0) && ctx.needs_input_grad(1) && !ctx.needs_input_grad(2));
            Ok(vec![inputs[0] * inputs[1]])
        };
        made(product, |ctx, grads| {
            let of = |at: usize| ctx.needs_input_grad(at).then(|| grads[0].shallow_clone());
            Ok(vec![of(0), of(1), of(2)])
        })
    };
    let constant = Tensor::ones([1], DOUBLE);
    let y = function().apply(vec![&a, &b, &constant]).unwrap().remove(0);
    assert_eq!(list(&grad(&y, &b).retain_graph(true).run().unwrap()), [1.0]);
    assert_eq!(grad(&y, [&a, &b]).run().unwrap().map(|it| list(&it)), [[1.0], [1.0]]);
}

#[test]
fn once_differentiable_refuses_a_second_derivative() {
    let x = param(&[1.0, 2.0]);
    let square = |_: &mut Context, inputs: &[&Tensor]| Ok(vec![inputs[0] * inputs[0]]);
    let held = x.copy().detach();
    let twice = std::sync::Mutex::new(held);
    let doubles = move |_: &BackwardContext<'_>, grads: Vec<Tensor>| {
        let y = &grads[0] * 2.0;
        assert!(!y.requires_grad(), "nothing is recorded");
        Ok(vec![Some(&grads[0] * 2.0 * &*twice.lock().unwrap())])
    };
    let y = Made::<_, _, true> { forward: square, backward: doubles }.apply(vec![&x]).unwrap().remove(0);
    let loss = (&y * &y).sum(Kind::Double);
    assert_eq!(list(&grad(&loss, &x).retain_graph(true).run().unwrap()), [4.0, 32.0]);
    let first = grad(&loss, &x).create_graph(true).run().unwrap();
    assert_eq!(list(&first), [4.0, 32.0]);
    let error = backward(&first.sum(Kind::Double)).run().unwrap_err().to_string();
    assert_eq!(error, "trying to differentiate twice a function that was marked with @once_differentiable");
}

#[test]
fn inputs_can_be_returned_or_changed_in_place() {
    let x = param(&[1.0, 2.0]);
    // Returned unchanged: another tensor with the same memory.
    let y = made(|_, inputs| Ok(vec![inputs[0].shallow_clone()]), pass_on).apply(vec![&x]).unwrap().remove(0);
    assert!(y.data_ptr() == x.data_ptr() && !y.is_leaf() && x.is_leaf());
    assert_eq!(list(&grad(&y.sum(Kind::Double), &x).run().unwrap()), [1.0, 1.0]);

    let triple_in_place = || {
        made(
            |ctx, inputs| {
                let mut x = inputs[0].shallow_clone();
                let x = x.f_mul_(&Tensor::from(3.0))?;
                ctx.mark_dirty([&x]);
                Ok(vec![x])
            },
            |_, grads| Ok(vec![Some(&grads[0] * 3.0)]),
        )
    };
    let y = &x * &x;
    let z = triple_in_place().apply(vec![&y]).unwrap().remove(0);
    assert_eq!((z.data_ptr(), list(&y)), (y.data_ptr(), vec![3.0, 12.0]));
    assert_eq!(list(&grad(&y.sum(Kind::Double), &x).run().unwrap()), [6.0, 12.0], "y itself has the new history");
    // A view of a tensor: the tensor's history changes, too.
    let y = &x * &x;
    triple_in_place().apply(vec![&y.narrow(0, 1, 1)]).unwrap();
    assert_eq!(list(&grad(&y.sum(Kind::Double), &x).run().unwrap()), [2.0, 12.0]);

    let error = triple_in_place().apply(vec![&param(&[1.0])]).unwrap_err().to_string();
    assert_eq!(error, "a leaf Variable that requires grad has been used in an in-place operation.");
    let lost = made(
        |ctx, inputs| {
            ctx.mark_dirty([inputs[0]]);
            Ok(vec![inputs[0] * 2.0])
        },
        never,
    );
    let error = lost.apply(vec![&(&x * 2.0)]).unwrap_err().to_string();
    assert!(error.contains("must all be outputs of the Function"), "{error}");
}
