//! The marker segments of a JPEG file: the tables and headers that its scans are decoded with.

use crate::Error;
use crate::huffman::Table;
use crate::scan::zigzag;

/// One colour component.
#[derive(Clone)]
pub(crate) struct Component {
    id: u8,
    /// Blocks across and down in each minimum coded unit (MCU).
    pub(crate) h: usize,
    pub(crate) v: usize,
    quant_slot: usize,
    /// The quantization table, in the block's row-major order; set by the first scan that has this component.
    pub(crate) quant: Option<[i16; 64]>,
}

/// The colour model: what the components mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    Grey,
    YCbCr,
    Rgb,
    Cmyk,
    /// CMYK whose first three are stored as YCbCr.
    Ycck,
}

/// The image as a whole.
#[derive(Clone)]
pub(crate) struct Frame {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) components: Vec<Component>,
    pub(crate) h_max: usize,
    pub(crate) v_max: usize,
    pub(crate) progressive: bool,
    pub(crate) model: Model,
}

impl Frame {
    /// Minimum coded units across and down.
    pub(crate) fn mcus(&self) -> [usize; 2] {
        [self.width.div_ceil(8 * self.h_max), self.height.div_ceil(8 * self.v_max)]
    }

    /// A component's columns and rows, without the padding to whole blocks, when each block is decoded to `size`
    /// samples across.
    pub(crate) fn samples(&self, component: &Component, size: usize) -> [usize; 2] {
        [
            (self.width * component.h * size).div_ceil(8 * self.h_max),
            (self.height * component.v * size).div_ceil(8 * self.v_max),
        ]
    }
}

/// A component's part in a scan.
#[derive(Clone, Copy)]
pub(crate) struct Member {
    /// Its index among the frame's components.
    pub(crate) index: usize,
    pub(crate) dc: usize,
    pub(crate) ac: usize,
}

/// What a scan holds.
pub(crate) struct Scan {
    pub(crate) members: Vec<Member>,
    /// The first and the last coefficient, in zigzag order.
    pub(crate) band: [usize; 2],
    /// The lowest bit position that earlier scans have given (0 in the first), and the lowest that this scan gives.
    pub(crate) bits: [u32; 2],
}

/// Reads the marker segments one after the other.
#[derive(Clone)]
pub(crate) struct Markers<'a> {
    pub(crate) file: &'a [u8],
    /// Where the next marker, or the data of the scan just found, begins.
    pub(crate) at: usize,
    pub(crate) frame: Frame,
    pub(crate) dc: [Option<Table>; 4],
    pub(crate) ac: [Option<Table>; 4],
    /// Minimum coded units between restart markers; 0 without them.
    pub(crate) restart_interval: usize,
    quant: [Option<[i16; 64]>; 4],
    jfif: bool,
    adobe: Option<u8>,
}

/// The offset of the next marker that begins a segment or ends the image. As in libjpeg, stray bytes before it are
/// skipped.
pub(crate) fn marker(file: &[u8], mut at: usize) -> Option<usize> {
    loop {
        at += memchr::memchr(0xff, file.get(at..)?)?;
        match *file.get(at + 1)? {
            // A stuffed byte and a restart marker, which belong to no scan here, and a marker for private use.
            0x00 | 0x01 | 0xd0..=0xd7 => at += 2,
            // Padding.
            0xff => at += 1,
            _ => return Some(at),
        }
    }
}

impl<'a> Markers<'a> {
    /// Reads up to the first scan.
    pub(crate) fn open(file: &'a [u8]) -> Result<(Self, Scan), Error> {
        let frame = Frame {
            width: 0,
            height: 0,
            components: Vec::new(),
            h_max: 1,
            v_max: 1,
            progressive: false,
            model: Model::Grey,
        };
        let (dc, ac, quant) = Default::default();
        let mut markers = Self { file, at: 2, frame, dc, ac, restart_interval: 0, quant, jfif: false, adobe: None };
        let scan = markers.next_scan()?.ok_or(Error::Damaged { at: markers.at, found: "an image without a scan" })?;
        markers.frame.model = markers.model();
        Ok((markers, scan))
    }

