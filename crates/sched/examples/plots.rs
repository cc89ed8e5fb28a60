//! Draws the pictures of `docs/schedules.md`, without libtorch.
//!
//!     cargo run -p overdrive-sched --no-default-features --example plots
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::path::Path;

use overdrive_sched::{
    BatchSizeWarmup, ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts, Curriculum,
    CyclicLr, CyclicMode, DecayShape, ExponentialLr, InverseSqrtLr, LambdaLr, LinearLr, MultiStepLr, MultiplicativeLr,
    NoamLr, OneCycleLr, Plan, PolynomialLr, ProgressiveResize, ReduceLrOnPlateau, ScheduleError, SequentialLr, StepLr,
    SwaLr, WarmupCosineLr, WarmupStableDecayLr, layer_wise_lrs, plot, plot_values,
};

const STEPS: u64 = 100;

/// All pictures, with their file names.
pub fn pictures() -> Result<Vec<(&'static str, String)>, ScheduleError> {
    let cosine = || CosineAnnealingLr::new(STEPS).eta_min(0.01);
    let warm_up = || LinearLr::new().start_factor(0.1).total_iters(10);
    let one: [(&str, &str, Plan); 19] = [
        ("lambda", "LambdaLr", LambdaLr::new(|step| 1.0 / (1.0 + 0.05 * step as f64)).into()),
        ("multiplicative", "MultiplicativeLr", MultiplicativeLr::new(|_| 0.97).into()),
        ("step", "StepLr", StepLr::new(30).gamma(0.3).into()),
        ("multi_step", "MultiStepLr", MultiStepLr::new([40, 60, 90]).gamma(0.3).into()),
        ("constant", "ConstantLr", ConstantLr::new().total_iters(30).into()),
        ("linear", "LinearLr", LinearLr::new().start_factor(0.1).total_iters(40).into()),
        ("exponential", "ExponentialLr", ExponentialLr::new(0.96).into()),
        ("polynomial", "PolynomialLr", PolynomialLr::new().total_iters(80).power(2.0).into()),
        ("cosine", "CosineAnnealingLr", cosine().into()),
        ("warm_restarts", "CosineAnnealingWarmRestarts", CosineAnnealingWarmRestarts::new(15).t_mult(2).into()),
        ("cyclic", "CyclicLr", CyclicLr::new(0.01, 0.1).step_size_up(12).mode(CyclicMode::Triangular2).into()),
        ("one_cycle", "OneCycleLr", OneCycleLr::new(0.1, STEPS).into()),
        (
            "sequential",
            "SequentialLr",
            SequentialLr::new(warm_up()).then(10, CosineAnnealingLr::new(STEPS - 10)).into(),
        ),
        (
            "swa",
            "SwaLr after CosineAnnealingLr",
            SequentialLr::new(cosine()).then(60, SwaLr::new(0.05).anneal_epochs(15)).into(),
        ),
        ("chained", "ChainedScheduler", ChainedScheduler::new(warm_up()).and(StepLr::new(30).gamma(0.3)).into()),
        ("warmup_cosine", "WarmupCosineLr", WarmupCosineLr::new(10, STEPS).into()),
        (
            "warmup_stable_decay",
            "WarmupStableDecayLr",
            WarmupStableDecayLr::new(10, 60, 30).shape(DecayShape::OneMinusSqrt).into(),
        ),
        ("inverse_sqrt", "InverseSqrtLr", InverseSqrtLr::new(10).into()),
        ("noam", "NoamLr", NoamLr::new(100, 20).into()),
    ];
    let mut pictures = Vec::new();
    for (name, title, plan) in one {
        pictures.push((name, plot(title, plan, &[0.1], STEPS)?));
    }
    pictures.push(("layer_wise", plot("layer_wise_lrs, 4 groups", cosine(), &layer_wise_lrs(0.1, 0.6, 4)?, STEPS)?));
    let rates = plateau()?;
    let rate = |step: u64| rates.get(step as usize).copied().unwrap_or(f64::NAN);
    pictures.push(("plateau", plot_values("ReduceLrOnPlateau", "learning rate", STEPS, rate)));

    for (name, title, curriculum) in [
        ("curriculum_linear", "Curriculum::linear", Curriculum::linear(0.1, 80)?),
        ("curriculum_root", "Curriculum::root", Curriculum::root(0.1, 2.0, 80)?),
        ("curriculum_step", "Curriculum::step", Curriculum::step(0.3, 40)?),
        ("curriculum_exponential", "Curriculum::exponential", Curriculum::exponential(0.1, 1.5, 12)?),
    ] {
        pictures.push((name, plot_values(title, "share of the data", STEPS, |step| curriculum.share(step))));
    }
    let resize = ProgressiveResize::new(128, 224, 60)?.multiple_of(32)?.delay(20);
    pictures.push(("resize", plot_values("ProgressiveResize", "pixels", STEPS, |step| resize.side(step) as f64)));
    let batch = BatchSizeWarmup::new(32, 256, 80)?.multiple_of(32)?;
    pictures.push(("batch_size", plot_values("BatchSizeWarmup", "samples", STEPS, |step| batch.size(step) as f64)));
    Ok(pictures)
}

/// The rates for a loss that falls in three stages.
fn plateau() -> Result<Vec<f64>, ScheduleError> {
    let mut plateau = ReduceLrOnPlateau::builder().factor(0.5).patience(8).build(&[0.1])?;
    let mut rates = vec![0.1];
    for epoch in 0..STEPS {
        // Falls for 20 epochs, then stays constant for 15.
        let (stage, since) = (epoch / 35, epoch % 35);
        plateau.update(1.0 / (1.0 + (20 * stage + since.min(20)) as f64));
        rates.extend_from_slice(plateau.last_lr());
    }
    Ok(rates)
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schedules");
    fs::create_dir_all(&folder)?;
    let pictures = pictures()?;
    for (name, svg) in &pictures {
        fs::write(folder.join(format!("{name}.svg")), svg)?;
    }
    println!("{} pictures in docs/schedules", pictures.len());
    Ok(())
}
