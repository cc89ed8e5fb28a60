//! Groups, reducers and works that begin and end in random order, which is the same on all ranks. Run it under
//! AddressSanitizer with a larger number: `OVERDRIVE_TEST_STARTS=1000 cargo xtask sanitize -- -p overdrive-ddp --test ranks
//! groups_and_reducers_start`.

use anyhow::{Context, Result};
use overdrive_ddp::hooks::{CastCompress, TopK};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup, ReduceOp, Work};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const STARTS: &str = "OVERDRIVE_TEST_STARTS";
const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// What is alive, and is dropped sooner or later.
#[expect(dead_code, reason = "dropped")]
enum Alive {
    Group(ProcessGroup),
    Work(Work, Tensor),
    Wrapped(Box<DistributedDataParallel>, Vec<Tensor>),
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let starts = std::env::var(STARTS).map_or(Ok(40), |number| number.parse())?;
    let mut state = 1u64;
    let mut below = |most: usize| {
        // The constants of PCG's generator.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % most
    };
    let members: Vec<usize> = (0..group.size()).collect();
    let mut alive: Vec<Alive> = Vec::new();
    for _ in 0..starts {
        let own = match below(3) {
            0 => group.clone(),
            _ => group.new_group(&members)?.context("every rank is a member")?,
        };
        alive.push(match below(4) {
            0 => Alive::Group(own),
            1 => {
                let mut sum = Tensor::ones([1000], FLOAT);
                let work = own.all_reduce_async(&mut sum, ReduceOp::Sum)?;
                Alive::Work(work, sum)
            }
            _ => wrapped(&own, below(4), below(3))?,
        });
        let most = below(5);
        while alive.len() > most {
            drop(alive.swap_remove(below(alive.len())));
        }
    }
    drop(alive);
    Ok(group.close()?)
}

/// A wrapped model: with a hook or none, before a pass, within one, or after it.
fn wrapped(group: &ProcessGroup, hook: usize, passes: usize) -> Result<Alive> {
    let params: Vec<Tensor> = [40, 7, 300].map(|count| Tensor::ones([count], FLOAT).set_requires_grad(true)).into();
    let named = params.iter().enumerate().map(|(number, param)| (number.to_string(), param.shallow_clone()));
    let ddp = DistributedDataParallel::builder(group).bucket_cap_mb(0.0001).build_from(named.collect(), Vec::new())?;
    match hook {
        0 => ddp.register_comm_hook(CastCompress::half(group))?,
        1 => ddp.register_comm_hook(TopK::new(group, 0.5, 0)?)?,
        2 => ddp.register_fp16_compress()?,
        _ => {}
    }
    let forward = || ddp.forward(|| params.iter().fold(Tensor::from(0f32), |sum, param| sum + param.sum(Kind::Float)));
    for _ in 0..passes {
        ddp.backward(&forward()?)?;
    }
    if passes == 1 {
        drop(forward()?);
    }
    Ok(Alive::Wrapped(Box::new(ddp), params))
}
