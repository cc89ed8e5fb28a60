//! Samples at times that the test chooses, of GPUs that appear and vanish.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use overdrive_profile::{
    Counters, GapSource, GpuProcess, GpuSample, GpuSource, MonitorGap, ProfileError, Sample, Sampler, ThrottleReason,
    prometheus_text,
};

/// How the fake GPUs answer.
#[derive(Clone, Copy, PartialEq)]
enum Driver {
    Works,
    IsGone,
    LostGpu1,
    Panics,
    PanicsAtGpu1,
}

struct Planted(Arc<Mutex<Driver>>);

impl GpuSource for Planted {
    fn count(&mut self) -> Result<u32, ProfileError> {
        match *self.0.lock().unwrap() {
            Driver::IsGone => Err(ProfileError::Gpu("planted: the driver is gone".to_owned())),
            Driver::Panics => panic!("planted: a mistake of its own"),
            _ => Ok(2),
        }
    }

    fn sample(&mut self, index: u32) -> Result<GpuSample, ProfileError> {
        match *self.0.lock().unwrap() {
            Driver::LostGpu1 if index == 1 => Err(ProfileError::Gpu("planted: the GPU is lost".to_owned())),
            Driver::PanicsAtGpu1 if index == 1 => panic!("planted: a mistake at GPU {index}"),
            _ => Ok(gpu(index)),
        }
    }
}

fn gpu(index: u32) -> GpuSample {
    GpuSample { index, name: "planted".to_owned(), utilization: Some(0.5), ..GpuSample::default() }
}

fn at(seconds: u64) -> (Duration, SystemTime) {
    (Duration::from_secs(seconds), UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds))
}

fn sources(gaps: &[MonitorGap]) -> Vec<(GapSource, f64, Option<f64>)> {
    gaps.iter().map(|gap| (gap.source, gap.from_seconds, gap.to_seconds)).collect()
}

#[test]
fn rates_are_counts_divided_by_the_given_time() {
    let mut sampler = Sampler::with_gpus(None);
    let (elapsed, wall) = at(10);
    let first = sampler.sample_at(elapsed, wall);
    let (system, process) = (first.system.unwrap(), first.process.unwrap());
    assert!(system.rates.is_none() && process.rates.is_none());
    assert!(system.cpus > 0 && system.memory_total_bytes > 0 && system.counters.cpu_seconds > 0.0);
    assert!(process.resident_memory_bytes > 0 && process.threads > 0 && process.counters.page_faults > 0);
    assert!((first.elapsed_seconds, first.unix_seconds) == (10.0, 1_000_010.0));
    // Work that shows in the counters.
    let touched: Vec<u8> = vec![1; 64 << 20];
    assert_eq!(touched.iter().map(|&byte| u64::from(byte)).sum::<u64>(), 64 << 20);
    let (elapsed, wall) = at(14);
    let second = sampler.sample_at(elapsed, wall);
    let now = second.process.unwrap();
    let grown = now.counters.page_faults - process.counters.page_faults;
    assert!(grown > 0);
    assert_eq!(now.rates.unwrap().page_faults_per_second, Some(grown as f64 / 4.0));
    let busy = now.counters.cpu_seconds - process.counters.cpu_seconds;
    assert_eq!(now.rates.unwrap().cpus_busy, Some(busy / 4.0));
    assert!(second.system.unwrap().cpu_utilization().is_some_and(|share| (0.0..=1.0).contains(&share)));
    assert!(sampler.gaps().is_empty());
}

#[test]
fn a_clock_that_jumps_gives_gaps_and_no_wrong_rates() {
    let mut sampler = Sampler::with_gpus(None);
    let hour = Duration::from_secs(3600);
    let (elapsed, wall) = at(10);
    sampler.sample_at(elapsed, wall);
    // The system's clock is set: only the label depends on it.
    let (elapsed, wall) = at(11);
    let sample = sampler.sample_at(elapsed, wall + hour);
    assert!(sample.process.unwrap().rates.is_some());
    assert_eq!(sources(&sampler.gaps()), [(GapSource::Clock, 10.0, Some(11.0))]);
    assert!(sampler.gaps()[0].reason.contains("3600.000 s"), "{:?}", sampler.gaps());
    let (elapsed, wall) = at(12);
    sampler.sample_at(elapsed, wall + hour - 2 * hour);
    assert!(sampler.gaps()[1].reason.contains("-7200.000 s"));
    // The elapsed time stands still, and runs backwards.
    for seconds in [12, 5] {
        let sample = sampler.sample_at(Duration::from_secs(seconds), wall);
        assert!(sample.process.unwrap().rates.is_none() && sample.system.unwrap().rates.is_none());
    }
    assert_eq!(sampler.gaps().len(), 4);
    let before_1970 = sampler.sample_at(Duration::from_secs(6), UNIX_EPOCH - hour);
    assert_eq!(before_1970.unix_seconds, -3600.0);
    assert!(before_1970.process.unwrap().rates.is_some());
    // The number of gaps is bounded.
    (0..300).for_each(|_| drop(sampler.sample_at(Duration::from_secs(6), wall)));
    assert!(sampler.gaps().len() <= 256);
}

#[test]
fn counters_that_run_backwards_have_no_rate() {
    let before = Counters { cpu_seconds: 5.0, page_faults: 7, context_switches: 9, ..Counters::default() };
    let now = Counters { cpu_seconds: 4.0, page_faults: 6, context_switches: 11, ..Counters::default() };
    let rates = now.rates_since(&before, Duration::from_millis(500)).unwrap();
    assert_eq!((rates.cpus_busy, rates.page_faults_per_second), (None, None));
    assert_eq!(rates.context_switches_per_second, Some(4.0));
    assert_eq!(rates.disk_read_bytes_per_second, None);
    assert_eq!(now.rates_since(&before, Duration::ZERO), None);
}

