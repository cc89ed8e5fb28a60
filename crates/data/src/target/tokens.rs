//! Files of tokens: Megatron's with an index, and nanoGPT's without.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use overdrive_dataload::{IndexedTokens, IndexedTokensWriter, TokenDtype, TokenWriter};

use super::{Refused, Target, refuse_existing};
use crate::cli::ConvertOptions;
use crate::format::Format;
use crate::sample::{Sample, TOKENS};

pub enum Tokens {
    /// A file and its path.
    Plain(TokenWriter, PathBuf),
    Indexed(IndexedTokensWriter, [PathBuf; 2]),
}

impl Tokens {
    pub fn create(options: &ConvertOptions, format: Format) -> Result<Self> {
        let dtype = options.token_dtype.map_or(TokenDtype::default(), TokenDtype::from);
        if format == Format::Tokens {
            return Ok(Self::Plain(TokenWriter::create(&options.dst, dtype)?, options.dst.clone()));
        }
        let files = IndexedTokens::files(&options.dst);
        files.iter().try_for_each(|file| refuse_existing(file))?;
        Ok(Self::Indexed(IndexedTokensWriter::create(&options.dst, dtype)?, files))
    }
}

impl Target for Tokens {
    fn write(&mut self, sample: Sample) -> Result<(), Refused> {
        let tokens = tokens(&sample).map_err(Refused::Sample)?;
        let named = |refused: Refused| match refused {
            Refused::Sample(error) => Refused::Sample(error.context(format!("{}: see --token-dtype", sample.key))),
            all => all,
        };
        match self {
            Self::Plain(writer, _) => writer.write(&tokens).map_err(|error| named(error.into())),
            Self::Indexed(writer, _) => {
                writer.write(&tokens).map_err(|error| named(error.into()))?;
                writer.end_document();
                Ok(())
            }
        }
    }

    fn finish(self: Box<Self>) -> Result<()> {
        // A file of that name may have appeared meanwhile.
        match *self {
            Self::Plain(writer, file) => refuse_existing(&file).and_then(|()| Ok(writer.finish()?))?,
            Self::Indexed(writer, files) => {
                files.iter().try_for_each(|file| refuse_existing(file))?;
                writer.finish()?
            }
        };
        Ok(())
    }
}

/// The integers of a sample: separated by spaces, or a list of JSON.
fn tokens(sample: &Sample) -> Result<Vec<i64>> {
    let is = |name: &str, wanted: &str| name.strip_suffix(".json").unwrap_or(name) == wanted;
    let field = TOKENS.iter().find_map(|wanted| sample.fields.iter().find(|(name, _)| is(name, wanted)));
    let none = || {
        let names: Vec<_> = sample.fields.iter().map(|(name, _)| name).collect();
        anyhow!(
            "{}: no field `input_ids` or `tokens` with the integers of a text, only {names:?}: text has to be tokenized \
             first",
            sample.key
        )
    };
    let (name, content) = field.ok_or_else(none)?;
    let bad = || format!("{}: field {name:?} is no list of integers", sample.key);
    let text = std::str::from_utf8(content).with_context(bad)?;
    match text.trim_start().starts_with('[') {
        true => serde_json::from_str(text).with_context(bad),
        false => text.split_ascii_whitespace().map(|token| token.parse().with_context(bad)).collect(),
    }
}