    /// Reads up to the next scan; `None` at the end of the image.
    pub(crate) fn next_scan(&mut self) -> Result<Option<Scan>, Error> {
        loop {
            self.at = marker(self.file, self.at).ok_or(Error::Damaged { at: self.at, found: "the end of the file" })?;
            let at = self.at;
            let fault = |found| Error::Damaged { at, found };
            let (marker, after) = (self.file[at + 1], &self.file[at + 2..]);
            if marker == 0xd9 {
                return Ok(None);
            }
            let length = after.first_chunk().map_or(0, |&length| usize::from(u16::from_be_bytes(length)));
            let body = after.get(2..length.max(2)).ok_or(fault("the end of the file"))?;
            self.at += 2 + length;
            let read = match marker {
                0xc0..=0xc2 => {
                    self.frame = frame(at, body, marker == 0xc2, &self.frame)?;
                    Ok(())
                }
                0xc4 => self.huffman(body),
                0xda => match self.scan(body) {
                    Ok(scan) => return Ok(Some(scan)),
                    Err(found) => Err(found),
                },
                0xdb => self.quantization(body),
                0xdd => {
                    self.restart_interval = body.first_chunk().map_or(0, |&n| usize::from(u16::from_be_bytes(n)));
                    Ok(())
                }
                0xe0 => {
                    self.jfif |= body.starts_with(b"JFIF\0");
                    Ok(())
                }
                0xee if body.starts_with(b"Adobe") => {
                    self.adobe = body.get(11).copied();
                    Ok(())
                }
                0xc3 | 0xc5..=0xcf => {
                    return Err(Error::Unsupported { at, found: "a kind of JPEG other than baseline and progressive" });
                }
                _ => Ok(()),
            };
            read.map_err(fault)?;
        }
    }

    fn huffman(&mut self, mut body: &[u8]) -> Result<(), &'static str> {
        const BROKEN: &str = "a damaged Huffman table";
        while let Some((&class, tail)) = body.split_first() {
            let (counts, tail) = tail.split_first_chunk::<16>().ok_or(BROKEN)?;
            let total = counts.iter().map(|&n| usize::from(n)).sum();
            let values = tail.get(..total).ok_or(BROKEN)?;
            let slots = if class >> 4 == 0 { &mut self.dc } else { &mut self.ac };
            *slots.get_mut(usize::from(class & 15)).ok_or(BROKEN)? = Some(Table::new(counts, values).ok_or(BROKEN)?);
            body = &tail[total..];
        }
        Ok(())
    }

    fn quantization(&mut self, mut body: &[u8]) -> Result<(), &'static str> {
        const BROKEN: &str = "a damaged quantization table";
        while let Some((&which, tail)) = body.split_first() {
            let width = 1 + usize::from(which >> 4 != 0);
            let values = tail.get(..64 * width).ok_or(BROKEN)?;
            let table = self.quant.get_mut(usize::from(which & 15)).ok_or(BROKEN)?.insert([0; 64]);
            for (i, value) in values.chunks_exact(width).enumerate() {
                table[zigzag(i)] = value.iter().fold(0, |sum, &byte| sum << 8 | u16::from(byte)) as i16;
            }
            body = &tail[64 * width..];
        }
        Ok(())
    }

    fn scan(&mut self, body: &[u8]) -> Result<Scan, &'static str> {
        const BROKEN: &str = "a damaged scan header";
        let (&count, tail) = body.split_first().ok_or(BROKEN)?;
        let count = usize::from(count);
        let (chosen, &[start, end, bits]) = tail
            .split_at_checked(2 * count)
            .and_then(|(chosen, tail)| Some((chosen, tail.first_chunk()?)))
            .ok_or(BROKEN)?;
        let mut members: Vec<Member> = Vec::new();
        for &[id, tables] in chosen.as_chunks().0 {
            let index = self.frame.components.iter().position(|c| c.id == id).ok_or(BROKEN)?;
            if members.iter().any(|member| member.index >= index) {
                return Err(BROKEN);
            }
            let component = &mut self.frame.components[index];
            if component.quant.is_none() {
                let table = self.quant.get(component.quant_slot).copied().flatten();
                component.quant = Some(table.ok_or("a missing quantization table")?);
            }
            members.push(Member { index, dc: usize::from(tables >> 4), ac: usize::from(tables & 15) });
        }
        let (band, bits) = match self.frame.progressive {
            true => ([usize::from(start), usize::from(end)], [u32::from(bits >> 4), u32::from(bits & 15)]),
            false => ([0, 63], [0, 0]),
        };
        let [first, last] = band;
        let one_kind = !self.frame.progressive || (first == 0) == (last == 0);
        let refines_by_one = bits[0] == 0 || bits[0] == bits[1] + 1;
        if members.is_empty() || first > last || last > 63 || !one_kind || !refines_by_one || bits[1] > 13 {
            return Err(BROKEN);
        }
        if first > 0 && members.len() > 1 {
            return Err(BROKEN);
        }
        Ok(Scan { members, band, bits })
    }

    /// The colour model, by libjpeg's rules.
    fn model(&self) -> Model {
        let ids: Vec<u8> = self.frame.components.iter().map(|c| c.id).collect();
        match (ids.len(), self.adobe) {
            (1, _) => Model::Grey,
            (4, None | Some(0)) => Model::Cmyk,
            (4, Some(_)) => Model::Ycck,
            (_, _) if self.jfif => Model::YCbCr,
            (_, Some(0)) => Model::Rgb,
            (_, None) if ids == *b"RGB" => Model::Rgb,
            _ => Model::YCbCr,
        }
    }
}

