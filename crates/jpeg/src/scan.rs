//! The entropy-coded data of a scan that holds a whole image, decoded where a crop needs it.

use crate::Error;
use crate::bits::Bits;
use crate::header::{Component, Markers, Member, Scan};
use crate::huffman::Table;
use crate::planes::{Plane, Window};
use crate::segments::Segments;

/// Decodes the blocks of `window`. The blocks before it are skipped over, those after it not read.
pub(crate) fn decode(
    markers: &Markers<'_>,
    scan: &Scan,
    segments: &Segments,
    window: &Window,
    planes: &mut [Plane; 4],
) -> Result<(), Error> {
    let frame = &markers.frame;
    let [mcus_x, mcus_y] = frame.mcus();
    let interval = markers.restart_interval;
    segments.check_count(mcus_x * mcus_y, interval)?;
    let fault = |found| segments.fault(found);
    let tables = scan.members.iter().map(|member| tables(markers, member));
    let tables = tables.collect::<Result<Vec<_>, _>>().map_err(fault)?;

    let mut dc = [0i32; 4];
    let mut block = [0i16; 64];
    // Segments before the first row that is needed are skipped.
    let mut segment = (window.rows.start * mcus_x).checked_div(interval).unwrap_or(0);
    let mut bits = segments.bits(segment);
    for mcu in segment * interval..window.rows.end * mcus_x {
        if mcu.checked_div(interval).is_some_and(|current| current != segment) {
            segments.check_end(segment, &bits)?;
            segment = mcu / interval;
            bits = segments.bits(segment);
            dc = [0; 4];
        }
        let (my, mx) = (mcu / mcus_x, mcu % mcus_x);
        let wanted = window.rows.contains(&my) && window.columns.contains(&mx);
        for (tables, plane) in tables.iter().zip(planes.iter_mut()) {
            let (c, dc) = (tables.component, &mut dc[tables.index]);
            for by in 0..c.v {
                for bx in 0..c.h {
                    if !wanted {
                        skip_block(&mut bits, tables, dc).map_err(fault)?;
                        continue;
                    }
                    let last = read_block(&mut bits, tables, dc, &mut block).map_err(fault)?;
                    plane.put(my * c.v + by, mx * c.h + bx, &block, last);
                    if last > 0 {
                        block = [0; 64];
                    }
                }
            }
        }
        // Data past the end reads as zeros; checking here limits that to one row.
        if mx + 1 == mcus_x && bits.overrun() {
            return Err(fault("the end of its data"));
        }
    }
    Ok(())
}

/// The tables that a component's blocks are read with.
pub(crate) struct Tables<'a> {
    index: usize,
    component: &'a Component,
    dc: &'a Table,
    ac: &'a Table,
    quant: &'a [i16; 64],
}

pub(crate) fn tables<'a>(markers: &'a Markers<'_>, member: &Member) -> Result<Tables<'a>, &'static str> {
    let component = &markers.frame.components[member.index];
    let quant = component.quant.as_ref().ok_or("a missing quantization table")?;
    let [dc, ac] = [(&markers.dc, member.dc), (&markers.ac, member.ac)].map(|(tables, slot)| table(tables, slot));
    Ok(Tables { index: member.index, component, dc: dc?, ac: ac?, quant })
}

/// The Huffman table in the slot that a scan names.
pub(crate) fn table(tables: &[Option<Table>; 4], slot: usize) -> Result<&Table, &'static str> {
    tables.get(slot).and_then(Option::as_ref).ok_or("a missing Huffman table")
}

