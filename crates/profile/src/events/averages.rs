//! Sums over events of the same name.

use std::collections::HashMap;
use std::sync::Arc;

use super::event::{DeviceType, RecordScope};
use super::list::{EventList, Recording, text};
use super::table::{self, Row, TableOptions};

/// What separates events into groups, besides their name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grouping {
    /// Their inputs' shapes.
    pub input_shapes: bool,
    /// Their overloads' names.
    pub overload_names: bool,
}

/// Sums over events of the same name.
///
/// # Source
/// `torch.autograd.profiler_util.FunctionEventAvg`
#[derive(Clone, Debug, PartialEq)]
pub struct FunctionEventAvg {
    /// The events' name.
    pub key: Arc<str>,
    /// How many there are.
    pub count: u64,
    /// Their inputs' shapes, if events are grouped by shapes.
    pub input_shapes: Option<Vec<Vec<i64>>>,
    /// Their overload, if events are grouped by overload; else empty.
    pub overload_name: Arc<str>,
    /// Time on the host, in nanoseconds.
    pub cpu_time_total_ns: i64,
    /// Time on the host less that of their children, in nanoseconds.
    pub self_cpu_time_total_ns: i64,
    /// Time on the device of what they and their children have launched, in nanoseconds.
    pub device_time_total_ns: i64,
    /// Time on the device of what they themselves have launched, in nanoseconds.
    pub self_device_time_total_ns: i64,
    /// Bytes of host memory allocated, less those freed.
    pub cpu_memory_usage: i64,
    /// The same without their children's.
    pub self_cpu_memory_usage: i64,
    /// Bytes of device memory allocated, less those freed.
    pub device_memory_usage: i64,
    /// The same without their children's.
    pub self_device_memory_usage: i64,
    /// Floating point operations, if libtorch computes them.
    pub flops: u64,
    /// Where they took place.
    pub device_type: DeviceType,
    /// The kind of code that the first of them is.
    pub scope: RecordScope,
    /// Whether the first of them is asynchronous, or ended on another thread.
    pub is_async: bool,
    /// Whether they are scopes of the user.
    pub is_user_annotation: bool,
    /// Whether the first of them has no parent.
    pub is_top_level: bool,
}

impl FunctionEventAvg {
    fn first(events: &EventList, place: usize, grouping: Grouping) -> Self {
        let event = &events[place];
        Self {
            key: event.name.clone(),
            count: 0,
            input_shapes: grouping.input_shapes.then(|| event.input_shapes.clone()),
            overload_name: if grouping.overload_names { event.overload_name.clone() } else { text("") },
            cpu_time_total_ns: 0,
            self_cpu_time_total_ns: 0,
            device_time_total_ns: 0,
            self_device_time_total_ns: 0,
            cpu_memory_usage: 0,
            self_cpu_memory_usage: 0,
            device_memory_usage: 0,
            self_device_memory_usage: 0,
            flops: 0,
            device_type: event.device_type,
            scope: event.scope,
            is_async: event.is_async,
            is_user_annotation: event.is_user_annotation,
            is_top_level: event.cpu_parent.is_none(),
        }
    }

    fn add(&mut self, events: &EventList, place: usize) {
        let event = &events[place];
        self.count += 1;
        self.cpu_time_total_ns += event.cpu_time_total_ns();
        self.self_cpu_time_total_ns += events.self_cpu_time_total_ns(place);
        self.device_time_total_ns += events.device_time_total_ns(place);
        self.self_device_time_total_ns += events.self_device_time_total_ns(place);
        self.cpu_memory_usage += event.cpu_memory_usage;
        self.self_cpu_memory_usage += events.self_cpu_memory_usage(place);
        self.device_memory_usage += event.device_memory_usage;
        self.self_device_memory_usage += events.self_device_memory_usage(place);
        self.flops = self.flops.saturating_add(event.flops);
    }

