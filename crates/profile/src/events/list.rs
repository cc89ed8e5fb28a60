//! All events of a profile, and figures that follow from how they nest.

use std::sync::Arc;

use super::averages::{Averages, FunctionEventAvg, Grouping};
use super::event::{DeviceType, FunctionEvent};
use super::table::{self, Row, TableOptions};
use super::tree;

/// What the profiler recorded, as far as it affects tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// Work of the GPU.
    pub cuda: bool,
    /// Memory.
    pub profile_memory: bool,
    /// Floating point operations.
    pub with_flops: bool,
}

/// The events of a profile, by start time.
///
/// # Source
/// `torch.autograd.profiler_util.EventList`
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventList {
    events: Vec<FunctionEvent>,
    recording: Recording,
    /// For each event, the device time of what it and its children have launched, in nanoseconds.
    device_ns: Vec<i64>,
}

impl EventList {
    /// Sorts events and determines how they nest, replacing the parents and children that they have.
    pub fn new(mut events: Vec<FunctionEvent>, recording: Recording) -> Self {
        for event in &mut events {
            event.cpu_parent = None;
            event.cpu_children.clear();
        }
        events.sort_by_key(tree::order);
        tree::build(&mut events);
        let device_ns = device_times(&events, recording);
        Self { events, recording, device_ns }
    }

    /// Appends another profile's events.
    pub(crate) fn append(&mut self, other: &Self) {
        let offset = self.events.len();
        self.events.extend(other.events.iter().cloned().map(|mut event| {
            event.cpu_parent = event.cpu_parent.map(|parent| parent + offset);
            event.cpu_children.iter_mut().for_each(|child| *child += offset);
            event
        }));
        self.device_ns.extend_from_slice(&other.device_ns);
    }

    /// What the profiler recorded.
    pub fn recording(&self) -> Recording {
        self.recording
    }

    /// Time on the host less that of the event's children, in nanoseconds.
    ///
    /// # Panics
    /// When there is no event at this place.
    pub fn self_cpu_time_total_ns(&self, place: usize) -> i64 {
        self.of_self(place, FunctionEvent::cpu_time_total_ns)
    }

    /// Time on the device of what the event and its children have launched, in nanoseconds.
    ///
    /// # Panics
    /// When there is no event at this place.
    pub fn device_time_total_ns(&self, place: usize) -> i64 {
        self.device_ns[place]
    }

    /// Time on the device of what the event itself has launched, in nanoseconds.
    ///
    /// # Panics
    /// When there is no event at this place.
    pub fn self_device_time_total_ns(&self, place: usize) -> i64 {
        let children = self.events[place].cpu_children.iter().map(|&child| self.device_ns[child]);
        self.device_ns[place] - children.sum::<i64>()
    }

    /// Bytes of host memory less those of the event's children.
    ///
    /// # Panics
    /// When there is no event at this place.
    pub fn self_cpu_memory_usage(&self, place: usize) -> i64 {
        self.of_self(place, |event| event.cpu_memory_usage)
    }

    /// Bytes of device memory less those of the event's children.
    ///
    /// # Panics
    /// When there is no event at this place.
    pub fn self_device_memory_usage(&self, place: usize) -> i64 {
        self.of_self(place, |event| event.device_memory_usage)
    }

    fn of_self(&self, place: usize, figure: impl Fn(&FunctionEvent) -> i64) -> i64 {
        let event = &self.events[place];
        if !event.nests() {
            return 0;
        }
        figure(event) - event.cpu_children.iter().map(|&child| figure(&self.events[child])).sum::<i64>()
    }

    /// Sums over events of the same name; `grouping` can separate them further.
    ///
    /// # Source
    /// `EventList.key_averages`
    pub fn key_averages(&self, grouping: Grouping) -> Averages {
        Averages::of(self, grouping)
    }

    /// Sums over all events, under the name `Total`.
    ///
    /// # Source
    /// `EventList.total_average`
    pub fn total_average(&self) -> FunctionEventAvg {
        FunctionEventAvg::total(self)
    }

    /// The events in PyTorch's table, one row per event.
    ///
    /// # Source
    /// `EventList.table`
    pub fn table(&self, options: &TableOptions) -> String {
        let rows = (0..self.events.len()).map(|place| self.row(place)).collect();
        table::build(rows, self.recording, options)
    }

    fn row(&self, place: usize) -> Row<'_> {
        let event = &self.events[place];
        Row {
            name: &event.name,
            overload_name: &event.overload_name,
            input_shapes: Some(&event.input_shapes),
            count: 1,
            self_cpu_ns: self.self_cpu_time_total_ns(place),
            cpu_ns: event.cpu_time_total_ns(),
            self_device_ns: self.self_device_time_total_ns(place),
            device_ns: self.device_ns[place],
            cpu_memory: event.cpu_memory_usage,
            self_cpu_memory: self.self_cpu_memory_usage(place),
            device_memory: event.device_memory_usage,
            self_device_memory: self.self_device_memory_usage(place),
            flops: event.flops,
            is_async: event.is_async,
            is_top_level: event.cpu_parent.is_none(),
            is_device_work: event.device_type != DeviceType::Cpu && !event.is_user_annotation,
        }
    }
}

impl std::ops::Deref for EventList {
    type Target = [FunctionEvent];

    fn deref(&self) -> &Self::Target {
        &self.events
    }
}

impl<'a> IntoIterator for &'a EventList {
    type Item = &'a FunctionEvent;
    type IntoIter = std::slice::Iter<'a, FunctionEvent>;

    fn into_iter(self) -> Self::IntoIter {
        self.events.iter()
    }
}

/// Children come after their parents, so iterating from the end sees children first.
fn device_times(events: &[FunctionEvent], recording: Recording) -> Vec<i64> {
    let mut times = vec![0; events.len()];
    if !recording.cuda {
        return times;
    }
    for (place, event) in events.iter().enumerate().rev().filter(|(_, event)| !event.is_async) {
        times[place] = if event.device_type == DeviceType::Cpu {
            let kernels = event.kernels.iter().map(|kernel| kernel.duration_ns);
            kernels.sum::<i64>() + event.cpu_children.iter().map(|&child| times[child]).sum::<i64>()
        } else {
            event.elapsed_ns()
        };
    }
    times
}

/// A constant as `Arc<str>`.
pub(super) fn text(text: &str) -> Arc<str> {
    text.into()
}
