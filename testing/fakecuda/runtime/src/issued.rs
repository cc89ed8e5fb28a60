//! What the devices were given to do, in the order in which the host issued it.

/// A line for each kernel, copy and fill, and for each call of NCCL. Nothing is kept unless it was asked for.
#[derive(Default)]
pub struct Issued {
    pub is_kept: bool,
    pub lines: Vec<String>,
}

impl Issued {
    pub fn add(&mut self, what: impl FnOnce() -> String) {
        if self.is_kept {
            self.lines.push(what());
        }
    }
}
