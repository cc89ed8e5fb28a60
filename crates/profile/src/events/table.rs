//! PyTorch's table, column for column.

use super::format::{self, TimeUnit};
use super::list::Recording;
use super::sort_by::SortBy;

/// How a table looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableOptions {
    /// The sort key of the rows; `None` leaves them in the order of their first event.
    pub sort_by: Option<SortBy>,
    /// The maximum number of rows; `None` shows all.
    pub row_limit: Option<usize>,
    /// The largest width of the name column. Names are cut from 3 characters below it on, as in PyTorch; `None` never
    /// cuts.
    pub max_name_column_width: Option<usize>,
    /// Longer shapes are cut; `None` never cuts.
    pub max_shapes_column_width: Option<usize>,
    /// A line above the table.
    pub header: Option<String>,
    /// Whether events within others are left out.
    pub top_level_events_only: bool,
    /// The unit of all times; `None` chooses one for each time.
    pub time_unit: Option<TimeUnit>,
}

impl Default for TableOptions {
    fn default() -> Self {
        Self {
            sort_by: None,
            row_limit: Some(100),
            max_name_column_width: Some(55),
            max_shapes_column_width: Some(80),
            header: None,
            top_level_events_only: false,
            time_unit: None,
        }
    }
}

impl TableOptions {
    /// Options to sort by a key, the largest first.
    pub fn sorted_by(sort_by: SortBy) -> Self {
        Self { sort_by: Some(sort_by), ..Self::default() }
    }

    /// Shows at most this many rows.
    pub fn row_limit(mut self, rows: usize) -> Self {
        self.row_limit = Some(rows);
        self
    }
}

/// A row of the table, for one event or a group. Times are in nanoseconds.
pub(super) struct Row<'a> {
    pub name: &'a str,
    pub overload_name: &'a str,
    /// `None` if rows are not grouped by shapes.
    pub input_shapes: Option<&'a [Vec<i64>]>,
    pub count: u64,
    pub self_cpu_ns: i64,
    pub cpu_ns: i64,
    pub self_device_ns: i64,
    pub device_ns: i64,
    pub cpu_memory: i64,
    pub self_cpu_memory: i64,
    pub device_memory: i64,
    pub self_device_memory: i64,
    pub flops: u64,
    pub is_async: bool,
    pub is_top_level: bool,
    /// Whether it ran on a device. Only such rows count for the device's total: an operator's row repeats the time of
    /// its kernels.
    pub is_device_work: bool,
}

impl Row<'_> {
    fn shapes(&self) -> String {
        self.input_shapes.map(format::shapes).unwrap_or_default()
    }
}

/// Spaces between two columns.
const SPACING: usize = 2;
const COLUMN_WIDTH: usize = 12;

