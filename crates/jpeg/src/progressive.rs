//! Images of several scans: all coefficients are gathered first, then transformed where a crop needs them.

use crate::Error;
use crate::bits::Bits;
use crate::header::{Frame, Markers, Scan};
use crate::huffman::Table;
use crate::planes::{Plane, Window};
use crate::scan::{TOO_MANY, read_dc, table, zigzag};
use crate::segments::Segments;

/// More scans than any encoder writes. Each goes through the whole image, so without a limit a small file could take
/// hours.
const MOST_SCANS: usize = 256;
/// The bits of a coefficient. A scan adds at least one to each coefficient that it visits, so more visits would only
/// repeat bits and waste time.
const COEFFICIENT_BITS: u64 = 14;

/// A component's coefficients, block by block, each in row-major order.
#[derive(Default)]
pub(crate) struct Coefficients {
    values: Vec<[i16; 64]>,
    /// Blocks per row, including those that pad the last MCU.
    stride: usize,
}

impl Coefficients {
    /// Bytes held.
    pub(crate) fn held(&self) -> usize {
        self.values.capacity() * size_of::<[i16; 64]>()
    }
}

/// Bytes that an image's coefficients take.
pub(crate) fn bytes(frame: &Frame) -> u64 {
    let [mcus_x, mcus_y] = frame.mcus();
    let blocks: usize = frame.components.iter().map(|c| c.h * c.v).sum();
    (mcus_x * mcus_y * blocks * size_of::<[i16; 64]>()) as u64
}

/// Decodes every scan from `first` on, then the blocks of `window`.
pub(crate) fn decode(
    mut markers: Markers<'_>,
    first: &Scan,
    segments: &mut Segments,
    all: &mut [Coefficients; 4],
    window: &Window,
    planes: &mut [Plane; 4],
) -> Result<(), Error> {
    let [mcus_x, mcus_y] = markers.frame.mcus();
    for (to, c) in all.iter_mut().zip(&markers.frame.components) {
        to.stride = mcus_x * c.h;
        to.values.clear();
        to.values.resize(to.stride * mcus_y * c.v, [0; 64]);
    }
    let coefficients = bytes(&markers.frame) / size_of::<i16>() as u64;
    let mut budget = (COEFFICIENT_BITS * coefficients).saturating_sub(visits(&markers.frame, first));
    markers.at = segments.read(markers.file, markers.at)?;
    read_scan(&markers, first, segments, all)?;
    let mut scans = 1;
    while let Some(scan) = markers.next_scan()? {
        let fault = |found| Error::Damaged { at: markers.at, found };
        if scans == MOST_SCANS {
            return Err(fault("more than 256 scans"));
        }
        scans += 1;
        let left = budget.checked_sub(visits(&markers.frame, &scan));
        budget = left.ok_or(fault("scans of more bits than the coefficients have"))?;
        markers.at = segments.read(markers.file, markers.at)?;
        read_scan(&markers, &scan, segments, all)?;
    }
    for ((from, plane), c) in all.iter().zip(planes).zip(&markers.frame.components) {
        let quant = c.quant.as_ref().ok_or(Error::Damaged { at: markers.at, found: "a component without a scan" })?;
        let [columns, rows] = window.blocks(c.h, c.v);
        for row in rows {
            for column in columns.clone() {
                let block = &from.values[row * from.stride + column];
                let block: [i16; 64] = std::array::from_fn(|k| block[k].wrapping_mul(quant[k]));
                let last = if block[1..].iter().any(|&value| value != 0) { 63 } else { 0 };
                plane.put(row, column, &block, last);
            }
        }
    }
    Ok(())
}

/// Units across and down: blocks in a scan of one component, MCUs in other scans.
fn units(frame: &Frame, scan: &Scan) -> [usize; 2] {
    match scan.members[..] {
        [only] => frame.samples(&frame.components[only.index], 8).map(|samples| samples.div_ceil(8)),
        _ => frame.mcus(),
    }
}

/// How many coefficients a scan may visit.
fn visits(frame: &Frame, scan: &Scan) -> u64 {
    let blocks = match scan.members[..] {
        [_] => 1,
        _ => scan.members.iter().map(|member| &frame.components[member.index]).map(|c| c.h * c.v).sum(),
    };
    let [units_x, units_y] = units(frame, scan);
    let [first, last] = scan.band;
    (units_x * units_y * blocks * (last + 1 - first)) as u64
}

