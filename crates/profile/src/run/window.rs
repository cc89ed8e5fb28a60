//! Sums the events of a profile over its steps.

mod device;
mod read_backs;

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use super::ops::{HostGap, OpTimes, PhaseTimes, ProfiledSteps, ScopeTimes};
use super::track::{Span, Track, overlap, union};
use crate::diagnosis::kernels;
use crate::events::EventList;
use crate::{DeviceType, FunctionEvent, MemoryTimeline, Phase, Profile, ProfileError, RecordScope};

/// The name of steps in [`EventList`].
const STEP: &str = "ProfilerStep*";
/// The scope that marks the end of skipped time: a step timer leaves out what came between the last step and this.
pub(crate) const SKIPPED: &str = "StepTimer.skip";
/// Shorter pauses between operators are normal.
const SHORTEST_GAP_NS: i64 = 100_000;
/// A call with less self time consists mostly of call overhead, which is 1 to 5 us under a profiler.
const SMALL_CALL_NS: i64 = 10_000;
/// How many rows of each table are kept.
const MOST_ROWS: usize = 300;

impl ProfiledSteps {
    /// None if the profile has no step. An unfinished step after the `whole_steps` is left out.
    pub(super) fn of(profile: &Profile, whole_steps: u64) -> Result<Option<Self>, ProfileError> {
        let Some(window) = Window::find(profile.events()?, whole_steps) else { return Ok(None) };
        let ends: Vec<i64> = window.steps.iter().map(|step| step.1).collect();
        let mut steps = window.sum_up();
        if profile.events()?.recording().profile_memory {
            steps.memory = profile.memory_timeline()?;
            steps.kept_bytes = kept_bytes(&steps.memory, &ends);
        }
        Ok(Some(steps))
    }
}

/// Empty for a single step, because it may free its memory only in the next one.
fn kept_bytes(memory: &[MemoryTimeline], step_ends: &[i64]) -> BTreeMap<String, f64> {
    let [first, .., last] = step_ends else { return BTreeMap::new() };
    let in_use = |line: &MemoryTimeline, at: i64| {
        let changes = line.times_ns.partition_point(|time| *time <= at);
        changes.checked_sub(1).map_or(0, |change| line.in_use[change]) as f64
    };
    let each = |line: &MemoryTimeline| (in_use(line, *last) - in_use(line, *first)) / (step_ends.len() - 1) as f64;
    memory.iter().map(|line| (line.device.clone(), each(line))).collect()
}

/// A step lasts until the next one begins, the last one until the end of the profile. A step's scope is split in two if
/// a phase continues beyond the end of the step before, so only its first start counts.
fn steps(events: &EventList, thread: u64) -> Vec<Span> {
    let own = || events.iter().filter(|event| event.thread == thread && event.device_type == DeviceType::Cpu);
    let scopes = own().filter(|event| is_scope(event) && &*event.name == STEP);
    let mut begins: Vec<(&str, i64)> =
        scopes.filter_map(|event| Some((event.trace_name.as_deref()?, event.start_ns))).collect();
    begins.sort_by_key(|(_, start)| *start);
    begins.dedup_by_key(|(name, _)| *name);
    let end = own().map(|event| event.end_ns).max();
    let ends = begins.iter().skip(1).map(|(_, start)| *start).chain(end);
    let skips: Vec<i64> = own().filter(|event| &*event.name == SKIPPED).map(|event| event.end_ns).collect();
    let after_skips = |(start, end): Span| {
        let skips = skips.iter().copied().filter(|skip| (start..end).contains(skip));
        (skips.max().unwrap_or(start), end)
    };
    begins.iter().map(|(_, start)| *start).zip(ends).map(after_skips).collect()
}

/// A step, a phase and a scope.
type Place<'a> = (usize, Phase, Option<&'a str>);

/// The steps of a profile, and what happened in them.
struct Window<'a> {
    events: &'a EventList,
    thread: u64,
    /// In order, without overlap.
    steps: Vec<Span>,
    phases: Track<Phase>,
    scopes: Track<&'a str>,
    /// When an operator ran on the training thread.
    operators: Vec<Span>,
    /// When ranks communicated.
    exchanges: Vec<Span>,
}

