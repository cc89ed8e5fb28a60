//! The form of a sample between all formats.

/// The name of the key where it is stored beside the fields.
pub const KEY: &str = "__key__";
/// The field with the class's number: stored as a number where possible, as training programs expect it.
pub const LABEL: &str = "cls";

/// The fields with the integers of a text, by Hugging Face's name first.
pub const TOKENS: [&str; 2] = ["input_ids", "tokens"];
/// Fields of text, beside the label, which is a number where it can be.
pub const TEXTS: [&str; 2] = ["json", "txt"];

/// The field names (extensions) of images.
pub const IMAGES: [&str; 9] = ["jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff"];

/// Contents by name; in file names, the name is the extension: `jpg`, `seg.png`, `cls`.
pub type Fields = Vec<(String, Vec<u8>)>;

/// A key, and named contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Parts separated by slashes: `train/0001`.
    pub key: String,
    pub fields: Fields,
}

impl Sample {
    pub fn bytes(&self) -> usize {
        self.fields.iter().map(|(_, content)| content.len()).sum()
    }
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
