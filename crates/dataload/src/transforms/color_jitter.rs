//! Random changes of brightness, contrast, saturation and hue.

use std::ops::RangeInclusive;

use crate::{Canvas, DataError, Draws, Transform};

/// Changes brightness, contrast, saturation and hue by random factors, in random order; nothing unless set.
///
/// # Source
/// `torchvision.transforms.ColorJitter` on Pillow images, whose rounding is kept.
#[derive(Clone, Debug)]
pub struct ColorJitter {
    changes: [(Change, RangeInclusive<f64>); 4],
}

/// The allowed factors, as a range and in words.
const FACTORS: (RangeInclusive<f64>, &str) = (0.0..=f64::MAX, "a non-empty range of finite factors from 0 on");
/// The allowed hue rotations, as a range and in words.
const TURNS: (RangeInclusive<f64>, &str) = (-0.5..=0.5, "a non-empty range within -0.5 to 0.5 of the colour circle");

/// What a factor changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Brightness,
    Contrast,
    Saturation,
    Hue,
}

impl ColorJitter {
    /// Changes nothing until ranges are set.
    pub fn new() -> Self {
        let changes = [Change::Brightness, Change::Contrast, Change::Saturation].map(|change| (change, 1.0..=1.0));
        let [brightness, contrast, saturation] = changes;
        Self { changes: [brightness, contrast, saturation, (Change::Hue, 0.0..=0.0)] }
    }

    /// Scales every value by a factor from this range: 0 is black, 1 the unchanged image.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an empty range, or factors that are not finite or below 0.
    pub fn brightness(self, factor: RangeInclusive<f64>) -> Result<Self, DataError> {
        self.set(0, "brightness", factor, FACTORS)
    }

    /// Scales the distance from the mean grey by a factor from this range: 0 is grey, 1 the unchanged image.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an empty range, or factors that are not finite or below 0.
    pub fn contrast(self, factor: RangeInclusive<f64>) -> Result<Self, DataError> {
        self.set(1, "contrast", factor, FACTORS)
    }

    /// Scales the distance from each pixel's own grey by a factor from this range: 0 is grey, 1 the unchanged image.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an empty range, or factors that are not finite or below 0.
    pub fn saturation(self, factor: RangeInclusive<f64>) -> Result<Self, DataError> {
        self.set(2, "saturation", factor, FACTORS)
    }

    /// Rotates every hue by a fraction of the colour circle from this range.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an empty range or one that is not within -0.5 to 0.5.
    pub fn hue(self, turn: RangeInclusive<f64>) -> Result<Self, DataError> {
        self.set(3, "hue", turn, TURNS)
    }

    fn set(
        mut self,
        index: usize,
        name: &'static str,
        range: RangeInclusive<f64>,
        (allowed, expected): (RangeInclusive<f64>, &str),
    ) -> Result<Self, DataError> {
        if range.is_empty() || !allowed.contains(range.start()) || !allowed.contains(range.end()) {
            return Err(DataError::option(name, expected, format!("{range:?}")));
        }
        self.changes[index].1 = range;
        Ok(self)
    }
}

impl Default for ColorJitter {
    /// [`ColorJitter::new`].
    fn default() -> Self {
        Self::new()
    }
}

impl Transform for ColorJitter {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let mut order = [0, 1, 2, 3];
        for last in (1..order.len()).rev() {
            order.swap(last, draws.below(last + 1));
        }
        let factors = self.changes.each_ref().map(|(_, range)| draws.uniform(*range.start(), *range.end()));
        for index in order {
            let (change, range) = &self.changes[index];
            let neutral = if *change == Change::Hue { 0.0 } else { 1.0 };
            if (*range.start(), *range.end()) != (neutral, neutral) {
                change.apply(canvas.colors()?, factors[index]);
            }
        }
        Ok(())
    }
}

