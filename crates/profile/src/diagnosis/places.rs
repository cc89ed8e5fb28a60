//! Finds the scope or operator that a finding is about.

use std::collections::BTreeMap;

use super::facts::Facts;
use crate::{HostGap, OpTimes, Phase};

/// The key with half of the total weight or more. None if no key has that much, or there is no weight.
pub(super) fn main_part<K: Ord + Copy>(weights: impl Iterator<Item = (K, f64)>) -> Option<K> {
    let mut sums: BTreeMap<K, f64> = BTreeMap::new();
    for (key, weight) in weights {
        *sums.entry(key).or_default() += weight.max(0.0);
    }
    let whole: f64 = sums.values().sum();
    let most = sums.into_iter().max_by(|one, other| one.1.total_cmp(&other.1))?;
    (whole > 0.0 && most.1 >= 0.5 * whole).then_some(most.0)
}

/// Seconds on the host by phase, scope and operator; gaps have no operator.
pub(super) fn host_times<'a>(
    ops: &'a [OpTimes],
    gaps: &'a [HostGap],
) -> impl Iterator<Item = (Phase, Option<&'a str>, Option<&'a str>, f64)> {
    let ops = ops.iter().map(|op| (op.phase, op.scope.as_deref(), Some(op.name.as_str()), op.self_cpu_seconds));
    ops.chain(gaps.iter().map(|gap| (gap.phase, gap.scope.as_deref(), None, gap.seconds)))
}

impl<'a> Facts<'a> {
    /// The scope with most of the host's time in some phases.
    pub fn scope_of_phases(&self, phases: &[Phase]) -> Option<&'a str> {
        let profiled = self.profiled()?;
        let times = host_times(&profiled.ops, &profiled.gaps).filter(|(phase, ..)| phases.contains(phase));
        main_part(times.map(|(_, scope, _, seconds)| (scope, seconds))).flatten()
    }

    /// The scope with most of the operators' weight. Operators of the backward pass are usually in no scope; they are
    /// left out then, because the forward operators that cause them have scopes.
    pub fn scope_of_ops(&self, weight: impl Fn(&OpTimes) -> f64) -> Option<&'a str> {
        let ops = self.profiled()?.ops.iter().filter(|op| op.phase != Phase::Backward || op.scope.is_some());
        main_part(ops.map(|op| (op.scope.as_deref(), weight(op)))).flatten()
    }

    /// The caller's scope in which threads other than the training thread spend most time, if that is at least half of
    /// the `waiting` seconds.
    pub fn scope_of_workers(&self, waiting: f64) -> Option<(&'a str, f64)> {
        /// Spans of these crates, which are not the caller's.
        const OWN: [&str; 3] = ["dataload_batch", "dataload_transfer", "checkpoint_write"];
        let scopes = self.profiled()?.scopes.iter().filter(|it| !it.is_main_thread && !OWN.contains(&it.name.as_str()));
        let longest = scopes.max_by(|one, other| one.seconds.total_cmp(&other.seconds))?;
        (longest.seconds >= 0.5 * waiting).then_some((&longest.name, longest.seconds))
    }

    /// The scope in which the training thread itself loads: one without operators of other phases.
    pub fn scope_of_own_loading(&self, waiting: f64) -> Option<&'a str> {
        let profiled = self.profiled()?;
        let is_elsewhere = |name: &str| {
            let mut times = host_times(&profiled.ops, &profiled.gaps);
            times.any(|(phase, scope, ..)| phase != Phase::DataWait && scope == Some(name))
        };
        let scopes = profiled.scopes.iter().filter(|it| it.is_main_thread && !is_elsewhere(&it.name));
        let longest = scopes.max_by(|one, other| one.seconds.total_cmp(&other.seconds))?;
        (longest.seconds >= 0.5 * waiting).then_some(&longest.name)
    }
}

#[cfg(test)]
mod tests {
    use super::main_part;

    #[test]
    fn the_main_part_has_at_least_half_of_the_weight() {
        assert_eq!(main_part([('a', 1.0), ('b', 1.0), ('a', 0.5)].into_iter()), Some('a'));
        assert_eq!(main_part([('a', 1.0), ('b', 1.1), ('c', 1.0)].into_iter()), None);
        assert_eq!(main_part([('a', 0.0)].into_iter()), None);
        assert_eq!(main_part(std::iter::empty::<(char, f64)>()), None);
    }
}
