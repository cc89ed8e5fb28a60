//! Prints a comparison.

use std::fmt;

use super::{ComparedTime, Comparison, Verdict};
use crate::page::text::{bytes, count, percent, plural, time};

/// Larger ratios are printed as `>1000x`.
const MOST_TIMES: f64 = 1000.0;

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::WithinNoise => "within noise",
            Self::TooFewSteps => "too few steps",
            Self::NotComparable => "not comparable",
        })
    }
}

impl fmt::Display for Comparison {
    /// A table of the times, then throughput, operators, memory, and notes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, after] = self.steps;
        let level = 100.0 * self.confidence;
        writeln!(f, "Median times of {} before and {} after", plural(before, "step"), plural(after, "step"))?;
        let interval = format!("{level:.0}% confidence");
        writeln!(f, "{:<30}{:>11}{:>11}{:>10}  {interval:>19}", "", "before", "after", "change")?;
        for time in &self.times {
            row(f, time)?;
        }
        if let (Some([before, after]), Some(time)) = (self.samples_per_second, &self.sample_time) {
            writeln!(f, "\nThroughput, from all steps: {before:.1} samples/s before, {after:.1} after")?;
            row(f, time)?;
        }
        self.fmt_ops(f)?;
        if !self.memory.is_empty() {
            writeln!(f)?;
        }
        for memory in &self.memory {
            let change = change(Some(memory.after_bytes / memory.before_bytes));
            let (before, after) = (bytes(memory.before_bytes), bytes(memory.after_bytes));
            writeln!(f, "{:<30}{before:>11}{after:>11}{change:>10}", memory.name)?;
        }
        writeln!(f, "\n{}", self.summary())?;
        self.notes.iter().try_for_each(|note| writeln!(f, "Note: {note}."))?;
        write!(
            f,
            "Note: each interval covers only the variation between steps within these two runs. Repeated runs of a \
             program differ for further reasons: compare several before you trust a change of a few percent."
        )
    }
}

impl Comparison {
    fn fmt_ops(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ops.is_empty() {
            return Ok(());
        }
        let [before, after] = self.profiled_steps.map(|steps| plural(steps, "step"));
        writeln!(f, "\nOperators whose share of a profiled step changed most")?;
        writeln!(f, "(from {before} before and {after} after; without a confidence interval, so only a hint)")?;
        writeln!(f, "{:<40}{:>9}{:>9}{:>14}{:>14}", "", "before", "after", "calls before", "calls after")?;
        for op in &self.ops {
            let shares = [op.before_share, op.after_share].map(percent);
            let calls = [op.before_calls, op.after_calls].map(count);
            let name: String = op.name.chars().take(39).collect();
            writeln!(f, "{name:<40}{:>9}{:>9}{:>14}{:>14}", shares[0], shares[1], calls[0], calls[1])?;
        }
        Ok(())
    }

    /// What got faster and what got slower, each in a line.
    fn summary(&self) -> String {
        let names = |verdict: Verdict| {
            let times = self.times.iter().chain(&self.sample_time).filter(|time| time.verdict == verdict);
            times.map(|time| format!("{} ({})", label(time), change(time.ratio))).collect::<Vec<_>>().join(", ")
        };
        let lines =
            [(Verdict::Faster, "Faster"), (Verdict::Slower, "Slower")].map(|(verdict, word)| match names(verdict) {
                names if names.is_empty() => format!("{word}: nothing beyond noise."),
                names => format!("{word}: {names}."),
            });
        lines.join("\n")
    }
}

fn row(f: &mut fmt::Formatter<'_>, it: &ComparedTime) -> fmt::Result {
    let interval = match it.ratio_interval {
        Some([low, high]) => format!("{} to {}", change(Some(low)), change(Some(high))),
        None => "-".to_owned(),
    };
    let (before, after, change) = (time(it.before_seconds), time(it.after_seconds), change(it.ratio));
    let label = label(it);
    writeln!(f, "{label:<30}{before:>11}{after:>11}{change:>10}  {interval:>19}  {}", it.verdict)
}

fn label(time: &ComparedTime) -> String {
    if time.is_on_device { format!("{} on the device", time.name) } else { time.name.clone() }
}

/// The change in percent; a very large one as a factor.
fn change(ratio: Option<f64>) -> String {
    match ratio.filter(|ratio| ratio.is_finite()) {
        Some(ratio) if ratio >= MOST_TIMES => format!(">{MOST_TIMES:.0}x"),
        // Rounding may give -0.0; adding 0.0 makes it 0.0, so that no `-0.0%` is printed.
        Some(ratio) => format!("{:+.1}%", (1000.0 * (ratio - 1.0)).round() / 10.0 + 0.0),
        None => "-".to_owned(),
    }
}