#[test]
fn a_driver_that_vanishes_leaves_a_gap_and_the_rest_continues() {
    let driver = Arc::new(Mutex::new(Driver::Works));
    let mut sampler = Sampler::with_gpus(Some(Box::new(Planted(driver.clone()))));
    let states = [Driver::Works, Driver::IsGone, Driver::IsGone, Driver::Works, Driver::LostGpu1, Driver::LostGpu1];
    let mut seen = Vec::new();
    for (second, state) in states.into_iter().enumerate() {
        *driver.lock().unwrap() = state;
        let (elapsed, wall) = at(second as u64);
        let sample = sampler.sample_at(elapsed, wall);
        assert!(sample.system.is_some() && sample.process.is_some());
        seen.push(sample.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>());
    }
    assert_eq!(seen, [vec![0, 1], vec![], vec![], vec![0, 1], vec![0], vec![0]]);
    let gaps = sampler.gaps();
    assert_eq!(sources(&gaps), [(GapSource::Gpus, 1.0, Some(3.0)), (GapSource::Gpu(1), 4.0, None)]);
    assert!(gaps[0].reason.contains("the driver is gone") && gaps[1].reason.contains("lost"));
}

#[test]
fn a_source_that_panics_is_a_gap_and_not_asked_again() {
    for (state, seen_then, text) in [
        (Driver::Panics, vec![], "panicked, and is not asked again: planted: a mistake of its own"),
        (Driver::PanicsAtGpu1, vec![0], "panicked, and is not asked again: planted: a mistake at GPU 1"),
    ] {
        let driver = Arc::new(Mutex::new(Driver::Works));
        let mut sampler = Sampler::with_gpus(Some(Box::new(Planted(driver.clone()))));
        let mut seen = Vec::new();
        for (second, state) in [Driver::Works, Driver::IsGone, state, Driver::Works].into_iter().enumerate() {
            // A panic poisons the lock.
            *driver.lock().unwrap_or_else(PoisonError::into_inner) = state;
            let (elapsed, wall) = at(second as u64);
            let sample = sampler.sample_at(elapsed, wall);
            assert!(sample.system.is_some() && sample.process.is_some());
            seen.push(sample.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>());
        }
        assert_eq!(seen, [vec![0, 1], vec![], seen_then, vec![]]);
        let gaps = sampler.gaps();
        assert_eq!(sources(&gaps), [(GapSource::Gpus, 1.0, Some(2.0)), (GapSource::Gpus, 2.0, None)]);
        assert!(gaps[1].reason.contains(text), "{gaps:?}");
        assert_eq!(Arc::strong_count(&driver), 1, "the source is dropped");
    }
}

#[test]
fn without_nvml_the_rest_is_sampled() {
    let mut sampler = Sampler::new();
    for second in 0..3 {
        let (elapsed, wall) = at(second);
        let sample = sampler.sample_at(elapsed, wall);
        assert!(sample.system.is_some() && sample.process.is_some());
        let missing = sources(&sampler.gaps());
        // One open gap, or there are GPUs.
        assert!(missing == [(GapSource::Gpus, 0.0, None)] || missing.is_empty(), "{missing:?}");
    }
}

#[test]
fn gpus_in_metrics() {
    let mut sample = Sample::default();
    assert_eq!(prometheus_text(&sample), "");
    sample.gpus = vec![
        GpuSample {
            uuid: Some("a\"b\\c\nd".to_owned()),
            power_watts: Some(701.5),
            sm_clock_hertz: Some(1.98e9),
            throttle_reasons: vec![ThrottleReason::HardwareThermal],
            processes: vec![
                GpuProcess { pid: 7, memory_used_bytes: Some(1 << 30) },
                GpuProcess { pid: 8, memory_used_bytes: None },
            ],
            ..gpu(0)
        },
        gpu(1),
    ];
    let text = prometheus_text(&sample);
    let label = r#"gpu="0",uuid="a\"b\\c\nd""#;
    for line in [
        "# TYPE overdrive_gpu_utilization_ratio gauge".to_owned(),
        format!("overdrive_gpu_utilization_ratio{{{label}}} 0.5"),
        r#"overdrive_gpu_utilization_ratio{gpu="1",uuid=""} 0.5"#.to_owned(),
        format!("overdrive_gpu_power_watts{{{label}}} 701.5"),
        format!("overdrive_gpu_sm_clock_hertz{{{label}}} 1980000000"),
        format!(r#"overdrive_gpu_throttled{{{label},reason="hardware_thermal"}} 1"#),
        format!(r#"overdrive_gpu_throttled{{{label},reason="idle"}} 0"#),
        format!(r#"overdrive_gpu_process_memory_bytes{{{label},pid="7"}} 1073741824"#),
    ] {
        assert_eq!(text.lines().filter(|found| *found == line).count(), 1, "{line}\n{text}");
    }
    assert!(!text.contains(r#"pid="8""#) && !text.contains("pcie") && !text.contains("overdrive_system"));
    assert!(sample.gpus[0].is_throttled() && !sample.gpus[1].is_throttled());
    let line = sample.to_string();
    assert_eq!(line, "GPU 0 50% 702 W throttled, GPU 1 50%");
    let json = serde_json::to_string(&sample).unwrap();
    assert_eq!(serde_json::from_str::<Sample>(&json).unwrap(), sample);
}
