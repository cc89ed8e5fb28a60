//! DDP's collectives in a profiler's trace.

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::DistributedDataParallel;
use overdrive_profile::Profiler;
use serde_json::Value;
use tch::nn::{self, Module};

use crate::harness::Meeting;

const STEPS: usize = 3;

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 64, 64, Default::default());
    let mut opt = AdamW::builder(vs.trainable_variables()).build()?;
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    let mut profiler = Profiler::builder().start()?;
    for _ in 0..STEPS {
        let outputs = ddp.forward(|| model.forward(&Tensor::randn([8, 64], (Kind::Float, Device::Cpu))))?;
        ddp.backward(&outputs.square().mean(Kind::Float))?;
        opt.step()?;
        opt.zero_grad()?;
    }
    profiler.stop()?;
    let profile = profiler.profile().context("nothing was recorded")?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("trace.json");
    profile.export_chrome_trace(&path)?;
    let trace: Value = serde_json::from_slice(&std::fs::read(path)?)?;
    let events = trace["traceEvents"].as_array().context("a trace without events")?;
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
    // The reducer starts collectives in the backward pass; Gloo's own threads run them, on their tracks.
    let (asked, done) = (named("c10d::allreduce_"), named("gloo:all_reduce"));
    ensure!(asked.len() == STEPS && done.len() == STEPS, "{} asked for, {} done", asked.len(), done.len());
    let tracks = named("thread_name");
    for exchange in &done {
        let of_thread = |track: &&&Value| track["tid"] == exchange["tid"];
        // If a thread has several names, viewers show the latest.
        let track = tracks.iter().filter(of_thread).max_by_key(|track| track["ts"].as_f64().map(|it| it as i64));
        let track = track.with_context(|| format!("no track of {exchange}"))?;
        let label = track["args"]["name"].as_str().unwrap_or_default();
        ensure!(label.ends_with("(pt_gloo_runloop)"), "{label} has {exchange}");
        ensure!(asked.iter().all(|it| it["tid"] != exchange["tid"]), "on the thread that trains: {exchange}");
        ensure!(exchange["dur"].as_f64().is_some_and(|it| it > 0.0), "{exchange}");
    }
    Ok(())
}
