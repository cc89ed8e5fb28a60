//! A run with all parts that is interrupted within an epoch and resumed with new objects.

use std::path::Path;

use overdrive::dataload::TensorDataset;
use overdrive::optim::Lookahead;
use overdrive::prelude::*;
use overdrive::sched::ExponentialLr;
use tch::nn::{self, ModuleT};

const CPU: Device = Device::Cpu;
const EPOCHS: u64 = 3;

struct Run {
    vs: nn::VarStore,
    model: nn::SequentialT,
    opt: AdamW,
    scaler: GradScaler,
    sched: LrScheduler,
    average: AveragedModel,
    rng: RngState,
    loader: DataLoader<(Tensor, Tensor)>,
}

impl Run {
    /// `seed` simulates the random state of a new process.
    fn new(seed: i64, workers: usize) -> anyhow::Result<Self> {
        tch::manual_seed(seed);
        let vs = nn::VarStore::new(CPU);
        let model = nn::seq_t()
            .add(nn::linear(vs.root() / "hidden", 6, 32, Default::default()))
            .add(nn::batch_norm1d(vs.root() / "norm", 32, Default::default()))
            .add_fn_t(|x, train| x.relu().dropout(0.3, train))
            .add(nn::linear(vs.root() / "out", 32, 3, Default::default()));
        let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-2).amsgrad(true).build()?;
        let sched = LrScheduler::new(&mut opt, OneCycleLr::new(0.05, EPOCHS * 10))?;
        let average = AveragedModel::builder(&vs, Averaging::Ema { decay: 0.9 }).use_buffers(true).build()?;
        let scaler = GradScaler::builder(CPU).init_scale(1024.0).growth_interval(7).build()?;
        let x = (Tensor::arange(80 * 6, (Kind::Float, CPU)) * 0.7).sin().view([80, 6]);
        let y = Tensor::arange(80, (Kind::Int64, CPU)).remainder(3);
        let loader = DataLoader::builder(TensorDataset::new((x, y))?).batch_size(8).shuffle(true).seed(5);
        let loader = loader.num_workers(workers).build()?;
        Ok(Self { vs, model, opt, scaler, sched, average, rng: RngState::new(CPU), loader })
    }

    /// Resumes from the checkpoint in `folder`, and returns after step `until`.
    fn train(&mut self, folder: &Path, until: u64) -> anyhow::Result<()> {
        let mut checkpoint = Checkpoint::builder(folder).every(1).keep(1).build()?;
        let resumed = checkpoint.resume(&mut [
            ("model", &mut self.vs),
            ("optimizer", &mut self.opt),
            ("scaler", &mut self.scaler),
            ("schedule", &mut self.sched),
            ("average", &mut self.average),
            ("rng", &mut self.rng),
            ("loader", &mut self.loader),
        ])?;
        let mut step = resumed.map_or(0, |resumed| resumed.step);
        while self.loader.next_epoch() < EPOCHS {
            for batch in &self.loader {
                let (x, y) = batch?;
                let loss = self.model.forward_t(&x, true).cross_entropy_for_logits(&y);
                self.scaler.scale(&loss)?.backward();
                self.scaler.unscale_(&mut self.opt)?;
                drop(clip_grad_norm_(self.opt.params(), 1.0)?);
                self.scaler.step(&mut self.opt)?;
                self.scaler.update()?;
                self.opt.zero_grad()?;
                self.sched.step(&mut self.opt)?;
                self.average.update()?;
                step += 1;
                if checkpoint.due(step)? {
                    checkpoint.save(
                        step,
                        &[
                            ("model", &self.vs),
                            ("optimizer", &self.opt),
                            ("scaler", &self.scaler),
                            ("schedule", &self.sched),
                            ("average", &self.average),
                            ("rng", &self.rng),
                            ("loader", &self.loader),
                        ],
                    )?;
                }
                if step == until {
                    return Ok(checkpoint.finish()?);
                }
            }
        }
        Ok(checkpoint.finish()?)
    }
}

