//! Samples in Prometheus' format.

use std::fmt::Write as _;

use super::{Counters, GpuSample, Sample, ThrottleReason};

/// A sample in Prometheus' text format, version 0.0.4: base units, counters that end in `_total`, GPUs with the labels
/// `gpu` and `uuid`. Unknown figures are left out.
///
/// # Source
/// <https://prometheus.io/docs/instrumenting/exposition_formats/>
pub fn prometheus_text(sample: &Sample) -> String {
    let mut text = Text::default();
    if let Some(system) = &sample.system {
        text.gauge("overdrive_system_cpus", "CPUs of the machine.", Some(f64::from(system.cpus)));
        text.gauge("overdrive_system_cpu_utilization_ratio", "Share of CPUs busy, 0 to 1.", system.cpu_utilization());
        text.gauge("overdrive_system_load1", "Load averaged over 1 minute.", Some(system.load1));
        text.gauge("overdrive_system_load5", "Load averaged over 5 minutes.", Some(system.load5));
        text.gauge("overdrive_system_load15", "Load averaged over 15 minutes.", Some(system.load15));
        let bytes = Some(system.memory_total_bytes as f64);
        text.gauge("overdrive_system_memory_bytes", "Memory of the machine.", bytes);
        let bytes = system.memory_available_bytes.map(|bytes| bytes as f64);
        text.gauge("overdrive_system_memory_available_bytes", "Memory still available to programs.", bytes);
        text.counters("overdrive_system", &system.counters);
    }
    if let Some(process) = &sample.process {
        let bytes = Some(process.resident_memory_bytes as f64);
        text.gauge("overdrive_process_resident_memory_bytes", "Resident memory of the process.", bytes);
        text.gauge("overdrive_process_threads", "Threads of the process.", Some(process.threads as f64));
        text.counters("overdrive_process", &process.counters);
    }
    text.gpus(&sample.gpus);
    text.0
}

#[derive(Default)]
struct Text(String);

/// A figure of a GPU: its metric's name, its help text, and how to get its value.
type Figure = (&'static str, &'static str, fn(&GpuSample) -> Option<f64>);

const GPU_FIGURES: [Figure; 14] = [
    ("utilization_ratio", "Share of time in which a kernel ran, 0 to 1.", |gpu| gpu.utilization),
    ("memory_utilization_ratio", "Share of time in which memory was busy, 0 to 1.", |gpu| gpu.memory_utilization),
    ("tensor_utilization_ratio", "Share of time tensor cores were busy, 0 to 1.", |gpu| gpu.tensor_utilization),
    ("memory_used_bytes", "Memory in use.", |gpu| gpu.memory_used_bytes.map(|bytes| bytes as f64)),
    ("memory_bytes", "Memory.", |gpu| gpu.memory_total_bytes.map(|bytes| bytes as f64)),
    ("temperature_celsius", "Temperature.", |gpu| gpu.temperature_celsius),
    ("power_watts", "Power drawn.", |gpu| gpu.power_watts),
    ("power_limit_watts", "Power limit.", |gpu| gpu.power_limit_watts),
    ("sm_clock_hertz", "Clock of the multiprocessors.", |gpu| gpu.sm_clock_hertz),
    ("memory_clock_hertz", "Clock of the memory.", |gpu| gpu.memory_clock_hertz),
    ("pcie_sent_bytes_per_second", "Sent over PCIe.", |gpu| gpu.pcie_sent_bytes_per_second),
    ("pcie_received_bytes_per_second", "Received over PCIe.", |gpu| gpu.pcie_received_bytes_per_second),
    ("nvlink_sent_bytes_per_second", "Sent over NVLink.", |gpu| gpu.nvlink_sent_bytes_per_second),
    ("nvlink_received_bytes_per_second", "Received over NVLink.", |gpu| gpu.nvlink_received_bytes_per_second),
];

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: Option<f64>) {
        if let Some(value) = value {
            self.head(name, kind, help);
            self.value(name, "", value);
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: Option<f64>) {
        self.one(name, "gauge", help, value);
    }

    fn counters(&mut self, prefix: &str, counters: &Counters) {
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        let all = [
            ("cpu_seconds", "Time that CPUs were busy.", Some(counters.cpu_seconds)),
            ("disk_read_bytes", "Read from disks.", bytes(counters.disk_read_bytes)),
            ("disk_written_bytes", "Written to disks.", bytes(counters.disk_written_bytes)),
            ("context_switches", "Switches between threads.", Some(counters.context_switches as f64)),
            ("page_faults", "Page faults.", Some(counters.page_faults as f64)),
            ("major_page_faults", "Page faults that read from a disk.", Some(counters.major_page_faults as f64)),
        ];
        for (name, help, value) in all {
            self.one(&format!("{prefix}_{name}_total"), "counter", help, value);
        }
    }

    fn gpus(&mut self, gpus: &[GpuSample]) {
        for (name, help, figure) in GPU_FIGURES {
            let known: Vec<_> = gpus.iter().filter_map(|gpu| Some((gpu, figure(gpu)?))).collect();
            if known.is_empty() {
                continue;
            }
            let name = format!("overdrive_gpu_{name}");
            self.head(&name, "gauge", help);
            for (gpu, value) in known {
                self.value(&name, &labels(gpu, ""), value);
            }
        }
        if gpus.is_empty() {
            return;
        }
        let name = "overdrive_gpu_throttled";
        self.head(name, "gauge", "1 if the reason lowers the clocks.");
        for gpu in gpus {
            for reason in ThrottleReason::ALL {
                let active = f64::from(u8::from(gpu.throttle_reasons.contains(&reason)));
                self.value(name, &labels(gpu, &format!(",reason=\"{}\"", reason.name())), active);
            }
        }
        let processes = gpus.iter().flat_map(|gpu| gpu.processes.iter().map(move |process| (gpu, process)));
        let known: Vec<_> = processes.filter_map(|(gpu, it)| Some((gpu, it.pid, it.memory_used_bytes?))).collect();
        if known.is_empty() {
            return;
        }
        let name = "overdrive_gpu_process_memory_bytes";
        self.head(name, "gauge", "Memory of the GPU that a process uses.");
        for (gpu, pid, bytes) in known {
            self.value(name, &labels(gpu, &format!(",pid=\"{pid}\"")), bytes as f64);
        }
    }
}

fn labels(gpu: &GpuSample, more: &str) -> String {
    let uuid = gpu.uuid.as_deref().unwrap_or_default();
    let escaped = uuid.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{{gpu=\"{}\",uuid=\"{escaped}\"{more}}}", gpu.index)
}
