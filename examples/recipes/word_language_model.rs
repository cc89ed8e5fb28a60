//! PyTorch's `examples/word_language_model` in small: an LSTM with tied weights, whose hidden state goes on from batch to
//! batch; the learning rate falls when the validation loss does not.
//!
//! Its losses are those of `parity/recipes/word_language_model.py`, to the bit: `cargo xtask parity recipes`. It was ported
//! from the documentation alone.
//!
//!     cargo run -p overdrive-examples --example recipe_word_language_model
#![forbid(unsafe_code)]

use std::collections::HashMap;

use anyhow::{Result, ensure};
use overdrive::nn::{LoadStateDict, init, load_safetensors, save_safetensors};
use overdrive::prelude::*;

// Model

#[derive(Module)]
struct RnnModel {
    ntoken: i64,
    drop: nn::Dropout,
    encoder: nn::Embedding,
    rnn: nn::Lstm,
    decoder: nn::Linear,
    nhid: i64,
    nlayers: i64,
}

type Hidden = (Tensor, Tensor);

impl RnnModel {
    fn new(ntoken: i64, ninp: i64, nhid: i64, nlayers: i64, dropout: f64, tie_weights: bool) -> Result<Self> {
        let mut model = Self {
            ntoken,
            drop: nn::Dropout::new(dropout)?,
            encoder: nn::Embedding::new(ntoken, ninp)?,
            rnn: nn::Lstm::builder(ninp, nhid).num_layers(nlayers).dropout(dropout).lstm()?,
            decoder: nn::Linear::new(nhid, ntoken)?,
            nhid,
            nlayers,
        };
        if tie_weights {
            ensure!(nhid == ninp, "When using the tied flag, nhid must be equal to emsize");
            model.decoder.weight = model.encoder.weight.tie();
        }
        model.init_weights()?;
        Ok(model)
    }

    fn init_weights(&self) -> Result<()> {
        let initrange = 0.1;
        init::uniform_(&self.encoder.weight, -initrange, initrange)?;
        init::zeros_(self.decoder.bias.as_ref().expect("a bias"))?;
        init::uniform_(&self.decoder.weight, -initrange, initrange)?;
        Ok(())
    }

    fn forward(&self, input: &Tensor, hidden: &Hidden) -> Result<(Tensor, Hidden)> {
        let emb = self.drop.forward(&self.encoder.forward(input)?)?;
        let (output, hidden) = self.rnn.forward(&emb, Some((&hidden.0, &hidden.1)))?;
        let output = self.drop.forward(&output)?;
        let decoded = self.decoder.forward(&output)?;
        let decoded = decoded.view([-1, self.ntoken]);
        Ok((decoded.log_softmax(1, Kind::Float), hidden))
    }

    fn init_hidden(&self, bsz: i64) -> Hidden {
        let zeros = || Tensor::zeros([self.nlayers, bsz, self.nhid], (Kind::Float, self.encoder.weight.device()));
        (zeros(), zeros())
    }
}

// Data

struct Corpus {
    words: usize,
    train: Tensor,
    valid: Tensor,
    test: Tensor,
}

impl Corpus {
    fn read(path: &str) -> Result<Self> {
        let text = std::fs::read_to_string(path)?;
        let lines: Vec<&str> = text.split('\n').collect();
        let (a, b) = (lines.len() * 8 / 10, lines.len() * 9 / 10);
        let mut word2idx = HashMap::new();
        let mut parts = Vec::new();
        for part in [&lines[..a], &lines[a..b], &lines[b..]] {
            let mut ids = Vec::new();
            for line in part {
                for word in line.split_whitespace().chain(["<eos>"]) {
                    let next = word2idx.len() as i64;
                    ids.push(*word2idx.entry(word).or_insert(next));
                }
            }
            parts.push(Tensor::from_slice(&ids));
        }
        let [train, valid, test] = parts.try_into().expect("three parts");
        Ok(Self { words: word2idx.len(), train, valid, test })
    }
}

fn batchify(data: &Tensor, bsz: i64) -> Tensor {
    let nbatch = data.size()[0] / bsz;
    let data = data.narrow(0, 0, nbatch * bsz);
    data.view([bsz, -1]).tr().contiguous()
}

fn repackage_hidden(h: &Hidden) -> Hidden {
    (h.0.detach(), h.1.detach())
}

const BPTT: i64 = 20;

fn get_batch(source: &Tensor, i: i64) -> (Tensor, Tensor) {
    let seq_len = BPTT.min(source.size()[0] - 1 - i);
    let data = source.narrow(0, i, seq_len);
    let target = source.narrow(0, i + 1, seq_len).reshape([-1]);
    (data, target)
}

// Training

fn evaluate(model: &RnnModel, data_source: &Tensor, eval_batch_size: i64) -> Result<f64> {
    model.eval();
    let mut total_loss = 0.0;
    let mut hidden = model.init_hidden(eval_batch_size);
    let _guard = tch::no_grad_guard();
    for i in (0..data_source.size()[0] - 1).step_by(BPTT as usize) {
        let (data, targets) = get_batch(data_source, i);
        let (output, new) = model.forward(&data, &hidden)?;
        hidden = repackage_hidden(&new);
        total_loss += data.size()[0] as f64 * output.nll_loss(&targets).double_value(&[]);
    }
    Ok(total_loss / (data_source.size()[0] - 1) as f64)
}

fn train(model: &RnnModel, train_data: &Tensor, batch_size: i64, opt: &mut Sgd) -> Result<()> {
    model.train();
    let mut hidden = model.init_hidden(batch_size);
    for i in (0..train_data.size()[0] - 1).step_by(BPTT as usize) {
        let (data, targets) = get_batch(train_data, i);
        opt.zero_grad()?;
        hidden = repackage_hidden(&hidden);
        let (output, new) = model.forward(&data, &hidden)?;
        hidden = new;
        let loss = output.nll_loss(&targets);
        loss.backward();
        clip_grad_norm_(model, 0.25)?;
        opt.step()?;
        println!("loss {}", loss.double_value(&[]));
    }
    Ok(())
}

fn main() -> Result<()> {
    let folder = std::env::var("OUT_DIR").unwrap_or_else(|_| "target".to_owned());
    std::fs::create_dir_all(&folder)?;
    let save = std::path::Path::new(&folder).join("word_language_model.safetensors");
    tch::manual_seed(1111);
    let corpus = Corpus::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/text/hamlet.txt"))?;
    let train_data = batchify(&corpus.train, 20).narrow(0, 0, 601);
    let val_data = batchify(&corpus.valid, 10);
    let test_data = batchify(&corpus.test, 10);
    let model = RnnModel::new(corpus.words as i64, 64, 64, 2, 0.2, true)?;
    let mut lr = 20.0;
    // Unfused, as the counterpart's `p.data.add_(p.grad, alpha=-lr)`.
    let mut opt = Sgd::builder(&model).lr(lr).fused(false).build()?;
    let mut best_val_loss = None;
    for _epoch in 0..2 {
        train(&model, &train_data, 20, &mut opt)?;
        let val_loss = evaluate(&model, &val_data, 10)?;
        println!("valid loss {val_loss}");
        if best_val_loss.is_none_or(|best| val_loss < best) {
            save_safetensors(&save, &model.state_dict()?, &[])?;
            best_val_loss = Some(val_loss);
        } else {
            lr /= 4.0;
            opt.set_lr(0, lr)?;
        }
    }
    LoadStateDict::new(&load_safetensors(&save)?).into(&model)?;
    println!("test loss {}", evaluate(&model, &test_data, 10)?);
    Ok(())
}
