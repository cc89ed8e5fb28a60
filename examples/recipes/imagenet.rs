//! PyTorch's `examples/imagenet` in small: a model by its name, meters, top-k accuracy, resume and the best checkpoint.
//!
//! Trains on a folder of JPEG files, by default on pictures that it draws itself. Its losses are those of
//! `parity/recipes/imagenet.py`, both on `--data`: `cargo xtask parity recipes`.
//!
//!     cargo run -p overdrive-examples --example recipe_imagenet
#![forbid(unsafe_code)]

use std::f64::consts::PI;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Parser;
use jpeg_encoder::{ColorType, Encoder};
use overdrive::checkpoint::Goal;
use overdrive::core::Entry;
use overdrive::dataload::{ImageFolder, RandomHorizontalFlip, RandomResizedCrop, TensorDataset};
use overdrive::nn::Forward;
use overdrive::nn::metrics::{AverageMeter, ProgressMeter, accuracy};
use overdrive::nn::models::{Efficientnet, MobilenetV2, Resnet, ResnetBlock};
use overdrive::prelude::*;

// Model

fn make_model(arch: &str, num_classes: i64) -> Result<Box<dyn Forward>> {
    Ok(match arch {
        "resnet18" => Box::new(Resnet::builder(ResnetBlock::Basic, [2, 2, 2, 2]).num_classes(num_classes).build()?),
        "mobilenet_v2" => Box::new(MobilenetV2::builder().num_classes(num_classes).build()?),
        "efficientnet_b0" => Box::new(Efficientnet::builder().num_classes(num_classes).build()?),
        _ => bail!("there is no model {arch}"),
    })
}

// Data

const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];
const SIZE: u16 = 64;

type Loader = DataLoader<(Tensor, Tensor)>;

fn loaders(args: &Args, folder: &Path, device: Device) -> Result<(Loader, Loader)> {
    if let Some(file) = &args.data {
        let (train, val) = (tensors(file, "train")?, tensors(file, "val")?);
        let train = train.loader().batch_size(args.batch_size).shuffle(true).generator(None);
        let val = val.loader().batch_size(args.batch_size).generator(None);
        return Ok((train.to_device(device).build()?, val.to_device(device).build()?));
    }
    let folder = folder.join("pictures");
    let split = |split: &str, pipeline: ImagePipeline| {
        draw_pictures(&folder.join(split), args.classes, if split == "train" { 320 } else { 64 })?;
        let pictures = ImageFolder::open(folder.join(split))?;
        let pipeline = pipeline.to_float(ToFloat::new(&MEAN, &STD)?);
        let loader = DataLoader::builder(pictures).batch_size(args.batch_size).shuffle(split == "train");
        Ok::<_, anyhow::Error>(loader.collate(pipeline).to_device(device).build()?)
    };
    let crops =
        ImagePipeline::new(0).then(RandomResizedCrop::new(usize::from(SIZE))).then(RandomHorizontalFlip::default());
    Ok((split("train", crops)?, split("val", ImagePipeline::new(0))?))
}

fn tensors(file: &Path, split: &str) -> Result<TensorDataset<(Tensor, Tensor)>> {
    let state = nn::load_safetensors(file)?;
    let tensor = |name: &str| match state.get(&format!("{split}.{name}"))? {
        Entry::Tensor(tensor) => Ok(tensor.shallow_clone()),
        _ => bail!("{split}.{name} is no tensor"),
    };
    let row = |values: [f32; 3]| Tensor::from_slice(&values).view([3, 1, 1]);
    let images = (tensor("images")? / 255 - row(MEAN)) / row(STD);
    Ok(TensorDataset::new((images, tensor("labels")?))?)
}

/// Stripes whose direction is the class, with noise, as JPEG files in a folder for each class.
fn draw_pictures(folder: &Path, classes: i64, count: usize) -> Result<()> {
    let noise = Tensor::randn([count as i64, i64::from(SIZE), i64::from(SIZE), 3], (Kind::Float, Device::Cpu)) * 12;
    let axis = Tensor::linspace(0, 1, i64::from(SIZE), (Kind::Float, Device::Cpu));
    for number in 0..count {
        let class = number as i64 % classes;
        // Less than a right angle: a flip must not turn one class into another.
        let angle = PI / 2.0 * f64::from(class as i32) / classes as f64;
        let wave = ((axis.unsqueeze(0) * angle.cos() + axis.unsqueeze(1) * angle.sin()) * 20).sin() * 80 + 128;
        let pixels = (wave.unsqueeze(2) + noise.get(number as i64)).clamp(0, 255).to_kind(Kind::Uint8).contiguous();
        let class = folder.join(class.to_string());
        fs::create_dir_all(&class)?;
        let pixels = Vec::<u8>::try_from(pixels.view(-1))?;
        Encoder::new_file(class.join(format!("{number}.jpg")), 90)?.encode(&pixels, SIZE, SIZE, ColorType::Rgb)?;
    }
    Ok(())
}

// Training

