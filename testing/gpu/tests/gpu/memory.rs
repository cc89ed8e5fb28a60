//! Less memory on the device: functions that run again, and smaller batches.

use std::sync::Arc;

use anyhow::{Result, ensure};
use overdrive::ffi::cuda;
use overdrive::memory::{ActivationCheckpoint, Policy};
use overdrive::prelude::*;
use overdrive_fakecuda::{Fake, waits};

use crate::FLOAT;

fn layer(x: &Tensor, weight: &Tensor) -> Result<Tensor, tch::TchError> {
    x.f_matmul(weight)?.f_tanh()?.f_dropout(0.5, true)?.f_sin()
}

/// The gradients, and what the device's generator draws next.
fn train(policy: Option<&Policy>) -> Result<Vec<Tensor>> {
    manual_seed(9);
    let leaf = |size: &[i64]| Tensor::randn(size, FLOAT).set_requires_grad(true);
    let (x, weights) = (leaf(&[16, 16]), [leaf(&[16, 16]), leaf(&[16, 16])]);
    let mut y = x.shallow_clone();
    for weight in &weights {
        let weight = weight.shallow_clone();
        y = match policy {
            None => layer(&y, &weight)?,
            Some(policy) => {
                let options = ActivationCheckpoint::default().keep(policy.clone());
                options.run(move |[x]| layer(x, &weight), [&y])?
            }
        };
    }
    y.square().sum(Kind::Float).f_backward()?;
    let next = Tensor::rand([4], FLOAT);
    Ok(std::iter::once(&x).chain(&weights).map(Tensor::grad).chain([next]).collect())
}

/// The second run is on a thread of libtorch's, which has neither this one's generator nor its hooks.
pub fn functions_run_again_on_the_device() -> Result<()> {
    let policies =
        [Policy::Nothing, Policy::Products, Policy::Operators(Arc::new(|name, _| name == "aten::native_dropout"))];
    let expected = train(None)?;
    for policy in policies {
        let found = train(Some(&policy))?;
        let are_equal = found.iter().zip(&expected).all(|(one, other)| one.equal(other));
        ensure!(are_equal, "{policy:?}");
    }
    Ok(())
}

pub fn functions_that_run_again_never_wait() -> Result<()> {
    train(Some(&Policy::Products))?;
    if let Some(fake) = Fake::get() {
        fake.reset();
    }
    let forbid = cuda::ForbidSync::new()?;
    train(Some(&Policy::Products))?;
    train(Some(&Policy::Nothing))?;
    drop(forbid);
    let counts = Fake::get().map(Fake::counts).unwrap_or_default();
    ensure!(waits(&counts) == 0, "{counts:?}");
    Ok(())
}
