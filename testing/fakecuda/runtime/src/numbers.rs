//! The numbers of an operator: computed over bytes that may be poison, and what of them is known then.

use std::cell::RefCell;
use std::ops::Range;

use crate::poison::{Poison, poison, spoil};

/// Bytes that an operator reads, writes, or both, by their addresses on the host.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Bytes {
    pub at: usize,
    pub bytes: usize,
    /// The bytes of one number.
    pub element: usize,
    pub reads: bool,
    pub writes: bool,
}

impl Bytes {
    fn range(&self) -> Range<usize> {
        self.at..self.at + self.bytes
    }

    /// What is put in place of poison: for numbers of several bytes NaN or less than 1, for others 1 or 0.
    fn patterns(&self) -> [u8; 2] {
        if self.element > 1 { [0xff, 0x3f] } else { [1, 0] }
    }

    fn read(&self) -> Vec<u8> {
        // SAFETY: the caller of `compute` promises memory that nobody else uses meanwhile.
        unsafe { std::slice::from_raw_parts(self.at as *const u8, self.bytes) }.to_vec()
    }

    fn write(&self, values: &[u8]) {
        // SAFETY: as for `read`; the values were read from as many bytes.
        unsafe { std::ptr::copy(values.as_ptr(), self.at as *mut u8, values.len()) };
    }

    fn fill(&self, part: &Range<usize>, value: u8) {
        // SAFETY: as for `read`, and the part is within.
        unsafe { std::ptr::write_bytes(part.start as *mut u8, value, part.len()) };
    }
}

/// Operators that take some numbers out of their first argument, unchanged.
const SELECT: [&str; 5] = ["aten::index_select", "aten::index", "aten::gather", "aten::take", "aten::embedding"];

thread_local! {
    /// What the operator that runs has left out of its results.
    static LEFT_OUT: RefCell<Vec<Range<usize>>> = const { RefCell::new(Vec::new()) };
}

/// The operator that runs cannot compute these bytes of its results.
pub fn not_computed(at: usize, bytes: usize) {
    LEFT_OUT.with_borrow_mut(|all| all.push(at..at + bytes));
}

/// Computes an operator's numbers. What it makes of poison is poison again, and so are results that it leaves out. One
/// that writes nothing on the device tells the host what it reads: poison among it is noted.
pub fn compute(name: &str, all: &[Bytes], run: &mut dyn FnMut() -> Option<String>) {
    if all.iter().all(|it| !it.writes) {
        all.iter().for_each(|it| poison().read(&format!("the host, in {name},"), it.at, it.bytes));
    }
    compute_known(name, all, run);
    for left in LEFT_OUT.take() {
        spoil(left.start, left.len(), &format!("operator {name} of the host does without it"));
    }
}

/// What can be known of an operator's results.
///
/// Some operators in place only use what they overwrite (`add_`), some do not (`fill_`), some write a part
/// (`index_copy_`); some take a part (`index_select`). So one that writes over poison, or takes a part of what holds some,
/// runs twice, with other bytes in its place each time: numbers that come out the same do not depend on it. `run` says why
/// it failed.
fn compute_known(name: &str, all: &[Bytes], run: &mut dyn FnMut() -> Option<String>) {
    let written: Vec<&Bytes> = all.iter().filter(|it| it.writes).collect();
    let selects = SELECT.contains(&name);
    // A new result is written whole.
    let is_part = |(number, it): (usize, &Bytes)| it.reads && (it.writes || (selects && number == 0));
    let read = all.iter().enumerate().filter(|&(number, it)| it.reads && !is_part((number, it)));
    let read = read.map(|(_, it)| it).find_map(|it| poison().of(it.at, it.bytes).map(str::to_owned));
    if let Some(why) = read.filter(|_| !written.is_empty()) {
        return spoil_all(&written, &why);
    }
    let in_part = all.iter().enumerate().filter(|it| is_part(*it)).map(|(_, it)| it);
    let parts: Vec<_> = in_part.map(|it| (it, poison().within(it.range()))).collect();
    let Some((_, why)) = parts.iter().flat_map(|(_, poisoned)| poisoned).next().cloned() else {
        written.iter().for_each(|it| poison().clear(it.at, it.bytes));
        return run().into_iter().for_each(|why| spoil_all(&written, &why));
    };
    let before: Vec<_> = parts.iter().map(|(it, _)| it.read()).collect();
    let outcome = |pattern: usize| {
        for ((it, poisoned), before) in parts.iter().zip(&before) {
            it.write(before);
            poisoned.iter().for_each(|(part, _)| it.fill(part, it.patterns()[pattern]));
        }
        let failed = run();
        (failed, written.iter().map(|it| it.read()).collect::<Vec<_>>())
    };
    let [(_, second), (failed, first)] = [1, 0].map(outcome);
    if let Some(why) = failed {
        return spoil_all(&written, &why);
    }
    for (it, (first, second)) in written.iter().zip(first.iter().zip(&second)) {
        let mut poison = poison();
        poison.clear(it.at, it.bytes);
        mark_differences(&mut poison, it, [first, second], &why);
    }
}

fn mark_differences(poison: &mut Poison, it: &Bytes, [first, second]: [&[u8]; 2], why: &str) {
    let element = it.element.max(1);
    let mut begin = None;
    for (number, (first, second)) in first.chunks(element).zip(second.chunks(element)).enumerate() {
        match (first == second, begin) {
            (true, Some(at)) => {
                poison.mark(it.at + at, number * element - at, why);
                begin = None;
            }
            (false, None) => begin = Some(number * element),
            _ => {}
        }
    }
    if let Some(at) = begin {
        poison.mark(it.at + at, it.bytes - at, why);
    }
}

