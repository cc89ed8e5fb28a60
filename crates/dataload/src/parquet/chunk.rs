//! Decodes one column of one row group.

use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use ::parquet::data_type::{ByteArray, DataType};
use bytemuck::Pod;

use super::element::{Consumer, dispatch};
use super::field::Leaf;
use super::guard::guarded;
use super::lists::{BadLevels, Lists};
use super::pages::{ChunkPlace, Pages};
use crate::columns::{Array, Element, OnNull, Words};
use crate::{Cancellation, DataError};

/// Rows decoded at a time: few enough for their values to stay in the L1 cache.
const STEP: usize = 4096;
/// The same for strings: delta-encoded ones are copied in full, so fewer at a time bound the memory.
const TEXT_STEP: usize = 256;

/// A column chunk that is to be read.
pub(super) struct Chunk<'a> {
    pub(super) leaf: &'a Leaf,
    pub(super) element: Element,
    pub(super) nulls: &'a OnNull,
    pub(super) place: ChunkPlace,
    pub(super) rows: usize,
    /// The number of definition level entries: one per row where there are no lists.
    pub(super) levels: u64,
    /// The most bytes that the values may take, where their number is not known beforehand.
    pub(super) max_bytes: u64,
    pub(super) cancelled: &'a Cancellation,
}

/// The values and levels decoded in one step.
struct Step<T> {
    values: Vec<T>,
    defs: Vec<i16>,
    reps: Vec<i16>,
}

impl Chunk<'_> {
    /// Reads a column of one value per row into `out`, which has exactly the room for them, and which of them are null
    /// into `mask`, which is all 0, if nulls are masked.
    pub(super) fn read_into(&self, pages: Pages, out: &mut [u8], mask: Option<&mut [u8]>) -> Result<(), DataError> {
        let reader = get_column_reader(self.leaf.descriptor.clone(), Box::new(pages));
        dispatch(self.element, reader, Flat { chunk: self, out, mask }).unwrap_or_else(|| Err(self.other_type()))
    }

    /// Reads a column of lists, strings, or lists of strings into `memory`, which is empty and grows.
    pub(super) fn read(&self, pages: Pages, memory: Words) -> Result<Array, DataError> {
        match get_column_reader(self.leaf.descriptor.clone(), Box::new(pages)) {
            ColumnReader::ByteArrayColumnReader(reader) => self.read_texts(reader, memory),
            reader => {
                let lists = InLists { chunk: self, values: memory };
                dispatch(self.element, reader, lists).unwrap_or_else(|| Err(self.other_type()))
            }
        }
    }

    fn other_type(&self) -> DataError {
        self.place.corrupt("values of the type in the schema", "another type")
    }

    /// Decodes the values of at most `most` rows and returns the number of rows.
    fn step<T: DataType>(
        &self,
        reader: &mut ColumnReaderImpl<T>,
        most: usize,
        step: &mut Step<T::T>,
    ) -> Result<usize, DataError> {
        self.cancelled.check()?;
        let Step { values, defs, reps } = step;
        values.clear();
        defs.clear();
        reps.clear();
        let describe = |found| self.place.corrupt("values that can be decoded", found);
        let (rows, ..) = guarded(describe, || reader.read_records(most, Some(defs), Some(reps), values))?;
        if rows == 0 && values.is_empty() && defs.is_empty() {
            let expected = format!("values of {} rows", self.rows);
            return Err(self.place.corrupt(&expected, "the end of the column"));
        }
        Ok(rows)
    }

    /// The error of a step that begins at `row`.
    fn bad_levels<T>(&self, row: usize, step: &Step<T>, bad: BadLevels) -> DataError {
        let (row_group, column) = (self.place.row_group, &self.place.column);
        match bad {
            BadLevels::Malformed => self.place.corrupt("levels that form lists", "levels that contradict each other"),
            BadLevels::Null { at } => DataError::layout(
                self.place.source.path(),
                format!("a value in every row of column {column:?}, or a `fill_null` or `mask_null` for it"),
                format!("a null in row {} of row group {row_group}", row + step.row_of_level(at)),
            ),
        }
    }

    /// The error of the value at `position` among those of a step that begins at `row`.
    fn out_of_range<T>(&self, row: usize, step: &Step<T>, position: usize) -> DataError {
        let max_def = self.leaf.descriptor.max_def_level();
        let mut levels = (0..step.defs.len()).filter(|&at| step.defs[at] == max_def);
        // Without levels, each row has a value.
        let row = row + step.row_of_level(levels.nth(position).unwrap_or(position));
        self.place.corrupt(&format!("values of type {:?}", self.element), format!("another value in row {row}"))
    }

    fn lists(&self) -> Lists {
        let max_def = self.leaf.descriptor.max_def_level();
        Lists::new(self.leaf.list_levels.clone(), max_def, self.nulls)
    }

    /// The column of these values, and of strings that end there, once it is checked that there is one list per row, and
    /// the declared number of levels.
    fn finish(&self, lists: Lists, levels: usize, ends: Option<Vec<i64>>, values: Words) -> Result<Array, DataError> {
        let (mut offsets, mask) = lists.finish();
        if let Some(outermost) = offsets.first()
            && (outermost.len() - 1, levels as u64) != (self.rows, self.levels)
        {
            let expected = format!("{} rows of {} levels", self.rows, self.levels);
            return Err(self.place.corrupt(&expected, format!("{} of {levels}", outermost.len() - 1)));
        }
        offsets.extend(ends);
        let mask = mask.map(|mut mask| {
            // Where nothing can be null, there are no levels.
            mask.resize(self.rows, false);
            Array::of_bools(&mask).map(Box::new)
        });
        Ok(Array { mask: mask.transpose()?, ..Array::of_lists(self.element, offsets, values) })
    }

    fn check_bytes(&self, bytes: usize) -> Result<(), DataError> {
        DataError::check_bytes(self.max_bytes, bytes as u64, "a column of a row group", self.place.source.path())
    }

    fn read_texts(
        &self,
        mut reader: ColumnReaderImpl<::parquet::data_type::ByteArrayType>,
        mut values: Words,
    ) -> Result<Array, DataError> {
        let mut step = Step::new();
        let mut lists = self.lists();
        let mut present = Vec::new();
        let (mut ends, fill) = (vec![0], self.nulls.fill(0));
        let (mut row, mut levels) = (0, 0);
        while row < self.rows {
            let rows = self.step(&mut reader, TEXT_STEP.min(self.rows - row), &mut step)?;
            present.clear();
            if self.leaf.descriptor.max_def_level() == 0 {
                present.resize(rows, true);
            } else {
                let pushed = lists.push(&step.reps, &step.defs, &mut present);
                pushed.map_err(|bad| self.bad_levels(row, &step, bad))?;
            }
            let mut texts = step.values.iter().map(ByteArray::data);
            let texts = present.iter().map(|&present| {
                let text = if present { texts.next() } else { fill.as_deref() };
                text.ok_or_else(|| self.place.corrupt("as many strings as levels", "fewer"))
            });
            let texts = texts.collect::<Result<Vec<&[u8]>, _>>()?;
            let (mut end, bytes) = (values.bytes().len(), texts.iter().map(|text| text.len()).sum());
            self.check_bytes(end.saturating_add(bytes))?;
            let mut rest = values.extend(bytes)?;
            for text in texts {
                let (here, tail) = rest.split_at_mut(text.len());
                here.copy_from_slice(text);
                (rest, end) = (tail, end + text.len());
                ends.push(end as i64);
            }
            row += rows;
            levels += step.defs.len();
        }
        self.finish(lists, levels, Some(ends), values)
    }
}

