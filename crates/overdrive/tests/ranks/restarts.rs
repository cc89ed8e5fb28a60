//! A run whose ranks are killed repeatedly, and that the launcher restarts each time.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive::checkpoint::Writers;
use overdrive::dataload::{DistributedSampler, TensorDataset};
use overdrive::prelude::*;
use overdrive_ddp::DistributedDataParallel;
use overdrive_launch::{Launch, Streams};
use rustix::process::{Signal, getpid, kill_process};
use tch::nn::{self, ModuleT};

use crate::harness::Meeting;
use crate::moments::{self, Random};

const KILLS: usize = 6;
const EPOCHS: u64 = 6;
/// Batches per rank and epoch.
const BATCHES: u64 = 10;
/// How many more steps a rank trains while its kill is pending, which may be late on a busy machine. All kills together
/// come before the end.
const GRACE: u64 = 1;
/// One `rank:step:microseconds` for each attempt.
const KILLED: &str = "OVERDRIVE_TEST_KILLED";

pub fn ends_alike() -> Result<()> {
    let seed = moments::seed()?;
    let mut random = Random::new(seed, "restarts");
    let kills: Vec<String> = (0..KILLS)
        .map(|_| {
            let (rank, step) = (random.below(2), random.below(9));
            // Before the first step, the ranks meet, which takes longer.
            let delay = random.below(if step == 0 { 100_000 } else { 6_000 });
            format!("{rank}:{step}:{delay}")
        })
        .collect();
    println!("seed {seed}: the attempts' kills, as rank:step:microseconds, are {kills:?}");
    let (whole, killed) = (tempfile::tempdir()?, tempfile::tempdir()?);
    launch(whole.path(), &[])?;
    launch(killed.path(), &kills)?;
    let left = moments::processes_with(&mark())?;
    ensure!(left.is_empty(), "still running: {left:?}");
    // If one rank is killed right at its start, the other may be ended before it has written its file.
    let said = std::fs::read_dir(killed.path().join("attempts"))?.map(|entry| Ok(entry?.file_name()));
    let said: Vec<_> = said.collect::<Result<_>>()?;
    let of_attempt =
        |attempt: usize| said.iter().any(|name| name.to_string_lossy().starts_with(&format!("{attempt}-")));
    let attempts = (0..=KILLS).filter(|attempt| of_attempt(*attempt)).count();
    ensure!(attempts == KILLS + 1, "{attempts} attempts were made, with seed {seed}: {said:?}");
    for rank in 0..2 {
        let step = format!("rank-{rank}/step-{:012}", EPOCHS * BATCHES);
        for name in ["manifest.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"] {
            let read =
                |folder: &Path| std::fs::read(folder.join(&step).join(name)).with_context(|| format!("{step}/{name}"));
            ensure!(read(whole.path())? == read(killed.path())?, "rank {rank}: {name} differs, with seed {seed}");
        }
    }
    let model = |rank: usize| std::fs::read(killed.path().join(format!("rank-{rank}/weights")));
    ensure!(model(0)? == model(1)?, "the ranks' weights differ, with seed {seed}");
    Ok(())
}

/// Marks every process that is launched here, in its environment.
fn mark() -> String {
    format!("{}-restarts", std::process::id())
}

fn launch(folder: &Path, kills: &[String]) -> Result<()> {
    std::fs::create_dir(folder.join("attempts"))?;
    let launch = Launch::new(std::env::current_exe()?)
        .nproc(2)
        .max_restarts(kills.len() as u32)
        .grace_period(Duration::from_secs(5))
        .redirects(Streams::All)
        .log_dir(folder)
        .env("OVERDRIVE_TEST_SCENARIO", "restarts")
        .env(moments::FOLDER, folder)
        .env("OMP_NUM_THREADS", "1")
        .env(moments::MARK, mark())
        .env(KILLED, kills.join(","));
    launch.run().with_context(|| format!("with kills {kills:?}"))
}

/// When this rank is to be killed: how long after the start of which of its steps.
fn own_kill(rank: usize) -> Result<Option<(u64, Duration)>> {
    let attempt: usize = std::env::var("TORCHELASTIC_RESTART_COUNT")?.parse()?;
    std::fs::write(crate::folder()?.join(format!("attempts/{attempt}-{rank}")), "")?;
    let kills = std::env::var(KILLED)?;
    let Some(kill) = kills.split(',').nth(attempt).filter(|kill| !kill.is_empty()) else { return Ok(None) };
    let numbers = kill.split(':').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    Ok((numbers[0] == rank as u64).then(|| (numbers[1], Duration::from_micros(numbers[2]))))
}

