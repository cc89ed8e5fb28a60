//! How events nest.

use std::collections::BTreeMap;

use super::event::FunctionEvent;

/// Finds each event's parent and children, then merges an event with its only child of the same name.
pub(super) fn build(events: &mut Vec<FunctionEvent>) {
    populate_children(events);
    remove_duplicates(events);
}

/// An event is within another if both are on one thread and its time lies within the other's.
fn populate_children(events: &mut [FunctionEvent]) {
    let mut threads: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (place, event) in events.iter().enumerate().filter(|(_, event)| event.nests()) {
        threads.entry(event.thread).or_default().push(place);
    }
    for mut places in threads.into_values() {
        places.sort_by_key(|&place| order(&events[place]));
        // Open events, each within those before it.
        let mut around: Vec<usize> = Vec::new();
        for place in places {
            let (start, end) = (events[place].start_ns, events[place].end_ns);
            while around.last().is_some_and(|&last| start >= events[last].end_ns || end > events[last].end_ns) {
                around.pop();
            }
            if let Some(&parent) = around.last() {
                events[parent].cpu_children.push(place);
                events[place].cpu_parent = Some(parent);
            }
            around.push(place);
        }
    }
}

/// By start time; of two events that start together, the longer first.
pub(super) fn order(event: &FunctionEvent) -> (i64, std::cmp::Reverse<i64>) {
    (event.start_ns, std::cmp::Reverse(event.end_ns))
}

/// A parent takes over the children and kernels of an only child that has its name.
fn remove_duplicates(events: &mut Vec<FunctionEvent>) {
    let mut gone = vec![false; events.len()];
    loop {
        let mut found = false;
        for place in 0..events.len() {
            let Some(parent) = events[place].cpu_parent.filter(|_| !gone[place]) else { continue };
            if events[parent].name != events[place].name || events[parent].cpu_children.len() != 1 {
                continue;
            }
            let children = std::mem::take(&mut events[place].cpu_children);
            for &child in &children {
                events[child].cpu_parent = Some(parent);
            }
            events[parent].cpu_children = children;
            events[parent].kernels = std::mem::take(&mut events[place].kernels);
            gone[place] = true;
            found = true;
        }
        if !found {
            break;
        }
    }
    remove(events, &gone);
}

/// Removes events and renumbers the parents and children of the others.
fn remove(events: &mut Vec<FunctionEvent>, gone: &[bool]) {
    let mut kept = 0;
    let places: Vec<usize> = gone
        .iter()
        .map(|gone| {
            kept += usize::from(!gone);
            kept.saturating_sub(1)
        })
        .collect();
    let mut gone = gone.iter();
    events.retain(|_| !gone.next().copied().unwrap_or(false));
    for event in events {
        event.cpu_parent = event.cpu_parent.map(|parent| places[parent]);
        event.cpu_children.iter_mut().for_each(|child| *child = places[*child]);
    }
}
