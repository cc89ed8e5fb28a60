//! Scales images down and encodes them as JPEG.

use std::path::Path;

use anyhow::{Context, Result};
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use overdrive_dataload::{Color, ImagePipeline, Resize, decode_image};

use crate::sample::Sample;

/// Fields that are scaled; not a mask like `seg.png`, whose values scaling would mix.
const SCALED: [&str; 4] = ["jpg", "jpeg", "png", "webp"];

/// Scales images to a size, and encodes them with a quality.
pub struct Reencode {
    shorter_side: usize,
    quality: u8,
    resize: ImagePipeline,
}

impl Reencode {
    pub fn new(shorter_side: u16, quality: u8) -> Self {
        let shorter_side = shorter_side.into();
        Self { shorter_side, quality, resize: ImagePipeline::new(0).then(Resize::shorter(shorter_side)) }
    }

    /// Scales the sample's images in place; a scaled field is renamed to `jpg`.
    pub fn apply(&self, sample: &mut Sample) -> Result<()> {
        let Sample { key, fields } = sample;
        for (name, content) in fields.iter_mut().filter(|(name, _)| SCALED.contains(&&**name)) {
            let file = format!("{key}.{name}");
            if let Some(scaled) =
                self.scale(content, Path::new(&file)).with_context(|| format!("cannot scale {file}"))?
            {
                *content = scaled;
                *name = "jpg".to_owned();
            }
        }
        Ok(())
    }

    /// `None` for an image that is small enough.
    fn scale(&self, content: &[u8], file: &Path) -> Result<Option<Vec<u8>>> {
        let image = decode_image(content, Color::Rgb, file)?;
        if image.height().min(image.width()) <= self.shorter_side {
            return Ok(None);
        }
        let image = self.resize.image(&image, 0, 0)?;
        let (width, height) = (u16::try_from(image.width())?, u16::try_from(image.height())?);
        let mut jpeg = Vec::new();
        let mut encoder = Encoder::new(&mut jpeg, self.quality);
        // 4:2:0, the default of Pillow and libjpeg-turbo.
        encoder.set_sampling_factor(SamplingFactor::F_2_2);
        encoder.encode(image.data(), width, height, ColorType::Rgb)?;
        Ok(Some(jpeg))
    }
}