/// Which columns are shown, and the widths that vary.
struct Layout {
    name_width: usize,
    overload_names: bool,
    device_time: bool,
    memory: bool,
    device_memory: bool,
    shapes_width: Option<usize>,
    flops: Option<(f64, &'static str)>,
}

struct Sums {
    self_cpu_us: f64,
    self_device_us: f64,
}

pub(super) fn build(mut rows: Vec<Row<'_>>, recording: Recording, options: &TableOptions) -> String {
    if rows.is_empty() {
        return String::new();
    }
    if let Some(sort_by) = options.sort_by {
        sort_by.sort(&mut rows);
    }
    let layout = Layout::of(&rows, recording, options);
    let sums = Sums {
        self_cpu_us: us(rows.iter().map(|row| row.self_cpu_ns).sum()),
        self_device_us: us(rows.iter().filter(|row| row.is_device_work).map(|row| row.self_device_ns).sum()),
    };
    let shown = rows.iter().filter(|row| row.is_top_level || !options.top_level_events_only);
    let shown = shown.take(options.row_limit.unwrap_or(usize::MAX));

    let (headers, widths) = layout.headers();
    let ruler = line(widths.iter().map(|&width| "-".repeat(width)));
    let length = widths.iter().map(|width| width + SPACING).sum::<usize>() - SPACING;
    let aligned = |cells: Vec<String>| line(cells.iter().zip(&widths).map(|(cell, &width)| format!("{cell:>width$}")));

    let mut lines = Vec::new();
    if let Some(header) = &options.header {
        lines.extend(["=".repeat(length), header.clone()]);
    }
    if options.top_level_events_only {
        lines.extend(["=".repeat(length), "This report only display top-level ops statistics".to_owned()]);
    }
    lines.extend([ruler.clone(), aligned(headers), ruler.clone()]);
    lines.extend(shown.map(|row| aligned(layout.cells(row, &sums, options))));
    lines.push(ruler);
    lines.push(format!("Self CPU time total: {}", format::time(sums.self_cpu_us, options.time_unit)));
    if layout.device_time {
        lines.push(format!("Self CUDA time total: {}", format::time(sums.self_device_us, options.time_unit)));
    }
    lines.iter().flat_map(|line| [line, "\n"]).collect()
}

impl Layout {
    fn of(rows: &[Row<'_>], recording: Recording, options: &TableOptions) -> Self {
        let widest = |lengths: &mut dyn Iterator<Item = usize>, most: Option<usize>| {
            let width = lengths.max().unwrap_or(0) + 4;
            most.map_or(width, |most| width.min(most))
        };
        let has_shapes = rows.iter().any(|row| row.input_shapes.is_some_and(|shapes| !shapes.is_empty()));
        let smallest = rows.iter().map(|row| row.flops).filter(|&flops| flops > 0).min();
        Self {
            name_width: widest(&mut rows.iter().map(|row| row.name.chars().count()), options.max_name_column_width),
            overload_names: rows.iter().any(|row| !row.overload_name.is_empty()),
            device_time: rows.iter().any(|row| row.self_device_ns > 0),
            memory: recording.profile_memory,
            device_memory: recording.cuda && rows.iter().any(|row| row.self_device_memory > 0),
            shapes_width: has_shapes
                .then(|| widest(&mut rows.iter().map(|row| row.shapes().len()), options.max_shapes_column_width)),
            flops: smallest.filter(|_| recording.with_flops).map(format::flops_scale),
        }
    }

    fn headers(&self) -> (Vec<String>, Vec<usize>) {
        let mut columns = vec![("Name".to_owned(), self.name_width)];
        if self.overload_names {
            columns.push(("Overload Name".to_owned(), self.name_width));
        }
        let mut add = |names: &[&str]| columns.extend(names.iter().map(|name| ((*name).to_owned(), COLUMN_WIDTH)));
        add(&["Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg"]);
        if self.device_time {
            add(&["Self CUDA", "Self CUDA %", "CUDA total", "CUDA time avg"]);
        }
        if self.memory {
            add(&["CPU Mem", "Self CPU Mem"]);
            if self.device_memory {
                add(&["CUDA Mem", "Self CUDA Mem"]);
            }
        }
        add(&["# of Calls"]);
        if let Some(width) = self.shapes_width {
            columns.push(("Input Shapes".to_owned(), width));
        }
        if let Some((_, name)) = self.flops {
            columns.push((format!("Total {name}"), COLUMN_WIDTH));
        }
        columns.into_iter().unzip()
    }

    fn cells(&self, row: &Row<'_>, sums: &Sums, options: &TableOptions) -> Vec<String> {
        let time = |us: f64| format::time(us, options.time_unit);
        // In PyTorch's order of operations, so that the last digits are the same.
        let average = |total: i64| time(us(total) / row.count as f64);
        let mut cells = vec![shortened(row.name, options)];
        if self.overload_names {
            cells.push(shortened(row.overload_name, options));
        }
        let share_of_cpu = |ns: i64| format::share(us(ns), sums.self_cpu_us);
        cells.extend([
            share_of_cpu(row.self_cpu_ns),
            time(us(row.self_cpu_ns)),
            if row.is_async { "0".to_owned() } else { share_of_cpu(row.cpu_ns) },
            time(us(row.cpu_ns)),
            average(row.cpu_ns),
        ]);
        if self.device_time {
            cells.extend([
                time(us(row.self_device_ns)),
                format::share(us(row.self_device_ns), sums.self_device_us),
                time(us(row.device_ns)),
                average(row.device_ns),
            ]);
        }
        if self.memory {
            cells.extend([row.cpu_memory, row.self_cpu_memory].map(format::memory));
            if self.device_memory {
                cells.extend([row.device_memory, row.self_device_memory].map(format::memory));
            }
        }
        cells.push(row.count.to_string());
        if let Some(width) = self.shapes_width {
            cells.push(format::cut(&row.shapes(), width).to_owned());
        }
        if let Some((scale, _)) = self.flops {
            let scaled = || format!("{:8.3}", row.flops as f64 * scale);
            cells.push(if row.flops == 0 { "--".to_owned() } else { scaled() });
        }
        cells
    }
}

/// Each cell is followed by the spacing, as in PyTorch.
fn line(cells: impl Iterator<Item = String>) -> String {
    cells.flat_map(|cell| [cell, " ".repeat(SPACING)]).collect()
}

fn shortened(name: &str, options: &TableOptions) -> String {
    match options.max_name_column_width.map(|most| most.saturating_sub(3)) {
        Some(most) if name.chars().count() >= most => format!("{}...", format::cut(name, most)),
        _ => name.to_owned(),
    }
}

fn us(ns: i64) -> f64 {
    ns as f64 / 1e3
}
