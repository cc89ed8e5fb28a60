//! Several buckets stepped together, by operators that are given the parameters of all: fewer kernel launches.

use overdrive_core::{GradScale, TorchError};
use tch::Device;

use crate::algorithm::{Algorithm, Step};
use crate::bucket::Bucket;
use crate::pieces;

/// The step of a bucket, and those of the buckets before it.
pub(crate) struct Steps<'a> {
    step: Step<'a>,
    before: Option<&'a Steps<'a>>,
}

/// The buckets in lists that are stepped together: those on one GPU, of one dtype, if the algorithm can; else each alone.
/// On the CPU a launch costs nothing, and lists are short on purpose.
pub(crate) fn parts<A: Algorithm>(buckets: &mut [Bucket]) -> Vec<Vec<&mut Bucket>> {
    let mut parts: Vec<(_, Vec<&mut Bucket>)> = Vec::new();
    for bucket in buckets {
        let first = if A::STEPS_TOGETHER { bucket.params.get(0).ok() } else { None };
        let key = first.map(|param| (param.device(), param.kind())).filter(|(device, _)| *device != Device::Cpu);
        match parts.iter_mut().find(|(other, _)| key.is_some() && *other == key) {
            Some((_, part)) => part.push(bucket),
            None => parts.push((key, vec![bucket])),
        }
    }
    parts.into_iter().map(|(_, part)| part).collect()
}

/// Steps the buckets together, after those of `before`. If that fails, none of them counts the step.
pub(crate) fn step<A: Algorithm>(
    buckets: &mut [&mut Bucket],
    given: (&A, f64, bool),
    scale: Option<GradScale<'_>>,
    before: Option<&Steps<'_>>,
) -> Result<(), TorchError> {
    let Some((bucket, rest)) = buckets.split_first_mut() else {
        let mut steps: Vec<&Step<'_>> =
            std::iter::successors(before, |steps| steps.before).map(|steps| &steps.step).collect();
        steps.reverse();
        return match steps[..] {
            [alone] => pieces::step(given.0, alone),
            _ => given.0.step_together(&steps),
        };
    };
    bucket.step_by(given, scale, &mut |own| match own {
        Some(own) => step(rest, given, scale, Some(&Steps { step: own, before })),
        None => step(rest, given, scale, before),
    })
}

#[cfg(test)]
mod tests {
    use overdrive_core::Optimizer;
    use overdrive_ffi::TensorList;
    use tch::{Kind, Tensor};

    use super::*;
    use crate::adafactor::Adafactor;

    /// Matrices and vectors with gradients; the last one has none.
    fn weights() -> Vec<Tensor> {
        tch::manual_seed(3);
        let sizes: [&[i64]; 6] = [&[5, 3], &[7], &[2, 4, 3], &[1], &[6, 6], &[9]];
        let weight = |size: &&[i64]| Tensor::randn(*size, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        sizes.iter().map(weight).collect()
    }

    fn backward(weights: &[Tensor], step: i64) {
        let loss: Tensor =
            weights[..5].iter().map(|weight| (weight.sin() * (step + 1)).square().sum(Kind::Float)).sum();
        loss.backward();
    }

    fn step_together(opt: &mut Adafactor) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        let values = opt.groups[0].values.clone();
        let mut buckets: Vec<&mut Bucket> = opt.groups[0].buckets.iter_mut().collect();
        assert_eq!(buckets.len(), 2);
        step(&mut buckets, (&values.options, values.lr, false), None, None)
    }

    #[test]
    fn buckets_stepped_together_equal_those_stepped_alone() {
        for (decay, maximize) in [(0.0, false), (0.1, true)] {
            let lists = [weights(), weights()];
            let build = |weights: &Vec<Tensor>| {
                Adafactor::builder(weights).lr(0.3).weight_decay(decay).maximize(maximize).build().unwrap()
            };
            let [mut alone, mut together] = [build(&lists[0]), build(&lists[1])];
            for number in 0..4 {
                lists.iter().for_each(|weights| backward(weights, number));
                alone.step().unwrap();
                step_together(&mut together).unwrap();
                alone.zero_grad().unwrap();
                together.zero_grad().unwrap();
            }
            lists[0].iter().zip(&lists[1]).for_each(|(alone, together)| assert!(alone.equal(together)));
        }
    }

    #[test]
    fn no_bucket_counts_a_step_that_fails_together() {
        let weights = weights();
        let mut opt = Adafactor::builder(&weights).build().unwrap();
        backward(&weights, 0);
        opt.make_state().unwrap();
        let counts =
            |opt: &Adafactor| opt.groups[0].buckets.iter().map(|it| count(it.state.as_ref().unwrap())).sum::<f64>();
        fn count(state: &crate::bucket::State) -> f64 {
            state.counts.list().to_vec().unwrap().iter().map(|count| count.double_value(&[])).sum()
        }
        let state = opt.groups[0].buckets[1].state.as_mut().unwrap();
        let wrong = Tensor::zeros([2, 2], (Kind::Float, Device::Cpu));
        let kept = std::mem::replace(&mut state.slots[0], TensorList::new(&[&wrong, &wrong, &wrong]).unwrap());
        step_together(&mut opt).unwrap_err();
        assert_eq!(counts(&opt), 0.0);
        opt.groups[0].buckets[1].state.as_mut().unwrap().slots[0] = kept;
        step_together(&mut opt).unwrap();
        assert_eq!(counts(&opt), 5.0);
    }
}
