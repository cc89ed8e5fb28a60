//! The profiled steps: operators, kernels, scopes and gaps.

use super::section;
use super::table::{Cell, numbers, table, words};
use super::text::{count, large, milliseconds, percent, plural, time};
use crate::{HostGap, ProfiledSteps, RunProfile, ScopeTimes};

/// The operators, the most expensive first.
pub(super) fn operators(run: &RunProfile) -> String {
    let Some(profiled) = &run.profiled else {
        return section(
            "Operators",
            "No step was profiled: the run was too short, or profiling was turned off. Unless set otherwise, the \
             profiler begins after the timer's warm-up and 20 more steps.",
            "",
        );
    };
    if profiled.ops.is_empty() {
        return section("Operators", "The profiler recorded no operator.", "");
    }
    let with_device = profiled.device_busy_seconds.is_some();
    let mut columns = vec![
        words("Operator"),
        words("Phase"),
        words("Scope"),
        numbers("Calls"),
        numbers("Self, ms"),
        numbers("Share"),
    ];
    if with_device {
        columns.push(numbers("Device, ms"));
    }
    columns.push(numbers("FLOPs"));
    let rows = profiled.ops.iter().map(|op| {
        let share = share(op.self_cpu_seconds, profiled);
        let mut cells = vec![
            Cell::text(&op.name),
            Cell::text(op.phase.name()),
            Cell::text(op.scope.as_deref().unwrap_or("\u{2013}")),
            Cell::number(count(op.calls), op.calls),
            Cell::number(milliseconds(op.self_cpu_seconds), op.self_cpu_seconds),
            Cell::number(percent(share), share),
        ];
        if with_device {
            cells.push(Cell::number(milliseconds(op.device_seconds), op.device_seconds));
        }
        cells.push(Cell::maybe((op.flops > 0.0).then_some(op.flops), |flops| large(flops).trim_end().to_owned()));
        cells
    });
    let explanation = format!(
        "Means over {} under the profiler, each {} long, on all recorded threads. Self: without the operators within. \
         The times include the profiler's overhead, so the shares are more reliable.",
        plural(profiled.steps, "step"),
        time(profiled.step_seconds),
    );
    section("Operators", &explanation, &(table("Operators", &columns, rows.collect()) + &device_work(profiled)))
}

/// What the GPU did, where there is one.
fn device_work(profiled: &ProfiledSteps) -> String {
    if profiled.device_work.is_empty() {
        return String::new();
    }
    let busy = profiled.device_busy_seconds.unwrap_or(0.0);
    let text = format!("The device was busy for {} of the mean step, {}.", time(busy), percent(share(busy, profiled)));
    let columns = [words("Kernel or copy"), numbers("Calls"), numbers("Time, ms"), numbers("Share")];
    let rows = profiled.device_work.iter().map(|work| {
        let share = share(work.seconds, profiled);
        vec![
            Cell::text(&work.name),
            Cell::number(count(work.calls), work.calls),
            Cell::number(milliseconds(work.seconds), work.seconds),
            Cell::number(percent(share), share),
        ]
    });
    section("On the device", &text, &table("Kernels and copies", &columns, rows.collect()))
}

/// The user's scopes.
pub(super) fn scopes(run: &RunProfile) -> String {
    let Some(profiled) = &run.profiled else { return String::new() };
    if profiled.scopes.is_empty() {
        let hint = "The program has no scopes: `record_function(\"name\")` opens one, until its guard is dropped.";
        return section("Scopes", hint, "");
    }
    let columns = [words("Scope"), words("Thread"), numbers("Calls"), numbers("Time, ms"), numbers("Share")];
    let row = |scope: &ScopeTimes| {
        let share = share(scope.seconds, profiled);
        vec![
            Cell::text(&scope.name),
            Cell::text(if scope.is_main_thread { "training" } else { "others" }),
            Cell::number(count(scope.calls), scope.calls),
            Cell::number(milliseconds(scope.seconds), scope.seconds),
            Cell::number(percent(share), share),
        ]
    };
    let explanation = "The program's scopes, including everything within them; means per profiled step.";
    section("Scopes", explanation, &table("Scopes", &columns, profiled.scopes.iter().map(row).collect()))
}

/// Where the host ran no operator.
pub(super) fn gaps(run: &RunProfile) -> String {
    let Some(profiled) = &run.profiled else { return String::new() };
    let columns = [words("Phase"), words("Scope"), numbers("Times"), numbers("Time, ms"), numbers("Share")];
    let row = |gap: &HostGap| {
        let share = share(gap.seconds, profiled);
        vec![
            Cell::text(gap.phase.name()),
            Cell::text(gap.scope.as_deref().unwrap_or("\u{2013}")),
            Cell::number(count(gap.calls), gap.calls),
            Cell::number(milliseconds(gap.seconds), gap.seconds),
            Cell::number(percent(share), share),
        ]
    };
    let tables = [
        (
            "Gaps of the host",
            "Where the training thread ran no operator for 0.1 ms or more at a time: it waited, or ran the program's \
             own code. Means per profiled step.",
            &profiled.gaps,
        ),
        (
            "Numbers read out of tensors",
            "Loops of `.item()`, `double_value` and the like, from the first to the last; with a GPU, each call waits \
             for it. Means per profiled step.",
            &profiled.read_backs,
        ),
    ];
    let shown = tables.into_iter().filter(|(.., rows)| !rows.is_empty());
    shown
        .map(|(title, text, rows)| section(title, text, &table(title, &columns, rows.iter().map(row).collect())))
        .collect()
}

fn share(seconds: f64, profiled: &ProfiledSteps) -> f64 {
    if profiled.step_seconds > 0.0 { seconds / profiled.step_seconds } else { 0.0 }
}