impl<'a> Window<'a> {
    fn find(events: &'a EventList, whole_steps: u64) -> Option<Self> {
        let is_step = |event: &&FunctionEvent| is_scope(event) && &*event.name == STEP;
        let thread = events.iter().find(is_step)?.thread;
        let whole_steps = usize::try_from(whole_steps).unwrap_or(usize::MAX);
        let steps: Vec<Span> = steps(events, thread).into_iter().take(whole_steps).collect();
        steps.first()?;
        let own = || events.iter().filter(|event| event.thread == thread && is_scope(event) && !is_of_profiler(event));
        let phases = own().filter_map(|event| Some((span_of(event), phase_of(event)?)));
        let scopes = own().filter(|event| phase_of(event).is_none()).map(|event| (span_of(event), &*event.name));
        let operators = (0..events.len()).filter(|&place| {
            let above = |place: usize| events[place].cpu_parent;
            let mut around = std::iter::successors(above(place), |&place| above(place));
            let event = &events[place];
            let is_own = event.thread == thread && is_operator(event) && is_of_steps(event, &steps);
            is_own && around.all(|it| is_scope(&events[it]))
        });
        Some(Self {
            operators: union(operators.map(|place| span_of(&events[place])).collect()),
            steps,
            phases: Track::new(phases.collect()),
            scopes: Track::new(scopes.collect()),
            exchanges: union(events.iter().filter(|event| is_exchange(event)).map(span_of).collect()),
            events,
            thread,
        })
    }

    fn phase_at(&self, time: i64) -> Phase {
        self.phases.at(time).unwrap_or(Phase::Other)
    }

