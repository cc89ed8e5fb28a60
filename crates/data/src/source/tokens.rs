//! Tokens: Megatron's sequences, and nanoGPT's files, which do not say where a sample ends.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use overdrive_dataload::{Dataset, IndexedTokens, TokenDtype, TokenFile};

use super::Source;
use crate::cli::ConvertOptions;
use crate::sample::{Draft, Sample, TOKENS};

/// How many tokens are read at once.
const PIECE: usize = 1 << 16;
/// The most tokens of a sample: 1 GiB, as int64.
const MAX_TOKENS: usize = 1 << 27;

pub fn open_indexed(path: &Path) -> Result<Source> {
    let data = IndexedTokens::open(path)?;
    let total = Some(data.len() as u64);
    let samples = (0..data.len()).map(move |index| sample(&data.get(index)?, index));
    Ok(Source { total, samples: Box::new(samples) })
}

pub fn open(options: &ConvertOptions) -> Result<Source> {
    let (path, end, most) = (&options.src, options.end_of_text, options.block_size);
    ensure!(
        end.is_some() || most.is_some(),
        "{}: a file of tokens does not say where a sample ends: state --end-of-text with the token that ends each text \
         (50256 where nanoGPT has prepared the file), or --block-size with the length of a sample",
        path.display()
    );
    let dtype = options.src_token_dtype.map_or(TokenDtype::default(), TokenDtype::from);
    if let Some(end) = end.filter(|&end| !dtype.holds(end)) {
        bail!("--end-of-text {end} is no token of {dtype:?}: state another, or --src-token-dtype with what SRC has");
    }
    let file = TokenFile::with_dtype(path, dtype)?;
    let most = most.map(|most| most as usize);
    let total = most.filter(|_| end.is_none()).map(|most| file.len().div_ceil(most) as u64);
    let samples = Texts { file, end, most, has_ended: false, at: 0, piece: Vec::new().into_iter() };
    let samples = samples.enumerate().map(|(index, tokens)| sample(&tokens?, index));
    Ok(Source { total, samples: Box::new(samples) })
}

/// A list of JSON, which lines of JSON hold as such.
fn sample(tokens: &[i64], index: usize) -> Result<Sample> {
    let mut draft = Draft::default();
    draft.add(format!("{}.json", TOKENS[0]), serde_json::to_vec(tokens)?)?;
    Ok(draft.finish(index))
}

/// All tokens of a file, cut behind each that ends a text, and where a sample would be longer than it may be.
struct Texts {
    file: TokenFile,
    end: Option<i64>,
    most: Option<usize>,
    /// Whether a text has ended before the file does.
    has_ended: bool,
    /// The first token that is not read yet.
    at: usize,
    /// What is read, and part of no sample yet.
    piece: std::vec::IntoIter<i64>,
}

impl Texts {
    fn text(&mut self) -> Result<Vec<i64>> {
        let mut text = Vec::new();
        loop {
            if self.piece.as_slice().is_empty() {
                let end = self.file.len().min(self.at + PIECE);
                self.piece = self.file.tokens(self.at..end)?.into_iter();
                self.at = end;
            }
            let Some(token) = self.piece.next() else {
                // All of it would be one sample.
                if let Some(end) = self.end.filter(|_| !self.has_ended && !text.is_empty() && self.most.is_none()) {
                    let path = self.file.path().display();
                    bail!("{path}: no token {end} in it: state one that ends its texts, or --block-size");
                }
                return Ok(text);
            };
            text.push(token);
            if self.end == Some(token) || self.most == Some(text.len()) {
                self.has_ended = true;
                return Ok(text);
            }
            if text.len() == MAX_TOKENS {
                let end = self.end.context("a token that ends texts")?;
                bail!("{}: {MAX_TOKENS} tokens without {end}: state --block-size too", self.file.path().display());
            }
        }
    }
}

impl Iterator for Texts {
    type Item = Result<Vec<i64>>;

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.text();
        if text.is_err() {
            // Nothing after it would begin where a text does.
            (self.at, self.piece) = (self.file.len(), Vec::new().into_iter());
        }
        text.map(|text| (!text.is_empty()).then_some(text)).transpose()
    }
}
