//! Comparisons of Overdrive with other tools (peers): the one format in which all of them are saved and shown.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::table::align;
use crate::{Machine, Spread, Versions, stats::median};

/// The version of the JSON format; adding a field does not change it.
pub const SCHEMA: u32 = 1;

/// Comparisons measured in one run on one machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VersusReport {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The machine.
    pub machine: Machine,
    /// The software, ours and the peers'.
    pub versions: Versions,
    /// What was measured.
    pub rows: Vec<VersusRow>,
    /// The comparisons that were not measured because their peer cannot run here, each with the reason.
    pub missing: Vec<MissingPeer>,
    /// The value of `--pairs`, if it was given. It shows that a report was measured with another number of pairs than
    /// usual, for example again after a missed target.
    #[serde(default)]
    pub pairs_asked: Option<u32>,
    /// When it was measured, as [`crate::date::utc_now`] writes it. Older records have only the day of their file's name.
    #[serde(default)]
    pub measured_at: Option<String>,
}

/// One comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VersusRow {
    /// What was compared and how the ratio reads, such as `"train step, ours / peer's time (lower is better)"`.
    pub case: String,
    /// Our median, in `unit`.
    pub ours: f64,
    /// The peer's median, in `unit`.
    pub peer: f64,
    /// The peer, with its version.
    pub peer_name: String,
    /// The unit of `ours` and `peer`.
    pub unit: String,
    /// The median of the ratios within each pair.
    pub ratio_median: f64,
    /// The lowest ratio.
    pub ratio_low: f64,
    /// The highest ratio.
    pub ratio_high: f64,
    /// Interleaved pairs measured.
    pub pairs: usize,
    /// The bound that the ratio should meet; `None` if there is none.
    pub target: Option<f64>,
    /// On which side of the bound the ratio should be.
    pub target_is: Option<Bound>,
    /// Whether the ratio meets the bound: `true` if all pairs do, `false` if none does, `None` if only some do, because
    /// that decides nothing. Records from before 23 November 2026 judge the median alone; `decided` judges all alike.
    pub met: Option<bool>,
    /// Whether the peer is not another tool but a limit: a constant, a bound, or another way of ours.
    #[serde(default)]
    pub is_limit: bool,
}

/// A comparison that was not measured, because its peer cannot run here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingPeer {
    /// What would have been compared.
    pub case: String,
    /// The peer.
    pub peer_name: String,
    /// Why it could not be measured, and what would make it measurable.
    pub reason: String,
}

/// How the ratio of a pair is taken, and so what it means; [`VersusRow::of_pairs`] writes the meaning into `case`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ratio {
    /// Samples are rates (work per time). The ratio is ours divided by the peer's: how many times faster ours is.
    TimesFasterByRate,
    /// Samples are times. The ratio is the peer's divided by ours: how many times faster ours is.
    TimesFasterByTime,
    /// Samples are costs, such as seconds or bytes. The ratio is ours divided by the peer's: a share of its cost.
    ShareOfCost,
    /// Samples are rates (work per time). The ratio is ours divided by the peer's: a share of its speed.
    ShareOfRate,
}

/// On which side of a bound a ratio should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The ratio should be at least the bound.
    AtLeast,
    /// The ratio should be at most the bound.
    AtMost,
    /// The ratio should differ from 1 by at most the bound.
    Within,
}

/// A bound that a ratio should meet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
    /// At most this far from 1.
    Within(f64),
}

/// Samples that cannot be compared.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{case}: {ours} samples of ours and {peer} of {peer_name}: both need the same number of samples, at least one, and \
     each above 0"
)]
pub struct PairsError {
    /// What was compared.
    pub case: String,
    /// The peer.
    pub peer_name: String,
    /// Samples of ours.
    pub ours: usize,
    /// Samples of the peer.
    pub peer: usize,
}