impl Change {
    pub(super) fn apply(self, pixels: &mut [[u8; 4]], factor: f64) {
        let factor_f32 = factor as f32;
        match self {
            Self::Brightness => {
                let table: [u8; 256] = std::array::from_fn(|value| blend(0, value as u8, factor_f32));
                look_up(pixels, &table);
            }
            Self::Contrast => {
                let sum: u64 = pixels.iter().map(|pixel| u64::from(luma(pixel))).sum();
                let mean = (sum as f64 / pixels.len().max(1) as f64 + 0.5) as u8;
                let table: [u8; 256] = std::array::from_fn(|value| blend(mean, value as u8, factor_f32));
                look_up(pixels, &table);
            }
            Self::Saturation => {
                for pixel in pixels {
                    let grey = luma(pixel);
                    let [red, green, blue, _] = *pixel;
                    *pixel = [
                        blend(grey, red, factor_f32),
                        blend(grey, green, factor_f32),
                        blend(grey, blue, factor_f32),
                        0,
                    ];
                }
            }
            Self::Hue => {
                let turn = (factor * 255.0) as i32 as u8;
                for pixel in pixels {
                    let [hue, saturation, value] = to_hsv(*pixel);
                    *pixel = from_hsv([hue.wrapping_add(turn), saturation, value]);
                }
            }
        }
    }
}

pub(super) fn look_up(pixels: &mut [[u8; 4]], table: &[u8; 256]) {
    for pixel in pixels {
        *pixel = pixel.map(|value| table[usize::from(value)]);
    }
}

/// Pillow's `Image.blend`: truncates, does not round.
pub(super) fn blend(from: u8, to: u8, share: f32) -> u8 {
    (f32::from(from) + share * (f32::from(to) - f32::from(from))) as u8
}

fn luma(&[red, green, blue, _]: &[u8; 4]) -> u8 {
    ((u32::from(red) * 19595 + u32::from(green) * 38470 + u32::from(blue) * 7471 + 0x8000) >> 16) as u8
}

/// Pillow's conversion from RGB to HSV.
fn to_hsv([red, green, blue, _]: [u8; 4]) -> [u8; 3] {
    let (most, least) = (red.max(green).max(blue), red.min(green).min(blue));
    if most == least {
        return [0, 0, most];
    }
    let range = f32::from(most - least);
    let share = |value: u8| f32::from(most - value) / range;
    let sixth = if red == most {
        share(blue) - share(green)
    } else if green == most {
        (2.0 + f64::from(share(red)) - f64::from(share(blue))) as f32
    } else {
        (4.0 + f64::from(share(green)) - f64::from(share(red))) as f32
    };
    let hue = (f64::from(sixth) / 6.0 + 1.0) % 1.0;
    let saturation = range / f32::from(most);
    [(hue as f32 as f64 * 255.0) as u8, (f64::from(saturation) * 255.0) as u8, most]
}

/// Pillow's conversion from HSV to RGB.
fn from_hsv([hue, saturation, value]: [u8; 3]) -> [u8; 4] {
    if saturation == 0 {
        return [value, value, value, 0];
    }
    let sixths = (f64::from(hue) * 6.0 / 255.0) as f32;
    let (sector, saturation) = (sixths.floor(), f64::from((f64::from(saturation) / 255.0) as f32));
    let rest = f64::from(sixths - sector);
    let scaled = |share: f64| (f64::from(value) * share).round().clamp(0.0, 255.0) as u8;
    let low = scaled(1.0 - saturation);
    let falling = scaled(1.0 - saturation * rest);
    let rising = scaled(1.0 - saturation * (1.0 - rest));
    let [red, green, blue] = match sector as u8 % 6 {
        0 => [value, rising, low],
        1 => [falling, value, low],
        2 => [low, value, rising],
        3 => [low, falling, value],
        4 => [rising, low, value],
        _ => [value, low, falling],
    };
    [red, green, blue, 0]
}
