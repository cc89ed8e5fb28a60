//! The inverse DCT, bit for bit libjpeg's accurate integer one: to whole 8x8 blocks, or to fewer samples where an image
//! is scaled while it is decoded.

use bytemuck::cast;
use wide::{i16x8, i32x8, u8x16, u16x8};

/// A block whose coefficients are 0 except the first (DC).
pub(crate) fn flat(dc: i16, out: &mut [u8], stride: usize) {
    // The first pass leaves 16 bits, as it does in `full`.
    let scaled = i32::from(dc << 2);
    let value = (((scaled + 16) >> 5) + 128).clamp(0, 255) as u8;
    for row in out.chunks_mut(stride).take(8) {
        row[..8].fill(value);
    }
}

/// Any block whose coefficients after the one at `last`, in the file's order, are 0.
pub(crate) fn full(block: &[i16; 64], last: usize, out: &mut [u8], stride: usize) {
    let rows: [i16x8; 8] = cast(*block);
    // The first ten are in the upper left quarter. The products with the others need not be computed.
    let samples = if last < 10 { both(upper_left(rows), upper_left) } else { both(rows, |columns| columns) };
    let half = i16x8::splat(128);
    for (pair, two) in samples.chunks_exact(2).enumerate() {
        let bytes = u8x16::narrow_i16x8(two[0].saturating_add(half), two[1].saturating_add(half)).to_array();
        let at = 2 * pair * stride;
        out[at..at + 8].copy_from_slice(&bytes[..8]);
        out[at + stride..at + stride + 8].copy_from_slice(&bytes[8..]);
    }
}

/// Both dimensions; `known` puts zeros where it is known that there are any, so that the compiler leaves them out.
#[inline(always)]
fn both(rows: [i16x8; 8], known: impl Fn([i16x8; 8]) -> [i16x8; 8]) -> [i16x8; 8] {
    transpose(pass::<18>(known(transpose(pass::<11>(rows)))))
}

#[inline(always)]
fn upper_left([a, b, c, d, ..]: [i16x8; 8]) -> [i16x8; 8] {
    let zero = i16x8::ZERO;
    [a, b, c, d, zero, zero, zero, zero]
}

#[inline(always)]
fn transpose(rows: [i16x8; 8]) -> [i16x8; 8] {
    cast(u16x8::transpose(cast(rows)))
}

#[inline(always)]
fn times(a: i16x8, constant: i16) -> i32x8 {
    a.widening_mul(i16x8::splat(constant))
}

/// One dimension of the transform, on eight columns at once.
#[inline(always)]
fn pass<const SHIFT: i32>(x: [i16x8; 8]) -> [i16x8; 8] {
    let t2 = times(x[2], 4433) + times(x[6], 4433 - 15137);
    let t3 = times(x[2], 4433 + 6270) + times(x[6], 4433);
    let t0 = times(x[0] + x[4], 1 << 13);
    let t1 = times(x[0] - x[4], 1 << 13);
    let round = i32x8::splat(1 << (SHIFT - 1));
    let even = [t0 + t3 + round, t1 + t2 + round, t1 - t2 + round, t0 - t3 + round];
    let (z3, z4) = (x[3] + x[7], x[1] + x[5]);
    let p3 = times(z3, 9633 - 16069) + times(z4, 9633);
    let p4 = times(z3, 9633) + times(z4, 9633 - 3196);
    let odd = [
        times(x[7], -7373) + times(x[1], 12299 - 7373) + p4,
        times(x[5], -20995) + times(x[3], 25172 - 20995) + p3,
        times(x[5], 16819 - 20995) + times(x[3], -20995) + p4,
        times(x[7], 2446 - 7373) + times(x[1], -7373) + p3,
    ];
    let done = |wide: i32x8| i16x8::from_i32x8_saturate(wide >> SHIFT);
    std::array::from_fn(|k| if k < 4 { done(even[k] + odd[k]) } else { done(even[7 - k] - odd[7 - k]) })
}

/// A block scaled to `size` (4, 2 or 1) samples a side; each is about the mean of the full-size samples it replaces.
pub(crate) fn reduced(block: &[i16; 64], size: usize, out: &mut [u8], stride: usize) {
    let rows: [i16x8; 8] = cast(*block);
    let samples = match size {
        4 => transpose(four::<19>(transpose(four::<12>(rows)))),
        2 => transpose(two::<20>(transpose(two::<13>(rows)))),
        _ => [i16x8::splat(((i32::from(block[0]) + 4) >> 3) as i16); 8],
    };
    let half = i16x8::splat(128);
    for (row, out) in samples.into_iter().zip(out.chunks_mut(stride)).take(size) {
        let row = row.saturating_add(half).to_array();
        for (out, value) in out.iter_mut().zip(row).take(size) {
            *out = value.clamp(0, 255) as u8;
        }
    }
}

/// Four points of one dimension, from all frequencies but the middle one.
#[inline(always)]
fn four<const SHIFT: i32>(x: [i16x8; 8]) -> [i16x8; 8] {
    let first = times(x[0], 1 << 14) + i32x8::splat(1 << (SHIFT - 1));
    let even = times(x[2], 15137) + times(x[6], -6270);
    let inner = times(x[7], -1730) + times(x[5], 11893) + times(x[3], -17799) + times(x[1], 8697);
    let outer = times(x[7], -4176) + times(x[5], -4926) + times(x[3], 7373) + times(x[1], 20995);
    let points = [first + even + outer, first - even + inner, first - even - inner, first + even - outer];
    std::array::from_fn(|k| points.get(k).map_or(i16x8::ZERO, |&wide| i16x8::from_i32x8_saturate(wide >> SHIFT)))
}

/// Two points of one dimension, from the first and the odd frequencies.
#[inline(always)]
fn two<const SHIFT: i32>(x: [i16x8; 8]) -> [i16x8; 8] {
    let first = times(x[0], 1 << 14) + times(x[0], 1 << 14) + i32x8::splat(1 << (SHIFT - 1));
    let odd = times(x[7], -5906) + times(x[5], 6967) + times(x[3], -10426) + times(x[1], 29692);
    let points = [first + odd, first - odd];
    std::array::from_fn(|k| points.get(k).map_or(i16x8::ZERO, |&wide| i16x8::from_i32x8_saturate(wide >> SHIFT)))
}