impl<T> Step<T> {
    fn new() -> Self {
        Self { values: Vec::new(), defs: Vec::new(), reps: Vec::new() }
    }

    /// The row that a level belongs to, counted from the step's first. A row begins at each repetition level of 0; without
    /// repetition levels, every level is a row.
    fn row_of_level(&self, at: usize) -> usize {
        match self.reps.get(..=at) {
            Some(reps) => reps.iter().filter(|&&rep| rep == 0).count().saturating_sub(1),
            None => at,
        }
    }
}

/// Reads one value per row.
struct Flat<'a, 'b> {
    chunk: &'a Chunk<'a>,
    out: &'b mut [u8],
    mask: Option<&'b mut [u8]>,
}

impl Consumer for Flat<'_, '_> {
    type Output = Result<(), DataError>;

    fn consume<T: DataType, E: Pod>(
        self,
        mut reader: ColumnReaderImpl<T>,
        per: usize,
        convert: fn(&[T::T], &mut [E]) -> Option<usize>,
    ) -> Self::Output {
        let Self { chunk, out, mut mask } = self;
        let max_def = chunk.leaf.descriptor.max_def_level();
        let out: &mut [E] = bytemuck::cast_slice_mut(out);
        let fill = chunk.nulls.fill(per * size_of::<E>());
        let mut step = Step::new();
        let mut row = 0;
        while row < chunk.rows {
            let rows = chunk.step(&mut reader, STEP.min(chunk.rows - row), &mut step)?;
            let out = &mut out[row * per..(row + rows) * per];
            let values = step.values.len();
            if let Some(position) = convert(&step.values, &mut out[..values * per]) {
                return Err(chunk.out_of_range(row, &step, position));
            }
            if values < rows {
                let spread = spread(out, per, &step.defs, max_def, values, fill.as_deref());
                spread.map_err(|bad| chunk.bad_levels(row, &step, bad))?;
                if let Some(mask) = &mut mask {
                    let places = mask[row..row + rows].iter_mut().zip(&step.defs);
                    places.for_each(|(null, &def)| *null = u8::from(def < max_def));
                }
            }
            row += rows;
        }
        Ok(())
    }
}

