//! What functions and gradients of chosen tensors allow and refuse.

use overdrive_ffi::autocast::{Region, State};
use overdrive_nn::NnError;
use overdrive_nn::autograd::{BackwardContext, BoxError, Context, CustomFwd, Function, Tensors, backward, grad};
use tch::{Device, Kind, Tensor};

use crate::function::*;

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

#[test]
fn unused_inputs_are_an_error_none_or_zeros() {
    let [x, w] = [param(&[1.0]), param(&[2.0, 3.0])];
    let y = &x * 2.0;
    let unused = "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True \
                  if this is the desired behavior.";
    assert_eq!(grad(&y, [&x, &w]).retain_graph(true).run().unwrap_err().to_string(), unused);
    let [dx, dw] = grad(&y, [&x, &w]).retain_graph(true).allow_unused().run().unwrap();
    assert!(dx.is_some() && dw.is_none());
    let [_, dw] = grad(&y, [&x, &w]).retain_graph(true).run_with_zeros().unwrap();
    assert_eq!(list(&dw), [0.0, 0.0]);

    let refused = |error: NnError| error.to_string();
    let not_scalar = refused(grad(&(&w * 2.0), &w).run().unwrap_err());
    assert_eq!(not_scalar, "grad can be implicitly created only for scalar outputs");
    let no_grad = refused(grad(&Tensor::ones([1], DOUBLE), &x).run().unwrap_err());
    assert_eq!(no_grad, "element 0 of tensors does not require grad and does not have a grad_fn");
    let input = refused(grad(&y, &Tensor::ones([1], DOUBLE)).run().unwrap_err());
    assert_eq!(input, "One of the differentiated Tensors does not require grad");
    let shape = refused(grad(&y, &x).grad_outputs([&w]).run().unwrap_err());
    let expected = "Mismatch in shape: grad_output[0] has a shape of torch.Size([2]) and output[0] has a shape of torch.Size([1]).";
    assert_eq!(shape, expected);

    let outputs = [&(&x * 2.0), &(&w * &x)];
    let ones = Tensor::ones([2], DOUBLE);
    let [dx] = grad(outputs, [&x]).grad_outputs([None, Some(&ones)]).run().unwrap();
    assert_eq!(list(&dx), [7.0]);
    let all: Vec<Tensor> = grad(vec![&(&x * &x)], vec![&x]).run().unwrap();
    assert_eq!(list(&all[0]), [2.0]);
}

#[test]
fn backward_adds_to_the_gradients_of_leaves() {
    let [a, b] = [param(&[1.0, 2.0]), param(&[3.0, 4.0])];
    let [y, z] = [&a * &b, &a + &b];
    let ones = Tensor::ones([2], DOUBLE);
    backward(&y).grad_tensors([&ones]).retain_graph(true).run().unwrap();
    backward([&y, &z]).grad_tensors([&ones, &ones]).run().unwrap();
    assert_eq!([list(&a.grad()), list(&b.grad())], [[7.0, 9.0], [3.0, 5.0]]);
    let error = backward(&(&a * 2.0)).run().unwrap_err().to_string();
    assert_eq!(error, "grad can be implicitly created only for scalar outputs");
    backward(&(&a * &a).sum(Kind::Double)).create_graph(true).run().unwrap();
    assert!(a.grad().requires_grad());
}

/// `u_xx` of a small network: the loss of a differential equation.
#[test]
fn second_derivatives_of_a_network_train_it() {
    tch::manual_seed(0);
    let weights = [[1, 8], [8, 8], [8, 1]].map(|size| Tensor::randn(size, DOUBLE).set_requires_grad(true));
    let x = Tensor::linspace(-1.0, 1.0, 6, DOUBLE).view([6, 1]).set_requires_grad(true);
    let network = |x: &Tensor| x.matmul(&weights[0]).tanh().matmul(&weights[1]).tanh().matmul(&weights[2]);
    let residual = |x: &Tensor| {
        let u = network(x);
        let ux = grad(&u.sum(Kind::Double), x).create_graph(true).run().unwrap();
        let uxx = grad(&ux.sum(Kind::Double), x).create_graph(true).run().unwrap();
        (&uxx + &u).square().mean(Kind::Double)
    };
    backward(&residual(&x)).run().unwrap();
    // The derivative by one weight, by differences.
    let eps = 1e-6;
    let moved = |by: f64| {
        let _ = tch::no_grad(|| weights[1].get(2).get(3).f_add_(&Tensor::from(by)).unwrap());
        residual(&x).double_value(&[])
    };
    let numerical = (moved(eps) - moved(-2.0 * eps)) / (2.0 * eps);
    let analytical = weights[1].grad().double_value(&[2, 3]);
    assert!((numerical - analytical).abs() < 1e-6 * (1.0 + analytical.abs()), "{numerical} {analytical}");
}

