//! The bits of a scan, after its byte stuffing has been removed.

/// Zero bytes after each segment's data: reads past the end need no bounds check each and are noticed afterwards.
pub(crate) const PADDING: usize = 16;

/// The bits of one segment.
pub(crate) struct Bits<'a> {
    /// Ends with [`PADDING`] zeros.
    data: &'a [u8],
    next: usize,
    /// The next bits, the first of them in the highest place.
    buffer: u64,
    held: u32,
}

impl<'a> Bits<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self { data, next: 0, buffer: 0, held: 0 }
    }

    /// Makes at least 56 bits available.
    #[inline(always)]
    pub(crate) fn refill(&mut self) {
        let word = match self.data.get(self.next..self.next + 8) {
            Some(bytes) => u64::from_be_bytes(bytes.try_into().unwrap_or_default()),
            None => 0,
        };
        self.buffer |= word >> self.held;
        self.next += (63 - self.held as usize) >> 3;
        self.held |= 56;
    }

    #[inline(always)]
    pub(crate) fn refill_below_32(&mut self) {
        if self.held < 32 {
            self.refill();
        }
    }

    #[inline(always)]
    pub(crate) fn top(&self) -> u64 {
        self.buffer
    }

    #[inline(always)]
    pub(crate) fn consume(&mut self, count: u32) {
        self.buffer <<= count;
        self.held -= count;
    }

    /// The next `size` bits (at most 15) as JPEG's signed value of that size.
    #[inline(always)]
    pub(crate) fn signed(&mut self, size: u32) -> i32 {
        let value = (self.buffer >> 1 >> (63 - size)) as i32;
        let negative = (!self.buffer >> 63) as i32;
        self.consume(size);
        value - (negative * ((1 << size) - 1))
    }

    /// The next `count` bits, at most 16 and no more than are available.
    #[inline(always)]
    pub(crate) fn take(&mut self, count: u32) -> u32 {
        let value = (self.buffer >> 1 >> (63 - count)) as u32;
        self.consume(count);
        value
    }

    /// Whether bits beyond the end of the data were read.
    pub(crate) fn overrun(&self) -> bool {
        self.read_bytes() > self.data.len() - PADDING
    }

    /// Whether whole bytes are left unread.
    pub(crate) fn leaves_bytes(&self) -> bool {
        self.read_bytes() < self.data.len() - PADDING
    }

    /// Bytes of which at least one bit was read.
    fn read_bytes(&self) -> usize {
        self.next - self.held as usize / 8
    }
}
