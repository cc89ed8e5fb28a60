//! The initial weights of all contenders of a seed, Python's too: those that PyTorch draws.

use anyhow::{Context, Result, ensure};
use overdrive_bench_report::Workload;
use overdrive_core::Parameter;
use overdrive_nn::{Conv2d, Embedding, LayerNorm, Linear, Module, ModuleList, init, models};
use tch::Device;
use tch::nn::VarStore;

use super::text::{Shape, shape};

/// The small CNN, as in `peers/digits.py`.
#[derive(Module)]
struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    fc1: Linear,
    fc2: Linear,
}

/// A block of the small GPT, as in `peers/text.py`.
#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    norm2: LayerNorm,
    attention: Linear,
    project: Linear,
    widen: Linear,
    narrow: Linear,
}

#[derive(Module)]
struct Gpt {
    characters: Embedding,
    places: Embedding,
    blocks: ModuleList<Block>,
    norm: LayerNorm,
}

impl Gpt {
    fn new(shape: &Shape) -> Result<Self> {
        let width = shape.width;
        let (characters, places) = (Embedding::new(shape.vocabulary, width)?, Embedding::new(shape.context, width)?);
        for embedding in [&characters, &places] {
            for weight in embedding.named_parameters() {
                init::normal_(weight.tensor(), 0.0, 0.02)?;
            }
        }
        let block = |_| {
            Ok(Block {
                norm1: LayerNorm::new(width)?,
                norm2: LayerNorm::new(width)?,
                attention: Linear::new(width, 3 * width)?,
                project: Linear::new(width, width)?,
                widen: Linear::new(width, 4 * width)?,
                narrow: Linear::new(4 * width, width)?,
            })
        };
        let blocks = (0..shape.blocks).map(block).collect::<Result<_>>()?;
        Ok(Self { characters, places, blocks, norm: LayerNorm::new(width)? })
    }
}

/// PyTorch's initial weights for a seed, under the names of the workload's variables; `classes` are the photographs'.
///
/// # Errors
/// When memory runs out.
pub fn weights(workload: Workload, seed: u32, device: Device, classes: i64) -> Result<Vec<Parameter>> {
    tch::manual_seed(i64::from(seed));
    Ok(match workload {
        Workload::Digits => {
            let (conv1, conv2) = (Conv2d::new(1, 16, 3)?, Conv2d::new(16, 32, 3)?);
            Cnn { conv1, conv2, fc1: Linear::new(32 * 7 * 7, 64)?, fc2: Linear::new(64, 10)? }.named_parameters()
        }
        Workload::Photos => {
            use models::{Resnet, ResnetBlock};
            let resnet = match device.is_cuda() {
                true => Resnet::builder(ResnetBlock::Bottleneck, [3, 4, 6, 3]),
                false => Resnet::builder(ResnetBlock::Basic, [2, 2, 2, 2]),
            };
            resnet.num_classes(classes).build()?.named_parameters()
        }
        Workload::Text => Gpt::new(shape(device))?.named_parameters(),
    })
}

/// Writes these weights to the variables of the same names.
///
/// # Errors
/// When the names are not those of all that is trained.
pub fn write(weights: &[Parameter], vs: &VarStore) -> Result<()> {
    let mut variables = vs.variables();
    variables.retain(|_, variable| variable.requires_grad());
    for weight in weights {
        let name = weight.name().unwrap_or_default();
        let mut variable = variables.remove(name).with_context(|| format!("the model has no variable {name}"))?;
        tch::no_grad(|| variable.f_copy_(weight.tensor()))?;
    }
    ensure!(variables.is_empty(), "no initial weights for {:?}", variables.keys());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use sha2::{Digest, Sha256};
    use tch::{Kind, Tensor};

    use super::*;

    /// The checksums of the values of Python's contenders, in their order.
    const PYTHON: &str = "
import hashlib, json, sys
import common, digits, photos, text
models = [digits.Cnn, lambda: photos.resnet(7), text.Gpt]
of = lambda values: hashlib.sha256(values.detach().numpy().tobytes()).hexdigest()
weights = [[of(values) for values in common.initial(model).parameters()] for model in models]
common.torch.manual_seed(5)
batches = iter(text.Pieces())
pieces = [of(part) for _ in range(2) for part in next(batches)]
print(json.dumps([weights, pieces]))
";

    /// Needs a Python with PyTorch and torchvision; `OVERDRIVE_PYTHON` sets the interpreter.
    #[test]
    fn all_contenders_begin_with_pythons_weights_and_read_its_pieces_of_text() {
        let python = std::env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let imported = Command::new(&python).args(["-c", "import torch, torchvision"]).output();
        if !imported.is_ok_and(|output| output.status.success()) {
            println!("skipped: no Python with PyTorch and torchvision");
            return;
        }
        let play = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/text/hamlet.txt");
        let job = serde_json::json!({
            "workload": "text", "contender": "pytorch", "parts": [], "device": "cpu", "seed": 5, "threads": 1,
            "batch_size": 3, "tries": true, "has_bf16": false, "options": null, "settle_seconds": 0.0,
            "turn_seconds": 0.0, "length": 1, "train": play, "test": null, "test_images": 0,
        });
        let peers = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");
        let output =
            Command::new(&python).args(["-c", PYTHON, &job.to_string()]).env("PYTHONPATH", peers).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let (theirs, pieces): (Vec<Vec<String>>, Vec<String>) = serde_json::from_slice(&output.stdout).unwrap();
        let hex = |bytes: Vec<u8>| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for (workload, theirs) in [Workload::Digits, Workload::Photos, Workload::Text].into_iter().zip(theirs) {
            let ours = weights(workload, 5, Device::Cpu, 7).unwrap();
            let checksum = |weight: &Parameter| {
                let values: Vec<f32> = weight.tensor().detach().flatten(0, -1).to_kind(Kind::Float).try_into().unwrap();
                hex(values.iter().flat_map(|value| value.to_le_bytes()).collect())
            };
            assert_eq!(ours.iter().map(checksum).collect::<Vec<_>>(), theirs, "{workload}");
        }
        let feed = super::super::text::feed(&serde_json::from_value(job).unwrap(), Device::Cpu).unwrap();
        tch::manual_seed(5);
        let batches = feed.epoch(0).take(2).map(Result::unwrap);
        let checksum = |part: Tensor| {
            let numbers: Vec<i64> = part.flatten(0, -1).try_into().unwrap();
            hex(numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
        };
        let ours: Vec<String> = batches.flat_map(|(inputs, targets)| [inputs, targets]).map(checksum).collect();
        assert_eq!(ours, pieces);
    }
}