/// A matrix product under autocast.
struct Product<const CAST: bool>;

impl<const CAST: bool> Function for Product<CAST> {
    type Inputs = [Tensor; 2];
    type Outputs = Tensor;

    const CUSTOM_FWD: Option<CustomFwd> = Some(match CAST {
        true => CustomFwd::new(Device::Cpu).cast_inputs(Kind::Float),
        false => CustomFwd::new(Device::Cpu),
    });

    fn forward(&mut self, ctx: &mut Context, [a, b]: [&Tensor; 2]) -> Result<Tensor, BoxError> {
        ctx.save_for_backward([a, b]);
        Ok(a.f_matmul(b)?)
    }

    fn backward(&self, ctx: &BackwardContext<'_>, grad: Tensor) -> Result<[Option<Tensor>; 2], BoxError> {
        let [a, b] = ctx.saved_tensors()?;
        let gradients = [grad.f_matmul(&b.tr())?, a.tr().f_matmul(&grad)?];
        let expected = if CAST { Kind::Float } else { grad.kind() };
        assert!(gradients.iter().all(|it| it.kind() == expected));
        Ok(gradients.map(Some))
    }
}

#[test]
fn backward_has_the_autocast_state_of_forward() {
    let options = (Kind::Float, Device::Cpu);
    let [a, b] = [0, 1].map(|_| Tensor::rand([3, 3], options).set_requires_grad(true));
    let on = State { enabled: true, kind: Kind::BFloat16, cache_enabled: true };
    let half = a.to_kind(Kind::BFloat16);
    let (casting, same, product) = {
        let _region = Region::enter(Device::Cpu, on).unwrap();
        (Product::<true>.apply([&half, &b]), Product::<false>.apply([&a, &b]), a.matmul(&b))
    };
    let (casting, same) = (casting.unwrap(), same.unwrap());
    assert_eq!((casting.kind(), same.kind()), (Kind::Float, Kind::BFloat16));
    assert_eq!(list(&same), list(&product));
    // Outside of the region, the same operators as inside: bfloat16, or float32.
    let [da, db] = grad(&same.sum(Kind::Float), [&a, &b]).run().unwrap();
    let [ea, eb] = grad(&product.sum(Kind::Float), [&a, &b]).run().unwrap();
    assert_eq!([list(&da), list(&db)], [list(&ea), list(&eb)]);
    // Inside of a region, float32 all the same.
    let _region = Region::enter(Device::Cpu, on).unwrap();
    let [_, db] = grad(&casting.sum(Kind::Float), [&a, &b]).run().unwrap();
    assert_eq!(db.kind(), Kind::Float);
    drop(_region);
    // Without autocast, inputs are not converted.
    assert_eq!(Product::<true>.apply([&half, &b.to_kind(Kind::BFloat16)]).unwrap().kind(), Kind::BFloat16);
}

/// The forms of inputs are those that a signature says.
#[test]
fn forms_are_kept() {
    fn form<T: Tensors>(_: &T) -> std::any::TypeId
    where
        T::Of<u8>: 'static,
    {
        std::any::TypeId::of::<T::Of<u8>>()
    }
    let x = Tensor::from(1.0);
    let found = [form(&x), form(&&x), form(&[&x, &x]), form(&vec![&x])];
    let expected = [
        std::any::TypeId::of::<u8>(),
        std::any::TypeId::of::<u8>(),
        std::any::TypeId::of::<[u8; 2]>(),
        std::any::TypeId::of::<Vec<u8>>(),
    ];
    assert_eq!(found, expected);
}
