//! The image that transforms work on: decoded as late and as little as possible.

mod target;

use std::path::Path;
use std::time::{Duration, Instant};

use fast_image_resize::images::{Image as Output, ImageRef as Input};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use overdrive_jpeg::{Jpeg, MAGIC, Scale, orientation};

use crate::decode::jpeg;
use crate::decode::{check_size, decode_image};
use crate::targets::Geometry;
use crate::{Color, DataError, Image, Region, Size, Target};

/// Larger buffers are freed after the image that needed them.
const KEPT_BYTES: usize = 64 << 20;

/// How pixels are interpolated.
///
/// # Source
/// `torchvision.transforms.InterpolationMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias = "InterpolationMode")]
pub enum Interpolation {
    /// The nearest pixel.
    Nearest,
    /// A triangle filter over the neighbours.
    #[default]
    Bilinear,
    /// A cubic filter with a = -0.5, as in Pillow.
    Bicubic,
}

/// Buffers kept from one image to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    pixels: Vec<u8>,
    spare: Vec<u8>,
    resizer: Resizer,
    /// Time spent in decoders since the last [`take_decoding_time`](Self::take_decoding_time).
    decoding: Duration,
}

impl Scratch {
    pub(crate) fn take_decoding_time(&mut self) -> Duration {
        std::mem::take(&mut self.decoding)
    }

    fn trim(&mut self) {
        if self.pixels.capacity() + self.spare.capacity() > KEPT_BYTES {
            *self = Self::default();
        } else if self.resizer.size_of_internal_buffers() > KEPT_BYTES {
            self.resizer = Resizer::default();
        }
    }
}

/// Where the pixels are.
enum Pixels<'a> {
    /// Not decoded yet; this region of the file is wanted.
    Encoded(Box<Jpeg<'a>>, Region),
    /// In the scratch's `pixels`: RGB and an unused byte.
    Decoded,
}

/// Channels that count against [`MAX_IMAGE_BYTES`](crate::MAX_IMAGE_BYTES); the unused fourth byte of a pixel does not.
const RGB: usize = 3;

/// A range of rows or columns, scaled by the decoder.
struct ScaledRange {
    /// The range widened to whole pixels.
    first: usize,
    length: usize,
    /// The exact range, relative to `first`.
    exact_start: f64,
    exact_length: f64,
}

impl ScaledRange {
    fn new(start: usize, length: usize, scale: Scale) -> Self {
        let eighths = scale.eighths();
        let (first, end) = (start * eighths / 8, ((start + length) * eighths).div_ceil(8));
        let exact = |pixels: usize| (pixels * eighths) as f64 / 8.0;
        Self { first, length: end - first, exact_start: exact(start) - first as f64, exact_length: exact(length) }
    }
}

/// An RGB image that transforms change in place.
///
/// A JPEG file is decoded only when a transform needs its pixels, so after a crop only the cropped region is decoded.
/// Flips are deferred until the image is written, or until a transform needs the pixels in their final order.
///
/// Where the image has a [`Target`], its boxes, masks and key points change with the image in everything that moves
/// pixels: crops, borders, resizing, flips and the operations that shear, move and turn.
pub struct Canvas<'a> {
    source: Pixels<'a>,
    scratch: &'a mut Scratch,
    path: &'a Path,
    height: usize,
    width: usize,
    mirrored: bool,
    upside_down: bool,
    dct_scaling: bool,
    /// What changes with the image.
    target: Option<&'a mut dyn Target>,
}

impl<'a> Canvas<'a> {
    /// The image in `encoded`; with `upright`, rotated and flipped by its EXIF orientation.
    pub(crate) fn open(
        encoded: &'a [u8],
        upright: bool,
        path: &'a Path,
        scratch: &'a mut Scratch,
    ) -> Result<Self, DataError> {
        let orientation = if upright { orientation(encoded) } else { 1 };
        let mut canvas = if encoded.starts_with(MAGIC) {
            let jpeg = jpeg::open(encoded, path)?;
            jpeg::check_size(&jpeg, RGB, path)?;
            let (height, width) = (jpeg.height(), jpeg.width());
            Self::over(Pixels::Encoded(Box::new(jpeg), Region::whole(height, width)), scratch, path, [height, width])
        } else {
            let begun = Instant::now();
            let image = decode_image(encoded, Color::AsStored, path)?;
            scratch.decoding += begun.elapsed();
            Self::of_image(&image, path, scratch)?
        };
        canvas.turn(orientation)?;
        Ok(canvas)
    }