impl VersusRow {
    /// The comparison of samples that were taken in turns: `ours[i]` and `peer[i]` belong together.
    ///
    /// # Errors
    ///
    /// [`PairsError`] if there are no samples, not equally many of both, or one is not above 0, or a ratio is not
    /// finite.
    pub fn of_pairs(
        case: &str,
        peer_name: &str,
        unit: &str,
        (ours, peer): (&[f64], &[f64]),
        ratio: Ratio,
        target: Option<Target>,
    ) -> Result<Self, PairsError> {
        let positive = ours.iter().chain(peer).all(|sample| *sample > 0.0);
        let (spread, meaning) = match ratio {
            Ratio::TimesFasterByRate => (Spread::of_ratios(ours, peer), "times faster than the peer"),
            Ratio::TimesFasterByTime => (Spread::of_ratios(peer, ours), "times faster than the peer"),
            Ratio::ShareOfCost => (Spread::of_ratios(ours, peer), "share of the peer's"),
            Ratio::ShareOfRate => (Spread::of_ratios(ours, peer), "share of the peer's speed"),
        };
        let made = spread.filter(|_| positive).zip(median(ours)).zip(median(peer));
        let ((spread, ours_median), peer_median) = made.ok_or_else(|| PairsError {
            case: case.to_owned(),
            peer_name: peer_name.to_owned(),
            ours: ours.len(),
            peer: peer.len(),
        })?;
        let (value, bound) = target.map(Target::parts).unzip();
        Ok(Self {
            case: format!("{case} ({meaning})"),
            ours: ours_median,
            peer: peer_median,
            peer_name: peer_name.to_owned(),
            unit: unit.to_owned(),
            ratio_median: spread.median,
            ratio_low: spread.low,
            ratio_high: spread.high,
            pairs: ours.len(),
            target: value,
            target_is: bound,
            met: target.and_then(|target| target.decided_by(spread)),
            is_limit: false,
        })
    }

    /// The same, with a peer that is a limit.
    #[must_use]
    pub fn limit(self) -> Self {
        Self { is_limit: true, ..self }
    }

    /// Whether the ratio meets the bound, by the rule of today, from the recorded spread: older records have another
    /// rule's `met`.
    pub fn decided(&self) -> Option<bool> {
        let spread = Spread { median: self.ratio_median, low: self.ratio_low, high: self.ratio_high };
        self.target_is?.at(self.target?).decided_by(spread)
    }
}

impl Bound {
    const fn at(self, value: f64) -> Target {
        match self {
            Self::AtLeast => Target::AtLeast(value),
            Self::AtMost => Target::AtMost(value),
            Self::Within => Target::Within(value),
        }
    }
}

impl Target {
    /// Whether `ratio` meets the bound.
    pub fn is_met_by(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(bound) => ratio >= bound,
            Self::AtMost(bound) => ratio <= bound,
            Self::Within(bound) => (ratio - 1.0).abs() <= bound,
        }
    }

    /// Whether all of a spread meets the bound (`true`) or none of it (`false`); `None` if only a part does.
    pub fn decided_by(self, spread: Spread) -> Option<bool> {
        let Spread { low, high, .. } = spread;
        let ends = [self.is_met_by(low), self.is_met_by(high)];
        match self {
            // Both ends are outside, but on different sides of 1: the middle is within.
            Self::Within(_) if ends == [false; 2] && low < 1.0 && high > 1.0 => None,
            _ => (ends[0] == ends[1]).then_some(ends[0]),
        }
    }

    const fn parts(self) -> (f64, Bound) {
        match self {
            Self::AtLeast(bound) => (bound, Bound::AtLeast),
            Self::AtMost(bound) => (bound, Bound::AtMost),
            Self::Within(bound) => (bound, Bound::Within),
        }
    }
}

