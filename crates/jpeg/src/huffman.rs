//! Huffman tables for the bits of a scan.

use std::sync::OnceLock;

use crate::bits::Bits;

const LOOK: u32 = 10;

/// The coefficient that the next [`LOOK`] bits hold completely; `bits` is 0 where they hold none.
#[derive(Clone, Copy, Default)]
pub(crate) struct Coefficient {
    pub(crate) value: i16,
    pub(crate) run: u8,
    pub(crate) bits: u8,
}

/// All coefficients that the next [`LOOK`] bits hold completely, up to the block's end; `bits` is 0 where they hold none.
#[derive(Clone, Copy, Default)]
pub(crate) struct Coefficients {
    /// How many they are, with those of 0 between them. The block's end counts as one.
    pub(crate) count: u8,
    pub(crate) bits: u8,
    /// Whether the block's end is the last of them.
    pub(crate) end: bool,
}

/// At `1 << n | bits`, what `n` bits hold.
#[derive(Clone)]
pub(crate) struct Skips([Coefficients; 2 << LOOK]);

impl Skips {
    #[inline(always)]
    pub(crate) fn look(&self, top: u64) -> Coefficients {
        self.0[1 << LOOK | (top >> (64 - LOOK)) as usize]
    }
}

#[derive(Clone)]
pub(crate) struct Table {
    coefficients: Box<[Coefficient; 1 << LOOK]>,
    /// Made where blocks are skipped.
    skips: OnceLock<Box<Skips>>,
    /// Symbol and length of the code that the next [`LOOK`] bits start with; length 0 where the code is longer.
    symbols: Box<[(u8, u8); 1 << LOOK]>,
    /// By code length: the first 16-bit prefix beyond the codes of this length; `offset` is what to add to a code for
    /// the index of its symbol in `values`.
    beyond: [u32; 17],
    offset: [i32; 17],
    values: Vec<u8>,
}

impl Table {
    pub(crate) fn new(counts: &[u8; 16], values: &[u8]) -> Option<Self> {
        let total: usize = counts.iter().map(|&n| usize::from(n)).sum();
        if total != values.len() || total > 256 {
            return None;
        }
        let mut table = Self {
            coefficients: Box::new([Coefficient::default(); 1 << LOOK]),
            skips: OnceLock::new(),
            symbols: Box::new([(0, 0); 1 << LOOK]),
            beyond: [0; 17],
            offset: [0; 17],
            values: values.to_vec(),
        };
        let (mut code, mut first) = (0u32, 0usize);
        for length in 1..=16u32 {
            let count = usize::from(counts[length as usize - 1]);
            table.offset[length as usize] = first as i32 - code as i32;
            for &symbol in &values[first..first + count] {
                if code >= 1 << length {
                    return None;
                }
                if length <= LOOK {
                    let start = (code << (LOOK - length)) as usize;
                    table.symbols[start..start + (1 << (LOOK - length))].fill((symbol, length as u8));
                }
                code += 1;
            }
            first += count;
            table.beyond[length as usize] = code << (16 - length);
            code <<= 1;
        }
        for (bits, entry) in table.coefficients.iter_mut().enumerate() {
            let (symbol, length) = table.symbols[bits];
            let (run, size) = (symbol >> 4, u32::from(symbol & 15));
            if length != 0 && size != 0 && u32::from(length) + size <= LOOK {
                let rest = (bits as u32) >> (LOOK - u32::from(length) - size) & ((1 << size) - 1);
                let value = if rest >> (size - 1) == 0 { rest as i32 - (1 << size) + 1 } else { rest as i32 };
                *entry = Coefficient { value: value as i16, run, bits: length + size as u8 };
            }
        }
        Some(table)
    }

    /// What skips blocks, whose values nobody needs. For a table of AC coefficients.
    #[inline(always)]
    pub(crate) fn skips(&self) -> &Skips {
        self.skips.get_or_init(|| self.make_skips())
    }

    #[cold]
    fn make_skips(&self) -> Box<Skips> {
        let mut skips = [Coefficients::default(); 2 << LOOK];
        for held in 1..=LOOK {
            for bits in 0..1usize << held {
                let (symbol, length) = self.symbols[bits << (LOOK - held)];
                let (run, size) = (symbol >> 4, symbol & 15);
                let taken = length + size;
                if length == 0 || u32::from(taken) > held {
                    continue;
                }
                let left = 1 << (held - u32::from(taken));
                skips[1 << held | bits] = match size == 0 && run != 15 {
                    true => Coefficients { count: 1, bits: taken, end: true },
                    false => {
                        let rest = skips[left | bits & (left - 1)];
                        Coefficients { count: run + 1 + rest.count, bits: taken + rest.bits, end: rest.end }
                    }
                };
            }
        }
        Box::new(Skips(skips))
    }

    #[inline(always)]
    pub(crate) fn look(&self, top: u64) -> Coefficient {
        self.coefficients[(top >> (64 - LOOK)) as usize]
    }

    /// Takes the next symbol, at most 16 bits.
    #[inline(always)]
    pub(crate) fn symbol(&self, bits: &mut Bits<'_>) -> Result<u8, &'static str> {
        let (symbol, length) = self.symbols[(bits.top() >> (64 - LOOK)) as usize];
        if length != 0 {
            bits.consume(u32::from(length));
            return Ok(symbol);
        }
        self.long_symbol(bits)
    }

    #[cold]
    fn long_symbol(&self, bits: &mut Bits<'_>) -> Result<u8, &'static str> {
        let prefix = (bits.top() >> 48) as u32;
        for length in LOOK + 1..=16 {
            if prefix < self.beyond[length as usize] {
                bits.consume(length);
                let index = (prefix >> (16 - length)) as i32 + self.offset[length as usize];
                return self.values.get(index as usize).copied().ok_or("a code that is not in its Huffman table");
            }
        }
        Err("a code that is not in its Huffman table")
    }
}