/// Reads a DC coefficient, which is stored as the difference to the one before.
#[inline(always)]
pub(crate) fn read_dc(bits: &mut Bits<'_>, table: &Table, dc: &mut i32) -> Result<(), &'static str> {
    let size = table.symbol(bits)?;
    if size > 15 {
        return Err("a DC coefficient that is too long");
    }
    *dc = dc.wrapping_add(bits.signed(u32::from(size)));
    Ok(())
}

pub(crate) const TOO_MANY: &str = "a block of more than 64 coefficients";

/// Reads a block into zeros, and returns the position of the last nonzero coefficient.
#[inline(always)]
fn read_block(
    bits: &mut Bits<'_>,
    tables: &Tables<'_>,
    dc: &mut i32,
    block: &mut [i16; 64],
) -> Result<usize, &'static str> {
    bits.refill();
    read_dc(bits, tables.dc, dc)?;
    block[0] = (*dc as i16).wrapping_mul(tables.quant[0]);
    let mut last = 0;
    let mut k = 1usize;
    while k < 64 {
        bits.refill_below_32();
        let entry = tables.ac.look(bits.top());
        if entry.value != 0 {
            k += usize::from(entry.run);
            bits.consume(u32::from(entry.bits));
            let at = zigzag(k);
            block[at] = entry.value.wrapping_mul(tables.quant[at]);
            last = k;
            k += 1;
            continue;
        }
        let symbol = tables.ac.symbol(bits)?;
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
        let at = zigzag(k);
        block[at] = value.wrapping_mul(tables.quant[at]);
        last = k;
        k += 1;
    }
    if k > 64 {
        return Err(TOO_MANY);
    }
    Ok(last)
}

#[inline(always)]
fn skip_block(bits: &mut Bits<'_>, tables: &Tables<'_>, dc: &mut i32) -> Result<(), &'static str> {
    bits.refill();
    read_dc(bits, tables.dc, dc)?;
    let skips = tables.ac.skips();
    let mut k = 1usize;
    while k < 64 {
        bits.refill_below_32();
        let all = skips.look(bits.top());
        // Those beyond 64 are of the next block, read by other tables.
        if all.bits != 0 && k + usize::from(all.count) <= 64 {
            bits.consume(u32::from(all.bits));
            if all.end {
                return Ok(());
            }
            k += usize::from(all.count);
            continue;
        }
        let symbol = tables.ac.symbol(bits)?;
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
        return Err(TOO_MANY);
    }
    Ok(())
}

/// The position in the block of each coefficient in the file's order; positions past the block map to its last one.
const ZIGZAG: [u8; 128] = {
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

#[inline(always)]
pub(crate) fn zigzag(i: usize) -> usize {
    usize::from(ZIGZAG[i & 127] & 63)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Jpeg;
    use crate::bits::PADDING;

    /// Over random bits, which also hold codes that no table has, blocks of too many coefficients, and the data's end.
    #[test]
    fn skipping_a_block_takes_the_bits_that_reading_it_does() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testing/images/h2v2.jpg");
        let file = std::fs::read(path).unwrap();
        let jpeg = Jpeg::open(&file).unwrap();
        let tables: Vec<_> = jpeg.scan.members.iter().map(|member| tables(&jpeg.markers, member).unwrap()).collect();
        let (mut random, mut outcomes) = (1u64, std::collections::BTreeMap::new());
        for round in 0..20_000 {
            let mut data = [0; 64];
            data[..64 - PADDING].chunks_mut(8).for_each(|bytes| {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                bytes.copy_from_slice(&(random ^ random >> 29).to_le_bytes());
            });
            let (mut read, mut skipped) = (Bits::new(&data), Bits::new(&data));
            let (mut dc, mut block) = ([0, 0], [0; 64]);
            for _ in 0..4 {
                let tables = &tables[round % tables.len()];
                let is_read = read_block(&mut read, tables, &mut dc[0], &mut block).map(|_| ());
                let is_skipped = skip_block(&mut skipped, tables, &mut dc[1]);
                assert_eq!((is_skipped, dc[1]), (is_read, dc[0]), "{data:?}");
                *outcomes.entry(is_read.err().unwrap_or("read")).or_insert(0) += 1;
                if is_read.is_err() {
                    break;
                }
                read.refill();
                skipped.refill();
                assert_eq!(skipped.top(), read.top(), "{data:?}");
            }
        }
        assert!(outcomes.len() > 1 && outcomes.contains_key(TOO_MANY), "{outcomes:?}");
    }
}
