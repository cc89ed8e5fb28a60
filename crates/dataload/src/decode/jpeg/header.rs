//! The headers of a baseline JPEG file, and its scan without the stuffing.

use super::huffman::Table;

/// One colour component and its tables.
pub(crate) struct Component {
    pub(crate) id: u8,
    /// Blocks across and down in each minimum coded unit.
    pub(crate) h: usize,
    pub(crate) v: usize,
    pub(crate) quant: usize,
    pub(crate) dc_table: usize,
    pub(crate) ac_table: usize,
}

/// The image as a whole.
pub(crate) struct Frame {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) components: Vec<Component>,
    pub(crate) h_max: usize,
    pub(crate) v_max: usize,
}

/// All that decoding the scan takes.
pub(crate) struct Header<'a> {
    pub(crate) frame: Frame,
    pub(crate) quant: [[i16; 64]; 4],
    pub(crate) dc: [Table; 4],
    pub(crate) ac: [Table; 4],
    /// Minimum coded units between restart markers; 0 without them.
    pub(crate) restart_interval: usize,
    /// The scan and what follows it.
    pub(crate) data: &'a [u8],
    /// Where `data` begins in the file.
    pub(crate) offset: usize,
}

/// Reads up to the first scan; nothing when the file is of a kind that the general decoder is for.
pub(crate) fn read(encoded: &[u8]) -> Option<Header<'_>> {
    let none = || Table::new(&[0; 16], &[]);
    let mut dc = [none()?, none()?, none()?, none()?];
    let mut ac = dc.clone();
    let mut quant = [[0i16; 64]; 4];
    let mut frame: Option<Frame> = None;
    let mut interval = 0;
    let mut rest = encoded.strip_prefix(b"\xff\xd8")?;
    loop {
        let (&[ff, marker], after) = rest.split_first_chunk()?;
        if ff != 0xff {
            return None;
        }
        if marker == 0xff {
            rest = &rest[1..];
            continue;
        }
        let (&length, _) = after.split_first_chunk()?;
        let length = usize::from(u16::from_be_bytes(length));
        let mut body = after.get(2..length)?;
        rest = &after[length..];
        match marker {
            0xc4 => {
                while let Some((&class, tail)) = body.split_first() {
                    let (counts, tail) = tail.split_first_chunk::<16>()?;
                    let total = counts.iter().map(|&n| usize::from(n)).sum();
                    let values = tail.get(..total)?;
                    let slot = if class >> 4 == 0 { &mut dc } else { &mut ac };
                    *slot.get_mut(usize::from(class & 15))? = Table::new(counts, values)?;
                    body = &tail[total..];
                }
            }
            0xdb => {
                while let Some((&which, tail)) = body.split_first() {
                    let table = quant.get_mut(usize::from(which & 15))?;
                    let width = 1 + usize::from(which >> 4);
                    let values = tail.get(..64 * width)?;
                    for (i, value) in values.chunks_exact(width).enumerate() {
                        let value = value.iter().fold(0, |sum, &byte| sum << 8 | u16::from(byte));
                        table[super::scan::zigzag(i)] = value as i16;
                    }
                    body = &tail[64 * width..];
                }
            }
            0xc0 | 0xc1 => {
                let &[depth, h1, h0, w1, w0, count] = body.first_chunk()?;
                if depth != 8 || !matches!(count, 1 | 3) || frame.is_some() {
                    return None;
                }
                let mut components = Vec::new();
                for c in body[6..].chunks_exact(3).take(usize::from(count)) {
                    components.push(Component {
                        id: c[0],
                        h: usize::from(c[1] >> 4),
                        v: usize::from(c[1] & 15),
                        quant: usize::from(c[2]),
                        dc_table: 0,
                        ac_table: 0,
                    });
                }
                if components.len() != usize::from(count) || components.iter().any(|c| c.quant > 3) {
                    return None;
                }
                let sampling: Vec<_> = components.iter().map(|c| (c.h, c.v)).collect();
                match sampling[..] {
                    [_] => (components[0].h, components[0].v) = (1, 1),
                    [(1, 1) | (2, 1) | (2, 2), (1, 1), (1, 1)] => {}
                    _ => return None,
                }
                let ids: Vec<_> = components.iter().map(|c| c.id).collect();
                if ids == *b"RGB" {
                    return None;
                }
                let (h_max, v_max) = (components[0].h, components[0].v);
                let size = |high, low| usize::from(u16::from_be_bytes([high, low]));
                frame = Some(Frame { width: size(w1, w0), height: size(h1, h0), components, h_max, v_max });
            }
            0xc2..=0xcf => return None,
            0xdd => {
                let (&n, _) = body.split_first_chunk()?;
                interval = usize::from(u16::from_be_bytes(n));
            }
            // Adobe's way to say that three components are red, green and blue.
            0xee if body.starts_with(b"Adobe") && body.get(11) == Some(&0) => return None,
            0xda => {
                let mut frame = frame?;
                let (&count, tail) = body.split_first()?;
                if usize::from(count) != frame.components.len() || frame.width == 0 || frame.height == 0 {
                    return None;
                }
                for (c, chosen) in frame.components.iter_mut().zip(tail.chunks_exact(2)) {
                    if chosen[0] != c.id {
                        return None;
                    }
                    (c.dc_table, c.ac_table) = (usize::from(chosen[1] >> 4), usize::from(chosen[1] & 15));
                    if c.dc_table > 3 || c.ac_table > 3 {
                        return None;
                    }
                }
                if tail.len() < 2 * usize::from(count) {
                    return None;
                }
                return Some(Header {
                    frame,
                    quant,
                    dc,
                    ac,
                    restart_interval: interval,
                    data: rest,
                    offset: encoded.len() - rest.len(),
                });
            }
            _ => {}
        }
    }
}

/// Takes the stuffing out of a scan: its bytes go to `scan`, the starts of its segments to `starts`.
///
/// Tells whether a marker ended it, as the last one of an intact file does.
pub(crate) fn unstuff(data: &[u8], scan: &mut Vec<u8>, starts: &mut Vec<usize>) -> bool {
    scan.clear();
    starts.clear();
    starts.push(0);
    let mut rest = data;
    let ended = loop {
        let Some(at) = memchr::memchr(0xff, rest) else {
            scan.extend_from_slice(rest);
            break false;
        };
        match rest.get(at + 1) {
            None => {
                scan.extend_from_slice(&rest[..at]);
                break false;
            }
            Some(0) => {
                scan.extend_from_slice(&rest[..=at]);
                rest = &rest[at + 2..];
            }
            Some(0xff) => {
                scan.extend_from_slice(&rest[..at]);
                rest = &rest[at + 1..];
            }
            Some(0xd0..=0xd7) => {
                scan.extend_from_slice(&rest[..at]);
                scan.extend_from_slice(&[0; super::bits::PADDING]);
                starts.push(scan.len());
                rest = &rest[at + 2..];
            }
            Some(_) => {
                scan.extend_from_slice(&rest[..at]);
                break true;
            }
        }
    };
    scan.extend_from_slice(&[0; super::bits::PADDING]);
    ended
}