fn spoil_all(written: &[&Bytes], why: &str) {
    written.iter().for_each(|it| spoil(it.at, it.bytes, why));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::nccl_tests::alone;

    fn over(numbers: &mut [f32], reads: bool, writes: bool) -> Bytes {
        Bytes { at: numbers.as_mut_ptr() as usize, bytes: size_of_val(numbers), element: 4, reads, writes }
    }

    fn poisoned(it: &Bytes) -> Vec<bool> {
        (0..it.bytes / 4).map(|number| poison().of(it.at + 4 * number, 4).is_some()).collect()
    }

    /// Runs an update of three numbers, the last two of them poison, and says which are poison then.
    fn update(change: fn(&mut f32)) -> ([f32; 3], Vec<bool>) {
        let mut numbers = [1.0f32; 3];
        let it = over(&mut numbers, true, true);
        poison().mark(it.at + 4, 8, "kernel");
        let at = it.at as *mut f32;
        compute("aten::any", &[it], &mut || {
            // SAFETY: the three numbers above.
            unsafe { std::slice::from_raw_parts_mut(at, 3) }.iter_mut().for_each(change);
            None
        });
        let found = poisoned(&it);
        poison().clear(it.at, it.bytes);
        (numbers, found)
    }

    #[test]
    fn what_is_made_of_poison_is_poison_and_what_is_written_over_it_is_not() {
        let (numbers, found) = update(|it| *it += 1.0);
        assert_eq!((numbers[0], found), (2.0, vec![false, true, true]));
        let (_, found) = update(|it| *it = if it.is_nan() { 0.0 } else { *it });
        assert_eq!(found, [false, true, true], "NaN as 0");
        let (numbers, found) = update(|it| *it = 7.0);
        assert_eq!((numbers, found), ([7.0; 3], vec![false; 3]));
    }

    #[test]
    fn a_part_that_is_written_is_known() {
        let mut numbers = [0.0f32; 3];
        let it = over(&mut numbers, true, true);
        poison().mark(it.at, it.bytes, "kernel");
        let at = it.at as *mut f32;
        // SAFETY: the second of the three numbers above.
        compute("aten::any", &[it], &mut || unsafe {
            at.add(1).write(3.0);
            None
        });
        assert_eq!(poisoned(&it), [true, false, true]);
        poison().clear(it.at, it.bytes);
    }

    #[test]
    fn a_known_part_that_is_taken_is_known() {
        let (mut source, mut target) = ([1.0f32, 2.0], [0.0f32; 2]);
        let (from, to) = (over(&mut source, true, false), over(&mut target, false, true));
        poison().mark(from.at + 4, 4, "kernel");
        let (read, write) = (from.at as *const f32, to.at as *mut f32);
        for (name, known) in [("aten::index_select", [true, false]), ("aten::add", [false, false])] {
            compute(name, &[from, to], &mut || {
                // SAFETY: two numbers each, as above.
                unsafe { std::ptr::copy(read, write, 2) };
                None
            });
            assert_eq!(poisoned(&to), known.map(|known| !known), "{name}");
            assert_eq!(poisoned(&from), [false, true]);
        }
        [from, to].iter().for_each(|it| poison().clear(it.at, it.bytes));
    }

    #[test]
    fn a_result_that_is_left_out_is_poison_and_the_others_are_not() {
        let (mut first, mut second) = ([1.0f32; 2], [1.0f32; 2]);
        let (first, second) = (over(&mut first, false, true), over(&mut second, false, true));
        for poisoned in [0, 4] {
            // With poison in it, the operator runs twice.
            poison().mark(first.at, poisoned, "kernel");
            let updated = Bytes { reads: true, ..first };
            compute("aten::any", &[updated, second], &mut || {
                first.write(&[0; 8]);
                not_computed(second.at, second.bytes);
                None
            });
            let found = [first, second].map(|it| poison().of(it.at, 8).map(str::to_owned));
            assert_eq!(found, [None, Some("operator aten::any of the host does without it".to_owned())]);
        }
        poison().clear(second.at, second.bytes);
    }

    #[test]
    fn what_tells_the_host_runs_and_its_reading_of_poison_is_noted() {
        // Others in this process ask what was noted.
        alone("numbers::tests::what_tells_the_host_runs_and_its_reading_of_poison_is_noted", || {
            let mut source = [1.0f32; 2];
            let (source, mut ran) = (over(&mut source, true, false), 0);
            let mut decide = || {
                compute("aten::equal", &[source], &mut || {
                    ran += 1;
                    None
                });
                poison().reads.len()
            };
            assert_eq!(decide(), 0);
            poison().mark(source.at, 4, "kernel");
            assert_eq!(decide(), 1);
            assert_eq!(ran, 2);
            let read = "the host, in aten::equal, reads 8 bytes that were not computed: kernel";
            assert_eq!(poison().reads, [read]);
        });
    }

    #[test]
    fn what_reads_poison_or_fails_leaves_poison_that_is_no_number() {
        let (mut numbers, mut source) = ([1.0f32; 2], [1.0f32; 2]);
        let (target, source) = (over(&mut numbers, false, true), over(&mut source, true, false));
        compute("aten::any", &[target, source], &mut || Some("it fails".to_owned()));
        assert_eq!(poison().of(target.at, 8), Some("it fails"));
        poison().mark(source.at, 4, "kernel");
        compute("aten::any", &[target, source], &mut || panic!("nothing to compute with"));
        assert_eq!(poison().of(target.at, 8), Some("kernel"));
        [target, source].iter().for_each(|it| poison().clear(it.at, it.bytes));
        assert!(numbers.iter().all(|it| it.is_nan()));
    }
}
