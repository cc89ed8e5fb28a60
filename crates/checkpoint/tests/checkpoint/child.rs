//! Child processes: this test program again, with the name of one ignored test.

use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive_checkpoint::{Checkpoint, RngState};
use overdrive_core::{Entry, StateDict, StateError, Stateful};
use tch::{Device, Kind, Tensor, nn, nn::ModuleT};

const FOLDER: &str = "OVERDRIVE_CHECKPOINT_TEST_FOLDER";
/// A variable with the last step; [`STEPS`] unless set.
pub const LAST_STEP: &str = "OVERDRIVE_CHECKPOINT_TEST_STEPS";
/// A variable with the step near which the run is killed. It waits for that a few steps later, so that a busy machine
/// cannot be late.
pub const KILLED: &str = "OVERDRIVE_CHECKPOINT_TEST_KILLED";
pub const STEPS: u64 = 200;
/// How many steps a run trains on while its kill is pending.
const GRACE: u64 = 8;

/// Adds the arguments and the environment that make this program run one child test.
pub fn arguments<'a>(command: &'a mut Command, test: &str, folder: &Path) -> &'a mut Command {
    let name = format!("child::{test}");
    command.args(["--exact", &name, "--ignored", "--nocapture", "--test-threads=1"]).env(FOLDER, folder)
}

fn number(variable: &str) -> Option<u64> {
    Some(std::env::var(variable).ok()?.parse().expect("a number"))
}

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).expect("started by another test").into()
}

/// SGD with momentum, and a position in the data: a state with tensors and plain values.
struct Trainer {
    params: Vec<Tensor>,
    momenta: Vec<Tensor>,
    seen: i64,
}

impl Stateful for Trainer {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("seen", Entry::Int(self.seen));
        for (index, momentum) in self.momenta.iter().enumerate() {
            state.insert(format!("momentum.{index}"), Entry::Tensor(momentum.shallow_clone()));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let seen = state.int("seen")?;
        let load = |(index, own): (usize, &Tensor)| {
            state.tensor(&format!("momentum.{index}"), &own.size(), own.kind()).map(Tensor::copy)
        };
        self.momenta = self.momenta.iter().enumerate().map(load).collect::<Result<_, _>>()?;
        self.seen = seen;
        Ok(())
    }
}

impl Trainer {
    fn step(&mut self, model: &nn::SequentialT) {
        // The data depends on the position, and dropout on the random generator.
        let x = (Tensor::arange(32, (Kind::Float, Device::Cpu)) + self.seen).sin().view([4, 8]);
        self.seen += 32;
        let loss = model.forward_t(&x, true).square().mean(Kind::Float);
        loss.backward();
        tch::no_grad(|| {
            for (param, momentum) in self.params.iter_mut().zip(&mut self.momenta) {
                *momentum = &*momentum * 0.9 + param.grad();
                let update: Tensor = &*momentum * 0.05;
                let _ = param.subtract_(&update);
                param.zero_grad();
            }
        });
    }
}

/// Trains to the end, saves every third step, and prints each stage ("moment").
#[test]
#[ignore = "a child of other tests"]
fn train() {
    tch::set_num_threads(1);
    tch::manual_seed(3);
    let mut vs = nn::VarStore::new(Device::Cpu);
    let model = nn::seq_t()
        .add(nn::linear(vs.root() / "a", 8, 64, Default::default()))
        .add_fn_t(|x, train| x.tanh().dropout(0.5, train))
        .add(nn::linear(vs.root() / "b", 64, 8, Default::default()));
    let params = vs.trainable_variables();
    let momenta = params.iter().map(Tensor::zeros_like).collect();
    let (mut trainer, mut rng) = (Trainer { params, momenta, seen: 0 }, RngState::new(Device::Cpu));

    println!("moment: open");
    let mut checkpoint = Checkpoint::builder(folder()).every(3).keep(2).on_signal(true).build().unwrap();
    println!("moment: resume");
    let parts: &mut [(&str, &mut dyn Stateful)] =
        &mut [("model", &mut vs), ("trainer", &mut trainer), ("rng", &mut rng)];
    let resumed = checkpoint.resume(parts).unwrap();
    assert!(
        resumed.as_ref().is_none_or(|resumed| resumed.skipped.is_empty()),
        "a kill must not damage a checkpoint: \
                                                                                {resumed:?}"
    );
    let (first, last) = (resumed.map_or(1, |resumed| resumed.step + 1), number(LAST_STEP).unwrap_or(STEPS));
    let killed = number(KILLED).map(|step| step.max(first));
    for step in first..=last {
        while killed.is_some_and(|killed| step > killed + GRACE) {
            std::thread::park();
        }
        println!("moment: step {step}");
        trainer.step(&model);
        if checkpoint.due(step).unwrap() || step == last {
            println!("moment: save {step}");
            checkpoint.save(step, &[("model", &vs), ("trainer", &trainer), ("rng", &rng)]).unwrap();
        }
        if checkpoint.stop_requested() {
            println!("stopped at {step}");
            break;
        }
    }
    checkpoint.finish().unwrap();
    println!("finished");
}

/// With a limit of 64 KiB per file, a model of 4 MB cannot be saved.
#[test]
#[ignore = "a child of another test"]
fn full_disk() {
    let vs = nn::VarStore::new(Device::Cpu);
    let _ = vs.root().zeros("weight", &[1_000_000]);
    let mut checkpoint = Checkpoint::builder(folder()).build().unwrap();
    checkpoint.save(3, &[("model", &vs)]).unwrap();
    let error = checkpoint.save(4, &[("model", &vs)]).unwrap_err();
    println!("{error}");
    assert_eq!(checkpoint.steps().unwrap(), [1, 2]);
    // The error is returned once; small checkpoints still fit.
    checkpoint.save(2, &[("model", &crate::model(2.0))]).unwrap();
    checkpoint.finish().unwrap();
}
