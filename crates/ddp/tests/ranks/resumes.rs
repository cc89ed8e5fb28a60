//! A run that resumes from a state goes on to the bit as one that was not interrupted, with each hook.

use anyhow::{Result, ensure};
use overdrive_core::{Entry, StateDict, Stateful};
use overdrive_ddp::hooks::{OneBit, PostLocalSgd, PowerSgd, PowerSgdOptions, TopK};
use overdrive_ddp::{CommHook, DdpError, DistributedDataParallel, GradBucket, ProcessGroup, ReduceOp};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::hooks::{close, grads, runs};

const SAVED: i64 = 6;
const STEPS: i64 = 12;
const HOOKS: [&str; 5] = ["none", "PowerSGD", "top-k", "1-bit", "post-local SGD"];

struct Run {
    net: nn::Sequential,
    ddp: DistributedDataParallel,
    params: Vec<Tensor>,
}

impl Run {
    /// Of several buckets, whose order libtorch changes after the first pass.
    fn new(group: &ProcessGroup, hook: &str) -> Result<Self> {
        tch::manual_seed(1);
        let vs = nn::VarStore::new(Device::Cpu);
        let linear = |name, from, to| nn::linear(vs.root() / name, from, to, Default::default());
        let net = nn::seq().add(linear("a", 24, 32)).add_fn(Tensor::relu).add(linear("b", 32, 16));
        let net = net.add_fn(Tensor::relu).add(linear("c", 16, 8));
        let ddp = DistributedDataParallel::builder(group).bucket_cap_mb(0.002).build(&vs)?;
        match hook {
            "PowerSGD" => {
                let options = PowerSgdOptions { start_power_sgd_iter: 2, ..Default::default() };
                ddp.register_comm_hook(PowerSgd::new(group, options)?)?;
            }
            "top-k" => ddp.register_comm_hook(TopK::new(group, 0.1, 2)?)?,
            "1-bit" => ddp.register_comm_hook(OneBit::new(group, 2))?,
            "top-k at once" => ddp.register_comm_hook(TopK::new(group, 0.1, 0)?)?,
            "1-bit at once" => ddp.register_comm_hook(OneBit::new(group, 0))?,
            "post-local SGD" => ddp.register_comm_hook(PostLocalSgd::new(group, None, SAVED as u64 + 2))?,
            _ => {}
        }
        let params = ddp.parameters().iter().map(|(_, param)| param.shallow_clone()).collect();
        Ok(Self { net, ddp, params })
    }

    fn train(&self, rank: usize, steps: std::ops::Range<i64>) -> Result<()> {
        for step in steps {
            tch::manual_seed(100 * step + rank as i64);
            let inputs = Tensor::randn([4, 24], (Kind::Float, Device::Cpu));
            let loss = self.ddp.forward(|| self.net.forward(&inputs))?.square().mean(Kind::Float);
            self.ddp.backward(&loss)?;
            tch::no_grad(|| {
                for param in &self.params {
                    let _ = param.shallow_clone().g_sub_(&(param.grad() * 0.1));
                    param.shallow_clone().zero_grad();
                }
            });
        }
        Ok(())
    }

    fn copy(&self) -> Vec<Tensor> {
        self.params.iter().map(|param| param.detach().copy()).collect()
    }

    fn write(&self, values: &[Tensor]) {
        tch::no_grad(|| self.params.iter().zip(values).for_each(|(param, value)| param.shallow_clone().copy_(value)));
    }
}

fn are_same(one: &StateDict, other: &StateDict) -> bool {
    let entry = |(one, other): ((&str, &Entry), (&str, &Entry))| match (one, other) {
        ((key, Entry::Tensor(one)), (found, Entry::Tensor(other))) => key == found && one.equal(other),
        (one, other) => format!("{one:?}") == format!("{other:?}"),
    };
    one.len() == other.len() && one.iter().zip(other.iter()).all(entry)
}

fn are_equal(one: &[Tensor], other: &[Tensor]) -> bool {
    one.iter().zip(other).all(|(one, other)| one.equal(other))
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for hook in HOOKS {
        let whole = Run::new(&group, hook)?;
        whole.train(group.rank(), 0..SAVED)?;
        let (params, state) = (whole.copy(), whole.ddp.state_dict()?.copied()?);
        whole.train(group.rank(), SAVED..STEPS)?;

        let mut resumed = Run::new(&group, hook)?;
        resumed.write(&params);
        resumed.ddp.load_state_dict(&state)?;
        let again = resumed.ddp.state_dict()?;
        ensure!(are_same(&again, &state), "{hook}: {again:?}, but {state:?} was loaded");
        resumed.train(group.rank(), SAVED..STEPS)?;
        ensure!(are_equal(&whole.copy(), &resumed.copy()), "{hook}: another run");

        // Without the state it is another run.
        let without = Run::new(&group, hook)?;
        without.write(&params);
        without.train(group.rank(), SAVED..STEPS)?;
        ensure!(!are_equal(&whole.copy(), &without.copy()), "{hook}: the state makes no difference");
    }
    refusals(&group)?;
    before_the_rebuild(&group)?;
    static_graphs(&group)?;
    other_buckets(&group)?;
    between_forward_and_backward(&group)?;
    another_approximation(&group)
}