/// Kills this process with SIGKILL after a delay, from another thread.
pub fn kill_after(delay: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let _ = kill_process(getpid(), Signal::KILL);
    });
}

struct Run {
    vs: nn::VarStore,
    model: nn::SequentialT,
    opt: AdamW,
    sched: LrScheduler,
    rng: RngState,
    loader: DataLoader<(Tensor, Tensor)>,
}

/// With running statistics and random numbers, which a resumed run has to restore.
pub fn model(vs: &nn::VarStore) -> nn::SequentialT {
    nn::seq_t()
        .add(nn::linear(vs.root() / "hidden", 6, 32, Default::default()))
        .add(nn::batch_norm1d(vs.root() / "norm", 32, Default::default()))
        .add_fn_t(|x, train| x.relu().dropout(0.3, train))
        .add(nn::linear(vs.root() / "out", 32, 3, Default::default()))
}

fn start(rank: usize) -> Result<Run> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = model(&vs);
    let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-2).build()?;
    let sched = LrScheduler::new(&mut opt, OneCycleLr::new(0.05, EPOCHS * BATCHES))?;
    let samples = BATCHES as i64 * 16;
    let x = (Tensor::arange(samples * 6, (Kind::Float, Device::Cpu)) * 0.7).sin().view([samples, 6]);
    let y = Tensor::arange(samples, (Kind::Int64, Device::Cpu)).remainder(3);
    let sampler = DistributedSampler::shuffled(samples as usize, 2, rank, 5)?;
    let loader = DataLoader::builder(TensorDataset::new((x, y))?).batch_size(8).sampler(sampler).num_workers(1);
    Ok(Run { vs, model, opt, sched, rng: RngState::new(Device::Cpu), loader: loader.build()? })
}

/// Trains from the newest checkpoint that both ranks have. Each has its own folder, because their random states differ.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let rank = meeting.rank;
    let kill = own_kill(rank)?;
    if let Some((0, delay)) = kill {
        kill_after(delay);
    }
    // Patient: when a rank is killed, the launcher ends the other.
    let group = meeting.group()?;
    tch::manual_seed(rank as i64);
    let mut run = start(rank)?;
    let folder = crate::folder()?;
    let mut checkpoint = Checkpoint::builder(&folder).every(3).ranks(group.clone(), Writers::Each).build()?;
    let parts: &mut [(&str, &mut dyn Stateful)] = &mut [
        ("model", &mut run.vs),
        ("optimizer", &mut run.opt),
        ("schedule", &mut run.sched),
        ("rng", &mut run.rng),
        ("loader", &mut run.loader),
    ];
    let mut step = checkpoint.resume(parts)?.map_or(0, |resumed| resumed.step);
    let ddp = DistributedDataParallel::new(&run.vs, &group)?;
    let mut done = 0;
    while run.loader.next_epoch() < EPOCHS {
        for batch in &run.loader {
            let (x, y) = batch?;
            done += 1;
            if let Some((_, delay)) = kill.filter(|(step, _)| *step == done) {
                kill_after(delay);
            }
            while kill.is_some_and(|(step, _)| done > step + GRACE) {
                std::thread::park();
            }
            let loss = ddp.forward(|| run.model.forward_t(&x, true))?.cross_entropy_for_logits(&y);
            ddp.backward(&loss)?;
            clip_grad_norm_(run.opt.params(), 1.0)?;
            run.opt.step()?;
            run.opt.zero_grad()?;
            run.sched.step(&mut run.opt)?;
            step += 1;
            if checkpoint.due(step)? {
                let parts: &[(&str, &dyn Stateful)] = &[
                    ("model", &run.vs),
                    ("optimizer", &run.opt),
                    ("schedule", &run.sched),
                    ("rng", &run.rng),
                    ("loader", &run.loader),
                ];
                checkpoint.save(step, parts)?;
            }
        }
    }
    checkpoint.finish()?;
    ensure!(kill.is_none(), "it was not killed");
    ensure!(step == EPOCHS * BATCHES, "{step} steps");
    let weights: Vec<u8> = run
        .vs
        .trainable_variables()
        .iter()
        .map(|param| Vec::<f32>::try_from(&param.detach().view([-1])))
        .collect::<Result<Vec<_>, _>>()?
        .concat()
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    std::fs::write(folder.join(format!("rank-{rank}/weights")), weights)?;
    Ok(())
}
