//! From the components' samples to rows of red, green and blue, equal to libjpeg's default result to the last bit.

use super::header::Frame;
use super::scan::Plane;
use crate::Region;

/// Fills the region's pixels as red, green, blue and an unused byte.
pub(crate) fn to_rgbx(frame: &Frame, planes: &[Plane; 3], region: &Region, out: &mut [u8]) {
    let (w, h) = (region.width, region.height);
    let mut up = [vec![0u8; 2 * w.div_ceil(2) + 2], vec![0u8; 2 * w.div_ceil(2) + 2]];
    let mut rgb = [(); 3].map(|()| vec![0; w]);
    let mut sums = Vec::new();
    if frame.components.len() == 1 {
        for (y, out) in out.chunks_exact_mut(4 * w).take(h).enumerate() {
            let luma = &planes[0].row((region.top + y) as isize)[region.left - planes[0].left..][..w];
            for (pixel, &grey) in out.as_chunks_mut::<4>().0.iter_mut().zip(luma) {
                *pixel = [grey, grey, grey, 0];
            }
        }
        return;
    }
    for y in 0..h {
        let row = (region.top + y) as isize;
        let luma = &planes[0].row(row)[region.left - planes[0].left..][..w];
        let (cb, cr): (&[u8], &[u8]) = if frame.h_max == 1 {
            let of = |plane: &'_ Plane| region.left - plane.left;
            (&planes[1].row(row)[of(&planes[1])..][..w], &planes[2].row(row)[of(&planes[2])..][..w])
        } else {
            for (plane, out) in planes[1..].iter().zip(&mut up) {
                upsample(plane, frame.v_max == 2, row, region, &mut sums, out);
            }
            let skip = region.left % 2;
            (&up[0][skip..][..w], &up[1][skip..][..w])
        };
        let at = y * w..(y + 1) * w;
        convert(luma, cb, cr, &mut rgb, &mut out[4 * at.start..4 * at.end]);
    }
}

/// Doubles the columns of a row, and the rows where `both`, weighing the nearer sample 3 to 1.
fn upsample(plane: &Plane, both: bool, row: isize, region: &Region, sums: &mut Vec<u16>, out: &mut [u8]) {
    let (first, last) = (region.left / 2, (region.left + region.width - 1) / 2);
    let count = last - first + 1;
    sums.clear();
    sums.resize(count + 2, 0);
    let smooth = plane.width > 2;
    let start = first - plane.left;
    let (near, far) = if both {
        (plane.row(row >> 1), plane.row(if row & 1 == 0 { (row >> 1) - 1 } else { (row >> 1) + 1 }))
    } else {
        (plane.row(row), plane.row(row))
    };
    if !smooth {
        for (pair, &sample) in out.chunks_exact_mut(2).zip(&near[start..][..count]) {
            pair.fill(sample);
        }
        return;
    }
    let fill = |sums: &mut [u16], from: usize, n: usize| {
        let samples = near[from..][..n].iter().zip(&far[from..][..n]);
        if both {
            for (sum, (&a, &b)) in sums.iter_mut().zip(samples) {
                *sum = 3 * u16::from(a) + u16::from(b);
            }
        } else {
            for (sum, (&a, _)) in sums.iter_mut().zip(samples) {
                *sum = u16::from(a);
            }
        }
    };
    let left = first.saturating_sub(1);
    let right = (last + 1).min(plane.width - 1);
    fill(&mut sums[..1], left - plane.left, 1);
    fill(&mut sums[1..=count], start, count);
    fill(&mut sums[count + 1..], right - plane.left, 1);
    let (even, odd, shift) = if both { (8, 7, 4) } else { (1, 2, 2) };
    let (before, middle, after) = (&sums[..count], &sums[1..=count], &sums[2..]);
    for (((pair, &a), &b), &c) in out.as_chunks_mut::<2>().0.iter_mut().zip(before).zip(middle).zip(after) {
        *pair = [((3 * b + a + even) >> shift) as u8, ((3 * b + c + odd) >> shift) as u8];
    }
}

/// One row; three plain loops, since the compiler turns those into vector code and an interleaved one not.
fn convert(luma: &[u8], cb: &[u8], cr: &[u8], rgb: &mut [Vec<u8>; 3], out: &mut [u8]) {
    const HALF: i32 = 1 << 15;
    let n = luma.len();
    let [red, green, blue] = rgb.each_mut().map(|row| &mut row[..n]);
    let (cb, cr) = (&cb[..n], &cr[..n]);
    for i in 0..n {
        let (y, b, r) = (i16::from(luma[i]), i16::from(cb[i]) - 128, i16::from(cr[i]) - 128);
        let (wide_b, wide_r) = (i32::from(b), i32::from(r));
        let clamp = |value: i16| value.clamp(0, 255) as u8;
        red[i] = clamp(y + r + ((wide_r * 26345 + HALF) >> 16) as i16);
        green[i] = clamp(y - r + ((wide_b * -22554 + wide_r * 18734 + HALF) >> 16) as i16);
        blue[i] = clamp(y + 2 * b + ((wide_b * -14942 + HALF) >> 16) as i16);
    }
    let (pixels, _) = out.as_chunks_mut::<4>();
    for (((pixel, &red), &green), &blue) in pixels.iter_mut().zip(&*red).zip(&*green).zip(&*blue) {
        *pixel = (u32::from(red) | u32::from(green) << 8 | u32::from(blue) << 16).to_le_bytes();
    }
}
