//! Samples that can be written to a file and read back.

use std::path::PathBuf;
use std::sync::Arc;

use crate::{EncodedImage, Image};

/// A sample that a [`DiskCached`](crate::DiskCached) can keep: bytes, strings, numbers, images, and tuples of them.
pub trait Storable: Sized {
    /// Names the stored format, so that a file in another one is refused. Must change whenever the format does.
    fn form() -> String;

    /// Appends the sample to `bytes`.
    fn store(&self, bytes: &mut Vec<u8>);

    /// Takes the sample off the front of `bytes`; `None` when they do not begin with one.
    fn load(bytes: &mut &[u8]) -> Option<Self>;
}

macro_rules! storable_numbers {
    ($($number:ty),*) => {$(
        impl Storable for $number {
            fn form() -> String {
                stringify!($number).to_owned()
            }

            fn store(&self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }

            fn load(bytes: &mut &[u8]) -> Option<Self> {
                let (number, rest) = bytes.split_first_chunk()?;
                *bytes = rest;
                Some(Self::from_le_bytes(*number))
            }
        }
    )*};
}

storable_numbers!(u8, i32, u32, i64, u64, f32, f64);

fn store_bytes(content: &[u8], bytes: &mut Vec<u8>) {
    (content.len() as u64).store(bytes);
    bytes.extend_from_slice(content);
}

fn load_bytes<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = usize::try_from(u64::load(bytes)?).ok()?;
    let (content, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    Some(content)
}

impl Storable for Vec<u8> {
    fn form() -> String {
        "bytes".to_owned()
    }

    fn store(&self, bytes: &mut Vec<u8>) {
        store_bytes(self, bytes);
    }

    fn load(bytes: &mut &[u8]) -> Option<Self> {
        Some(load_bytes(bytes)?.to_vec())
    }
}

impl Storable for Arc<[u8]> {
    fn form() -> String {
        "bytes".to_owned()
    }

    fn store(&self, bytes: &mut Vec<u8>) {
        store_bytes(self, bytes);
    }

    fn load(bytes: &mut &[u8]) -> Option<Self> {
        Some(load_bytes(bytes)?.into())
    }
}

impl Storable for String {
    fn form() -> String {
        "text".to_owned()
    }

    fn store(&self, bytes: &mut Vec<u8>) {
        store_bytes(self.as_bytes(), bytes);
    }

    fn load(bytes: &mut &[u8]) -> Option<Self> {
        Self::from_utf8(load_bytes(bytes)?.to_vec()).ok()
    }
}

impl Storable for Image {
    fn form() -> String {
        "image".to_owned()
    }

    fn store(&self, bytes: &mut Vec<u8>) {
        for side in [self.height(), self.width(), self.channels()] {
            (side as u64).store(bytes);
        }
        store_bytes(self.data(), bytes);
    }

    fn load(bytes: &mut &[u8]) -> Option<Self> {
        let mut side = || usize::try_from(u64::load(bytes)?).ok();
        let [height, width, channels] = [side()?, side()?, side()?];
        Self::new(load_bytes(bytes)?, height, width, channels).ok()
    }
}

impl Storable for EncodedImage {
    fn form() -> String {
        "encoded image".to_owned()
    }

    fn store(&self, bytes: &mut Vec<u8>) {
        self.path.to_string_lossy().into_owned().store(bytes);
        store_bytes(&self.bytes, bytes);
    }

    fn load(bytes: &mut &[u8]) -> Option<Self> {
        let path = PathBuf::from(String::load(bytes)?);
        Some(Self::new(load_bytes(bytes)?, path))
    }
}

macro_rules! storable_tuples {
    ($(($($part:ident $index:tt),+)),*) => {$(
        impl<$($part: Storable),+> Storable for ($($part,)+) {
            fn form() -> String {
                format!("({})", [$($part::form()),+].join(", "))
            }

            fn store(&self, bytes: &mut Vec<u8>) {
                $(self.$index.store(bytes);)+
            }

            fn load(bytes: &mut &[u8]) -> Option<Self> {
                Some(($($part::load(bytes)?,)+))
            }
        }
    )*};
}

storable_tuples!((A 0), (A 0, B 1), (A 0, B 1, C 2), (A 0, B 1, C 2, D 3));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_loaded_and_every_cut_is_noticed() {
        type Sample = (Image, (i64, String), Vec<u8>, f32);
        let image = Image::new(vec![1, 2, 3, 4, 5, 6], 1, 2, 3).unwrap();
        let sample: Sample = (image, (-5, "größer".to_owned()), vec![7; 9], 0.5);
        let mut bytes = Vec::new();
        sample.store(&mut bytes);
        let loaded = Sample::load(&mut &bytes[..]).unwrap();
        assert_eq!((loaded.0.data(), loaded.0.chw()), (sample.0.data(), sample.0.chw()));
        assert_eq!((&loaded.1, &loaded.2, loaded.3), (&sample.1, &sample.2, sample.3));
        assert!((0..bytes.len()).all(|cut| Sample::load(&mut &bytes[..cut]).is_none()));
        assert_eq!(Sample::form(), "(image, (i64, text), bytes, f32)");
    }
}