impl VersusReport {
    /// The comparisons as a table for a terminal: each case, and below it its peers; then what was not measured, and
    /// why.
    pub fn table(&self) -> String {
        let head = ["case and peer", "ours", "peer's", "ratio (low-high)", "pairs", "target", "met"];
        let table = align(&head, &self.rows.iter().map(cells).collect::<Vec<_>>());
        let mut lines = table.lines();
        let mut out: Vec<String> = lines.by_ref().take(2).map(str::to_owned).collect();
        let mut case = "";
        for (row, line) in self.rows.iter().zip(lines) {
            if row.case != case {
                case = &row.case;
                out.push(case.to_owned());
            }
            out.push(line.to_owned());
        }
        out.extend(
            self.missing.iter().map(|peer| format!("missing: {} for {}: {}", peer.peer_name, peer.case, peer.reason)),
        );
        out.extend(self.pairs_asked.map(|pairs| format!("measured with --pairs {pairs} in place of the usual number")));
        out.join("\n") + "\n"
    }

    /// The report as indented JSON.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|json| json + "\n")
    }
}

/// A goal as it is shown: 3.333 of 1 / 0.3.
pub(crate) fn rounded(goal: f64) -> f64 {
    (goal * 1e3).round() / 1e3
}

/// The cells of one comparison, without its case.
fn cells(row: &VersusRow) -> Vec<String> {
    let sign = row.target_is.map(|bound| match bound {
        Bound::AtLeast => ">=",
        Bound::AtMost => "<=",
        Bound::Within => "1 +-",
    });
    let target = row.target.zip(sign).map(|(target, sign)| format!("{sign} {}", rounded(target)));
    let met = match (row.met, row.target) {
        (Some(true), _) => "met",
        (Some(false), _) => "MISSED",
        (None, Some(_)) => "undecided",
        (None, None) => "-",
    };
    vec![
        format!("  {}{}", if row.is_limit { "limit: " } else { "" }, row.peer_name),
        format!("{} {}", brief(row.ours), row.unit),
        format!("{} {}", brief(row.peer), row.unit),
        format!("{} ({}-{})", ratio(row.ratio_median), ratio(row.ratio_low), ratio(row.ratio_high)),
        row.pairs.to_string(),
        target.unwrap_or_else(|| "-".to_owned()),
        met.to_owned(),
    ]
}

/// A ratio with two decimals, or with two significant digits where it is small.
pub(crate) fn ratio(value: f64) -> String {
    if value >= 0.095 || value <= 0.0 {
        return format!("{value:.2}");
    }
    format!("{value:.*}", (1.0 - value.log10().floor()).min(9.0) as usize)
}

