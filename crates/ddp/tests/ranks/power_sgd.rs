//! PowerSGD compared with a reference of its algorithm in one process that holds every rank's gradients.

use anyhow::{Context, Result};
use overdrive_ddp::hooks::{PowerSgd, PowerSgdOptions};
use overdrive_ddp::{CommHook, GradBucket};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::hooks::{close, grads, mean};

const ROWS: i64 = 12;
const COLUMNS: i64 = 10;
const MATRIX: i64 = ROWS * COLUMNS;
/// The length of a vector that follows the matrix in the bucket, and is sent whole.
const VECTOR: i64 = 9;
const RANK: i64 = 2;
/// Steps before the first that compresses.
const START: usize = 2;

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for (use_error_feedback, warm_start) in [(true, true), (false, true), (true, false)] {
        let options = PowerSgdOptions {
            matrix_approximation_rank: RANK as usize,
            start_power_sgd_iter: START as u64,
            use_error_feedback,
            warm_start,
            random_seed: 11,
            ..Default::default()
        };
        let mut hook = PowerSgd::new(&group, options)?;
        let mut reference = Reference::new(options, group.size());
        for step in 0..8 {
            let all: Vec<Tensor> = (0..group.size()).map(|rank| grads(rank, step, MATRIX + VECTOR)).collect();
            let bucket = bucket(&all[group.rank()].copy());
            let in_flight = hook.start(&bucket)?;
            let found = hook.finish(&bucket, in_flight)?;
            close(&found, &reference.mean(step, &all), &format!("step {step}"))
                .with_context(|| format!("error feedback {use_error_feedback}, warm start {warm_start}"))?;
        }
    }
    Ok(())
}

fn bucket(buffer: &Tensor) -> GradBucket {
    let gradients = vec![matrix(buffer), buffer.narrow(0, MATRIX, VECTOR)];
    let parameters = gradients.iter().map(Tensor::zeros_like).collect();
    GradBucket { index: 0, is_last: true, buffer: buffer.shallow_clone(), gradients, parameters, earlier: Vec::new() }
}

fn matrix(buffer: &Tensor) -> Tensor {
    buffer.narrow(0, 0, MATRIX).view([ROWS, COLUMNS])
}

struct Reference {
    options: PowerSgdOptions,
    /// Each rank's compression error.
    errors: Vec<Tensor>,
    q: Option<Tensor>,
}

impl Reference {
    fn new(options: PowerSgdOptions, ranks: usize) -> Self {
        let zeros = || Tensor::zeros([ROWS, COLUMNS], (Kind::Double, Device::Cpu));
        Self { options, errors: (0..ranks).map(|_| zeros()).collect(), q: None }
    }

    fn mean(&mut self, step: usize, all: &[Tensor]) -> Tensor {
        if step < START {
            return mean(all);
        }
        let matrices: Vec<Tensor> = all.iter().zip(&self.errors).map(|(one, error)| matrix(one) + error).collect();
        let kept = self.q.take().filter(|_| self.options.warm_start);
        let q = kept.unwrap_or_else(|| drawn(self.options.random_seed ^ ((step as u64) << 20)));
        let p = orthonormal(&mean(&matrices).matmul(&orthonormal(&q)));
        let q = mean(&matrices).tr().matmul(&p);
        let product = p.matmul(&q.tr());
        if self.options.use_error_feedback {
            self.errors = matrices.iter().map(|matrix| matrix - &product).collect();
        }
        self.q = Some(q);
        Tensor::cat(&[product.reshape([-1]), mean(all).narrow(0, MATRIX, VECTOR)], 0)
    }
}

fn orthonormal(matrix: &Tensor) -> Tensor {
    Tensor::linalg_qr(matrix, "reduced").0
}

/// The initial right factor for a seed: normally distributed numbers by Box and Muller, from SplitMix64.
fn drawn(seed: u64) -> Tensor {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (((mixed ^ (mixed >> 31)) >> 11) + 1) as f64 / (1u64 << 53) as f64
    };
    let normal = |_| (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    Tensor::from_slice(&(0..COLUMNS * RANK).map(normal).collect::<Vec<f64>>()).view([COLUMNS, RANK])
}
