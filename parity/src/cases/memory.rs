//! Activation checkpointing compared with Python's: gradients, and how often each part runs.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use overdrive_amp::autocast;
use overdrive_ffi::autograd::{GradOptions, grad};
use overdrive_memory::{
    ActivationCheckpoint, Policy, checkpoint, checkpoint_sequential, saved_tensors_hooks as hooks_of,
};
use tch::{Device, Kind, TchError, Tensor};

use crate::record::{Found, Given};

/// How often something was called.
#[derive(Clone, Default)]
struct Calls(Arc<AtomicI64>);

impl Calls {
    fn count(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn layer(weight: &Tensor, x: &Tensor) -> Result<Tensor, TchError> {
    x.f_matmul(weight)?.f_gelu("none")?.f_sin()
}

/// A layer that owns its weight.
fn own(weight: &Tensor) -> impl Fn(&Tensor) -> Result<Tensor, TchError> + Send + 'static + use<> {
    let weight = weight.shallow_clone();
    move |x| layer(&weight, x)
}

/// As the layer above, and counts its calls.
fn counted(weight: &Tensor, calls: &Calls) -> impl Fn(&Tensor) -> Result<Tensor, TchError> + Send + 'static + use<> {
    let (layer, calls) = (own(weight), calls.clone());
    move |x| {
        calls.count();
        layer(x)
    }
}

struct Expected<'a> {
    found: Found,
    by: Vec<&'a Tensor>,
}

impl Expected<'_> {
    fn add(&mut self, name: &str, loss: &Tensor, calls: &[&Calls]) -> Result<()> {
        let options = GradOptions { allow_unused: true, ..GradOptions::default() };
        for (index, grad) in grad::<Tensor>(&[loss], &self.by, &[], options)?.iter().enumerate() {
            if grad.defined() {
                self.found.insert(format!("{name}.{index}"), grad);
            }
        }
        for (index, calls) in calls.iter().enumerate() {
            self.found.insert(format!("{name}.calls.{index}"), &Tensor::from(calls.0.load(Ordering::SeqCst)));
        }
        Ok(())
    }
}

pub fn activation_checkpointing(given: &Given<'_>) -> Result<Found> {
    let weights = (0..5).map(|index| Ok(given.tensor(&format!("weight.{index}"))?.set_requires_grad(true)));
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let x = given.tensor("x")?.set_requires_grad(true);
    let mut expected = Expected { found: Found::default(), by: std::iter::once(&x).chain(&weights).collect() };
    let calls = || (0..5).map(|_| Calls::default()).collect::<Vec<_>>();

    let of = calls();
    let y = weights.iter().zip(&of).try_fold(x.shallow_clone(), |y, (weight, calls)| {
        let layer = counted(weight, calls);
        checkpoint(move |[y]| layer(y), [&y])
    })?;
    expected.add("layers", &y.square().sum(Kind::Float), &of.iter().collect::<Vec<_>>())?;

    tch::manual_seed(7);
    let y = weights[..3].iter().try_fold(x.shallow_clone(), |y, weight| {
        let layer = own(weight);
        checkpoint(move |[y]| layer(y)?.f_dropout(0.3, true)?.f_sin(), [&y])
    })?;
    expected.add("dropout", &y.square().sum(Kind::Float), &[])?;
    expected.found.insert("dropout.next", &Tensor::rand([4], (Kind::Float, Device::Cpu)));

    let of = calls();
    let y = {
        let (first, inner) = (own(&weights[0]), Arc::new(std::sync::Mutex::new(counted(&weights[1], &of[2]))));
        let (outer, middle) = (of[0].clone(), of[1].clone());
        let first = Arc::new(std::sync::Mutex::new(first));
        let run = move |[x]: &[Tensor; 1]| {
            outer.count();
            let (middle, first, inner) = (middle.clone(), first.clone(), inner.clone());
            let run = move |[x]: &[Tensor; 1]| {
                middle.count();
                let x = first.lock().expect("no panic")(x)?;
                let inner = inner.clone();
                checkpoint(move |[x]| inner.lock().expect("no panic")(x), [&x]).map(|y| y.sin())
            };
            checkpoint(run, [&(x * 2.0)]).map(|y| y.exp())
        };
        checkpoint(run, [&x])?
    };
    expected.add("nested", &y.sum(Kind::Float), &[&of[0], &of[1], &of[2]])?;

    let of = calls();
    let y = checkpoint_sequential(weights.iter().zip(&of).map(|(weight, calls)| counted(weight, calls)), 2, &x)?;
    expected.add("sequential", &y.square().sum(Kind::Float), &of.iter().collect::<Vec<_>>())?;

    let product = own(&weights[0]);
    let y = autocast(Device::Cpu, Kind::BFloat16, || checkpoint(move |[x]| product(x), [&x]))??;
    expected.add("autocast", &y.to_kind(Kind::Float).square().sum(Kind::Float), &[])?;

    let product = own(&weights[0]);
    let y = checkpoint(move |[x]| product(x), [&x])?;
    let create = GradOptions { create_graph: true, retain_graph: true, ..GradOptions::default() };
    let first = grad::<Tensor>(&[&y.sum(Kind::Float)], &[&x], &[], create)?.remove(0);
    expected.add("second", &first.square().sum(Kind::Float), &[])?;

    let y = weights[..2].iter().try_fold(x.shallow_clone(), |y, weight| {
        let layer = own(weight);
        ActivationCheckpoint::default().keep(Policy::Products).run(move |[y]| layer(y), [&y])
    })?;
    expected.add("selective", &y.square().sum(Kind::Float), &[])?;

    let of = calls();
    let inner = counted(&weights[0], &of[0]);
    let with_backward = move |[x]: &[Tensor; 1]| -> Result<Tensor, overdrive_ffi::Error> {
        let y = inner(x)?;
        let keep = GradOptions { retain_graph: true, ..GradOptions::default() };
        let dx = grad::<Tensor>(&[&y.sum(Kind::Float)], &[x], &[], keep)?.remove(0);
        Ok(y.f_mul(&dx)?.f_cos()?)
    };
    let y = checkpoint(with_backward, [&x])?;
    expected.add("backward_within", &y.sum(Kind::Float), &[&of[0]])?;
    Ok(expected.found)
}

