//! The profiler's sums, tables and traces, compared with those of Python's profiler.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use overdrive_profile::{
    Activity, DeviceType, EventList, FunctionEvent, Kernel, Profiler, ProfilerBuilder, RecordScope, Recording,
    Schedule, TableOptions, TimeUnit, record_function,
};
use serde::Deserialize;
use tch::{Kind, Reduction, Tensor, no_grad};

use crate::record::{Found, Given};

struct Model {
    weights: Vec<Tensor>,
    x: Tensor,
    targets: Tensor,
    lr: Tensor,
}

impl Model {
    fn new(given: &Given<'_>) -> Result<Self> {
        let weights = (0..4).map(|index| Ok(given.tensor(&format!("weight.{index}"))?.set_requires_grad(true)));
        Ok(Self {
            weights: weights.collect::<Result<_>>()?,
            x: given.tensor("x")?,
            targets: given.tensor("targets")?,
            lr: given.tensor("lr")?,
        })
    }

    fn step(&mut self) {
        let [conv, conv_bias, linear, linear_bias] = &mut self.weights[..] else { return };
        let loss = {
            let _scope = record_function("forward");
            let hidden = self.x.conv2d(conv, Some(&*conv_bias), [1, 1], [0, 0], [1, 1], 1).relu();
            let hidden = hidden.max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false).flatten(1, -1);
            let log_probabilities = hidden.linear(linear, Some(&*linear_bias)).log_softmax(1, None::<Kind>);
            log_probabilities.nll_loss_nd(&self.targets, None::<&Tensor>, Reduction::Mean, -100)
        };
        loss.backward();
        {
            let _scope = record_function("update");
            no_grad(|| {
                for weight in &mut self.weights {
                    let change = weight.grad() * &self.lr;
                    let _ = weight.g_sub_(&change);
                }
            });
        }
        self.weights.iter_mut().for_each(Tensor::zero_grad);
    }
}

fn builder() -> ProfilerBuilder {
    Profiler::builder().activities(&[Activity::Cpu]).record_shapes(true).profile_memory(true).with_flops(true)
}

fn text(found: &mut Found, name: &str, lines: &str) {
    found.insert(name, &Tensor::from_slice(lines.as_bytes()));
}

/// The number of this `at::RecordScope`.
fn scope_number(scope: RecordScope) -> i64 {
    match scope {
        RecordScope::Function => 0,
        RecordScope::BackwardFunction => 1,
        RecordScope::User => 7,
        RecordScope::Other(number) => i64::from(number),
        _ => -1,
    }
}

/// A list of lists in Python's notation.
fn shapes_text(shapes: &[Vec<i64>]) -> String {
    format!("{shapes:?}")
}

/// The calls, FLOPs and memory of every operator, by name and by shapes.
pub fn key_averages(given: &Given<'_>) -> Result<Found> {
    let mut model = Model::new(given)?;
    model.step();
    let mut profiler = builder().schedule(Schedule::new(1, 1, 3)?.repeat(1)).acc_events(true).start()?;
    for _ in 0..5 {
        model.step();
        profiler.step()?;
    }
    profiler.stop()?;
    let profile = profiler.profile().context("three steps were recorded")?;

    let mut found = Found::default();
    for (by_shape, title) in [(false, "False"), (true, "True")] {
        let mut groups = BTreeMap::new();
        for group in &profile.key_averages(by_shape)? {
            let shapes = group.input_shapes.as_ref().map(|shapes| format!(" {}", shapes_text(shapes)));
            let figures = [
                group.count as i64,
                group.flops as i64,
                group.cpu_memory_usage,
                group.self_cpu_memory_usage,
                i64::from(group.is_user_annotation),
                scope_number(group.scope),
            ];
            groups.insert(format!("{}{}", group.key, shapes.unwrap_or_default()), figures);
        }
        text(&mut found, &format!("names.{title}"), &groups.keys().cloned().collect::<Vec<_>>().join("\n"));
        for (name, figures) in groups {
            found.insert(format!("{title}.{name}"), &Tensor::from_slice(&figures));
        }
    }
    let total = profile.total_average()?;
    let figures = [total.count as i64, total.flops as i64, total.self_cpu_memory_usage];
    found.insert("total", &Tensor::from_slice(&figures));
    Ok(found)
}

#[derive(Deserialize)]
struct ScheduleConfig {
    wait: u64,
    warmup: u64,
    active: u64,
    repeat: u64,
    skip_first: u64,
    skip_first_wait: u64,
}

/// The actions of 300 schedules in 60 steps each.
pub fn schedules(given: &Given<'_>) -> Result<Found> {
    let configs: Vec<ScheduleConfig> = given.value("configs")?;
    let mut actions = Vec::new();
    for config in &configs {
        let schedule = Schedule::new(config.wait, config.warmup, config.active)?
            .repeat(config.repeat)
            .skip_first(config.skip_first)
            .skip_first_wait(config.skip_first_wait != 0);
        actions.extend((0..60).map(|step| schedule.action(step) as i64));
    }
    let mut found = Found::default();
    found.insert("actions", &Tensor::from_slice(&actions).view([configs.len() as i64, 60]));
    Ok(found)
}

