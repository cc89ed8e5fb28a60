//! The system's clock is set while a program trains. Only that program sees it: libfaketime intercepts its calls, and
//! reads the clock's offset from a file.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use overdrive_profile::{
    Gap, GapSource, GpuSample, GpuSource, Phase, Profile, ProfileError, Profiler, RunRecorder, Schedule, StepTimer,
    record_function,
};

use crate::child::TASK;
use crate::program::end;

/// The variable with the path of the clock's file.
const CLOCK: &str = "FAKETIME_TIMESTAMP_FILE";
const HOUR: i64 = 3600;
const MINUTE_NS: i64 = 60_000_000_000;
/// The minimum duration of a step.
const WORK: Duration = Duration::from_millis(5);

/// Why these tests cannot run; None if they can.
pub fn missing() -> Option<String> {
    library().is_none().then(|| "no libfaketime (Debian, Ubuntu: apt install libfaketime)".to_owned())
}

fn library() -> Option<PathBuf> {
    let roots = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from);
    let below = fs::read_dir("/usr/lib").into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    roots.into_iter().chain(below).map(|root| root.join("faketime/libfaketimeMT.so.1")).find(|path| path.exists())
}

crate::tests![windows_in_which_the_clock_is_set_are_discarded, a_record_notes_that_the_clock_was_set];

fn windows_in_which_the_clock_is_set_are_discarded() {
    run_with_fake_clock("clock windows");
}

fn a_record_notes_that_the_clock_was_set() {
    run_with_fake_clock("clock record");
}

fn run_with_fake_clock(task: &str) {
    let folder = tempfile::tempdir().unwrap();
    let clock = folder.path().join("clock");
    fs::write(&clock, "+0").unwrap();
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.env(TASK, task).env("LD_PRELOAD", library().unwrap()).env(CLOCK, &clock);
    // The file is read at each call, and the monotonic clock is not changed.
    program.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1").env("DONT_FAKE_MONOTONIC", "1");
    let ended = end(program);
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "the clock was set\n"), "{}", ended.err);
}

/// What the program under the fake clock does.
pub fn train_with_fake_clock(what: &str) {
    let start = (Instant::now(), SystemTime::now());
    set_clock(HOUR);
    let passed = SystemTime::now().duration_since(start.1).unwrap();
    assert!(passed >= Duration::from_secs(3600) && start.0.elapsed() < passed, "the clock is not faked: {passed:?}");
    set_clock(0);
    match what {
        "windows" => windows(),
        _ => record(),
    }
    println!("the clock was set");
}

/// Sets the clock to this many seconds after the system's. The file is replaced atomically.
fn set_clock(seconds: i64) {
    let path = PathBuf::from(std::env::var_os(CLOCK).unwrap());
    let new = path.with_extension("new");
    fs::write(&new, format!("{seconds:+}")).unwrap();
    fs::rename(new, path).unwrap();
}

fn unix_ns() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as i64
}

fn is_about(jump_ns: i64, seconds: i64) -> bool {
    // Within a minute; no other jump here is that close.
    (jump_ns / 1_000_000_000 - seconds).abs() < 60
}

/// Windows of two steps, each after one that warms up. In the second the clock is set an hour forward, in the fourth
/// back. In the fifth it is set as well, but before recording begins.
fn windows() {
    let kept: Rc<RefCell<Vec<Arc<Profile>>>> = Rc::default();
    let profiles = Rc::clone(&kept);
    let keep = move |profile: Arc<Profile>| {
        profiles.borrow_mut().push(profile);
        Ok::<(), ProfileError>(())
    };
    let mut profiler =
        Profiler::builder().schedule(Schedule::new(0, 1, 2).unwrap().repeat(5)).on_trace_ready(keep).start().unwrap();
    // For each step: the system's time before and after, and the minimum and maximum duration of the work by the
    // monotonic clock.
    let mut measured = Vec::new();
    for step in 0..15 {
        let (unix_before, outside) = (unix_ns(), Instant::now());
        let scope = record_function("work");
        let inside = Instant::now();
        sleep(WORK);
        match step {
            4 | 12 => set_clock(HOUR),
            10 => set_clock(0),
            _ => {}
        }
        let least = inside.elapsed();
        drop(scope);
        measured.push((unix_before, least, outside.elapsed(), unix_ns()));
        profiler.step().unwrap();
    }
    profiler.stop().unwrap();

    let gaps: Vec<(u64, u64)> = profiler.gaps().iter().map(|gap: &Gap| (gap.first_step, gap.last_step)).collect();
    assert_eq!(gaps, [(4, 5), (10, 11)], "{:?}", profiler.gaps());
    let jumps: Vec<i64> = profiler.gaps().iter().map(|gap| gap.clock_jump_ns).collect();
    assert!(is_about(jumps[0], HOUR) && is_about(jumps[1], -HOUR), "{jumps:?}");

    let kept = kept.borrow();
    let steps: Vec<u64> = kept.iter().flat_map(|profile| profile.steps()).collect();
    assert_eq!(steps, [1, 2, 7, 8, 13, 14]);
    for profile in kept.iter() {
        let events = profile.events().unwrap();
        let work: Vec<_> = events.iter().filter(|event| &*event.name == "work").collect();
        assert_eq!(work.len(), 2);
        for (event, step) in work.into_iter().zip(profile.steps()) {
            let (unix_before, least, most, unix_after) = measured[step as usize];
            let took = event.elapsed_ns() as f64;
            // libtorch calibrates the CPU's time-stamp counter with the system's clock, on a busy machine not exactly.
            // An hour within a window of milliseconds would change lengths many thousand times, and places by that
            // hour.
            let (least, most) = (0.5 * least.as_nanos() as f64, 2.0 * most.as_nanos() as f64 + 1e8);
            assert!((least..=most).contains(&took), "step {step}: {took} ns, not {least} to {most}");
            // The event lies within the step, by the system's clock at that time.
            let [began, ended] = [event.start_ns, event.end_ns].map(|at| profile.start_ns() + at);
            assert!(
                unix_before - MINUTE_NS <= began && ended <= unix_after + MINUTE_NS,
                "step {step}: {began}, {ended}"
            );
        }
    }
}

