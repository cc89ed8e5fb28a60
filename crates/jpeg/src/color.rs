//! Turns the components' samples into pixels, bit for bit as libjpeg does (for CMYK, as Pillow does).

use crate::header::{Frame, Model};
use crate::planes::Plane;
use crate::upsample::Upsampler;
use crate::{Region, Scale};

/// Fills the region's pixels of `N` bytes: 1 for the first component alone, 3 for RGB, 4 for RGB and an unused byte.
pub(crate) fn to_pixels<const N: usize>(
    frame: &Frame,
    planes: &[Plane; 4],
    region: &Region,
    scale: Scale,
    out: &mut [u8],
) {
    let (width, eighths) = (region.width, scale.eighths());
    let mut upsamplers: Vec<Upsampler> = Vec::new();
    for (c, plane) in frame.components.iter().zip(planes) {
        let ratio = [frame.h_max * eighths / (c.h * plane.size), frame.v_max * eighths / (c.v * plane.size)];
        upsamplers.push(Upsampler::new(ratio, plane, eighths > 1));
    }
    let mut rgb = [(); 3].map(|()| vec![0; width]);
    for (y, out) in out.chunks_exact_mut(N * width).enumerate() {
        let mut samples: [&[u8]; 4] = [&[]; 4];
        for ((samples, upsampler), plane) in samples.iter_mut().zip(&mut upsamplers).zip(planes) {
            *samples = upsampler.row(plane, region.top + y, region);
        }
        let [one, two, three, black] = samples;
        let pixels = out.as_chunks_mut::<N>().0;
        match frame.model {
            Model::Grey => {
                pixels.iter_mut().zip(one).for_each(|(pixel, &grey)| *pixel = pack(grey, grey, grey));
                continue;
            }
            Model::Rgb | Model::Cmyk => {
                for (to, from) in rgb.iter_mut().zip([one, two, three]) {
                    to.copy_from_slice(from);
                }
            }
            Model::YCbCr | Model::Ycck => convert(one, two, three, &mut rgb),
        }
        if !black.is_empty() {
            // Inks are stored inverted, as Adobe and everyone else do it. YCCK decodes to the complement of what is
            // stored.
            let flip = if frame.model == Model::Ycck { 255 } else { 0 };
            for plane in &mut rgb {
                plane.iter_mut().zip(black).for_each(|(ink, &black)| *ink = on_paper(*ink ^ flip, black));
            }
        }
        let [red, green, blue] = &rgb;
        for (((pixel, &red), &green), &blue) in pixels.iter_mut().zip(red).zip(green).zip(blue) {
            *pixel = pack(red, green, blue);
        }
    }
}

#[inline(always)]
fn pack<const N: usize>(red: u8, green: u8, blue: u8) -> [u8; N] {
    let all = (u32::from(red) | u32::from(green) << 8 | u32::from(blue) << 16).to_le_bytes();
    std::array::from_fn(|i| all[i])
}

/// The brightness of an ink that is printed together with black; both are given inverted.
fn on_paper(ink: u8, black: u8) -> u8 {
    let product = u32::from(255 - ink) * u32::from(black) + 128;
    black.saturating_sub(((product + (product >> 8)) >> 8) as u8)
}

/// Converts one row, into separate planes because the compiler vectorises that and not interleaved output.
fn convert(luma: &[u8], cb: &[u8], cr: &[u8], rgb: &mut [Vec<u8>; 3]) {
    const HALF: i32 = 1 << 15;
    let n = luma.len();
    let [red, green, blue] = rgb.each_mut().map(|row| &mut row[..n]);
    let (cb, cr) = (&cb[..n], &cr[..n]);
    // The product with twice the value, rounded down, then halved and rounded up, is the rounded product, within 16
    // bits.
    let times = |value: i16, factor: i32| (((i32::from(2 * value) * factor) >> 16) as i16 + 1) >> 1;
    let clamp = |value: i16| value.clamp(0, 255) as u8;
    for i in 0..n {
        let (y, b, r) = (i16::from(luma[i]), i16::from(cb[i]) - 128, i16::from(cr[i]) - 128);
        red[i] = clamp(y + r + times(r, 26345));
        green[i] = clamp(y - r + ((i32::from(b) * -22554 + i32::from(r) * 18734 + HALF) >> 16) as i16);
        blue[i] = clamp(y + 2 * b + times(b, -14942));
    }
}
