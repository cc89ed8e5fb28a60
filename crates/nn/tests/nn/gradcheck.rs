//! The check of gradients finds what is wrong, and confirms what is right.

use std::sync::atomic::{AtomicU32, Ordering};

use overdrive_nn::autograd::{
    BackwardContext, BoxError, Context, Function, GradcheckError, GradcheckOptions, gradcheck, gradgradcheck,
};
use tch::{Device, Kind, TchError, Tensor};

fn param(shape: &[i64]) -> Tensor {
    (Tensor::rand(shape, (Kind::Double, Device::Cpu)) + 0.5).set_requires_grad(true)
}

fn options() -> GradcheckOptions {
    GradcheckOptions::default()
}

/// `a * b^2` and `a + b`, with a factor that backward forgets for one element.
struct Wrong {
    factor: f64,
}

impl Function for Wrong {
    type Inputs = [Tensor; 2];
    type Outputs = [Tensor; 2];

    fn forward(&mut self, ctx: &mut Context, [a, b]: [&Tensor; 2]) -> Result<[Tensor; 2], BoxError> {
        ctx.save_for_backward([a, b]);
        Ok([a * b * b, a + b])
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        [product, sum]: [Tensor; 2],
    ) -> Result<[Option<Tensor>; 2], BoxError> {
        let [a, b] = ctx.saved_tensors()?;
        let factors = Tensor::from_slice(&[1.0, 1.0, self.factor]);
        Ok([Some(&product * &b * &b + &sum), Some(&product * &a * &b * 2.0 * factors + sum)])
    }
}

#[test]
fn right_gradients_are_confirmed() {
    let [a, b] = [param(&[3]), param(&[3])];
    let right = |args: &[Tensor]| Wrong { factor: 1.0 }.apply([&args[0], &args[1]]);
    gradcheck(right, [&a, &b], options()).unwrap();
    gradgradcheck(right, [&a, &b], options()).unwrap();
    let b = b.detach();
    gradcheck(right, [&a, &b], options()).unwrap();
    // Operators, an output that requires no gradient among them, and transposed inputs.
    let [x, w] = [param(&[4, 3]), param(&[4, 2])];
    let x = x.detach().transpose(0, 1).set_requires_grad(true);
    let operators =
        |args: &[Tensor]| Ok::<_, TchError>([args[0].f_argmax(0, false)?, args[0].f_matmul(&args[1])?.f_sin()?]);
    gradcheck(operators, [&x, &w], options()).unwrap();
    gradgradcheck(operators, [&x, &w], options()).unwrap();
}

#[test]
fn a_wrong_derivative_is_named() {
    let [a, b] = [param(&[3]), param(&[3])];
    let wrong = |args: &[Tensor]| Wrong { factor: 1.5 }.apply([&args[0], &args[1]]);
    let error = gradcheck(wrong, [&a, &b], options()).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("Jacobian mismatch for output 0 with respect to input 1, worst for element 2"), "{text}");
    let GradcheckError::Mismatch { output: 0, input: 1, to: 2, from: 2, numerical, analytical } = error else {
        panic!("{text}")
    };
    let right = 2.0 * a.double_value(&[2]) * b.double_value(&[2]);
    assert!((numerical - right).abs() < 1e-6 && (analytical - 1.5 * right).abs() < 1e-12, "{text}");
    // Within the tolerance it is right.
    gradcheck(wrong, [&a, &b], options().rtol(0.6)).unwrap();
    gradcheck(wrong, [&a, &b], options().atol(3.0)).unwrap();
    assert!(gradcheck(wrong, [&a, &b], options().atol(f64::NAN)).is_err());
}

/// The identity, whose backward pass does what the test says.
struct Made<B>(B);

impl<B: Fn(Tensor) -> Option<Tensor> + Send + Sync + 'static> Function for Made<B> {
    type Inputs = Tensor;
    type Outputs = Tensor;

    fn forward(&mut self, _: &mut Context, x: &Tensor) -> Result<Tensor, BoxError> {
        Ok(x * 1.0)
    }

    fn backward(&self, _: &BackwardContext<'_>, grad: Tensor) -> Result<Option<Tensor>, BoxError> {
        Ok((self.0)(grad))
    }
}

#[test]
fn other_faults_are_found() {
    let x = param(&[2]);
    let check =
        |backward: fn(Tensor) -> Option<Tensor>, options| gradcheck(|args| Made(backward).apply(&args[0]), &x, options);
    check(Some, options()).unwrap();
    // No gradient at all.
    assert!(matches!(check(|_| None, options()), Err(GradcheckError::Mismatch { output: 0, input: 0, .. })));
    // The right Jacobian, but not multiplied by the gradient.
    let not_multiplied = check(|grad| Some(&grad + (grad.abs().max() - 1.0)), options());
    assert!(matches!(not_multiplied, Err(GradcheckError::NotMultiplied { input: 0 })), "{not_multiplied:?}");
    // A little more each time.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let drifts = |grad: Tensor| Some(&grad * (1.0 + 1e-9 * f64::from(CALLS.fetch_add(1, Ordering::Relaxed))));
    assert!(matches!(check(drifts, options()), Err(GradcheckError::NotReentrant { output: 0, .. })));
    check(drifts, options().nondet_tol(1e-6)).unwrap();
    // A second derivative that is wrong while the first is right.
    let first = |grad: Tensor| Some(grad.detach());
    check(first, options()).unwrap();
    assert!(gradgradcheck(|args| Made(first).apply(&args[0]), &x, options()).is_err());
}

#[test]
fn what_cannot_be_checked_is_refused() {
    let x = param(&[2]);
    let square = |args: &[Tensor]| Ok::<_, TchError>(&args[0] * &args[0]);
    let text = |result: Result<(), GradcheckError>| result.unwrap_err().to_string();
    assert!(text(gradcheck(square, &x.detach(), options())).starts_with("gradcheck expects at least one input tensor"));
    let single = x.detach().to_kind(Kind::Float).set_requires_grad(true);
    assert_eq!(text(gradcheck(square, &single, options())), "input 0 is Float, but gradcheck needs Double");
    let wide = x.detach().get(0).expand([3], false).set_requires_grad(true);
    assert!(text(gradcheck(square, &wide, options())).contains("stride 0"));
    let failing = |_: &[Tensor]| Err::<Tensor, _>("planted");
    assert_eq!(text(gradcheck(failing, &x, options())), "the function failed: planted");
    let complex = |args: &[Tensor]| Tensor::f_complex(&args[0], &args[0]);
    assert!(text(gradcheck(complex, &x, options())).contains("output 0 is ComplexDouble"));
    // An output that depends on an input without a gradient.
    let cut = |args: &[Tensor]| Ok::<_, TchError>(args[0].detach() * 2.0);
    let error = gradcheck(cut, &x, options());
    assert!(matches!(error, Err(GradcheckError::NotZero { output: 0, input: 0 })), "{error:?}");
    gradcheck(|args| args[0].f_argmax(0, false), &x, options()).unwrap();
}

#[test]
fn a_tensor_that_is_given_twice_moves_in_both_places() {
    let x = param(&[3]);
    gradcheck(|a| Ok::<_, TchError>(vec![a[0].f_mul(&a[1])?]), [&x, &x], options()).unwrap();
}