    fn scope_at(&self, time: i64) -> Option<&'a str> {
        self.scopes.at(time)
    }

    fn sum_up(self) -> ProfiledSteps {
        let mut gaps = Sums::default();
        let mut of_steps: HashMap<_, Vec<i64>> = HashMap::new();
        let serves = |place: usize| serves_exchanges(&self.events[place]);
        let calls = self.call_times();
        let mut phases: Vec<PhaseTimes> = Phase::ALL.map(|phase| self.phase_times(phase)).into();
        for (place, event) in self.calls() {
            let times = &mut phases[self.phase_at(event.start_ns) as usize];
            times.calls += self.each(1);
            let own = self.events.self_cpu_time_total_ns(place);
            if own <= SMALL_CALL_NS {
                times.small_calls += self.each(1);
                times.small_call_seconds += self.per_step(own);
            }
            if serves(place) && !event.cpu_parent.is_some_and(serves) {
                times.exchange_operator_seconds += self.per_step(event.elapsed_ns());
            }
        }
        let loops = self.read_back_loops(&calls);
        for gap in self.pauses() {
            let phase = self.phase_at(gap.0);
            let exchanged: i64 = self.exchanges.iter().map(|exchange| overlap(gap, *exchange)).sum();
            phases[phase as usize].communication_seconds += self.per_step(exchanged);
            let own = gap.1 - gap.0 - exchanged;
            if gap.1 - gap.0 >= SHORTEST_GAP_NS && !loops.iter().any(|it| it.has(gap)) {
                let place = (phase, self.scope_at(gap.0));
                gaps.add(place, own);
                of_steps.entry(place).or_insert_with(|| vec![0; self.steps.len()])[step_at(&self.steps, gap.0)] += own;
            } else {
                phases[phase as usize].short_pause_seconds += self.per_step(own);
            }
        }
        let device = self.device_work();
        ProfiledSteps {
            steps: self.steps.len() as u64,
            queued_seconds: None,
            step_seconds: self.per_step(self.steps.iter().map(|step| step.1 - step.0).sum()),
            phases,
            ops: self.ops(),
            scopes: self.scope_times(),
            gaps: gaps.rows(|key, calls, time| {
                let typical_seconds = of_steps.remove(&key).map(|times| median(times) as f64 / 1e9);
                HostGap { typical_seconds, ..self.gap(key, calls, time, 0) }
            }),
            read_backs: self.read_backs(&loops, &calls),
            device_work: self.named(device.shared().map(|(name, time)| (name, false, time))),
            device_busy_seconds: self.events.recording().cuda.then(|| self.per_step(device.busy_time(&self.steps))),
            kept_bytes: BTreeMap::new(),
            memory: Vec::new(),
        }
    }

    fn phase_times(&self, phase: Phase) -> PhaseTimes {
        let within = |span: Span| {
            let parts = self.phases.cut(span).into_iter();
            parts.filter(|part| self.phase_at(part.0) == phase).map(|part| part.1 - part.0).sum::<i64>()
        };
        let begun = self.operators.iter().filter(|it| self.phase_at(it.0) == phase);
        PhaseTimes {
            phase,
            seconds: self.per_step(self.steps.iter().map(|step| within(*step)).sum()),
            operators: self.each(begun.count() as i64),
            calls: 0.0,
            small_calls: 0.0,
            small_call_seconds: 0.0,
            short_pause_seconds: 0.0,
            operator_seconds: self.per_step(self.operators.iter().map(|span| within(*span)).sum()),
            communication_seconds: 0.0,
            exchange_operator_seconds: 0.0,
        }
    }

    /// Operators of the training thread, including those within others.
    fn calls(&self) -> impl Iterator<Item = (usize, &FunctionEvent)> {
        let events = self.events.iter().enumerate();
        events.filter(|(_, event)| event.thread == self.thread && is_operator(event) && is_of_steps(event, &self.steps))
    }

    /// The start of each of them, sorted.
    fn call_times(&self) -> Vec<i64> {
        let mut times: Vec<i64> = self.calls().map(|(_, event)| event.start_ns).collect();
        times.sort_unstable();
        times
    }

    /// When no operator ran, in pieces that each lie in one phase and one scope.
    fn pauses(&self) -> Vec<Span> {
        let mut pauses = Vec::new();
        for step in &self.steps {
            let mut since = step.0;
            let first = self.operators.partition_point(|operator| operator.0 < step.0);
            let within = self.operators[first..].iter().take_while(|operator| operator.0 < step.1);
            for operator in within.chain([&(step.1, step.1)]) {
                if operator.0 > since {
                    let parts = self.phases.cut((since, operator.0));
                    pauses.extend(parts.into_iter().flat_map(|part| self.scopes.cut(part)));
                }
                since = since.max(operator.1);
            }
        }
        pauses
    }

    fn ops(&self) -> Vec<OpTimes> {
        let mut rows: HashMap<(Phase, Option<&str>, &str), OpTimes> = HashMap::new();
        let threads = self.threads();
        for (place, event) in self.events.iter().enumerate() {
            let is_operator = event.device_type == DeviceType::Cpu && !is_scope(event) && event.elapsed_ns() > 0;
            let is_elsewhere = kernels::is_call(&event.name) && !threads.contains(&event.device_resource_id);
            if !is_operator || is_elsewhere || !is_of_steps(event, &self.steps) {
                continue;
            }
            let phase = self.phase_at(event.start_ns);
            let scope = self.scope_at(event.start_ns).filter(|_| event.thread == self.thread);
            let row = rows.entry((phase, scope, &event.name)).or_insert_with(|| OpTimes {
                name: event.name.to_string(),
                phase,
                scope: scope.map(str::to_owned),
                calls: 0.0,
                self_cpu_seconds: 0.0,
                device_seconds: 0.0,
                flops: 0.0,
            });
            row.calls += self.each(1);
            row.self_cpu_seconds += self.per_step(self.events.self_cpu_time_total_ns(place));
            row.device_seconds += self.per_step(self.events.self_device_time_total_ns(place));
            row.flops += event.flops as f64 / self.steps.len() as f64;
        }
        let mut rows: Vec<_> = rows.into_values().collect();
        let time = |row: &OpTimes| row.self_cpu_seconds + row.device_seconds;
        rows.sort_by(|one, other| time(other).total_cmp(&time(one)).then_with(|| one.name.cmp(&other.name)));
        rows.truncate(MOST_ROWS);
        rows
    }

    fn scope_times(&self) -> Vec<ScopeTimes> {
        let is_own = |event: &&FunctionEvent| {
            let is_named = is_scope(event) && !is_of_profiler(event) && phase_of(event).is_none();
            is_named && is_of_steps(event, &self.steps)
        };
        let own = self.events.iter().filter(is_own);
        self.named(own.map(|event| (&*event.name, event.thread == self.thread, event.elapsed_ns())))
    }

    fn gap(&self, (phase, scope): (Phase, Option<&str>), calls: i64, time: i64, operators: i64) -> HostGap {
        HostGap {
            phase,
            scope: scope.map(str::to_owned),
            calls: self.each(calls),
            seconds: self.per_step(time),
            typical_seconds: None,
            operators: self.each(operators),
        }
    }

    fn named<'b>(&self, events: impl Iterator<Item = (&'b str, bool, i64)>) -> Vec<ScopeTimes> {
        let mut sums = Sums::default();
        for (name, is_main_thread, time) in events {
            sums.add((name, is_main_thread), time);
        }
        sums.rows(|(name, is_main_thread), calls, time| ScopeTimes {
            name: name.to_owned(),
            calls: self.each(calls),
            seconds: self.per_step(time),
            is_main_thread,
        })
    }

    /// Seconds per step.
    fn per_step(&self, nanoseconds: i64) -> f64 {
        self.each(nanoseconds) / 1e9
    }

    /// The mean per step.
    fn each(&self, count: i64) -> f64 {
        count as f64 / self.steps.len() as f64
    }
}