/// PyTorch's ImageNet example, in small
#[derive(Parser)]
struct Args {
    /// A safetensors file of `train.images`, `train.labels`, `val.images` and `val.labels`; by default JPEG files
    #[arg(long)]
    data: Option<PathBuf>,
    #[arg(long, default_value = "resnet18")]
    arch: String,
    #[arg(long, default_value_t = 2)]
    epochs: u64,
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    #[arg(long, default_value_t = 0.02)]
    lr: f64,
    #[arg(long, default_value_t = 0.9)]
    momentum: f64,
    #[arg(long, default_value_t = 1e-4)]
    weight_decay: f64,
    #[arg(long, default_value_t = 8)]
    classes: i64,
    #[arg(long, default_value_t = 0)]
    seed: i64,
    /// The folder for checkpoints; by default a temporary one
    #[arg(long)]
    checkpoints: Option<PathBuf>,
    #[arg(long)]
    resume: bool,
}

fn train(train_loader: &Loader, model: &impl Forward, optimizer: &mut Sgd, epoch: u64) -> Result<()> {
    let mut batch_time = AverageMeter::new("Time").fixed(6, 3);
    let mut data_time = AverageMeter::new("Data").fixed(6, 3);
    let mut losses = AverageMeter::new("Loss").fixed(0, 4);
    let mut top1 = AverageMeter::new("Acc@1").fixed(6, 2);
    let mut top5 = AverageMeter::new("Acc@5").fixed(6, 2);
    let progress = ProgressMeter::new(train_loader.len().unwrap_or(0), format!("Epoch: [{epoch}]"));
    model.train();
    let mut end = Instant::now();
    for (i, batch) in train_loader.iter().enumerate() {
        let (images, target) = batch?;
        let size = images.size()[0];
        data_time.update_host(end.elapsed().as_secs_f64(), 1)?;
        let output = model.forward(&images)?;
        let loss = output.cross_entropy_for_logits(&target);
        let acc = accuracy(&output, &target, &[1, 5])?;
        losses.update(&loss, size)?;
        top1.update(&acc[0], size)?;
        top5.update(&acc[1], size)?;
        optimizer.zero_grad()?;
        loss.backward();
        optimizer.step()?;
        batch_time.update_host(end.elapsed().as_secs_f64(), 1)?;
        end = Instant::now();
        println!("{}", progress.display(i + 1, &[&batch_time, &data_time, &losses, &top1, &top5])?);
        println!("loss {}", losses.val()?);
    }
    Ok(())
}

fn validate(val_loader: &Loader, model: &impl Forward) -> Result<f64> {
    let mut losses = AverageMeter::new("Loss");
    let mut top1 = AverageMeter::new("Acc@1");
    let mut top5 = AverageMeter::new("Acc@5");
    model.eval();
    let _no_grad = tch::no_grad_guard();
    for batch in val_loader {
        let (images, target) = batch?;
        let output = model.forward(&images)?;
        let acc = accuracy(&output, &target, &[1, 5])?;
        losses.update(&output.cross_entropy_for_logits(&target), images.size()[0])?;
        top1.update(&acc[0], images.size()[0])?;
        top5.update(&acc[1], images.size()[0])?;
    }
    println!(" * Acc@1 {:.3} Acc@5 {:.3} loss {}", top1.avg()?, top5.avg()?, losses.avg()?);
    Ok(top1.avg()?)
}

fn main() -> Result<()> {
    let args = Args::parse();
    tch::manual_seed(args.seed);
    let device = Device::cuda_if_available();
    let temporary = tempfile::tempdir()?;
    let folder = args.checkpoints.as_deref().unwrap_or(temporary.path());
    let (train_loader, val_loader) = loaders(&args, folder, device)?;
    let mut model = make_model(&args.arch, args.classes)?;
    model.to(device)?;
    let sgd = Sgd::builder(&model).lr(args.lr).momentum(args.momentum).weight_decay(args.weight_decay);
    let mut optimizer = sgd.build()?;
    let mut scheduler = LrScheduler::new(&mut optimizer, StepLr::new(30))?;
    let mut checkpoint = Checkpoint::builder(folder.join("steps")).keep(1).keep_best(1, "acc1", Goal::Max).build()?;
    let mut start_epoch = 0;
    if args.resume {
        let resumed = checkpoint.resume(&mut [
            ("model", &mut model),
            ("optimizer", &mut optimizer),
            ("scheduler", &mut scheduler),
        ])?;
        start_epoch = resumed.map_or(0, |resumed| resumed.step);
    }
    for epoch in start_epoch..args.epochs {
        train(&train_loader, &model, &mut optimizer, epoch)?;
        let acc1 = validate(&val_loader, &model)?;
        scheduler.step(&mut optimizer)?;
        checkpoint.set("acc1", &acc1)?;
        checkpoint.save(epoch + 1, &[("model", &model), ("optimizer", &optimizer), ("scheduler", &scheduler)])?;
    }
    Ok(checkpoint.finish()?)
}