/// Moves the first `values` values to the rows that have one, and puts `fill` into the others.
fn spread<E: Pod>(
    out: &mut [E],
    per: usize,
    defs: &[i16],
    max_def: i16,
    mut values: usize,
    fill: Option<&[u8]>,
) -> Result<(), BadLevels> {
    if defs.len() * per != out.len() || defs.iter().any(|&def| def > max_def) {
        return Err(BadLevels::Malformed);
    }
    let Some(fill) = fill else {
        let null = defs.iter().position(|&def| def < max_def);
        return Err(null.map_or(BadLevels::Malformed, |at| BadLevels::Null { at }));
    };
    let fill = filled::<E>(fill, per).ok_or(BadLevels::Malformed)?;
    // From the back, so that no value is written over before it has moved.
    for (row, &def) in defs.iter().enumerate().rev() {
        if def == max_def {
            values = values.checked_sub(1).ok_or(BadLevels::Malformed)?;
            out.copy_within(values * per..(values + 1) * per, row * per);
        } else {
            out[row * per..(row + 1) * per].copy_from_slice(&fill);
        }
    }
    Ok(())
}

/// The bytes of a value as `per` elements.
fn filled<E: Pod>(bytes: &[u8], per: usize) -> Option<Vec<E>> {
    let mut fill = vec![E::zeroed(); per];
    let target: &mut [u8] = bytemuck::cast_slice_mut(&mut fill);
    (target.len() == bytes.len()).then(|| target.copy_from_slice(bytes))?;
    Some(fill)
}

/// Reads lists of values.
struct InLists<'a> {
    chunk: &'a Chunk<'a>,
    values: Words,
}

impl Consumer for InLists<'_> {
    type Output = Result<Array, DataError>;

    fn consume<T: DataType, E: Pod>(
        self,
        mut reader: ColumnReaderImpl<T>,
        per: usize,
        convert: fn(&[T::T], &mut [E]) -> Option<usize>,
    ) -> Self::Output {
        let Self { chunk, mut values } = self;
        let mut step = Step::new();
        let (mut lists, fill) = (chunk.lists(), chunk.nulls.fill(per * size_of::<E>()));
        let (mut present, mut converted) = (Vec::new(), Vec::new());
        let (mut row, mut levels) = (0, 0);
        while row < chunk.rows {
            let rows = chunk.step(&mut reader, STEP.min(chunk.rows - row), &mut step)?;
            present.clear();
            let pushed = lists.push(&step.reps, &step.defs, &mut present);
            pushed.map_err(|bad| chunk.bad_levels(row, &step, bad))?;
            let bytes = present.len() * per * size_of::<E>();
            chunk.check_bytes(values.bytes().len() + bytes)?;
            let out: &mut [E] = bytemuck::cast_slice_mut(values.extend(bytes)?);
            let out_of_range = |position| chunk.out_of_range(row, &step, position);
            if step.values.len() == present.len() {
                convert(&step.values, out).map_or(Ok(()), |position| Err(out_of_range(position)))?;
            } else {
                converted.resize(step.values.len() * per, E::zeroed());
                convert(&step.values, &mut converted).map_or(Ok(()), |position| Err(out_of_range(position)))?;
                let mut found = converted.chunks_exact(per.max(1)).map(bytemuck::cast_slice::<E, u8>);
                for (out, &present) in out.chunks_exact_mut(per.max(1)).zip(&present) {
                    let value = if present { found.next() } else { fill.as_deref() };
                    let value = value.ok_or_else(|| chunk.place.corrupt("as many values as levels", "fewer"))?;
                    bytemuck::cast_slice_mut(out).copy_from_slice(value);
                }
            }
            row += rows;
            levels += step.defs.len();
        }
        chunk.finish(lists, levels, None, values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_move_to_their_rows() {
        let fill = 9i32.to_ne_bytes();
        let mut out = [1, 2, 3, 0, 0, 0];
        assert_eq!(spread(&mut out, 1, &[0, 1, 1, 0, 0, 1], 1, 3, Some(&fill)), Ok(()));
        assert_eq!(out, [9, 1, 2, 9, 9, 3]);
        let mut pairs = [1u8, 2, 0, 0];
        assert_eq!(spread(&mut pairs, 2, &[0, 1], 1, 1, Some(&[7, 8])), Ok(()));
        assert_eq!(pairs, [7, 8, 1, 2]);
        assert_eq!(spread(&mut out, 1, &[1, 1, 0, 1, 0, 1], 1, 4, None), Err(BadLevels::Null { at: 2 }));
        assert_eq!(spread(&mut out, 1, &[2; 6], 1, 0, Some(&fill)), Err(BadLevels::Malformed));
        assert_eq!(spread(&mut out, 1, &[1; 6], 1, 3, Some(&fill)), Err(BadLevels::Malformed));
    }
}