    /// A decoded image; transparency is dropped.
    pub(crate) fn of_image(image: &Image, path: &'a Path, scratch: &'a mut Scratch) -> Result<Self, DataError> {
        check_size(image.height(), image.width(), RGB, path)?;
        if image.data().is_empty() {
            return Err(DataError::option("image", "at least one pixel", format!("{image:?}")));
        }
        scratch.pixels.clear();
        for pixel in image.data().chunks_exact(image.channels()) {
            scratch.pixels.extend_from_slice(&match *pixel {
                [grey] | [grey, _] => [grey, grey, grey, 0],
                [red, green, blue, ..] => [red, green, blue, 0],
                [] => [0; 4],
            });
        }
        Ok(Self::over(Pixels::Decoded, scratch, path, [image.height(), image.width()]))
    }

    fn over(source: Pixels<'a>, scratch: &'a mut Scratch, path: &'a Path, [height, width]: [usize; 2]) -> Self {
        let (mirrored, upside_down, dct_scaling) = (false, false, false);
        Self { source, scratch, path, height, width, mirrored, upside_down, dct_scaling, target: None }
    }

    /// Rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Keeps only `region`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when the region is empty or reaches beyond the image.
    pub fn crop(&mut self, region: Region) -> Result<(), DataError> {
        let (height, width) = (self.height, self.width);
        if !region.fits(height, width) {
            let expected = format!("a region within {height} x {width} pixels");
            return Err(DataError::option("crop", expected, format!("{region:?}")));
        }
        self.change_target(&Geometry::Crop(region))?;
        let mut stored = region;
        if self.mirrored {
            stored.left = width - region.left - region.width;
        }
        if self.upside_down {
            stored.top = height - region.top - region.height;
        }
        if let Pixels::Encoded(_, wanted) = &mut self.source {
            (stored.top, stored.left) = (wanted.top + stored.top, wanted.left + stored.left);
            *wanted = stored;
        } else if stored != Region::whole(height, width) {
            let pixels = &mut self.scratch.pixels;
            let (from, to) = (4 * width, 4 * stored.width);
            for row in 0..stored.height {
                let start = (stored.top + row) * from + 4 * stored.left;
                pixels.copy_within(start..start + to, row * to);
            }
            pixels.truncate(stored.height * to);
        }
        (self.height, self.width) = (stored.height, stored.width);
        Ok(())
    }

    fn decode(&mut self) -> Result<(), DataError> {
        self.decode_scaled(Scale::Full)?;
        Ok(())
    }

    /// Decodes the wanted region scaled by `scale`, widened to whole pixels, and returns the exact region within the
    /// result: left, top, width, height.
    fn decode_scaled(&mut self, scale: Scale) -> Result<[f64; 4], DataError> {
        let Pixels::Encoded(jpeg, region) = &self.source else {
            return Ok([0.0, 0.0, self.width as f64, self.height as f64]);
        };
        let [rows, columns] = [(region.top, region.height), (region.left, region.width)]
            .map(|(start, length)| ScaledRange::new(start, length, scale));
        let scaled = Region { top: rows.first, left: columns.first, height: rows.length, width: columns.length };
        let begun = Instant::now();
        let pixels = &mut self.scratch.pixels;
        pixels.resize(4 * scaled.height * scaled.width, 0);
        jpeg::decode_part::<4>(jpeg, &scaled, scale, pixels, self.path)?;
        self.scratch.decoding += begun.elapsed();
        (self.source, self.height, self.width) = (Pixels::Decoded, scaled.height, scaled.width);
        Ok([columns.exact_start, rows.exact_start, columns.exact_length, rows.exact_length])
    }