#[test]
fn a_run_with_all_parts_resumes_bit_for_bit_within_an_epoch() -> anyhow::Result<()> {
    let _turn = crate::turn();
    tch::set_num_threads(1);
    let (whole, parts) = (tempfile::tempdir()?, tempfile::tempdir()?);
    Run::new(1, 0)?.train(whole.path(), u64::MAX)?;
    // Interrupted within an epoch and at its end, and with another number of workers each time.
    for (seed, until, workers) in [(1, 3, 0), (2, 10, 2), (3, 17, 1), (4, u64::MAX, 2)] {
        Run::new(seed, workers)?.train(parts.path(), until)?;
    }
    let last = format!("step-{:012}", EPOCHS * 10);
    for part in ["model", "optimizer", "scaler", "average", "rng"] {
        let name = format!("{part}.safetensors");
        let read = |folder: &Path| std::fs::read(folder.join(&last).join(&name));
        match (read(whole.path()), read(parts.path())) {
            (Ok(whole), Ok(parts)) => assert!(whole == parts, "{name} differs"),
            // A part without tensors has no file.
            (Err(_), Err(_)) if part == "scaler" => {}
            found => panic!("{name}: {found:?}"),
        }
    }
    let manifest = |folder: &Path| std::fs::read(folder.join(&last).join("manifest.json"));
    assert_eq!(manifest(whole.path())?, manifest(parts.path())?);
    Ok(())
}

/// Trains a model whose backbone is unfrozen after step 3.
fn train_unfreezing(folder: &Path, until: u64) -> anyhow::Result<Vec<f64>> {
    let vs = nn::VarStore::new(CPU);
    let backbone = vs.root().ones("backbone", &[3]).set_requires_grad(false);
    let head = vs.root().ones("head", &[3]);
    let sgd = Sgd::builder([("head", &head)]).lr(0.1).momentum(0.9).build()?;
    let mut opt = Lookahead::new(sgd, 2, 0.5)?;
    let mut sched = LrScheduler::new(&mut opt, ExponentialLr::new(0.9))?;
    let unfreeze = |opt: &mut Lookahead<Sgd>| {
        let _ = backbone.set_requires_grad(true);
        opt.inner_mut().add_param_group(Sgd::group([("backbone", &backbone)]).lr(0.01))
    };
    let mut checkpoint = Checkpoint::builder(folder).every(1).build()?;
    checkpoint.read_fields()?;
    if checkpoint.get("unfrozen")?.unwrap_or(false) {
        unfreeze(&mut opt)?;
        sched.apply(&mut opt)?;
    }
    let mut vs = vs;
    let resumed = checkpoint.resume(&mut [("model", &mut vs), ("optimizer", &mut opt), ("schedule", &mut sched)])?;
    sched.apply(&mut opt)?;
    for step in resumed.map_or(0, |resumed| resumed.step) + 1..=until {
        (&backbone * &head * step as f64).square().sum(Kind::Float).backward();
        opt.step()?;
        opt.zero_grad()?;
        sched.step(&mut opt)?;
        if step == 3 {
            unfreeze(&mut opt)?;
            sched.apply(&mut opt)?;
            checkpoint.set("unfrozen", &true)?;
        }
        checkpoint.save(step, &[("model", &vs), ("optimizer", &opt), ("schedule", &sched)])?;
    }
    checkpoint.finish()?;
    Ok(Vec::try_from(Tensor::cat(&[backbone.detach(), head.detach()], 0))?)
}

#[test]
fn a_run_with_unfrozen_layers_adds_their_group_before_it_resumes() -> anyhow::Result<()> {
    let _turn = crate::turn();
    let (whole, parts) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let expected = train_unfreezing(whole.path(), 8)?;
    assert!(expected[0] != 1.0, "the backbone was not trained");
    // Interrupted before the unfreezing, directly after it, and later.
    for until in [2, 3, 6, 8] {
        let found = train_unfreezing(parts.path(), until)?;
        assert!(until < 8 || found == expected, "{found:?} {expected:?}");
    }
    Ok(())
}