/// Calls and nanoseconds by key.
struct Sums<K>(HashMap<K, (i64, i64)>);

impl<K> Default for Sums<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> Sums<K> {
    fn add(&mut self, key: K, time: i64) {
        self.add_calls(key, 1, time);
    }

    fn add_calls(&mut self, key: K, calls: i64, time: i64) {
        let sum = self.0.entry(key).or_default();
        *sum = (sum.0 + calls, sum.1 + time);
    }

    fn calls(&self, key: &K) -> i64 {
        self.0.get(key).map_or(0, |(calls, _)| *calls)
    }

    /// The longest first.
    fn rows<R>(self, mut row: impl FnMut(K, i64, i64) -> R) -> Vec<R> {
        let mut sums: Vec<_> = self.0.into_iter().collect();
        sums.sort_by_key(|(_, (_, time))| std::cmp::Reverse(*time));
        sums.truncate(MOST_ROWS);
        sums.into_iter().map(|(key, (calls, time))| row(key, calls, time)).collect()
    }
}

/// The lower median, which is 0 if half of the steps are 0.
fn median(mut times: Vec<i64>) -> i64 {
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

/// How many of the sorted times lie in a span.
fn calls_within(times: &[i64], span: Span) -> i64 {
    let before = |time: i64| times.partition_point(|start| *start < time);
    (before(span.1) - before(span.0)) as i64
}

fn phase_of(event: &FunctionEvent) -> Option<Phase> {
    Phase::ALL.into_iter().find(|phase| phase.name() == &*event.name)
}

/// A user's scope. Communication is recorded as scopes too, but not by the user.
fn is_scope(event: &FunctionEvent) -> bool {
    event.device_type == DeviceType::Cpu && event.scope == RecordScope::User && !is_exchange(event)
}

fn is_operator(event: &FunctionEvent) -> bool {
    event.nests() && !is_scope(event) && !is_exchange(event) && event.elapsed_ns() > 0
}

/// The reducer's copies, and collectives before they reach the backend.
fn serves_exchanges(event: &FunctionEvent) -> bool {
    ["c10d::", "torch::distributed::", "torch.distributed."].iter().any(|start| event.name.starts_with(start))
}

fn is_exchange(event: &FunctionEvent) -> bool {
    ["gloo:", "nccl:", "ncclDevKernel", "ncclKernel"].iter().any(|start| event.name.starts_with(start))
}

fn span_of(event: &FunctionEvent) -> Span {
    (event.start_ns, event.end_ns)
}

/// The index of the step at a time; 0 before the first step.
fn step_at(steps: &[Span], time: i64) -> usize {
    steps.partition_point(|step| step.0 <= time).saturating_sub(1)
}

fn is_of_steps(event: &FunctionEvent, steps: &[Span]) -> bool {
    steps.get(step_at(steps, event.start_ns)).is_some_and(|step| within_span(span_of(event), *step))
}

fn is_of_profiler(event: &FunctionEvent) -> bool {
    matches!(&*event.name, STEP | SKIPPED)
}

fn within_span(span: Span, outer: Span) -> bool {
    outer.0 <= span.0 && span.0 < outer.1
}