pub fn saved_tensors_hooks(given: &Given<'_>) -> Result<Found> {
    let weights = (0..3).map(|index| Ok(given.tensor(&format!("weight.{index}"))?.set_requires_grad(true)));
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let x = given.tensor("x")?.set_requires_grad(true);
    type Seen = Arc<Mutex<Vec<i64>>>;
    let (packed, unpacked) = (Seen::default(), Seen::default());
    let note = |seen: &Seen, name: i64, tensor: &Tensor| {
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.push(name);
        seen.extend(tensor.size());
    };
    let hooks = |name: i64, kind: Kind| {
        let (packed, unpacked) = (packed.clone(), unpacked.clone());
        hooks_of(
            move |tensor: &Tensor| {
                note(&packed, name, tensor);
                tensor.f_to_kind(kind)
            },
            move |tensor: &Tensor| {
                note(&unpacked, name, tensor);
                tensor.f_to_kind(Kind::Float)
            },
        )
    };
    let mut found = Found::default();
    let mut expect = |name: &str, loss: &Tensor| -> Result<()> {
        let options = GradOptions { retain_graph: true, ..GradOptions::default() };
        let by: Vec<&Tensor> = std::iter::once(&x).chain(&weights).collect();
        for (index, grad) in grad::<Tensor>(&[loss], &by, &[], options)?.iter().enumerate() {
            found.insert(format!("{name}.{index}"), grad);
        }
        for (what, seen) in [("packed", &packed), ("unpacked", &unpacked)] {
            let seen = Tensor::from_slice(&seen.lock().unwrap_or_else(PoisonError::into_inner));
            found.insert(format!("{name}.{what}"), &seen.view([-1, 3]));
        }
        Ok(())
    };

    let y = {
        let _outer = hooks(0, Kind::BFloat16)?;
        let mut y = x.matmul(&weights[0]).gelu("none").sin();
        {
            let _inner = hooks(1, Kind::Half)?;
            y = y.matmul(&weights[1]).tanh() * y;
        }
        y.matmul(&weights[2])
    };
    let loss = y.exp().softmax(1, None::<Kind>).square().sum(Kind::Float);
    expect("once", &loss)?;
    expect("twice", &loss)?;

    let pooled = {
        let _hooks = hooks(2, Kind::Float)?;
        let dropped = x.dropout(0.0, true).relu().matmul(&weights[0]);
        dropped.layer_norm([8], None::<Tensor>, None::<Tensor>, 1e-5, true).sigmoid()
    };
    expect("others", &pooled.matmul(&weights[1]).matmul(&weights[2]).sum(Kind::Float))?;
    Ok(found)
}
