//! Spans of time, and what was active in them.

/// Nanoseconds, from and to.
pub(super) type Span = (i64, i64);

/// What was active at each time; of nested spans, the innermost.
pub(super) struct Track<T>(Vec<(Span, T)>);

impl<T: Copy> Track<T> {
    /// From spans that may nest.
    pub fn new(mut spans: Vec<(Span, T)>) -> Self {
        spans.sort_by_key(|((start, end), _)| (*start, std::cmp::Reverse(*end)));
        let mut flat = Vec::new();
        let mut around: Vec<(i64, T)> = Vec::new();
        let mut since = i64::MIN;
        let mut put = |from: i64, to: i64, what: T| {
            if to > from {
                flat.push(((from, to), what));
            }
        };
        for ((start, end), what) in spans {
            while let Some(&(last_end, last)) = around.last().filter(|(last_end, _)| *last_end <= start) {
                put(since, last_end, last);
                since = since.max(last_end);
                around.pop();
            }
            if let Some(&(_, last)) = around.last() {
                put(since, start, last);
            }
            since = start;
            around.push((end, what));
        }
        while let Some((end, what)) = around.pop() {
            put(since, end, what);
            since = since.max(end);
        }
        Self(flat)
    }

    pub fn at(&self, time: i64) -> Option<T> {
        let next = self.0.partition_point(|((start, _), _)| *start <= time);
        let ((_, end), what) = self.0.get(next.checked_sub(1)?)?;
        (time < *end).then_some(*what)
    }

    /// Cuts a span into pieces that each lie within one of these spans, or between two.
    pub fn cut(&self, span: Span) -> Vec<Span> {
        let first = self.0.partition_point(|((_, end), _)| *end <= span.0);
        let inside = self.0[first..].iter().take_while(|((start, _), _)| *start < span.1);
        let edges = inside.flat_map(|((start, end), _)| [*start, *end]).filter(|edge| span.0 < *edge && *edge < span.1);
        let mut pieces = Vec::new();
        let mut since = span.0;
        for edge in edges.chain([span.1]) {
            if edge > since {
                pieces.push((since, edge));
                since = edge;
            }
        }
        pieces
    }
}

pub(super) fn overlap(one: Span, other: Span) -> i64 {
    (one.1.min(other.1) - one.0.max(other.0)).max(0)
}

/// Joins spans that overlap.
pub(super) fn union(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut joined: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        match joined.last_mut().filter(|last| span.0 < last.1) {
            Some(last) => last.1 = last.1.max(span.1),
            None => joined.push(span),
        }
    }
    joined
}

/// How long each span lasts, where spans that overlap share the time between them: the sum is the length of their union.
pub(super) fn shared(spans: &[Span]) -> Vec<f64> {
    let mut edges: Vec<(i64, bool, usize)> = Vec::with_capacity(2 * spans.len());
    for (place, span) in spans.iter().enumerate().filter(|(_, span)| span.1 > span.0) {
        edges.extend([(span.0, true, place), (span.1, false, place)]);
    }
    edges.sort_unstable();
    let (mut times, mut active, mut since) = (vec![0.0; spans.len()], Vec::new(), 0);
    for (time, begins, place) in edges {
        for &other in &active {
            times[other] += (time - since) as f64 / active.len() as f64;
        }
        since = time;
        if begins { active.push(place) } else { active.retain(|other| *other != place) }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_span_is_active() {
        let track = Track::new(vec![((0, 10), 'a'), ((2, 5), 'b'), ((3, 4), 'c'), ((12, 14), 'd')]);
        let seen: String = (-1..15).map(|time| track.at(time).unwrap_or('.')).collect();
        assert_eq!(seen, ".aabcbaaaaa..dd.");
        assert_eq!(track.cut((1, 13)), [(1, 2), (2, 3), (3, 4), (4, 5), (5, 10), (10, 12), (12, 13)]);
        assert_eq!(track.cut((10, 11)), [(10, 11)]);
        assert_eq!(Track::<char>::new(vec![]).cut((1, 2)), [(1, 2)]);
    }

    #[test]
    fn spans_are_joined() {
        assert_eq!(union(vec![(5, 6), (0, 3), (2, 4), (4, 5)]), [(0, 4), (4, 5), (5, 6)]);
        assert_eq!((overlap((0, 3), (2, 5)), overlap((0, 1), (2, 3))), (1, 0));
    }

    #[test]
    fn spans_that_overlap_share_the_time() {
        let spans = [(0, 10), (4, 8), (6, 6), (20, 21)];
        assert_eq!(shared(&spans), [8.0, 2.0, 0.0, 1.0]);
        let three = [(0, 3), (0, 3), (0, 3)];
        assert_eq!(shared(&three), [1.0; 3]);
        assert!(shared(&[]).is_empty());
    }
}