    /// Lets [`Canvas::resize`] leave a part of the scaling to the JPEG decoder.
    pub(crate) fn dct_scaling(&mut self, on: bool) {
        self.dct_scaling = on;
    }

    /// Resizes to `size`; each value differs by at most 1 (of 255) from Pillow's, with [`Interpolation::Bicubic`] by at
    /// most 2.
    ///
    /// The filter weights have 14 bits here and 22 in Pillow, so the horizontal and the vertical pass may each round
    /// differently; the negative weights of the cubic filter increase the difference. With
    /// [`dct_scaling`](crate::ImagePipeline::dct_scaling), the decoder does a part of the scaling.
    ///
    /// Without `antialias`, each pixel is interpolated from its direct neighbours only, however much the image shrinks.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a size without pixels; [`DataError::TooLarge`] for a size above
    /// [`MAX_IMAGE_BYTES`](crate::MAX_IMAGE_BYTES); an error of the decoder.
    pub fn resize(&mut self, size: Size, interpolation: Interpolation, antialias: bool) -> Result<(), DataError> {
        if size.height == 0 || size.width == 0 {
            return Err(DataError::option("size", "at least one pixel", format!("{size:?}")));
        }
        check_size(size.height, size.width, RGB, self.path)?;
        let from = Size { height: self.height, width: self.width };
        if size == from {
            return Ok(());
        }
        self.change_target(&Geometry::Resize { from, to: size })?;
        // The smallest scale at which the decoded image is not smaller than `size`.
        let enough = |scale: &Scale| {
            self.height * scale.eighths() >= 8 * size.height && self.width * scale.eighths() >= 8 * size.width
        };
        let may_scale = self.dct_scaling && antialias && interpolation != Interpolation::Nearest;
        let scales = [Scale::Eighth, Scale::Quarter, Scale::Half];
        let scale = scales.into_iter().find(enough).filter(|_| may_scale).unwrap_or_default();
        let [left, top, width, height] = self.decode_scaled(scale)?;
        // Of two equally near pixels, always the one on the same side is taken. After a flip it would be the other one,
        // so the flip comes first.
        if interpolation == Interpolation::Nearest {
            self.apply_flips();
        }
        let filter = match interpolation {
            Interpolation::Bicubic => FilterType::CatmullRom,
            _ => FilterType::Bilinear,
        };
        let algorithm = match (interpolation, antialias) {
            (Interpolation::Nearest, _) => ResizeAlg::Nearest,
            (_, true) => ResizeAlg::Convolution(filter),
            (_, false) => ResizeAlg::Interpolation(filter),
        };
        let options = ResizeOptions::new().resize_alg(algorithm).use_alpha(false).crop(left, top, width, height);
        let [from, to] =
            [[self.height, self.width], [size.height, size.width]].map(|side| side.map(|side| side as u32));
        let Scratch { pixels, spare, resizer, .. } = &mut *self.scratch;
        spare.resize(4 * size.height * size.width, 0);
        let input = Input::new(from[1], from[0], pixels, PixelType::U8x4).map_err(DataError::other)?;
        let mut output = Output::from_slice_u8(to[1], to[0], spare, PixelType::U8x4).map_err(DataError::other)?;
        resizer.resize(&input, &mut output, &options).map_err(DataError::other)?;
        std::mem::swap(pixels, spare);
        (self.height, self.width) = (size.height, size.width);
        Ok(())
    }

    /// Flips left and right.
    pub fn hflip(&mut self) {
        // No part refuses a flip.
        _ = self.change_target(&Geometry::FlipHorizontal { width: self.width });
        self.mirrored = !self.mirrored;
    }

    /// Flips top and bottom.
    pub fn vflip(&mut self) {
        _ = self.change_target(&Geometry::FlipVertical { height: self.height });
        self.upside_down = !self.upside_down;
    }