/// Factors of another rank, and errors that nothing adds to any more, are not used.
fn another_approximation(group: &ProcessGroup) -> Result<()> {
    let hook = |matrix_approximation_rank, min_compression_rate| {
        let options = PowerSgdOptions {
            start_power_sgd_iter: 2,
            matrix_approximation_rank,
            min_compression_rate,
            ..Default::default()
        };
        PowerSgd::new(group, options)
    };
    let gradients = grads(group.rank(), 1, 120).to_kind(Kind::Float);
    let mut one = hook(1, 2.0)?;
    for _ in 0..4 {
        let _ = runs(&mut one, &gradients.copy(), &[12, 10])?;
    }
    let state = one.state_dict()?.copied()?;
    ensure!(state.tensor("q.0.0", &[10, 1], Kind::Float).is_ok() && state.get("error.0").is_ok(), "{state:?}");
    let mut two = hook(2, 2.0)?;
    two.load_state_dict(&state)?;
    let _ = runs(&mut two, &gradients.copy(), &[12, 10])?;
    ensure!(two.state_dict()?.tensor("q.0.0", &[10, 2], Kind::Float).is_ok());
    // It sends all of them whole.
    let mut none = hook(1, 1e6)?;
    none.load_state_dict(&state)?;
    let _ = runs(&mut none, &gradients.copy(), &[12, 10])?;
    let mean = runs(&mut none, &gradients.copy(), &[12, 10])?;
    ensure!(none.state_dict()?.get("error.0").is_err());
    let all: Vec<Tensor> = (0..group.size()).map(|rank| grads(rank, 1, 120)).collect();
    close(&mean, &crate::hooks::mean(&all), "without compression")
}

/// A state from before the buckets were rebuilt has errors of buckets that are no more: they are dropped, and no pass fails.
fn before_the_rebuild(group: &ProcessGroup) -> Result<()> {
    for hook in ["top-k at once", "1-bit at once"] {
        let early = Run::new(group, hook)?;
        early.train(group.rank(), 0..1)?;
        let mut resumed = Run::new(group, hook)?;
        resumed.write(&early.copy());
        resumed.ddp.load_state_dict(&early.ddp.state_dict()?.copied()?)?;
        resumed.train(group.rank(), 1..5)?;
        for param in resumed.copy() {
            let all = group.all_gather(&param)?;
            ensure!(all.iter().all(|other| other.equal(&param)), "{hook}: the ranks' models differ");
        }
    }
    Ok(())
}

/// libtorch numbers all buckets of their first pass alike; hooks get each bucket's own number.
fn static_graphs(group: &ProcessGroup) -> Result<()> {
    let params: Vec<Tensor> = [(Kind::Float, 300), (Kind::Double, 200), (Kind::Float, 100)]
        .map(|(kind, count)| Tensor::ones([count], (kind, Device::Cpu)).set_requires_grad(true))
        .into();
    let named = params.iter().enumerate().map(|(number, param)| (number.to_string(), param.shallow_clone()));
    let mut ddp = DistributedDataParallel::builder(group).static_graph(true).build_from(named.collect(), Vec::new())?;
    ddp.register_comm_hook(TopK::new(group, 0.5, 1)?)?;
    for _ in 0..4 {
        let loss = ddp.forward(|| {
            let sums = params.iter().map(|param| param.square().sum(Kind::Double));
            sums.fold(Tensor::from(0.0), |sum, part| sum + part)
        })?;
        ddp.backward(&loss)?;
    }
    for error in [ddp.state_dict().map(drop), ddp.load_state_dict(&StateDict::new())] {
        let error = error.expect_err("its buckets are made anew").to_string();
        ensure!(error.contains("static_graph"), "{error}");
    }
    Ok(())
}