    pub(super) fn total(events: &EventList) -> Self {
        let mut total = if events.is_empty() {
            let nothing = EventList::new(vec![super::FunctionEvent::new("Total", 0, 0, 0)], events.recording());
            Self::first(&nothing, 0, Grouping::default())
        } else {
            Self::first(events, 0, Grouping::default())
        };
        (0..events.len()).for_each(|place| total.add(events, place));
        total.key = text("Total");
        total
    }

    /// Time on the host per call, in nanoseconds.
    pub fn cpu_time_ns(&self) -> f64 {
        mean(self.cpu_time_total_ns, self.count)
    }

    /// Time on the device per call, in nanoseconds.
    #[doc(alias = "cuda_time")]
    pub fn device_time_ns(&self) -> f64 {
        mean(self.device_time_total_ns, self.count)
    }

    fn row(&self) -> Row<'_> {
        Row {
            name: &self.key,
            overload_name: &self.overload_name,
            input_shapes: self.input_shapes.as_deref(),
            count: self.count,
            self_cpu_ns: self.self_cpu_time_total_ns,
            cpu_ns: self.cpu_time_total_ns,
            self_device_ns: self.self_device_time_total_ns,
            device_ns: self.device_time_total_ns,
            cpu_memory: self.cpu_memory_usage,
            self_cpu_memory: self.self_cpu_memory_usage,
            device_memory: self.device_memory_usage,
            self_device_memory: self.self_device_memory_usage,
            flops: self.flops,
            is_async: self.is_async,
            is_top_level: self.is_top_level,
            is_device_work: self.device_type != DeviceType::Cpu && !self.is_user_annotation,
        }
    }
}

/// The mean; 0 if `count` is 0.
pub(super) fn mean(total: i64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { total as f64 / count as f64 }
}

/// Events summed by name, in the order of each name's first event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Averages {
    groups: Vec<FunctionEventAvg>,
    recording: Recording,
}

impl Averages {
    pub(super) fn of(events: &EventList, grouping: Grouping) -> Self {
        type Key<'a> = (&'a str, DeviceType, bool, &'a str, &'a [Vec<i64>]);
        let mut places: HashMap<Key<'_>, usize> = HashMap::new();
        let mut groups: Vec<FunctionEventAvg> = Vec::new();
        for (place, event) in events.iter().enumerate() {
            let overload = if grouping.overload_names { &*event.overload_name } else { "" };
            let shapes = if grouping.input_shapes { &*event.input_shapes } else { &[] };
            let key = (&*event.name, event.device_type, event.is_user_annotation, overload, shapes);
            let group = *places.entry(key).or_insert_with(|| {
                groups.push(FunctionEventAvg::first(events, place, grouping));
                groups.len() - 1
            });
            groups[group].add(events, place);
        }
        Self { groups, recording: events.recording() }
    }

    /// What the profiler recorded.
    pub fn recording(&self) -> Recording {
        self.recording
    }

    /// The first group of this name.
    pub fn get(&self, key: &str) -> Option<&FunctionEventAvg> {
        self.groups.iter().find(|group| &*group.key == key)
    }

    /// Time of all groups on the host less that of their children, in nanoseconds.
    pub fn self_cpu_time_total_ns(&self) -> i64 {
        self.groups.iter().map(|group| group.self_cpu_time_total_ns).sum()
    }

    /// PyTorch's table.
    ///
    /// # Source
    /// `EventList.table`
    pub fn table(&self, options: &TableOptions) -> String {
        table::build(self.groups.iter().map(FunctionEventAvg::row).collect(), self.recording, options)
    }
}

impl std::ops::Deref for Averages {
    type Target = [FunctionEventAvg];

    fn deref(&self) -> &Self::Target {
        &self.groups
    }
}

impl<'a> IntoIterator for &'a Averages {
    type Item = &'a FunctionEventAvg;
    type IntoIter = std::slice::Iter<'a, FunctionEventAvg>;

    fn into_iter(self) -> Self::IntoIter {
        self.groups.iter()
    }
}

impl std::fmt::Display for Averages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.table(&TableOptions::default()))
    }
}