/// Counts the monitor's samples, because each asks for GPUs.
struct Counted(Arc<AtomicU64>);

impl GpuSource for Counted {
    fn count(&mut self) -> Result<u32, ProfileError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(0)
    }

    fn sample(&mut self, index: u32) -> Result<GpuSample, ProfileError> {
        Err(ProfileError::Gpu(format!("there is no GPU {index}")))
    }
}

/// A timer that records. The clock is set an hour forward in a profiled step, and back later.
fn record() {
    let samples = Arc::new(AtomicU64::new(0));
    // Waits for two samples. The second begins after this is called, so it sees the clock as it is now.
    let be_sampled = || {
        let before = samples.load(Ordering::SeqCst);
        while samples.load(Ordering::SeqCst) < before + 2 {
            sleep(Duration::from_millis(1));
        }
    };
    let recorder = RunRecorder::new()
        .gpus(Counted(Arc::clone(&samples)))
        .steps_before(4)
        .profiled_steps(4)
        .sample_interval(Duration::from_millis(10))
        .folder(folder());
    let timer = StepTimer::builder().warmup_steps(0).record(recorder).build().unwrap();
    let start = Instant::now();
    be_sampled();
    for step in 0..24 {
        {
            let _phase = timer.phase(Phase::Forward);
            sleep(WORK);
            match step {
                6 => set_clock(HOUR),
                18 => set_clock(0),
                _ => {}
            }
            if matches!(step, 6 | 18) {
                be_sampled();
            }
        }
        timer.step(4);
    }
    let run = timer.finish().unwrap();
    let all = start.elapsed().as_secs_f64();
    assert!(run.profiled.is_none(), "{:?}", run.profiled);
    let noted = |note: &String| note.starts_with("the profiled steps were discarded: the system's clock jumped by 3");
    assert!(run.notes.iter().any(noted), "{:?}", run.notes);
    assert!(!folder().join("trace.json.gz").exists());

    // 24 steps less one that warms the profiler up and 4 profiled ones.
    let steps = run.steps.unwrap();
    assert_eq!((steps.steps, steps.steps_seen, steps.clock_jumps), (19, 24, 0));
    assert!(steps.total_seconds >= 19.0 * WORK.as_secs_f64() && steps.total_seconds <= all, "{steps}");
    for step in &run.step_times {
        let took = step.total_seconds();
        assert!((WORK.as_secs_f64()..=all).contains(&took), "step {} took {took} s", step.step);
    }
    assert!(run.step_times.windows(2).all(|pair| pair[0].start_seconds < pair[1].start_seconds));
    let samples = &run.samples;
    assert!(samples.windows(2).all(|pair| pair[0].elapsed_seconds < pair[1].elapsed_seconds));
    // The monitor has a gap for each jump.
    let set: Vec<&str> =
        run.gaps.iter().filter(|gap| gap.source == GapSource::Clock).map(|gap| gap.reason.as_str()).collect();
    assert_eq!(set.len(), 2, "{:?}", run.gaps);
    assert!(set[0].starts_with("the system's clock jumped by 3") && set[1].contains("jumped by -3"), "{set:?}");
}

/// The folder for the record, which also has the clock's file.
fn folder() -> PathBuf {
    Path::new(&std::env::var_os(CLOCK).unwrap()).parent().unwrap().to_owned()
}