/// A program that has trained loads another division: a hook sees each bucket's own parameters.
fn other_buckets(group: &ProcessGroup) -> Result<()> {
    let mut run = Run::new(group, "none")?;
    run.ddp.register_comm_hook({
        let group = group.clone();
        move |bucket: &GradBucket| {
            let fits = |(gradient, param): (&Tensor, &Tensor)| gradient.size() == param.size();
            let pairs = bucket.gradients.len() == bucket.parameters.len();
            if !pairs || !bucket.gradients.iter().zip(&bucket.parameters).all(fits) {
                return Err(DdpError::NoParameters);
            }
            let mut mean = bucket.buffer.shallow_clone();
            Ok(group.all_reduce_async(&mut mean, ReduceOp::Avg)?.and_then(move |()| Ok(mean)))
        }
    })?;
    run.train(group.rank(), 0..4)?;
    for (numbers, lengths) in [([0i64, 1, 2, 3, 4, 5], vec![2i64, 2, 2]), ([5, 3, 1, 0, 2, 4], vec![6])] {
        let mut state = StateDict::new();
        state.insert("bucket_parameters", Entry::Tensor(Tensor::from_slice(&numbers)));
        state.insert("bucket_lengths", Entry::Tensor(Tensor::from_slice(&lengths)));
        state.insert("buckets_are_final", Entry::Bool(true));
        run.ddp.load_state_dict(&state)?;
        ensure!(are_same(&run.ddp.state_dict()?, &state));
        run.train(group.rank(), 4..7)?;
    }
    Ok(())
}

fn between_forward_and_backward(group: &ProcessGroup) -> Result<()> {
    let mut run = Run::new(group, "top-k")?;
    run.train(group.rank(), 0..1)?;
    let other = Run::new(group, "top-k")?;
    other.train(group.rank(), 0..4)?;
    let (state, before) = (other.ddp.state_dict()?, run.ddp.state_dict()?.copied()?);
    let inputs = Tensor::ones([4, 24], (Kind::Float, Device::Cpu));
    // The first forward after the first pass divides the parameters anew.
    let loss = run.ddp.forward(|| run.net.forward(&inputs))?.sum(Kind::Float);
    ensure!(!are_same(&run.ddp.state_dict()?, &before));
    let before = run.ddp.state_dict()?.copied()?;
    let error = run.ddp.load_state_dict(&state).expect_err("a backward pass is still to come").to_string();
    ensure!(error.contains("backward pass has not run"), "{error}");
    ensure!(are_same(&run.ddp.state_dict()?, &before));
    run.ddp.backward(&loss)?;
    Ok(run.ddp.load_state_dict(&state)?)
}

/// Refused, and nothing has changed.
fn refusals(group: &ProcessGroup) -> Result<()> {
    let mut run = Run::new(group, "top-k")?;
    run.train(group.rank(), 0..4)?;
    let before = run.ddp.state_dict()?.copied()?;
    let numbers = |numbers: &[i64]| Entry::Tensor(Tensor::from_slice(numbers));
    let changes: [(&str, Option<Entry>, &str); 8] = [
        ("bucket_parameters", Some(numbers(&[0, 1, 2, 3, 4, 4])), "6 parameters, each once"),
        ("bucket_parameters", Some(numbers(&[0, 1, 2, 3, 4])), "6 parameters, each once"),
        ("bucket_parameters", Some(numbers(&[0, 1, 2, 3, 4, -5])), "from 0 on"),
        ("bucket_lengths", Some(numbers(&[2, 5])), "add up to 6"),
        ("bucket_lengths", Some(numbers(&[6, 0])), "add up to 6"),
        ("buckets_are_final", None, "no entry `buckets_are_final`"),
        ("hook.errors.0", Some(numbers(&[1])), "`errors.0`"),
        ("hook.error.0", Some(Entry::Int(1)), "a tensor"),
    ];
    for (key, entry, said) in changes {
        let mut state = StateDict::new();
        for (name, value) in run.ddp.state_dict()?.copied()?.iter() {
            let value = match value {
                Entry::Tensor(tensor) => Entry::Tensor(tensor.shallow_clone()),
                Entry::Bool(value) => Entry::Bool(*value),
                Entry::Int(value) => Entry::Int(*value),
                other => anyhow::bail!("{other:?}"),
            };
            if name != key {
                state.insert(name, value);
            }
        }
        if let Some(entry) = entry {
            state.insert(key, entry);
        }
        let error = run.ddp.load_state_dict(&state).expect_err(key).to_string();
        ensure!(error.contains(said), "{key}: {error}");
        ensure!(are_same(&run.ddp.state_dict()?, &before), "{key} has changed something");
    }
    // The state of a run with a hook, without one.
    let (state, mut plain) = (run.ddp.state_dict()?, Run::new(group, "none")?);
    let error = plain.ddp.load_state_dict(&state).expect_err("it has no hook").to_string();
    ensure!(error.contains("`hook."), "{error}");
    ensure!(run.ddp.differs_by_rank() && !plain.ddp.differs_by_rank());
    Ok(())
}
