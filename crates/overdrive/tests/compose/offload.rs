//! An optimizer whose state is on the host, for parameters that are on the host too.

use overdrive::core::{OptimizerError, Parameter};
use overdrive::memory::CpuOffloadOptimizer;
use overdrive::prelude::*;

use crate::{CPU, turn};

fn adamw(params: Vec<Parameter>) -> Result<AdamW, OptimizerError> {
    AdamW::builder(params).lr(0.1).build()
}

fn train(params: &[(&str, Tensor)], opt: &mut dyn Optimizer, steps: u32) -> anyhow::Result<()> {
    for _ in 0..steps {
        for (_, param) in params {
            (param * param).sum(Kind::Float).f_backward()?;
        }
        clip_grad_norm_(opt.params(), 0.5)?;
        opt.step()?;
        opt.zero_grad()?;
    }
    Ok(())
}

#[test]
fn on_a_cpu_it_is_the_optimizer_itself_and_their_states_are_each_others() -> anyhow::Result<()> {
    let _turn = turn();
    let start = [3, 5].map(|size| Tensor::randn([size], (Kind::Float, CPU)));
    let params = || ["a", "b"].into_iter().zip(&start).map(|(name, it)| (name, it.copy().set_requires_grad(true)));
    let [plain, offloaded]: [Vec<_>; 2] = [params().collect(), params().collect()];
    let (mut opt, mut on_host) =
        (AdamW::builder(&plain).lr(0.1).build()?, CpuOffloadOptimizer::new(&offloaded, adamw)?);
    assert_eq!(on_host.parameters()[1].name(), Some("b"));
    on_host.set_lr(0, 0.05)?;
    opt.set_lr(0, 0.05)?;
    let both = |opt: &mut AdamW, on_host: &mut CpuOffloadOptimizer<AdamW>, steps| -> anyhow::Result<()> {
        train(&plain, opt, steps)?;
        train(&offloaded, on_host, steps)?;
        assert!(plain.iter().zip(&offloaded).all(|(one, other)| one.1 == other.1));
        Ok(())
    };
    both(&mut opt, &mut on_host, 3)?;
    let [one, other] = [opt.state_dict()?.copied()?, on_host.state_dict()?.copied()?];
    opt.load_state_dict(&other)?;
    on_host.load_state_dict(&one)?;
    both(&mut opt, &mut on_host, 3)
}
