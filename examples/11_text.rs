//! A small transformer that learns to write like Hamlet, byte by byte.
//!
//! Trains a two-layer decoder on the shipped play (163 kB) with AdamW, a warm-up and a cosine, clipping and windows of two
//! micro-batches; then writes some lines. `-- --eight-bit` keeps AdamW's averages in eight bits.
//!
//! Expect: a loss per byte that falls from about 4.9 to below 2.4, and lines with words among them, in under a minute on a
//! CPU.
//!
//!     cargo run -p overdrive-examples --example 11_text
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use overdrive::dataload::FnDataset;
use overdrive::optim::AdamW8Bit;
use overdrive::prelude::*;
use overdrive::sched::WarmupCosineLr;

const TEXT: &str = include_str!("../data/text/hamlet.txt");
const VOCABULARY: i64 = 128;
const CONTEXT: i64 = 64;
const WIDTH: i64 = 96;
const HEADS: i64 = 4;
const STEPS: u64 = 400;
/// Micro-batches a step: together 32 pieces of text.
const WINDOW: usize = 2;

fn main() -> Result<()> {
    tch::manual_seed(1);
    let device = Device::cuda_if_available();
    let eight_bit = std::env::args().any(|arg| arg == "--eight-bit");

    let vs = nn::VarStore::new(device);
    let model = Decoder::new(&vs.root());
    let variables = vs.trainable_variables();
    let mut opt: Box<dyn Optimizer> = match eight_bit {
        true => Box::new(AdamW8Bit::builder(&variables).lr(3e-3).build()?),
        false => Box::new(AdamW::builder(&variables).lr(3e-3).build()?),
    };
    let mut sched = LrScheduler::new(&mut *opt, WarmupCosineLr::new(20, STEPS))?;
    let mut accum = Accumulator::new(&variables, WINDOW)?;

    let loader = DataLoader::builder(pieces()).batch_size(16).shuffle(true).drop_last(true).num_workers(1).build()?;
    let (mut step, mut recent) = (0, Vec::new());
    'training: loop {
        for micro in accum.windows(&loader) {
            let batch = micro.batch?.to_device(device).to_kind(Kind::Int64);
            let (inputs, targets) = (batch.narrow(1, 0, CONTEXT), batch.narrow(1, 1, CONTEXT));
            let logits = model.forward(&inputs);
            let loss = logits.flatten(0, 1).cross_entropy_for_logits(&targets.flatten(0, 1));
            accum.backward(&loss, inputs.size()[0], micro.closes)?;
            recent.push(loss.detach());
            if !micro.closes {
                continue;
            }
            clip_grad_norm_(opt.params(), 1.0)?;
            opt.step()?;
            opt.zero_grad()?;
            sched.step(&mut *opt)?;
            step += 1;
            if step % 50 == 0 {
                let loss = Tensor::stack(&recent, 0).mean(Kind::Float).double_value(&[]);
                println!("step {step}: loss {loss:.3}, learning rate {:.1e}", sched.last_lr()[0]);
                recent.clear();
                if step == STEPS {
                    ensure!(loss < 2.4, "it should have learned more");
                    break 'training;
                }
            }
        }
    }
    println!("\n{}", model.write("  Ham. ", 300, device));
    Ok(())
}

/// The text in pieces of a context and the byte behind it, each half a context further on.
fn pieces() -> FnDataset<impl Fn(usize) -> Result<Tensor, overdrive::dataload::DataError>> {
    let (bytes, stride) = (TEXT.as_bytes(), CONTEXT as usize / 2);
    let count = (bytes.len() - CONTEXT as usize - 1) / stride;
    FnDataset::new(count, move |index| Ok(Tensor::from_slice(&bytes[index * stride..][..=CONTEXT as usize])))
}

/// A decoder in the manner of GPT-2: norms before attention and perceptron, the head shares the embedding.
struct Decoder {
    bytes: nn::Embedding,
    places: nn::Embedding,
    blocks: Vec<Block>,
    norm: nn::LayerNorm,
}

struct Block {
    norms: [nn::LayerNorm; 2],
    attention: nn::Linear,
    project: nn::Linear,
    widen: nn::Linear,
    narrow: nn::Linear,
}

impl Decoder {
    fn new(vs: &nn::Path<'_>) -> Self {
        let init = nn::Init::Randn { mean: 0.0, stdev: 0.05 };
        let config = nn::EmbeddingConfig { ws_init: init, ..Default::default() };
        Self {
            bytes: nn::embedding(vs / "bytes", VOCABULARY, WIDTH, config),
            places: nn::embedding(vs / "places", CONTEXT, WIDTH, config),
            blocks: (0..2).map(|block| Block::new(&(vs / format!("block{block}")))).collect(),
            norm: nn::layer_norm(vs / "norm", vec![WIDTH], Default::default()),
        }
    }

    /// Bytes `[batch, length]` to logits `[batch, length, 128]`.
    fn forward(&self, bytes: &Tensor) -> Tensor {
        let places = Tensor::arange(bytes.size()[1], (Kind::Int64, bytes.device()));
        let mut x = self.bytes.forward(bytes) + self.places.forward(&places);
        for block in &self.blocks {
            x = block.forward(&x);
        }
        self.norm.forward(&x).matmul(&self.bytes.ws.transpose(0, 1))
    }

    /// Goes on behind `start`, byte by byte, as the model finds likely.
    fn write(&self, start: &str, count: usize, device: Device) -> String {
        let _no_grad = tch::no_grad_guard();
        let mut text = start.as_bytes().to_vec();
        for _ in 0..count {
            let context = &text[text.len().saturating_sub(CONTEXT as usize)..];
            let context = Tensor::from_slice(context).to_kind(Kind::Int64).to_device(device).unsqueeze(0);
            let last = self.forward(&context).select(1, -1) / 0.7;
            let byte = last.softmax(-1, Kind::Float).multinomial(1, false);
            text.push(u8::try_from(byte.int64_value(&[0, 0])).unwrap_or(b' '));
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Block {
    fn new(vs: &nn::Path<'_>) -> Self {
        let linear = |name, inputs, outputs| nn::linear(vs / name, inputs, outputs, Default::default());
        Self {
            norms: ["norm1", "norm2"].map(|name| nn::layer_norm(vs / name, vec![WIDTH], Default::default())),
            attention: linear("attention", WIDTH, 3 * WIDTH),
            project: linear("project", WIDTH, WIDTH),
            widen: linear("widen", WIDTH, 4 * WIDTH),
            narrow: linear("narrow", 4 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let (batch, length, _) = x.size3().unwrap_or_default();
        // [batch, length, 3 * WIDTH] to three of [batch, HEADS, length, WIDTH / HEADS].
        let all =
            self.attention.forward(&self.norms[0].forward(x)).view([batch, length, 3 * HEADS, -1]).transpose(1, 2);
        let [q, k, v] = [0, 1, 2].map(|part| all.narrow(1, part * HEADS, HEADS));
        let heads = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
        let x = x + self.project.forward(&heads.transpose(1, 2).reshape([batch, length, WIDTH]));
        &x + self.narrow.forward(&self.widen.forward(&self.norms[1].forward(&x)).gelu("none"))
    }
}
