//! One window: what is left to decode of it, and its decoded rows.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::columns::{Array, Place};

/// Decoded row groups.
pub(super) struct Window {
    /// The arrays of each column: one of the shuffled rows, or one for each row group.
    pub(super) columns: Vec<Vec<Array>>,
    /// For each array, the range of its rows that are used, and where they are in the epoch.
    arrays: Vec<(Range<usize>, usize)>,
}

impl Window {
    /// The arrays with rows in this range of the epoch, and which rows of them these are.
    pub(super) fn pieces(&self, places: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.arrays.iter().enumerate().filter_map(move |(array, (rows, place))| {
            let start = rows.start + places.start.saturating_sub(*place);
            let end = rows.end.min(rows.start + places.end.saturating_sub(*place));
            (start < end).then_some((array, start..end))
        })
    }
}

/// What one thread does at a time: a column of one of the window's row groups, counted from 0. The thread that has a
/// column's last one puts its rows into the epoch's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) column: usize,
    pub(super) group: usize,
}

/// A window that is being decoded.
pub(super) struct Decoding {
    /// The parts that no thread has begun; the last is begun first.
    pub(super) waiting: Vec<Part>,
    pub(super) columns: Vec<Vec<Option<Array>>>,
    /// The order of the rows, if they are shuffled, once it is needed.
    pub(super) order: Arc<OnceLock<Vec<Place>>>,
    /// As in [`Window`].
    arrays: Vec<(Range<usize>, usize)>,
    /// How many parts are not done.
    missing: usize,
    /// Whether a part could not be decoded: a batch that needs the window tries again, to get the error.
    pub(super) failed: bool,
    pub(super) done: Option<Arc<Window>>,
}

impl Decoding {
    /// A window of so many row groups and columns, with all its parts; `arrays` as in [`Window`].
    pub(super) fn new(groups: usize, columns: usize, waiting: Vec<Part>, arrays: Vec<(Range<usize>, usize)>) -> Self {
        let (missing, order) = (waiting.len(), Arc::default());
        let columns = (0..columns).map(|_| (0..groups).map(|_| None).collect()).collect();
        let mut window = Self { waiting, columns, order, arrays, missing, failed: false, done: None };
        // Without columns there is nothing to decode.
        window.finish_if_complete();
        window
    }

    pub(super) fn part_done(&mut self) {
        self.missing -= 1;
        self.finish_if_complete();
    }

    fn finish_if_complete(&mut self) {
        if self.missing == 0 {
            let columns = std::mem::take(&mut self.columns).into_iter();
            let columns = columns.map(|arrays| arrays.into_iter().flatten().collect()).collect();
            self.done = Some(Arc::new(Window { columns, arrays: std::mem::take(&mut self.arrays) }));
        }
    }

    /// Takes parts back that a thread could not decode: the one that it had begun, or all those of its column.
    pub(super) fn lost(&mut self, mut parts: Vec<Part>, groups: usize) {
        parts.iter().for_each(|part| self.columns[part.column].resize_with(groups, || None));
        self.missing += parts.len() - 1;
        self.waiting.append(&mut parts);
        self.failed = true;
    }
}