/// Adds a scan to the coefficients.
fn read_scan(
    markers: &Markers<'_>,
    scan: &Scan,
    segments: &Segments,
    all: &mut [Coefficients; 4],
) -> Result<(), Error> {
    let frame = &markers.frame;
    let alone = scan.members.len() == 1;
    let [units_x, units_y] = units(frame, scan);
    let interval = markers.restart_interval;
    segments.check_count(units_x * units_y, interval)?;
    let fault = |found| segments.fault(found);
    let mut reader = Reader { scan, progressive: frame.progressive, dc: [0; 4], end_of_band: 0 };
    let mut tables = Vec::new();
    for member in &scan.members {
        let needs_dc = scan.band[0] == 0 && scan.bits[0] == 0;
        let dc = needs_dc.then(|| table(&markers.dc, member.dc)).transpose().map_err(fault)?;
        let ac = (scan.band[1] > 0).then(|| table(&markers.ac, member.ac)).transpose().map_err(fault)?;
        tables.push((dc, ac));
    }
    let mut segment = 0;
    let mut bits = segments.bits(0);
    for unit in 0..units_x * units_y {
        if unit.checked_div(interval).is_some_and(|current| current != segment) {
            segments.check_end(segment, &bits)?;
            segment = unit / interval;
            bits = segments.bits(segment);
            (reader.dc, reader.end_of_band) = ([0; 4], 0);
        }
        let (y, x) = (unit / units_x, unit % units_x);
        for (member, tables) in scan.members.iter().zip(&tables) {
            let c = &frame.components[member.index];
            let [across, down] = if alone { [1, 1] } else { [c.h, c.v] };
            let to = &mut all[member.index];
            for by in 0..down {
                for bx in 0..across {
                    let block = &mut to.values[(y * down + by) * to.stride + x * across + bx];
                    reader.read(&mut bits, *tables, member.index, block).map_err(fault)?;
                }
            }
        }
        if x + 1 == units_x && bits.overrun() {
            return Err(fault("the end of its data"));
        }
    }
    segments.check_end(segment, &bits)
}

/// The state that is carried from block to block of a scan.
struct Reader<'a> {
    scan: &'a Scan,
    progressive: bool,
    dc: [i32; 4],
    /// How many of the next blocks have no further coefficients in this band (the end-of-band run).
    end_of_band: u32,
}

impl Reader<'_> {
    #[inline(always)]
    fn read(
        &mut self,
        bits: &mut Bits<'_>,
        (dc, ac): (Option<&Table>, Option<&Table>),
        component: usize,
        block: &mut [i16; 64],
    ) -> Result<(), &'static str> {
        let [before, low] = self.scan.bits;
        if let Some(table) = dc {
            bits.refill();
            read_dc(bits, table, &mut self.dc[component])?;
            block[0] = (self.dc[component] << low) as i16;
        } else if self.scan.band[0] == 0 {
            bits.refill();
            block[0] |= (bits.take(1) << low) as i16;
        }
        let from = self.scan.band[0].max(1);
        match ac {
            Some(table) if before == 0 => self.first(bits, table, from, block),
            Some(table) => self.refine(bits, table, from, block),
            None => Ok(()),
        }
    }

    /// The first bits of a band.
    #[inline(always)]
    fn first(
        &mut self,
        bits: &mut Bits<'_>,
        ac: &Table,
        from: usize,
        block: &mut [i16; 64],
    ) -> Result<(), &'static str> {
        if self.end_of_band > 0 {
            self.end_of_band -= 1;
            return Ok(());
        }
        let (to, low) = (self.scan.band[1], self.scan.bits[1]);
        let mut k = from;
        while k <= to {
            bits.refill();
            let symbol = ac.symbol(bits)?;
            let (run, size) = (usize::from(symbol >> 4), u32::from(symbol & 15));
            if size > 0 {
                k += run;
                block[zigzag(k)] = (bits.signed(size) << low) as i16;
                k += 1;
            } else if run == 15 {
                k += 16;
            } else {
                self.end_of_band = self.blocks_ended(bits, run) - 1;
                return Ok(());
            }
        }
        if k > to + 1 { Err(TOO_MANY) } else { Ok(()) }
    }

    /// Reads the length of an end-of-band run, this block included; a sequential image has no such runs.
    #[inline(always)]
    fn blocks_ended(&self, bits: &mut Bits<'_>, run: usize) -> u32 {
        if self.progressive { (1 << run) + bits.take(run as u32) } else { 1 }
    }

    /// One more bit of a band.
    fn refine(
        &mut self,
        bits: &mut Bits<'_>,
        ac: &Table,
        from: usize,
        block: &mut [i16; 64],
    ) -> Result<(), &'static str> {
        let (to, low) = (self.scan.band[1], self.scan.bits[1]);
        let mut k = from;
        while self.end_of_band == 0 && k <= to {
            bits.refill();
            let symbol = ac.symbol(bits)?;
            let (run, size) = (usize::from(symbol >> 4), symbol & 15);
            let new = match size {
                0 if run < 15 => {
                    self.end_of_band = self.blocks_ended(bits, run);
                    break;
                }
                0 => 0,
                1 if bits.take(1) == 1 => 1 << low,
                1 => -1 << low,
                _ => return Err("a refinement by more than one bit"),
            };
            k = refine_up_to(bits, block, k, to, low, run);
            if new != 0 {
                if k > to {
                    return Err(TOO_MANY);
                }
                block[zigzag(k)] = new;
            }
            k += 1;
        }
        if self.end_of_band > 0 {
            refine_up_to(bits, block, k, to, low, usize::MAX);
            self.end_of_band -= 1;
        }
        Ok(())
    }
}

/// Adds a bit to each nonzero coefficient from `k` on, skipping `zeros` coefficients that are 0; stops at the next 0
/// after those, or past `to`, and returns that position.
fn refine_up_to(
    bits: &mut Bits<'_>,
    block: &mut [i16; 64],
    mut k: usize,
    to: usize,
    low: u32,
    mut zeros: usize,
) -> usize {
    while k <= to {
        let value = &mut block[zigzag(k)];
        if *value == 0 {
            if zeros == 0 {
                break;
            }
            zeros -= 1;
        } else {
            bits.refill_below_32();
            if bits.take(1) == 1 && *value & (1 << low) == 0 {
                *value = value.wrapping_add(value.signum() << low);
            }
        }
        k += 1;
    }
    k
}
