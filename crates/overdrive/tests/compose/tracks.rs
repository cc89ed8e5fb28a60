//! The loader's and the checkpoints' threads have their own tracks in a profiler's trace.

use overdrive::dataload::TensorDataset;
use overdrive::prelude::*;
use overdrive_profile::{Profiler, SpanLayer, record_function};
use tch::nn::{self, Module};
use tracing_subscriber::layer::SubscriberExt as _;

const CPU: Device = Device::Cpu;

#[test]
fn threads_of_the_crates_have_tracks_with_their_names() -> anyhow::Result<()> {
    let _turn = crate::turn();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(SpanLayer::new()))?;
    let folder = tempfile::tempdir()?;
    let vs = nn::VarStore::new(CPU);
    let model = nn::linear(vs.root(), 6, 3, Default::default());
    let rows = Tensor::randn([80, 6], (Kind::Float, CPU));
    let loader = DataLoader::builder(TensorDataset::new((rows.shallow_clone(), rows))?).batch_size(8).num_workers(2);
    let loader = loader.build()?;
    let mut checkpoint = Checkpoint::builder(folder.path().join("checkpoints")).build()?;

    let mut profiler = Profiler::builder().start()?;
    for batch in &loader {
        let _step = record_function("step");
        let (inputs, _) = batch?;
        let _ = model.forward(&inputs);
    }
    checkpoint.save(10, &[("model", &vs)])?;
    checkpoint.finish()?;
    profiler.stop()?;

    let profile = profiler.profile().ok_or_else(|| anyhow::anyhow!("nothing was recorded"))?;
    let averages = profile.key_averages(false)?;
    for (scope, least) in [("step", 10), ("aten::linear", 10), ("dataload_batch", 10), ("checkpoint_write", 1)] {
        let count = averages.get(scope).map_or(0, |group| group.count);
        assert!(count >= least, "{scope}: {count}");
    }
    let path = folder.path().join("trace.json");
    profile.export_chrome_trace(&path)?;
    let trace = std::fs::read_to_string(path)?;
    for thread in ["(dataload-", "(checkpoint)"] {
        assert!(trace.contains(thread), "no track of {thread}");
    }
    Ok(())
}