#[derive(Deserialize)]
struct Run {
    cuda: bool,
    profile_memory: bool,
    with_flops: bool,
    events: Vec<Planted>,
    tables: Vec<Table>,
}

#[derive(Deserialize)]
struct Planted {
    name: String,
    thread: u64,
    start: i64,
    end: i64,
    shapes: Vec<Vec<i64>>,
    memory: i64,
    device_memory: i64,
    flops: u64,
    is_async: bool,
    cuda: bool,
    kernels: Vec<i64>,
}

impl Planted {
    fn event(self) -> FunctionEvent {
        let kernel = |us: i64| Kernel { name: "kernel".into(), device: 0, duration_ns: us * 1000 };
        FunctionEvent {
            input_shapes: self.shapes,
            cpu_memory_usage: self.memory,
            device_memory_usage: self.device_memory,
            flops: self.flops,
            is_async: self.is_async,
            device_type: if self.cuda { DeviceType::Cuda } else { DeviceType::Cpu },
            kernels: self.kernels.into_iter().map(kernel).collect(),
            ..FunctionEvent::new(&self.name, self.thread, self.start * 1000, self.end * 1000)
        }
    }
}

#[derive(Deserialize)]
struct Table {
    sort_by: Option<String>,
    row_limit: i64,
    max_name_column_width: Option<usize>,
    max_shapes_column_width: Option<usize>,
    header: Option<String>,
    top_level_events_only: bool,
    time_unit: Option<String>,
    of: String,
}

impl Table {
    fn options(&self) -> Result<TableOptions> {
        Ok(TableOptions {
            sort_by: self.sort_by.as_deref().map(str::parse).transpose()?,
            row_limit: usize::try_from(self.row_limit).ok(),
            max_name_column_width: self.max_name_column_width,
            max_shapes_column_width: self.max_shapes_column_width,
            header: self.header.clone(),
            top_level_events_only: self.top_level_events_only,
            time_unit: match self.time_unit.as_deref() {
                Some("s") => Some(TimeUnit::Seconds),
                Some("ms") => Some(TimeUnit::Milliseconds),
                Some("us") => Some(TimeUnit::Microseconds),
                _ => None,
            },
        })
    }
}

/// PyTorch's tables of made-up events, character by character, for every key and every column.
pub fn tables(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (number, run) in given.value::<Vec<Run>>("runs")?.into_iter().enumerate() {
        let recording = Recording { cuda: run.cuda, profile_memory: run.profile_memory, with_flops: run.with_flops };
        let events = EventList::new(run.events.into_iter().map(Planted::event).collect(), recording);
        for (place, table) in run.tables.iter().enumerate() {
            let options = table.options()?;
            let by = |input_shapes| {
                let grouping = overdrive_profile::Grouping { input_shapes, ..Default::default() };
                events.key_averages(grouping).table(&options)
            };
            let lines = match table.of.as_str() {
                "events" => events.table(&options),
                of => by(of == "shapes"),
            };
            text(&mut found, &format!("{number}.{place}"), &lines);
        }
    }
    Ok(found)
}

/// The keys of a trace's head, and the keys and argument names of every kind of event.
pub fn traces(given: &Given<'_>) -> Result<Found> {
    let mut model = Model::new(given)?;
    model.step();
    let mut profiler = builder().start()?;
    (0..2).for_each(|_| model.step());
    profiler.stop()?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("trace.json");
    profiler.profile().context("two steps were recorded")?.export_chrome_trace(&path)?;
    kinds(&path)
}

fn kinds(path: &Path) -> Result<Found> {
    #[derive(Deserialize)]
    struct Trace {
        #[serde(rename = "traceEvents")]
        events: Vec<serde_json::Map<String, serde_json::Value>>,
        #[serde(flatten)]
        head: BTreeMap<String, serde_json::Value>,
    }
    let trace: Trace = serde_json::from_slice(&std::fs::read(path)?)?;
    let mut found = Found::default();
    let head: Vec<_> = trace.head.into_keys().chain(["traceEvents".to_owned()]).collect();
    text(&mut found, "head", &sorted(head).join("\n"));
    let mut kinds: BTreeMap<Arc<str>, i64> = BTreeMap::new();
    for event in trace.events {
        let keys = sorted(event.keys().cloned().collect()).join(", ");
        let arguments = event.get("args").and_then(serde_json::Value::as_object);
        let mut arguments: Vec<_> = arguments.map(|keys| keys.keys().cloned().collect()).unwrap_or_default();
        // Python's profiler records this operator without autograd's keys, because Python calls it below autograd; so
        // they are left out here.
        if event.get("name").is_some_and(|name| name == "aten::ones_like") {
            arguments.retain(|key| !["Fwd thread id", "Sequence number"].contains(&key.as_str()));
        }
        let arguments = sorted(arguments).join(", ");
        let word = |key: &str| event.get(key).and_then(serde_json::Value::as_str).unwrap_or_default();
        let kind = format!("{} {} {} [{keys}] [{arguments}]", word("ph"), word("cat"), word("name"));
        *kinds.entry(kind.into()).or_default() += 1;
    }
    for (kind, count) in kinds {
        found.insert(&*kind, &Tensor::from(count));
    }
    Ok(found)
}

fn sorted(mut words: Vec<String>) -> Vec<String> {
    words.sort();
    words
}
