//! The entropy-coded data of a baseline scan, decoded only where a crop needs it.

use std::ops::Range;

use super::bits::Bits;
use super::header::{Frame, Header};
use super::huffman::Table;
use super::idct;
use crate::Region;

/// The samples of one component within the window of blocks that the region needs.
#[derive(Default)]
pub(crate) struct Plane {
    pub(crate) samples: Vec<u8>,
    /// Samples a row of the plane.
    pub(crate) stride: usize,
    /// The component's sample that the plane begins with.
    pub(crate) left: usize,
    pub(crate) top: usize,
    /// The component's own size, without the padding to whole blocks.
    pub(crate) width: usize,
    pub(crate) height: usize,
}

impl Plane {
    /// The samples of a row of the component, a row outside being the nearest one inside.
    pub(crate) fn row(&self, y: isize) -> &[u8] {
        let y = y.clamp(0, self.height as isize - 1) as usize - self.top;
        &self.samples[y * self.stride..][..self.stride]
    }
}

/// Decodes the blocks that `region` needs, and says what is wrong when the data does not give them.
pub(crate) fn decode(
    header: &Header<'_>,
    scan: &[u8],
    starts: &[usize],
    region: &Region,
    planes: &mut [Plane; 3],
) -> Result<(), &'static str> {
    let frame: &Frame = &header.frame;
    let (across, down) = (8 * frame.h_max, 8 * frame.v_max);
    let (mcus_x, mcus_y) = (frame.width.div_ceil(across), frame.height.div_ceil(down));
    // Smooth upsampling looks one chroma sample, two pixels, beyond the region.
    let near = |range: Range<usize>, size: usize, most: usize| {
        (range.start.saturating_sub(2) / size)..((range.end + 2).div_ceil(size)).min(most)
    };
    let columns = near(region.left..region.left + region.width, across, mcus_x);
    let rows = near(region.top..region.top + region.height, down, mcus_y);
    for (plane, c) in planes.iter_mut().zip(&frame.components) {
        plane.stride = columns.len() * 8 * c.h;
        (plane.left, plane.top) = (columns.start * 8 * c.h, rows.start * 8 * c.v);
        plane.width = (frame.width * c.h).div_ceil(frame.h_max);
        plane.height = (frame.height * c.v).div_ceil(frame.v_max);
        let len = plane.stride * rows.len() * 8 * c.v;
        plane.samples.resize(len, 0);
    }
    let mut dc = [0i32; 3];
    let mut block = [0i16; 64];
    let interval = header.restart_interval;
    // Segments before the first row needed can be passed over.
    let mut segment = (rows.start * mcus_x).checked_div(interval).unwrap_or(0);
    let mut mcu = segment * interval;
    let end = rows.end * mcus_x;
    let mut bits = Bits::new(scan, *starts.get(segment).ok_or("too few restart markers")?);
    while mcu < end {
        if mcu.checked_div(interval).is_some_and(|current| current != segment) {
            segment = mcu / interval;
            bits = Bits::new(scan, *starts.get(segment).ok_or("too few restart markers")?);
            dc = [0; 3];
        }
        let (my, mx) = (mcu / mcus_x, mcu % mcus_x);
        let wanted = rows.contains(&my) && columns.contains(&mx);
        for (i, c) in frame.components.iter().enumerate() {
            let (dc_table, ac_table) = (&header.dc[c.dc_table], &header.ac[c.ac_table]);
            for by in 0..c.v {
                for bx in 0..c.h {
                    if !wanted {
                        skip_block(&mut bits, dc_table, ac_table, &mut dc[i])?;
                        continue;
                    }
                    let last =
                        read_block(&mut bits, dc_table, ac_table, &mut dc[i], &header.quant[c.quant], &mut block)?;
                    let plane = &mut planes[i];
                    let at = ((my - rows.start) * c.v + by) * 8 * plane.stride + ((mx - columns.start) * c.h + bx) * 8;
                    let stride = plane.stride;
                    let out = &mut plane.samples[at..];
                    if last == 0 {
                        idct::flat(block[0], out, stride)
                    } else {
                        idct::full(&block, out, stride);
                        block = [0; 64];
                    }
                }
            }
        }
        if mx + 1 == mcus_x && bits.overrun() {
            return Err("the end of its data");
        }
        mcu += 1;
    }
    Ok(())
}

#[inline(always)]
fn read_dc(bits: &mut Bits<'_>, table: &Table, dc: &mut i32) -> Result<(), &'static str> {
    let size = table.symbol(bits)?;
    if size > 15 {
        return Err("a DC coefficient is too long");
    }
    *dc = dc.wrapping_add(bits.signed(u32::from(size)));
    Ok(())
}

const DAMAGED: &str = "a block of more than 64 coefficients";

#[inline(always)]
fn read_block(
    bits: &mut Bits<'_>,
    dc_table: &Table,
    ac: &Table,
    dc: &mut i32,
    quant: &[i16; 64],
    block: &mut [i16; 64],
) -> Result<usize, &'static str> {
    bits.refill();
    read_dc(bits, dc_table, dc)?;
    block[0] = (*dc as i16).wrapping_mul(quant[0]);
    let mut last = 0;
    let mut k = 1usize;
    while k < 64 {
        bits.refill_below_32();
        let entry = ac.look(bits.top());
        if entry.value != 0 {
            k += usize::from(entry.run);
            bits.consume(u32::from(entry.bits));
            let at = ZIGZAG[k & 127];
            block[at] = entry.value.wrapping_mul(quant[at]);
            last = k;
            k += 1;
            continue;
        }
        let symbol = ac.symbol(bits)?;
        let (run, size) = (usize::from(symbol >> 4), u32::from(symbol & 15));
        if size == 0 {
            if run != 15 {
                break;
            }
            k += 16;
            continue;
        }
        k += run;
        let value = bits.signed(size) as i16;
        let at = ZIGZAG[k & 127];
        block[at] = value.wrapping_mul(quant[at]);
        last = k;
        k += 1;
    }
    if k > 64 {
        return Err(DAMAGED);
    }
    Ok(last)
}

#[inline(always)]
fn skip_block(bits: &mut Bits<'_>, dc_table: &Table, ac: &Table, dc: &mut i32) -> Result<(), &'static str> {
    bits.refill();
    read_dc(bits, dc_table, dc)?;
    let mut k = 1usize;
    while k < 64 {
        bits.refill_below_32();
        let entry = ac.look(bits.top());
        if entry.bits != 0 {
            k += usize::from(entry.run) + 1;
            bits.consume(u32::from(entry.bits));
            continue;
        }
        let symbol = ac.symbol(bits)?;
        let (run, size) = (usize::from(symbol >> 4), u32::from(symbol & 15));
        if size == 0 {
            if run != 15 {
                break;
            }
            k += 16;
            continue;
        }
        k += run + 1;
        bits.consume(size);
    }
    if k > 64 {
        return Err(DAMAGED);
    }
    Ok(())
}

/// Where the coefficients of a block go, in the file's order; what runs out of the block goes to its last place.
const ZIGZAG: [usize; 128] = {
    let order = [
        0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14,
        21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60,
        61, 54, 47, 55, 62, 63,
    ];
    let mut table = [63; 128];
    let mut i = 0;
    while i < 64 {
        table[i] = order[i];
        i += 1;
    }
    table
};
pub(crate) fn zigzag(i: usize) -> usize {
    ZIGZAG[i & 127]
}
