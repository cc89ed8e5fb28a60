//! Converts fields to the features of a `tf.train.Example`, and back.

use std::borrow::Cow;

use anyhow::{Result, bail};
use overdrive_dataload::{Example, Feature};

use crate::sample::{Draft, KEY, LABEL, number};

/// Encodes an example with these fields, and with the key as one more feature if it is given.
pub fn encode(key: Option<&str>, fields: &[(String, Vec<u8>)]) -> Vec<u8> {
    let bytes = |content| Feature::Bytes(vec![Cow::Borrowed(content)]);
    let mut example = Example::new();
    if let Some(key) = key {
        example = example.with(KEY, bytes(key.as_bytes()));
    }
    for (name, content) in fields {
        let number = Some(content).filter(|_| name == LABEL).and_then(|content| number(content));
        example = example.with(&**name, number.map_or_else(|| bytes(content), |number| Feature::Int64(vec![number])));
    }
    example.encode()
}

/// The key, if there is one, and the fields: bytes are kept, and numbers become text, separated by spaces.
pub fn draft(example: &Example<'_>) -> Result<Draft> {
    let mut draft = Draft::default();
    for (name, feature) in example.features() {
        let content = match feature {
            Feature::Bytes(values) => match values.as_slice() {
                [value] => value.to_vec(),
                values => bail!("the feature {name:?} has {} values where only one can be converted", values.len()),
            },
            Feature::Int64(values) => text(values),
            Feature::Float(values) => text(values),
            Feature::Empty => continue,
        };
        draft.add(name, content)?;
    }
    Ok(draft)
}

/// Numbers, separated by spaces.
pub fn text(values: &[impl ToString]) -> Vec<u8> {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ").into_bytes()
}
