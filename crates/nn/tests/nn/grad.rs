//! Gradients of chosen tensors, and of all leaves.

use overdrive_nn::NnError;
use overdrive_nn::autograd::{Tensors, backward, grad};
use tch::{Kind, Tensor};

use super::function::{DOUBLE, list, param};

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
    let expected = "Mismatch in shape: grad_output[0] has a shape of torch.Size([2]) and output[0] has a shape of \
                    torch.Size([1]).";
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

#[test]
fn a_leaf_is_its_own_gradients_origin() {
    let x = param(&[3.0]);
    assert_eq!(list(&grad(&x, &x).run().unwrap()), [1.0]);
    let x = param(&[3.0]);
    assert_eq!(list(&grad(&x, &x).run_with_zeros().unwrap()), [1.0]);
}
