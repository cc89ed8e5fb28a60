//! What a GPU did in the steps.

use std::collections::{BTreeMap, HashSet};

use super::{Span, Window, is_of_steps, is_scope, overlap, span_of, union};
use crate::diagnosis::kernels;
use crate::run::track::shared;
use crate::{DeviceType, FunctionEvent};

/// Kernels and copies of one device.
#[derive(Default)]
pub(super) struct DeviceWork<'a>(Vec<&'a FunctionEvent>);

impl Window<'_> {
    /// Kernels and copies that begin in the steps; of several devices, those of the busiest.
    pub(super) fn device_work(&self) -> DeviceWork<'_> {
        let is_work = |event: &&FunctionEvent| event.device_type == DeviceType::Cuda && !event.is_user_annotation;
        let mut devices: BTreeMap<i32, DeviceWork<'_>> = BTreeMap::new();
        for event in self.events.iter().filter(is_work).filter(|event| is_of_steps(event, &self.steps)) {
            devices.entry(event.device_index).or_default().0.push(event);
        }
        devices.into_values().max_by_key(|work| work.busy_time(&self.steps)).unwrap_or_default()
    }

    /// The system's numbers of the threads that ran operators. CUDA calls are recorded on all threads: those of a
    /// loader's threads hold up no step.
    pub(super) fn threads(&self) -> HashSet<i64> {
        let is_operator = |event: &&FunctionEvent| {
            event.device_type == DeviceType::Cpu && !is_scope(event) && !kernels::is_call(&event.name)
        };
        self.events.iter().filter(is_operator).map(|event| event.device_resource_id).collect()
    }
}

impl DeviceWork<'_> {
    fn spans(&self) -> Vec<Span> {
        self.0.iter().map(|event| span_of(event)).collect()
    }

    /// Nanoseconds of the steps in which the device was busy, on one stream or several.
    pub(super) fn busy_time(&self, steps: &[Span]) -> i64 {
        let busy = union(self.spans());
        steps.iter().map(|step| busy.iter().map(|span| overlap(*span, *step)).sum::<i64>()).sum()
    }

    /// Each one's name and nanoseconds. Kernels of several streams that run at the same time share it.
    pub(super) fn shared(&self) -> impl Iterator<Item = (&str, i64)> {
        let times = shared(&self.spans());
        self.0.iter().zip(times).map(|(event, time)| (&*event.name, time.round() as i64))
    }
}

#[cfg(test)]
mod tests {
    use crate::events::{EventList, Recording};
    use crate::{DeviceType, FunctionEvent, Phase, ProfiledSteps, RecordScope};

    use super::Window;

    const TRAINING: i64 = 100;
    const LOADING: i64 = 200;

    fn host(name: &str, system_thread: i64, (start, end): (i64, i64)) -> FunctionEvent {
        FunctionEvent { device_resource_id: system_thread, ..FunctionEvent::new(name, 1, start, end) }
    }

    fn kernel(name: &str, (device, stream): (i32, i64), (start, end): (i64, i64)) -> FunctionEvent {
        let device_type = DeviceType::Cuda;
        let event = FunctionEvent::new(name, 0, start, end);
        FunctionEvent { device_type, device_index: device, device_resource_id: stream, ..event }
    }

    fn summed(mut events: Vec<FunctionEvent>) -> ProfiledSteps {
        let mut step = host("ProfilerStep*", TRAINING, (0, 1000));
        (step.scope, step.trace_name) = (RecordScope::User, Some("ProfilerStep#1".into()));
        events.extend([step, host("aten::mm", TRAINING, (0, 1000))]);
        let events = EventList::new(events, Recording { cuda: true, ..Recording::default() });
        Window::find(&events, 1).expect("a step").sum_up()
    }

    #[test]
    fn kernels_that_run_at_the_same_time_add_up_to_the_busy_time() {
        let steps = summed(vec![
            kernel("gemm", (0, 7), (100, 500)),
            kernel("gemm", (0, 8), (100, 500)),
            kernel("ncclDevKernel", (0, 9), (300, 700)),
            kernel("gemm", (1, 7), (0, 300)),
        ]);
        assert_eq!(steps.device_busy_seconds, Some(600e-9));
        let rows: Vec<_> =
            steps.device_work.iter().map(|it| (&*it.name, it.calls, (it.seconds * 1e9).round())).collect();
        assert_eq!(rows, [("gemm", 2.0, 334.0), ("ncclDevKernel", 1.0, 267.0)]);
    }

    #[test]
    fn a_loaders_cuda_calls_are_not_the_training_threads() {
        let steps = summed(vec![
            host("cudaEventSynchronize", LOADING, (100, 900)),
            host("cudaStreamSynchronize", TRAINING, (400, 500)),
        ]);
        let waits: Vec<_> = steps.ops.iter().filter(|op| op.name.starts_with("cuda")).map(|op| &*op.name).collect();
        assert_eq!(waits, ["cudaStreamSynchronize"]);
        assert!(steps.ops.iter().all(|op| op.phase == Phase::Other));
    }
}
