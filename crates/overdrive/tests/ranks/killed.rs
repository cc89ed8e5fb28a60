//! A run with accumulation that is killed repeatedly.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{DataError, FnDataset};
use overdrive::prelude::*;
use tch::nn::{self, ModuleT};

use crate::harness::{Meeting, start};
use crate::moments::{self, Random};
use crate::restarts::{kill_after, model};

const KILLS: usize = 10;
const EPOCHS: u64 = 14;
/// How many windows a run may train after asking for its kill, which may come late on a busy machine.
const GRACE: u64 = 3;
const SAMPLES: usize = 61;
/// `windows:microseconds`: when the run is killed.
const KILLED: &str = "OVERDRIVE_TEST_KILLED";

pub fn while_accumulating() -> Result<()> {
    let seed = moments::seed()?;
    let mut random = Random::new(seed, "accumulating");
    let (whole, killed) = (tempfile::tempdir()?, tempfile::tempdir()?);
    attempt(whole.path(), None)?;
    for _ in 0..KILLS {
        let kill = format!("{}:{}", 1 + random.below(5), random.below(6_000));
        attempt(killed.path(), Some(&kill)).with_context(|| format!("killed at {kill}, with seed {seed}"))?;
    }
    attempt(killed.path(), None)?;
    let last = |folder: &Path| -> Result<_> {
        let steps: Result<Vec<_>, _> = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect();
        let steps: Vec<_> = steps.map_err(|error: std::io::Error| error)?;
        steps.into_iter().filter(|it| it.to_string_lossy().starts_with("step-")).max().context("no checkpoint")
    };
    let step = last(whole.path())?;
    ensure!(step == last(killed.path())?, "the killed run's last checkpoint has another step, with seed {seed}");
    for entry in std::fs::read_dir(whole.path().join(&step))? {
        let name = entry?.file_name();
        let read = |folder: &Path| std::fs::read(folder.join(&step).join(&name));
        ensure!(read(whole.path())? == read(killed.path())?, "{} differs, with seed {seed}", name.display());
    }
    Ok(())
}

fn attempt(folder: &Path, kill: Option<&str>) -> Result<()> {
    let folder = folder.to_str().context("the folder's path is not UTF-8")?;
    let mut vars = vec![(moments::FOLDER, folder)];
    vars.extend(kill.map(|kill| (KILLED, kill)));
    let ended = start("accumulating", 0, 1, 0, &vars)?.end(Instant::now())?;
    let as_expected = if kill.is_some() { ended.status.signal() == Some(9) } else { ended.status.success() };
    ensure!(as_expected, "it ended with {}\n{}{}", ended.status, ended.output, ended.errors);
    Ok(())
}

struct Run {
    vs: nn::VarStore,
    model: nn::SequentialT,
    opt: AdamW,
    scaler: GradScaler,
    accum: Accumulator,
    sched: LrScheduler,
    average: AveragedModel,
    rng: RngState,
    loader: DataLoader<Vec<usize>>,
}

fn start_run() -> Result<Run> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = model(&vs);
    let mut opt = AdamW::builder(&vs).lr(1e-2).build()?;
    let sched = LrScheduler::new(&mut opt, OneCycleLr::new(0.05, 100))?;
    let samples = FnDataset::new(SAMPLES, |sample| match sample % 9 {
        4 => Err(DataError::other("a bad sample")),
        _ => Ok(sample),
    });
    let loader = DataLoader::builder(samples).batch_size(3).shuffle(true).seed(5).on_error(OnError::Skip);
    Ok(Run {
        model,
        opt,
        scaler: GradScaler::builder(Device::Cpu).init_scale(1024.0).growth_interval(7).build()?,
        accum: Accumulator::new(3)?,
        sched,
        average: AveragedModel::new(&vs, Averaging::Ema { decay: 0.9 })?,
        rng: RngState::new(Device::Cpu),
        loader: loader.num_workers(2).collate(|batch: Vec<usize>| Ok(batch)).build()?,
        vs,
    })
}

impl Run {
    fn parts(&mut self) -> [(&'static str, &mut dyn Stateful); 8] {
        [
            ("model", &mut self.vs),
            ("optimizer", &mut self.opt),
            ("scaler", &mut self.scaler),
            ("accumulator", &mut self.accum),
            ("schedule", &mut self.sched),
            ("average", &mut self.average),
            ("rng", &mut self.rng),
            ("loader", &mut self.loader),
        ]
    }

    fn backward(&mut self, batch: &[usize], closes: bool) -> Result<()> {
        let rows: Vec<f32> =
            batch.iter().flat_map(|&row| (0..6).map(move |column| ((row * 6 + column) as f32 * 0.7).sin())).collect();
        let classes: Vec<i64> = batch.iter().map(|row| (row % 3) as i64).collect();
        let x = Tensor::from_slice(&rows).view([batch.len() as i64, 6]);
        // Batch norm cannot compute the variance of one sample.
        let outputs = self.model.forward_t(&x, batch.len() > 1);
        let loss = self.scaler.scale(&outputs.cross_entropy_for_logits(&Tensor::from_slice(&classes)))?;
        self.accum.backward(&self.opt, &loss, Samples(batch.len() as i64), closes)?;
        Ok(())
    }
}

/// Saves after every window, while the loader's workers read ahead.
pub fn scenario(_: &Meeting) -> Result<()> {
    let kill = match std::env::var(KILLED) {
        Ok(kill) => Some(kill.split(':').map(str::parse).collect::<Result<Vec<u64>, _>>()?),
        Err(_) => None,
    };
    tch::manual_seed(1);
    let mut run = start_run()?;
    let mut checkpoint = Checkpoint::builder(crate::folder()?).every(1).build()?;
    let mut window = checkpoint.resume(&mut run.parts())?.map_or(0, |resumed| resumed.step);
    let first = window;
    while run.loader.next_epoch() < EPOCHS {
        for micro in run.accum.windows(&run.loader) {
            run.backward(&micro.batch?, micro.closes)?;
            if !micro.closes {
                continue;
            }
            run.scaler.unscale_(&mut run.opt)?;
            drop(clip_grad_norm_(run.opt.params(), 1.0)?);
            run.scaler.step(&mut run.opt)?;
            run.scaler.update()?;
            run.opt.zero_grad()?;
            run.sched.step(&mut run.opt)?;
            run.average.update()?;
            window += 1;
            if let Some(kill) = kill.as_ref().filter(|kill| window == first + kill[0]) {
                kill_after(Duration::from_micros(kill[1]));
            }
            if checkpoint.due(window)? {
                let parts = run.parts();
                checkpoint.save(window, &parts.each_ref().map(|(name, part)| (*name, &**part)))?;
            }
            while kill.as_ref().is_some_and(|kill| window >= first + kill[0] + GRACE) {
                std::thread::park();
            }
        }
    }
    checkpoint.finish()?;
    // `EPOCHS` is large enough for all kills to come before the end.
    ensure!(kill.is_none(), "it was not killed");
    Ok(())
}
