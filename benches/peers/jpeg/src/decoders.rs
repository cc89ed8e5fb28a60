//! The decoders, each with its fastest settings that its documentation offers for RGB, and with buffers that it can use
//! again.

use std::path::Path;

use anyhow::{Result, anyhow};
use libjpeg_turbo_rs as pure;
use overdrive_jpeg::{Jpeg, Region, Scale};
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;

/// A file and what to cut out of it.
pub struct Photo {
    file: Vec<u8>,
    height: usize,
    width: usize,
    crop: Region,
}

impl Photo {
    /// The crop has about a third of the image's area, as RandomResizedCrop's has on average, anywhere in it.
    pub fn read(path: &Path, number: usize) -> Result<Self> {
        let file = std::fs::read(path)?;
        let jpeg = Jpeg::open(&file)?;
        let (height, width) = (jpeg.height(), jpeg.width());
        let (rows, columns) = (height * 3 / 5, width * 3 / 5);
        let (top, left) = (number * 37 % (height - rows + 1), number * 61 % (width - columns + 1));
        Ok(Self { crop: Region { top, left, height: rows, width: columns }, file, height, width })
    }

    /// The file without its second half.
    pub fn cut(&self) -> Self {
        Self { file: self.file[..self.file.len() / 2].to_vec(), ..*self }
    }
}

/// What is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    Whole,
    Half,
    Quarter,
    Eighth,
    Crop,
}

impl Task {
    fn scale(self) -> Scale {
        match self {
            Self::Whole | Self::Crop => Scale::Full,
            Self::Half => Scale::Half,
            Self::Quarter => Scale::Quarter,
            Self::Eighth => Scale::Eighth,
        }
    }
}

/// A decoder.
#[derive(Clone, Copy)]
pub enum Decode {
    Ours,
    TurboJpeg,
    LibjpegTurboRs,
    ZuneJpeg,
    JpegDecoder,
}

/// Ours is the first.
pub const DECODERS: [(&str, Decode); 5] = [
    ("overdrive-jpeg", Decode::Ours),
    ("turbojpeg (C)", Decode::TurboJpeg),
    ("libjpeg-turbo-rs", Decode::LibjpegTurboRs),
    ("zune-jpeg", Decode::ZuneJpeg),
    ("jpeg-decoder", Decode::JpegDecoder),
];

impl Decode {
    /// Whether its safe interface offers this other than by decoding the whole.
    pub fn can(self, task: Task) -> bool {
        match self {
            Self::Ours | Self::LibjpegTurboRs => true,
            Self::TurboJpeg | Self::JpegDecoder => task != Task::Crop,
            Self::ZuneJpeg => task == Task::Whole,
        }
    }

    /// Decodes to RGB.
    pub fn run(self, photo: &Photo, task: Task, pixels: &mut Vec<u8>) -> Result<()> {
        let scale = task.scale();
        let (height, width) = (scale.side(photo.height), scale.side(photo.width));
        let region = if task == Task::Crop { photo.crop } else { Region::whole(height, width) };
        pixels.resize(3 * region.height * region.width, 0);
        match self {
            Self::Ours => Jpeg::open(&photo.file)?.decode::<3>(&region, scale, pixels)?,
            Self::TurboJpeg => turbo(photo, scale, pixels)?,
            Self::LibjpegTurboRs => {
                let mut decoder = pure::Decoder::new(&photo.file)?;
                decoder.set_output_format(pure::PixelFormat::Rgb);
                if scale != Scale::Full {
                    decoder.set_scale(pure::ScalingFactor::try_new(1, 8 / scale.eighths() as u32)?);
                }
                if task != Task::Crop {
                    decoder.decode_image_into(pixels)?;
                    return Ok(());
                }
                // As with libjpeg, a crop begins at a whole MCU, and smoothing needs its neighbours.
                let (left, top) = (region.left.saturating_sub(2) / 16 * 16, region.top.saturating_sub(2));
                let right = (region.left + region.width + 2).min(photo.width);
                let bottom = (region.top + region.height + 2).min(photo.height);
                decoder.set_crop_region(left, top, right - left, bottom - top);
                let wide = decoder.decode_image()?;
                for (row, out) in pixels.chunks_exact_mut(3 * region.width).enumerate() {
                    let from = 3 * ((region.top - top + row) * wide.width + region.left - left);
                    out.copy_from_slice(&wide.data[from..][..out.len()]);
                }
            }
            Self::ZuneJpeg => {
                let options = DecoderOptions::new_fast().jpeg_set_out_colorspace(ColorSpace::RGB);
                let mut decoder = zune_jpeg::JpegDecoder::new_with_options(ZCursor::new(&photo.file), options);
                decoder.decode_into(pixels).map_err(|error| anyhow!("{error:?}"))?;
            }
            Self::JpegDecoder => {
                let mut decoder = jpeg_decoder::Decoder::new(&photo.file[..]);
                if scale != Scale::Full {
                    decoder.scale(width as u16, height as u16)?;
                }
                *pixels = decoder.decode()?;
            }
        }
        Ok(())
    }
}

/// libjpeg-turbo's pixels of any task.
pub fn reference(photo: &Photo, task: Task, pixels: &mut Vec<u8>) -> Result<()> {
    let scale = task.scale();
    let (height, width) = (scale.side(photo.height), scale.side(photo.width));
    pixels.resize(3 * height * width, 0);
    turbo(photo, scale, pixels)?;
    if task == Task::Crop {
        let Region { top, left, height, width: columns } = photo.crop;
        let rows = pixels.chunks_exact(3 * width).skip(top).take(height);
        *pixels = rows.flat_map(|row| &row[3 * left..][..3 * columns]).copied().collect();
    }
    Ok(())
}

fn turbo(photo: &Photo, scale: Scale, pixels: &mut [u8]) -> Result<()> {
    thread_local! {
        static HANDLE: std::cell::RefCell<turbojpeg::Decompressor> =
            std::cell::RefCell::new(turbojpeg::Decompressor::new().expect("a decompressor"));
    }
    let (height, width) = (scale.side(photo.height), scale.side(photo.width));
    HANDLE.with_borrow_mut(|handle| {
        handle.set_scaling_factor(turbojpeg::ScalingFactor::new(scale.eighths(), 8))?;
        let format = turbojpeg::PixelFormat::RGB;
        handle.decompress(&photo.file, turbojpeg::Image { pixels, width, pitch: 3 * width, height, format })?;
        Ok(())
    })
}
