//! Tokens of Hugging Face's tokenizers.

use anyhow::Result;
use overdrive_dataload::Tokenizer;
use tch::Tensor;

use crate::record::{Found, Given};

pub fn tokens_of_tokenizers(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let texts = given.value::<Vec<String>>("texts")?;
    for kind in given.value::<Vec<String>>("kinds")? {
        let tokenizer = Tokenizer::from_bytes(given.value::<String>(&kind)?.as_bytes(), &kind)?;
        for (name, special) in [("False", false), ("True", true)] {
            let tokenizer = tokenizer.clone().add_special_tokens(special);
            for (i, text) in texts.iter().enumerate() {
                found.insert(format!("{kind}.{name}.{i}"), &Tensor::from_slice(&tokenizer.encode(text)?));
            }
        }
    }
    Ok(found)
}