    /// Replaces the image by one of `size`, which `draw` makes of the present pixels, row by row as in
    /// [`pixels`](Self::pixels). It begins as black.
    pub(crate) fn redraw(
        &mut self,
        size: Size,
        draw: impl FnOnce(&[[u8; 4]], &mut [[u8; 4]]),
    ) -> Result<(), DataError> {
        check_size(size.height, size.width, RGB, self.path)?;
        self.decode()?;
        self.apply_flips();
        let Scratch { pixels, spare, .. } = &mut *self.scratch;
        spare.clear();
        spare.resize(4 * size.height * size.width, 0);
        draw(pixels.as_chunks().0, spare.as_chunks_mut().0);
        std::mem::swap(pixels, spare);
        (self.height, self.width) = (size.height, size.width);
        Ok(())
    }

    /// The pixels row by row: RGB and an unused byte.
    ///
    /// # Errors
    /// An error of the decoder.
    pub fn pixels(&mut self) -> Result<&mut [[u8; 4]], DataError> {
        self.decode()?;
        self.apply_flips();
        Ok(self.scratch.pixels.as_chunks_mut::<4>().0)
    }

    /// The pixels without the deferred flips: only for transforms to which the order of the pixels does not matter.
    pub(crate) fn colors(&mut self) -> Result<&mut [[u8; 4]], DataError> {
        self.decode()?;
        Ok(self.scratch.pixels.as_chunks_mut::<4>().0)
    }

    /// Performs the deferred flips.
    fn apply_flips(&mut self) {
        let pixels = self.scratch.pixels.as_chunks_mut::<4>().0;
        match (std::mem::take(&mut self.mirrored), std::mem::take(&mut self.upside_down)) {
            (false, false) => {}
            (true, true) => pixels.reverse(),
            (true, false) => pixels.chunks_exact_mut(self.width).for_each(<[_]>::reverse),
            (false, true) => {
                pixels.reverse();
                pixels.chunks_exact_mut(self.width).for_each(<[_]>::reverse);
            }
        }
    }

    /// Rotates and flips the image by an EXIF orientation.
    fn turn(&mut self, orientation: u8) -> Result<(), DataError> {
        // EXIF orientations 5 to 8 are transposed: rows become columns, then the flips follow.
        if orientation >= 5 {
            self.decode()?;
            let Scratch { pixels, spare, .. } = &mut *self.scratch;
            spare.clear();
            let (all, _) = pixels.as_chunks::<4>();
            for x in 0..self.width {
                spare.extend(all[x..].iter().step_by(self.width).flatten());
            }
            std::mem::swap(pixels, spare);
            (self.height, self.width) = (self.width, self.height);
        }
        self.mirrored = matches!(orientation, 2 | 3 | 6 | 7);
        self.upside_down = matches!(orientation, 3 | 4 | 7 | 8);
        Ok(())
    }

    /// Writes the image into its slot of a batch: plane by plane, or pixel by pixel with `channels_last`.
    pub(crate) fn write(mut self, channels_last: bool, slot: &mut [u8]) -> Result<(), DataError> {
        self.decode()?;
        let (height, width, mirrored) = (self.height, self.width, self.mirrored);
        for row in 0..height {
            let from = if self.upside_down { height - 1 - row } else { row };
            let pixels = &self.scratch.pixels.as_chunks::<4>().0[from * width..][..width];
            if channels_last {
                let out = slot[3 * row * width..][..3 * width].as_chunks_mut::<3>().0;
                let write = |(out, &[red, green, blue, _]): (&mut [u8; 3], &[u8; 4])| *out = [red, green, blue];
                match mirrored {
                    true => out.iter_mut().zip(pixels.iter().rev()).for_each(write),
                    false => out.iter_mut().zip(pixels).for_each(write),
                }
                continue;
            }
            for channel in 0..3 {
                let out = &mut slot[(channel * height + row) * width..][..width];
                let write = |(out, pixel): (&mut u8, &[u8; 4])| {
                    *out = (u32::from_le_bytes(*pixel) >> (8 * channel)) as u8;
                };
                match mirrored {
                    true => out.iter_mut().zip(pixels.iter().rev()).for_each(write),
                    false => out.iter_mut().zip(pixels).for_each(write),
                }
            }
        }
        self.scratch.trim();
        Ok(())
    }
}
