//! Two ranks keep half of the gradients and of the optimizer's state each (ZeRO-2), and train as if each had all.
//!
//! The program starts itself twice (`spawn`). Beside the sharded model, the same model trains with everything on each
//! rank, for comparison. At the end rank 0 gathers the whole state, which a plain optimizer loads.
//!
//! Expect: equal losses, and a rank's bytes of gradients and state at about half, in a few seconds on a CPU.
//!
//!     cargo run -p overdrive-examples --example 19_zero
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use overdrive::core::{Entry, Optimizer, StateDict, Stateful};
use overdrive::ddp::{Backend, DistributedDataParallel, InitMethod, init_process_group, spawn};
use overdrive::optim::{AdamW, clip_grad_norm_};
use overdrive::shard::{ShardedDataParallel, ZeroRedundancyOptimizer};
use overdrive::tch::nn::{self, Module};
use overdrive::tch::{self, Device, Kind, Tensor};

const STEPS: usize = 40;
const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn main() -> Result<()> {
    Ok(spawn(2, train)?)
}

fn train() -> Result<()> {
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    let rank = group.rank();
    // Rank 0's weights are sent to the others.
    let (vs, model) = mlp(rank as i64);
    let mut opt = ZeroRedundancyOptimizer::new(&vs, &group, |params| {
        AdamW::builder(params).lr(1e-3).weight_decay(0.1).decay_groups().build()
    })?;
    let sharded = ShardedDataParallel::new(&mut opt)?;

    let (whole_vs, whole_model) = mlp(rank as i64);
    let ddp = DistributedDataParallel::new(&whole_vs, &group)?;
    let mut whole_opt = AdamW::builder(&whole_vs).lr(1e-3).weight_decay(0.1).decay_groups().build()?;

    let (mut gradients, mut all_gradients) = (0, 0);
    for step in 0..STEPS {
        let (inputs, targets) = batch(step, rank);
        let loss = model.forward(&inputs).mse_loss(&targets, tch::Reduction::Mean);
        sharded.backward(&loss)?; // each gradient's mean is on one rank
        gradients = gradient_bytes(&opt);
        sharded.clip_grad_norm_(1.0)?;
        opt.step()?; // each rank steps its half, and sends it to the other
        opt.zero_grad()?;

        let whole_loss = ddp.forward(|| whole_model.forward(&inputs))?.mse_loss(&targets, tch::Reduction::Mean);
        ddp.backward(&whole_loss)?;
        all_gradients = gradient_bytes(&whole_opt);
        clip_grad_norm_(whole_opt.parameters(), 1.0)?;
        whole_opt.step()?;
        whole_opt.zero_grad()?;

        let (loss, whole_loss) = (loss.double_value(&[]), whole_loss.double_value(&[]));
        if step % 10 == 9 {
            println!("step {}: a loss of {loss:.5}, with everything on each rank {whole_loss:.5}", step + 1);
        }
        ensure!((loss - whole_loss).abs() <= 1e-3 * whole_loss, "step {step}: {loss}, not {whole_loss}");
    }

    let (state, all_state) = (state_bytes(&opt.state_dict()?), state_bytes(&whole_opt.state_dict()?));
    println!("gradients: {gradients} of {all_gradients} bytes; optimizer state: {state} of {all_state} bytes");
    ensure!(gradients * 5 < all_gradients * 3 && state * 5 < all_state * 3, "a rank should keep about half");
    if let Some(gathered) = opt.consolidate_state_dict(0)? {
        whole_opt.load_state_dict(&gathered)?;
        println!("a plain AdamW has loaded the state that rank 0 has gathered");
    }
    Ok(())
}

fn mlp(seed: i64) -> (nn::VarStore, nn::Sequential) {
    tch::manual_seed(seed);
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = |name: &str, inputs, outputs| nn::linear(vs.root() / name, inputs, outputs, Default::default());
    let model = nn::seq()
        .add(layer("first", 16, 128))
        .add_fn(|it| it.tanh())
        .add(layer("second", 128, 128))
        .add_fn(|it| it.tanh())
        .add(layer("third", 128, 128))
        .add_fn(|it| it.tanh())
        .add(layer("last", 128, 1));
    (vs, model)
}

/// This rank's part of a batch.
fn batch(step: usize, rank: usize) -> (Tensor, Tensor) {
    tch::manual_seed((1000 + 10 * step + rank) as i64);
    let inputs = Tensor::randn([32, 16], FLOAT);
    let targets = inputs.sum_dim_intlist(1, true, Kind::Float).sin();
    (inputs, targets)
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

fn gradient_bytes(opt: &impl Optimizer) -> usize {
    opt.params().iter().map(Tensor::grad).filter(Tensor::defined).map(|grad| bytes(&grad)).sum()
}

fn state_bytes(state: &StateDict) -> usize {
    let of = |(_, entry): (&str, &Entry)| if let Entry::Tensor(tensor) = entry { bytes(tensor) } else { 0 };
    state.iter().map(of).sum()
}
