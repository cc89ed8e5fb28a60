//! Functions with a backward pass of their own, compared with PyTorch's.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use overdrive_nn::NnError;
use overdrive_nn::autograd::{BackwardContext, BoxError, Context, Function, backward, grad};
use tch::{Device, Kind, Tensor};

use crate::record::{Found, Given};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

struct LegendrePolynomial3;

impl Function for LegendrePolynomial3 {
    type Inputs = Tensor;
    type Outputs = Tensor;

    fn forward(&mut self, ctx: &mut Context, input: &Tensor) -> Result<Tensor, BoxError> {
        ctx.save_for_backward([input]);
        Ok(0.5 * (5 * input.pow_tensor_scalar(3) - 3 * input))
    }

    fn backward(&self, ctx: &BackwardContext<'_>, grad: Tensor) -> Result<Option<Tensor>, BoxError> {
        let [input] = ctx.saved_tensors()?;
        Ok(Some(grad * 1.5 * (5.0 * input.pow_tensor_scalar(2) - 1.0)))
    }
}

struct Quantize {
    steps: f64,
}

impl Function for Quantize {
    type Inputs = Tensor;
    type Outputs = Tensor;

    const ONCE_DIFFERENTIABLE: bool = true;

    fn forward(&mut self, ctx: &mut Context, x: &Tensor) -> Result<Tensor, BoxError> {
        ctx.save_for_backward([x]);
        Ok((x.clamp(-1, 1) * self.steps).f_round()? / self.steps)
    }

    fn backward(&self, ctx: &BackwardContext<'_>, grad: Tensor) -> Result<Option<Tensor>, BoxError> {
        let [x] = ctx.saved_tensors()?;
        let within = x.f_abs()?.le(1).f_to_kind(grad.kind())?;
        Ok(Some(grad * within))
    }
}

struct Top {
    k: i64,
}

impl Function for Top {
    type Inputs = Tensor;
    type Outputs = [Tensor; 2];

    fn forward(&mut self, ctx: &mut Context, x: &Tensor) -> Result<[Tensor; 2], BoxError> {
        let (values, indices) = x.f_topk(self.k, 1, true, true)?;
        ctx.save_for_backward([x, &indices]);
        ctx.mark_non_differentiable([&indices]);
        Ok([values, indices])
    }

    fn backward(&self, ctx: &BackwardContext<'_>, [values, _]: [Tensor; 2]) -> Result<Option<Tensor>, BoxError> {
        let [x, indices] = ctx.saved_tensors()?;
        Ok(Some(x.f_zeros_like()?.f_scatter(1, &indices, &values)?))
    }
}

struct ProductAndSum;

impl Function for ProductAndSum {
    type Inputs = [Tensor; 2];
    type Outputs = [Tensor; 2];

    fn forward(&mut self, ctx: &mut Context, [a, b]: [&Tensor; 2]) -> Result<[Tensor; 2], BoxError> {
        ctx.save_for_backward([a, b]);
        Ok([a.f_mul(b)?, a.f_add(b)?])
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        [product, sum]: [Tensor; 2],
    ) -> Result<[Option<Tensor>; 2], BoxError> {
        let [a, b] = ctx.saved_tensors()?;
        // The engine sums the gradient over the dimensions by which `b` was expanded.
        Ok([Some(&product * b + &sum), Some(&product * a + &sum)])
    }
}

struct Swish;

impl Function for Swish {
    type Inputs = Tensor;
    type Outputs = Tensor;

    fn forward(&mut self, ctx: &mut Context, x: &Tensor) -> Result<Tensor, BoxError> {
        ctx.save_for_backward([x]);
        Ok(x * x.f_sigmoid()?)
    }

    fn backward(&self, ctx: &BackwardContext<'_>, grad: Tensor) -> Result<Option<Tensor>, BoxError> {
        let [x] = ctx.saved_tensors()?;
        let s = x.f_sigmoid()?;
        Ok(Some(grad * (&s + &x * &s * (1 - &s))))
    }
}

