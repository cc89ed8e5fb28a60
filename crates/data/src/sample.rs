//! The form of a sample between all formats.

use anyhow::{Context, Result, ensure};

/// The name of the key where it is stored beside the fields.
pub const KEY: &str = "__key__";
/// The field with the class's number: stored as a number where possible, as training programs expect it.
pub const LABEL: &str = "cls";

/// The fields with the integers of a text, that of Hugging Face first: it is taken where a sample has both.
pub const TOKENS: [&str; 2] = ["input_ids", "tokens"];
/// Fields of text, beside the label, which is a number where it can be.
pub const TEXTS: [&str; 2] = ["json", "txt"];

/// The field names (extensions) of images.
pub const IMAGES: [&str; 9] = ["jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff"];

/// Whether a field's name says that it is an image: `jpg`, `seg.png`.
pub fn is_image(field: &str) -> bool {
    field.rsplit('.').next().is_some_and(|ending| IMAGES.contains(&ending))
}

/// Contents by name; in file names, the name is the extension: `jpg`, `seg.png`, `cls`.
pub type Fields = Vec<(String, Vec<u8>)>;

/// A key, and named contents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sample {
    /// Parts separated by slashes: `train/0001`.
    pub key: String,
    pub fields: Fields,
}

impl Sample {
    pub fn bytes(&self) -> usize {
        self.fields.iter().map(|(_, content)| content.len()).sum()
    }

    /// What a field holds, if the sample has it.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, content)| content.as_slice())
    }

    /// Refuses a name that the sample has twice: most formats would keep one of the two.
    pub fn check_names(&self) -> Result<()> {
        for (at, (name, _)) in self.fields.iter().enumerate() {
            let twice = name == KEY || self.fields[..at].iter().any(|(before, _)| before == name);
            ensure!(!twice, "{}: field {name:?} is there twice", self.key);
        }
        Ok(())
    }
}

/// Collects a sample column by column.
#[derive(Debug, Default)]
pub struct Draft {
    key: Option<String>,
    pub fields: Fields,
}

impl Draft {
    /// Adds what a column holds: a field, or the key.
    pub fn add(&mut self, column: impl Into<String>, content: Vec<u8>) -> Result<()> {
        let column = column.into();
        match column == KEY {
            true => self.key = Some(String::from_utf8(content).context("the key is not text")?),
            false => self.fields.push((column, content)),
        }
        Ok(())
    }

    /// The sample, which is numbered if it has no key.
    pub fn finish(self, index: usize) -> Sample {
        Sample { key: self.key.unwrap_or_else(|| format!("{index:09}")), fields: self.fields }
    }
}

/// The name of a field in file names: without a slash, which would begin a folder, and in lower case, as readers of
/// shards and folders have it.
pub fn extension(field: &str) -> String {
    field.replace('/', ".").to_lowercase()
}

/// The number that a label is. Only one that turns back into the same text: `007` and `+7` stay text.
pub fn number(content: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(content).ok()?;
    text.parse::<i64>().ok().filter(|number| number.to_string() == text)
}

/// A field name for content that has none, from its first bytes.
pub fn guess_name(content: &[u8]) -> &'static str {
    match content {
        [0xff, 0xd8, 0xff, ..] => "jpg",
        [0x89, b'P', b'N', b'G', ..] => "png",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "webp",
        _ => "bin",
    }
}
