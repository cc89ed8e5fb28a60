//! A model of data-parallel training on many hosts. It computes step times from measurements of two ranks.
//!
//! `docs/scaling.md` explains the formula and holds the tables. A test checks that they are the ones printed here.

/// How the bytes that a rank sends grow with the number of ranks, relative to two ranks.
#[derive(Clone, Copy, Debug)]
enum Pattern {
    /// `2 (n - 1) / n` times: a ring all-reduce, or parts that are exchanged and then gathered (1-bit).
    Ring,
    /// `n - 1` times: an all-gather, in which the data of each rank goes to all others.
    Gather,
}

/// A way to communicate gradients: a hook or none. The numbers were measured with two ranks.
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    pattern: Pattern,
    /// Megabytes that a rank sends per step.
    megabytes: f64,
    /// Milliseconds per step of two ranks on one host.
    step_ms: f64,
}

/// Measured by `versus ddp` with the MLP of 10.0 million parameters: the record
/// `benches/record/2026-11-21-epyc-2-cores-ddp.json`, and what the command prints besides.
const WAYS: [Way; 6] = [
    Way { name: "none", pattern: Pattern::Ring, megabytes: 41.96, step_ms: 80.4 },
    Way { name: "float16", pattern: Pattern::Ring, megabytes: 20.98, step_ms: 88.9 },
    Way { name: "bfloat16", pattern: Pattern::Ring, megabytes: 20.99, step_ms: 80.4 },
    Way { name: "PowerSGD, rank 4", pattern: Pattern::Ring, megabytes: 0.243, step_ms: 93.4 },
    Way { name: "top-k, 1%", pattern: Pattern::Gather, megabytes: 0.836, step_ms: 76.3 },
    Way { name: "1-bit", pattern: Pattern::Ring, megabytes: 1.324, step_ms: 79.4 },
];
/// Milliseconds per step without communication.
const LOCAL_MS: f64 = 41.0;
/// Milliseconds per step in which gradients are sent while backward is still running.
const OVERLAP_MS: f64 = 19.3;
/// Milliseconds of an all-reduce of one number between two ranks, which takes two messages one after the other.
const ALL_REDUCE_MS: f64 = 0.320;
/// All-reduces per step, one per gradient bucket.
const BUCKETS: f64 = 3.0;

const RANKS: [f64; 8] = [8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
const GIGABITS: [f64; 4] = [1.0, 10.0, 25.0, 100.0];

impl Way {
    /// Milliseconds per step of `ranks` hosts with one rank each, on links of `gigabits` Gbit/s.
    fn step(&self, ranks: f64, gigabits: f64) -> f64 {
        let (bytes, messages) = match self.pattern {
            Pattern::Ring => (2.0 * (ranks - 1.0) / ranks, 2.0 * (ranks - 1.0)),
            Pattern::Gather => (ranks - 1.0, ranks - 1.0),
        };
        let transfer = self.megabytes * bytes * 8.0 / gigabits + BUCKETS * messages * ALL_REDUCE_MS / 2.0;
        self.step_ms + (transfer - OVERLAP_MS).max(0.0)
    }

    /// The link speeds at which it is faster than no compression.
    fn pays(&self, ranks: f64) -> String {
        let gains = |gigabits: f64| self.step(ranks, gigabits) < WAYS[0].step(ranks, gigabits);
        // Bisects link speeds in Gbit/s, from links so slow that only bytes matter to links faster than any in use.
        let (mut slow, mut fast) = (1e-3, 1e4);
        let (on_slow, on_fast) = (gains(slow), gains(fast));
        if on_slow == on_fast {
            return if on_slow { "always" } else { "never" }.to_owned();
        }
        for _ in 0..60 {
            let middle = f64::sqrt(slow * fast);
            if gains(middle) == on_slow { slow = middle } else { fast = middle }
        }
        let side = if on_slow { "below" } else { "above" };
        format!("{side} {slow:.*} Gbit/s", usize::from(slow < 10.0))
    }
}

/// The tables of `docs/scaling.md`, in Markdown.
pub fn tables() -> String {
    let mut out = format!(
        "\n### What was measured\n\n| step without communication | {LOCAL_MS:.1} ms |\n|---|---|\n\
         | overlap | {OVERLAP_MS:.1} ms |\n| all-reduce of one number | {ALL_REDUCE_MS:.2} ms |\n\n\
         | | a rank sends in a step | step of two ranks on one host |\n|---|---|---|\n"
    );
    for Way { name, megabytes, step_ms, .. } in WAYS {
        out += &format!("| {name} | {megabytes} MB | {step_ms:.1} ms |\n");
    }
    let heads: Vec<&str> = WAYS.iter().map(|way| way.name).collect();
    for gigabits in GIGABITS {
        out += &format!("\n### Links of {gigabits} Gbit/s\n\n| hosts | {} |\n", heads.join(" | "));
        out += &format!("|{}\n", "---|".repeat(WAYS.len() + 1));
        for ranks in RANKS {
            let cells = WAYS.map(|way| format!("{:.0}%", 100.0 * LOCAL_MS / way.step(ranks, gigabits)));
            out += &format!("| {ranks} | {} |\n", cells.join(" | "));
        }
    }
    out += "\n### Where compression starts to pay\n\n| hosts |";
    out += &heads[1..].iter().map(|name| format!(" {name} |")).collect::<String>();
    out += &format!("\n|{}\n", "---|".repeat(WAYS.len()));
    for ranks in RANKS {
        let cell = |way: &Way| format!(" {} |", way.pays(ranks));
        out += &format!("| {ranks} |{}\n", WAYS[1..].iter().map(cell).collect::<String>());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_holds_the_tables() {
        let page = include_str!("../../docs/scaling.md");
        assert!(page.contains(&tables()), "docs/scaling.md should end with:\n{}", tables());
    }

    #[test]
    fn slow_links_many_hosts_and_more_bytes_make_steps_slower() {
        let [none, .., one_bit] = WAYS;
        assert!(none.step(8.0, 1.0) > none.step(8.0, 10.0) && none.step(16.0, 1.0) > none.step(8.0, 1.0));
        // By hand: 2 * 7 / 8 * 41.96 MB at 1 Gbit/s, and 3 * 14 messages.
        let transfer = 41.96 * 1.75 * 8.0 + 42.0 * ALL_REDUCE_MS / 2.0;
        assert!((none.step(8.0, 1.0) - (none.step_ms + transfer - OVERLAP_MS)).abs() < 1e-9);
        assert!(one_bit.step(8.0, 1.0) < none.step(8.0, 1.0));
        assert_eq!((one_bit.pays(8.0).as_str(), none.pays(8.0).as_str()), ("always", "never"));
    }
}