/// A value with four significant digits, without an exponent.
pub(crate) fn brief(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let whole_digits = value.abs().log10().floor().max(-9.0) as i32 + 1;
    format!("{value:.*}", (4 - whole_digits).clamp(0, 9) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ratio: Ratio, target: Option<Target>) -> VersusRow {
        let samples: (&[f64], &[f64]) = (&[1.0, 2.0, 4.0], &[2.0, 5.0, 6.0]);
        VersusRow::of_pairs("step", "peer 1.0", "ms", samples, ratio, target).unwrap()
    }

    #[test]
    fn the_ratio_says_what_it_means_and_is_taken_pair_by_pair() {
        let faster = row(Ratio::TimesFasterByTime, Some(Target::AtLeast(2.5)));
        assert_eq!((faster.ratio_low, faster.ratio_median, faster.ratio_high), (1.5, 2.0, 2.5));
        assert_eq!((faster.ours, faster.peer, faster.pairs), (2.0, 5.0, 3));
        // 1.5 to 2.5 are on both sides of 2.5.
        assert_eq!((faster.case.as_str(), faster.met), ("step (times faster than the peer)", None));
        let share = row(Ratio::ShareOfCost, Some(Target::AtMost(0.7)));
        assert_eq!((share.ratio_median, share.met), (0.5, Some(true)));
        let rate = row(Ratio::ShareOfRate, Some(Target::AtLeast(0.5)));
        assert_eq!((rate.ratio_median, rate.case.as_str()), (0.5, "step (share of the peer's speed)"));
        let within = |bound| row(Ratio::ShareOfRate, Some(Target::Within(bound))).met;
        assert_eq!((within(0.6), within(0.4), within(0.2)), (Some(true), None, Some(false)));
        assert_eq!((rate.met, row(Ratio::TimesFasterByRate, None).met), (None, None));
    }

    #[test]
    fn the_whole_spread_decides() {
        let decided = |target: Target, low, high| target.decided_by(Spread { median: 1.0, low, high });
        assert_eq!(decided(Target::AtLeast(1.0), 1.0, 2.0), Some(true));
        assert_eq!(decided(Target::AtLeast(1.0), 0.9, 2.0), None);
        assert_eq!(decided(Target::AtMost(1.0), 1.1, 2.0), Some(false));
        assert_eq!(decided(Target::Within(0.1), 0.95, 1.05), Some(true));
        assert_eq!(decided(Target::Within(0.1), 0.5, 1.5), None);
        assert_eq!(decided(Target::Within(0.1), 1.2, 1.5), Some(false));
    }

    #[test]
    fn an_older_record_is_judged_by_the_rule_of_today() {
        for (target, decided) in [(Target::AtLeast(0.45), None), (Target::AtMost(0.3), Some(false))] {
            let row = VersusRow { met: Some(true), ..row(Ratio::ShareOfCost, Some(target)) };
            assert_eq!(row.decided(), decided, "{target:?}, {} to {}", row.ratio_low, row.ratio_high);
        }
        assert_eq!(row(Ratio::ShareOfCost, None).decided(), None);
        assert_eq!([1.0 / 0.3, 10.0, 0.975].map(rounded), [3.333, 10.0, 0.975]);
    }

    #[test]
    fn samples_without_a_pair_or_a_value_are_refused() {
        for samples in [(&[][..], &[][..]), (&[1.0][..], &[1.0, 2.0][..]), (&[0.0][..], &[1.0][..])] {
            let error = VersusRow::of_pairs("step", "peer", "ms", samples, Ratio::ShareOfCost, None).unwrap_err();
            assert_eq!((error.ours, error.peer), (samples.0.len(), samples.1.len()));
        }
    }

    #[test]
    fn the_json_has_every_field_of_the_format_and_the_table_names_what_is_missing() {
        let report = VersusReport {
            schema: SCHEMA,
            rows: vec![row(Ratio::ShareOfCost, Some(Target::AtMost(0.3)))],
            missing: vec![MissingPeer {
                case: "loader".to_owned(),
                peer_name: "spdl".to_owned(),
                reason: "pip install spdl".to_owned(),
            }],
            ..VersusReport::default()
        };
        let json: serde_json::Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
        let fields = "case ours peer peer_name unit ratio_median ratio_low ratio_high pairs target is_limit";
        for field in fields.split(' ') {
            assert!(!json["rows"][0][field].is_null(), "{field} is missing");
        }
        let table = report.table();
        assert!(table.contains("\nstep (share of the peer's)\n  peer 1.0 "), "{table}");
        assert!(table.contains("MISSED") && table.contains("<= 0.3"), "{table}");
        assert!(table.contains("missing: spdl for loader: pip install spdl"), "{table}");
    }

    #[test]
    fn a_small_ratio_is_not_rounded_to_nothing() {
        assert_eq!(
            [1.234, 0.1, 0.0951, 0.0234, 0.0023, 0.0].map(ratio),
            ["1.23", "0.10", "0.10", "0.023", "0.0023", "0.00"]
        );
    }

    #[test]
    fn values_keep_four_digits() {
        assert_eq!([0.012346, 12.346, 12345.6, 0.0].map(brief), ["0.01235", "12.35", "12346", "0"]);
    }
}