/// Reads the header of the frame that begins at `at`; the file must not have had one before.
fn frame(at: usize, body: &[u8], progressive: bool, before: &Frame) -> Result<Frame, Error> {
    let damaged = |found| Error::Damaged { at, found };
    let unsupported = |found| Error::Unsupported { at, found };
    let &[depth, h1, h0, w1, w0, count] = body.first_chunk().ok_or(damaged("a damaged frame header"))?;
    let [width, height] = [[w1, w0], [h1, h0]].map(|side| usize::from(u16::from_be_bytes(side)));
    let count = usize::from(count);
    if !before.components.is_empty() {
        return Err(damaged("two frames"));
    }
    if depth != 8 {
        return Err(unsupported("samples of other than 8 bits"));
    }
    if width == 0 || height == 0 || !matches!(count, 1 | 3 | 4) || body.len() < 6 + 3 * count {
        return Err(damaged("a damaged frame header"));
    }
    let read = |c: &[u8]| Component {
        id: c[0],
        h: usize::from(c[1] >> 4),
        v: usize::from(c[1] & 15),
        quant_slot: usize::from(c[2]),
        quant: None,
    };
    let mut components: Vec<_> = body[6..].chunks_exact(3).take(count).map(read).collect();
    if let [only] = &mut components[..] {
        // A scan of one component has its blocks one by one, whatever the sampling factors.
        (only.h, only.v) = (1, 1);
    }
    let [h_max, v_max] = [|c: &Component| c.h, |c: &Component| c.v].map(|of| components.iter().map(of).max());
    let (h_max, v_max) = (h_max.unwrap_or(0), v_max.unwrap_or(0));
    let divides = |c: &Component| (1..=4).contains(&c.h) && (1..=4).contains(&c.v) && h_max % c.h + v_max % c.v == 0;
    if !components.iter().all(divides) {
        return Err(unsupported("sampling factors that are not supported"));
    }
    Ok(Frame { width, height, components, h_max, v_max, progressive, model: Model::Grey })
}