fn train(
    found: &mut Found,
    name: &str,
    params: Vec<Tensor>,
    lr: f64,
    mut loss_of: impl FnMut(&[Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let mut losses = Vec::new();
    for _ in 0..20 {
        let loss = loss_of(&params)?;
        let gradients = grad(&loss, params.iter().collect::<Vec<_>>()).run()?;
        losses.push(loss.detach());
        let _no_grad = tch::no_grad_guard();
        for (param, gradient) in params.iter().zip(gradients) {
            let _ = param.shallow_clone().f_sub_(&(gradient * lr))?;
        }
    }
    found.insert(format!("{name}.losses"), &Tensor::stack(&losses, 0));
    for (number, param) in params.iter().enumerate() {
        found.insert(format!("{name}.{number}"), param);
    }
    Ok(())
}

fn leaves(given: &Given<'_>, name: &str, count: usize) -> Result<Vec<Tensor>> {
    (0..count).map(|number| Ok(given.tensor(&format!("{name}.{number}"))?.set_requires_grad(true))).collect()
}

pub fn nn_autograd(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let (x, y, data) = (given.tensor("x")?, given.tensor("y")?, given.tensor("data")?);
    train(&mut found, "polynomial", leaves(given, "polynomial", 4)?, 5e-6, |p| {
        let fitted = &p[0] + &p[1] * LegendrePolynomial3.apply(&(&p[2] + &p[3] * &x))?;
        Ok((fitted - &y).pow_tensor_scalar(2).sum(Kind::Float))
    })?;
    train(&mut found, "quantized", leaves(given, "quantized", 2)?, 0.1, |p| {
        let quantized = Quantize { steps: 4.0 }.apply(&p[0])?;
        Ok((data.matmul(&quantized) + &p[1]).pow_tensor_scalar(2).mean(Kind::Float))
    })?;
    train(&mut found, "both", leaves(given, "both", 2)?, 0.05, |p| {
        let [product, sum] = ProductAndSum.apply([&data.matmul(&p[0]), &p[1]])?;
        let [top, _] = Top { k: 2 }.apply(&product)?;
        Ok((top - 1).pow_tensor_scalar(2).mean(Kind::Float) + sum.abs().mean(Kind::Float))
    })?;
    equation(given, &mut found)?;
    texts(given)?;
    Ok(found)
}

/// A heat equation: `u_t = u_xx`.
fn equation(given: &Given<'_>, found: &mut Found) -> Result<()> {
    let points = leaves(given, "point", 2)?;
    let (x, time) = (&points[0], &points[1]);
    let mut curvature = Vec::new();
    train(found, "equation", leaves(given, "equation", 4)?, 0.01, |p| {
        let hidden = Swish.apply(&(Tensor::cat(&[x, time], 1).matmul(&p[0]) + &p[1]))?;
        let u = hidden.matmul(&p[2]) + &p[3];
        let [u_x, u_t] = grad(&u.sum(Kind::Float), [x, time]).create_graph(true).run()?;
        let u_xx = grad(&u_x, x).grad_outputs([&u_x.ones_like()]).create_graph(true).run()?;
        curvature.push(u_xx.detach());
        Ok((u_t - u_xx).pow_tensor_scalar(2).mean(Kind::Float) + (u - x).pow_tensor_scalar(2).mean(Kind::Float))
    })?;
    found.insert("u_xx", &Tensor::stack(&curvature, 0));
    Ok(())
}

struct WrongCount;

impl Function for WrongCount {
    type Inputs = Vec<Tensor>;
    type Outputs = Tensor;

    fn forward(&mut self, _: &mut Context, inputs: Vec<&Tensor>) -> Result<Tensor, BoxError> {
        Ok(inputs[0].f_add(inputs[1])?)
    }

    fn backward(&self, _: &BackwardContext<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>, BoxError> {
        Ok(vec![Some(grad)])
    }
}

struct WrongShape;

impl Function for WrongShape {
    type Inputs = [Tensor; 2];
    type Outputs = Tensor;

    fn forward(&mut self, _: &mut Context, [a, b]: [&Tensor; 2]) -> Result<Tensor, BoxError> {
        Ok(a.f_add(b)?)
    }

    fn backward(&self, _: &BackwardContext<'_>, grad: Tensor) -> Result<[Option<Tensor>; 2], BoxError> {
        Ok([Some(Tensor::ones([3], FLOAT)), Some(grad)])
    }
}

struct InPlace {
    is_returned: bool,
}

impl Function for InPlace {
    type Inputs = Tensor;
    type Outputs = Tensor;

    fn forward(&mut self, ctx: &mut Context, x: &Tensor) -> Result<Tensor, BoxError> {
        ctx.mark_dirty([x]);
        Ok(if self.is_returned { x.shallow_clone().f_mul_(&Tensor::from(2.0))? } else { x * 2 })
    }

    fn backward(&self, _: &BackwardContext<'_>, grad: Tensor) -> Result<Option<Tensor>, BoxError> {
        Ok(Some(2 * grad))
    }
}

/// The errors, in PyTorch's words.
fn texts(given: &Given<'_>) -> Result<()> {
    let mut found = BTreeMap::new();
    let mut fails = |name: &str, result: Result<Tensor, NnError>| {
        if let Err(error) = result {
            found.insert(name.to_owned(), error.to_string());
        }
    };
    let sum = |y: Tensor| y.sum(Kind::Float);
    let [x, w] = [0, 1].map(|_| Tensor::ones([2], FLOAT).set_requires_grad(true));
    fails("count", grad(&sum(WrongCount.apply(vec![&x, &w])?), &x).run());
    fails("shape", grad(&sum(WrongShape.apply([&x, &w])?), &x).run());
    let y = sum(Swish.apply(&(&x + 0))?);
    drop(grad(&y, &x).run()?);
    fails("freed", grad(&y, &x).run());
    let mut z = &x + 0;
    let y = Swish.apply(&z)?;
    let _ = z.f_add_(&Tensor::from(1.0))?;
    fails("changed", grad(&sum(y), &x).run());
    let y = Quantize { steps: 4.0 }.apply(&(&x * &x))?;
    let first = grad(&sum(&y * &y), &x).create_graph(true).run()?;
    fails("twice", backward(&sum(first)).run().map(|()| Tensor::new()));
    fails("leaf", InPlace { is_returned: true }.apply(&x));
    fails("lost", InPlace { is_returned: false }.apply(&(&x + 0)));
    fails("unused", grad(&sum(&x * 2), [&x, &w]).run().map(|[dx, _]| dx));
    fails("not_scalar", grad(&(&x * 2), &x).run());
    fails("not_real", grad(&Tensor::complex(&x, &w).get(0), &x).run());
    fails("constant", grad(&Tensor::ones([1], FLOAT), &x).run());
    fails("not_required", grad(&sum(x.shallow_clone()), &Tensor::ones([1], FLOAT)).run());
    fails("grad_shape", grad(&(&x * 2), &x).grad_outputs([&Tensor::ones([3, 1], FLOAT)]).run());
    let theirs: BTreeMap<String, String> = given.value("texts")?;
    ensure!(theirs.len() == 13, "Python fails in {} ways", theirs.len());
    for (name, text) in theirs {
        let ours = found.get(&name).with_context(|| format!("`{name}` does not fail, but in Python: {text}"))?;
        ensure!(*ours == text, "`{name}`\nours:   {ours}\ntheirs: {text}");
    }
    Ok(())
}
