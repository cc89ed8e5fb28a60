//! Loops that read numbers out of tensors one by one.

use super::{Place, Sums, Window, calls_within, is_operator, span_of, step_at};
use crate::run::HostGap;
use crate::run::track::Span;

/// Fewer numbers are not a loop.
const LEAST_NUMBERS: i64 = 8;
/// With this many numbers, pauses of the host within the loop belong to the loop.
const LONG_LOOP: i64 = 32;
/// More calls of operators than this between two numbers end the loop.
const MOST_CALLS_BETWEEN: i64 = 24;

/// A loop that reads numbers out of tensors.
pub(super) struct ReadBacks<'a> {
    place: Place<'a>,
    /// From the first number to the last.
    span: Span,
    numbers: i64,
}

impl ReadBacks<'_> {
    /// Whether a pause of the host belongs to the loop.
    pub(super) fn has(&self, pause: Span) -> bool {
        self.numbers >= LONG_LOOP && self.span.0 <= pause.0 && pause.1 <= self.span.1
    }
}

impl<'a> Window<'a> {
    /// Loops: numbers that are read out of tensors one after the other, within one step, phase and scope.
    pub(super) fn read_back_loops(&self, calls: &[i64]) -> Vec<ReadBacks<'a>> {
        let mut loops: Vec<ReadBacks<'_>> = Vec::new();
        for (place, event) in self.calls().filter(|(_, event)| &*event.name == "aten::_local_scalar_dense") {
            // Numbers that operators read internally do not count.
            let around = |place: usize| self.events[place].cpu_parent.filter(|&place| is_operator(&self.events[place]));
            let item = around(place);
            if item.is_some_and(|item| &*self.events[item].name != "aten::item" || around(item).is_some()) {
                continue;
            }
            let place =
                (step_at(&self.steps, event.start_ns), self.phase_at(event.start_ns), self.scope_at(event.start_ns));
            let continues = |last: &Span| calls_within(calls, (last.1, event.start_ns)) <= MOST_CALLS_BETWEEN;
            match loops.last_mut().filter(|last| last.place == place && continues(&last.span)) {
                Some(last) => (last.span.1, last.numbers) = (event.end_ns, last.numbers + 1),
                None => loops.push(ReadBacks { place, span: span_of(event), numbers: 1 }),
            }
        }
        loops.retain(|it| it.numbers >= LEAST_NUMBERS);
        loops
    }

    pub(super) fn read_backs(&self, loops: &[ReadBacks<'a>], calls: &[i64]) -> Vec<HostGap> {
        let (mut sums, mut operators) = (Sums::default(), Sums::default());
        for &ReadBacks { place: (_, phase, scope), span, numbers } in loops {
            sums.add_calls((phase, scope), numbers, span.1 - span.0);
            operators.add_calls((phase, scope), calls_within(calls, span), 0);
        }
        sums.rows(|key, calls, time| self.gap(key, calls, time, operators.calls(&key)))
    }
}
